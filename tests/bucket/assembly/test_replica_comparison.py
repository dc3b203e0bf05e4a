"""Tests that what several ranks hold is compared before each commit: no checkpoint mixes ranks that differ (I11)."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raycheck.bucket.assembly.assemble import assemble
from raycheck.bucket.assembly.plan_cache import Section
from raycheck.bucket.assembly.replica_comparison import (
    DIGEST_BYTES,
    Cure,
    DecodedNames,
    Difference,
    RankDigests,
    Replica,
    described,
    differences,
    digest_of,
    dump_names,
    refusal,
)
from raycheck.bucket.assembly.save_report import Report
from raycheck.bucket.format.index import Chunk, Tensor, index_of
from raycheck.bucket.format.manifest import ShardRecord
from raycheck.bucket.format.progress import Progress
from raycheck.bucket.store import open_store
from raycheck.errors import SaveFailedError
from tests.support.samples.hostile_documents import thorough

BOTH: Cure = "RankZero or PerRank"


def replica(name: str) -> Replica:
    return Replica(key=f"crc {name}@0", label=f"tensor {name}", cure="")


def rank_with(held: dict[str, int]) -> RankDigests:
    names = dump_names([replica(name) for name in held])
    return RankDigests(names=names, digests=b"".join(digest_of([number]) for number in held.values()))


def test_i11_a_difference_names_the_tensors_and_the_ranks() -> None:
    ranks = [rank_with({"a": 1, "b": 2}), rank_with({"b": 2}), rank_with({"b": 3, "a": 1}), rank_with({"a": 9})]

    found = differences(ranks)

    assert [(item.label, item.ranks) for item in found] == [("tensor a", (0, 3)), ("tensor b", (0, 2))]
    assert described(found) == "tensor a is not the same on ranks 0 and 3; neither is tensor b"


def test_of_many_differences_and_ranks_a_few_are_named() -> None:
    ranks = [rank_with({f"t{number}": rank for number in range(9)}) for rank in range(9)]

    said = described(differences(ranks))

    assert said == (
        "tensor t0 is not the same on ranks 0, 1, 2, 3, 4 and 4 more; "
        "neither are tensor t1, tensor t2, tensor t3, tensor t4 and 4 more"
    )


def test_names_are_decoded_once_and_forgotten_when_no_rank_reports_them() -> None:
    known = DecodedNames()
    first, second, third = rank_with({"a": 1, "b": 2}), rank_with({"b": 2, "c": 3}), rank_with({"b": 3, "c": 3})

    before = known.of([first, second])
    after = known.of([second, third])

    assert after[second.names] is before[second.names]
    assert after.keys() == {second.names}
    for ranks in ([first, second], [second, third], [first, third]):
        assert differences(ranks, known) == differences(ranks)


@pytest.mark.parametrize(("kinds", "is_mixed"), [(("crc", "sum"), True), (("sum", "sum"), False)])
def test_ranks_agree_anew_when_one_of_them_has_moved_a_tensor_to_the_host_since(
    kinds: Sequence[str], is_mixed: bool
) -> None:
    held = [
        RankDigests(names=dump_names([replica("kept"), replica("w")._replace(key=f"{kind} w@0")]), digests=bytes(16))
        for kind in kinds
    ]
    nothing = Section.of(index_of([], [], values={}, rank_values=[{}]), held[1])
    reports = [report(0, [5], held[0]), replace(report(1, [5], held[1]), section=nothing, shards=())]

    assert assemble(open_store("memory://kinds"), reports).has_copies == is_mixed


def difference(name: str, cure: Cure) -> Difference:
    return Difference(label=f"tensor {name}", cure=cure, ranks=(0, 1))


def test_a_refusal_names_the_cure_of_each_difference_and_the_way_out() -> None:
    one = refusal([difference("ema.w", "RankZero")])
    many = refusal([difference("model.w", ""), difference("ema.w", "RankZero"), difference("own.n", BOTH)])

    assert "If only rank 0 updates this, give the entry as raycheck.RankZero(entry) on every rank" in one
    assert "If only rank 0 updates tensor ema.w, give the entry as raycheck.RankZero(entry)" in many
    assert "If only rank 0 updates tensor own.n, " in many
    assert "raycheck.PerRank(entry)" in many
    for text in (one, many, refusal([difference("model.w", "")])):
        assert "rounds differently" in text
        assert 'SaveSettings(on_drift="keep_first")' in text


@thorough
@given(st.lists(st.dictionaries(st.sampled_from("abcde"), st.integers(0, 1)), min_size=1, max_size=5))
def test_exactly_what_differs_between_any_two_holders_is_found(held: list[dict[str, int]]) -> None:
    found = differences([rank_with(own) for own in held])

    wanted = {name for name in "abcde" if len({own[name] for own in held if name in own}) > 1}
    assert {item.label for item in found} == {f"tensor {name}" for name in wanted}


@pytest.mark.parametrize("is_compared", [True, False])
def test_the_same_box_that_two_ranks_wrote_with_other_bytes_is_refused_where_it_has_to_be_equal(
    is_compared: bool,
) -> None:
    """The tensor is new since the agreement, and is in host memory on one rank and on a device on the other."""
    store, reports = open_store("memory://copies"), []
    for rank, (kind, crc) in enumerate([("crc", 5), ("sum", 6)]):
        names = [replica("w")._replace(key=f"{kind} w@0")] if is_compared else []
        reports.append(
            report(rank, [crc], RankDigests(names=dump_names(names), digests=bytes(DIGEST_BYTES * len(names))))
        )

    if is_compared:
        with pytest.raises(SaveFailedError, match="tensor w is not the same on ranks 0 and 1"):
            assemble(store, reports)
    reports = [replace(own, keeps_drift=True) for own in reports]
    assert assemble(store, reports).manifest.drifted == (("tensor w",) if is_compared else ())


def report(rank: int, crcs: Sequence[int], replicas: RankDigests) -> Report:
    tensor = Tensor(name="w", dtype="uint8", shape=(4,), path=("w",))
    chunk = Chunk(
        tensor=0,
        component="train",
        rank=rank,
        offsets=(0,),
        sizes=(4,),
        record_offset=0,
        record_size=64,
        payload_offset=8,
        payload_size=4,
        crcs=tuple(crcs),
    )
    index = index_of([tensor], [chunk], values={}, rank_values=[{}])
    return Report(
        group="group",
        rank=rank,
        world_size=2,
        attempt=1,
        save=1,
        progress=Progress(step=1),
        shards=(ShardRecord(component="train", rank=rank, size_bytes=64, crc32=0),),
        section=Section.of(index, replicas),
    )
