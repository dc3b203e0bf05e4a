"""Ranks agree once on who writes what several of them hold, and check that it is equal on all of them."""

import copy
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from raycheck.bucket.assembly.assemble import assemble
from raycheck.bucket.assembly.replica_agreement import SPREAD_FROM_BYTES, HeldBox, Holdings, agree
from raycheck.bucket.assembly.save_report import Report
from raycheck.bucket.format.manifest import Manifest
from raycheck.bucket.format.progress import Progress
from raycheck.bucket.protocol.write_once import put_all_once
from raycheck.bucket.reading import Checkpoint
from raycheck.bucket.store import Store
from raycheck.errors import ConfigError
from raycheck.state.entries.per_rank_entries import PerRank
from raycheck.state.train_state import TrainState
from tests.support.processes.save_without_ray import Own, agreed, claimed, save, upload

State = dict[str, Any]
MIB = 1 << 20


def replicas(count: int) -> list[State]:
    """Returns the replicas of a training after a step, as DDP has them."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(torch.randn(8, 4)).pow(2).sum().backward()
    optimizer.step()
    ema = Own({"average": {"weight": model[0].weight.detach().clone()}, "decay": 0.9})
    return [copy.deepcopy({"model": model, "optimizer": optimizer, "ema": ema}) for _ in range(count)]


def ranks_of(states: list[State]) -> list[TrainState]:
    return [TrainState(state, rank=rank, world_size=len(states)) for rank, state in enumerate(states)]


def save_ranks(store: Store, states: list[State], **options: Any) -> Checkpoint:
    return save(store, [rank.stage(Progress(step=1)) for rank in agreed(ranks_of(states))], **options)


# --- replicas that drifted ---


def drift_parameter(state: State) -> None:
    state["model"][0].weight.data[3, 3] += 1e-7


def drift_slot(state: State) -> None:
    state["optimizer"].state[state["model"][0].bias]["exp_avg_sq"][0] *= 2


def drift_object(state: State) -> None:
    state["ema"].state["average"]["weight"][0, 0] = 5


def drift_learning_rate(state: State) -> None:
    state["optimizer"].param_groups[0]["lr"] = 0.2


def drift_value(state: State) -> None:
    state["ema"].state["decay"] = 0.8


def drift_shape(state: State) -> None:
    state["ema"].state["average"]["weight"] = torch.ones(2)


def lack_entry(state: State) -> None:
    del state["ema"]


DRIFTS = {
    drift_parameter: r"tensor model\.0\.weight is not the same on ranks 0 and 2",
    drift_slot: r"tensor optimizer\.state\.0\.bias\.exp_avg_sq is not the same on ranks 0 and 2",
    drift_object: r"tensor ema\.average\.weight is not the same on ranks 0 and 2.*raycheck\.PerRank",
    drift_learning_rate: r"state\['optimizer'\] is not the same on ranks 0 and 2",
    drift_value: r"state\['ema'\] is not the same on ranks 0 and 2.*raycheck\.PerRank",
    drift_shape: r"tensor ema\.average\.weight is float32\[4, 4\] on rank 0 and float32\[2\] on rank 2",
    lack_entry: r"state\['ema'\] is on rank 0 and not on rank 2.*raycheck\.PerRank",
}


@pytest.mark.parametrize("drift", DRIFTS, ids=lambda drift: drift.__name__)
def test_a_replica_that_drifted_is_named_with_its_ranks(drift: Any):
    states = replicas(3)
    agreed(ranks_of(states))

    drift(states[2])

    with pytest.raises(ConfigError, match=DRIFTS[drift]):
        agreed(ranks_of(states))


def test_an_entry_that_rank_0_lacks_is_named_too():
    states = replicas(2)
    lack_entry(states[0])

    with pytest.raises(ConfigError, match=r"state\['ema'\] is on rank 1 and not on rank 0"):
        agreed(ranks_of(states))


def test_a_conjugate_parameter_is_compared_by_its_values():
    def build(imaginary: float) -> State:
        module = nn.Module()
        module.register_parameter("phase", nn.Parameter(torch.tensor([complex(1, imaginary)] * 3).conj()))
        return {"model": module}

    agreed(ranks_of([build(2), build(2)]))
    with pytest.raises(ConfigError, match=r"tensor model\.phase"):
        agreed(ranks_of([build(2), build(3)]))


def test_buffers_and_extra_state_may_differ_and_the_first_ranks_are_kept(memory: Store):
    class Counting(nn.BatchNorm1d):
        calls: Any = 0

        def get_extra_state(self) -> Any:
            return {"calls": self.calls}

        def set_extra_state(self, state: Any) -> None:
            self.calls = state["calls"]

    def build(rank: int) -> State:
        norm = Counting(4)
        norm.running_mean.fill_(rank)
        norm.calls = rank
        return {"model": norm}

    checkpoint = save_ranks(memory, [build(rank) for rank in (7, 8, 9)])

    for rank in range(3):
        state = build(5)
        report = TrainState(state, rank=rank, world_size=3).apply(checkpoint).report
        assert state["model"].running_mean.tolist() == [7.0] * 4
        assert state["model"].calls == 7
        assert report.unused == ()


# --- values of each rank ---


def counters(rank: int) -> State:
    """Returns an object and plain data with tensors that differ between the ranks, also in their form."""
    return {
        "model": nn.Linear(1, 1),
        "counters": PerRank(Own({"seen": torch.arange(rank + 1), "names": [f"shard-{rank}"]})),
        "plain": PerRank({"rank": rank, "nested": [torch.full((2,), float(rank)), (rank, None)]}),
    }


@pytest.mark.parametrize(("saving", "loading"), [(1, 2), (2, 1), (3, 2), (2, 2)])
def test_each_rank_gets_its_own_value_back_and_a_new_rank_keeps_its_first(memory: Store, saving: int, loading: int):
    torch.manual_seed(0)
    model = nn.Linear(1, 1)
    checkpoint = save_ranks(memory, [counters(rank) | {"model": model} for rank in range(saving)])

    for rank in range(loading):
        state = counters(50 + rank)
        report = TrainState(state, rank=rank, world_size=loading).apply(checkpoint).report

        number = rank if rank < saving else 50 + rank
        owned, plain = state["counters"].value.state, state["plain"].value
        assert torch.equal(owned["seen"], torch.arange(number + 1))
        assert owned["names"] == [f"shard-{number}"]
        assert plain["rank"] == number
        assert torch.equal(plain["nested"][0], torch.full((2,), float(number)))
        assert plain["nested"][1] == (number, None)
        is_new = rank >= saving
        assert report.fresh == ((f"counters.rank{rank}", f"plain.rank{rank}") if is_new else ())
        gone = range(loading, saving)
        assert report.unused == tuple(f"{name}.rank{rank}" for name in ("counters", "plain") for rank in gone)


def test_a_rank_local_none_comes_back_as_none(memory: Store):
    checkpoint = save_ranks(memory, [{"mine": PerRank(None)}])
    state = {"mine": PerRank(5)}

    report = TrainState(state, rank=0, world_size=1).apply(checkpoint).report

    assert state["mine"].value is None
    assert report.restored == ("mine", "progress", "rng")


def test_a_module_is_not_taken_per_rank():
    with pytest.raises(ConfigError, match=r"state\['mine'\] is PerRank of a module"):
        TrainState({"mine": PerRank(nn.Linear(1, 1))}, rank=0, world_size=1).check()


# --- what appears after the agreement ---


def test_late_optimizer_state_is_written_by_all_kept_once_and_settled_anew(memory: Store):
    states = replicas(3)
    for state in states:
        state["model"].register_parameter("late", nn.Parameter(torch.ones(600, 600)))
        state["optimizer"].add_param_group({"params": [state["model"].late]})
    ranks = agreed(ranks_of(states))
    first, has_copies = assembled(memory, ranks, number=1)
    assert not has_copies
    for state in states:
        state["model"].late.grad = torch.ones(600, 600)
        state["optimizer"].step()

    second, has_copies = assembled(memory, ranks, number=2)
    agreed(ranks)
    third, still_has_copies = assembled(memory, ranks, number=3)

    assert has_copies
    assert not still_has_copies
    late = 2 * 600 * 600 * 4
    assert bytes_of(second) >= bytes_of(first) + 3 * late
    assert bytes_of(first) + late <= bytes_of(third) < bytes_of(first) + 1.5 * late


def test_what_late_state_came_to_is_restored(memory: Store):
    states = replicas(2)
    ranks = agreed(ranks_of(states))
    for state in states:
        state["optimizer"].state[state["model"][0].bias]["late"] = torch.arange(4.0)

    checkpoint = save(memory, [rank.stage(Progress(step=1)) for rank in ranks])

    (fresh,) = replicas(1)
    TrainState(fresh, rank=0, world_size=1).apply(checkpoint, strict=False)
    assert torch.equal(fresh["optimizer"].state[fresh["model"][0].bias]["late"], torch.arange(4.0))


def assembled(store: Store, ranks: Any, *, number: int) -> tuple[Manifest, bool]:
    """Returns what the coordinator makes of one save, up to the commit."""
    name = claimed(store, world_size=len(ranks), save=number, step=number)
    reports = []
    for rank, state in enumerate(ranks):
        progress = Progress(step=number)
        done = upload(store, state.stage(progress), name=name)
        reports.append(
            Report(
                group="group",
                rank=rank,
                world_size=len(ranks),
                attempt=1,
                save=number,
                progress=progress,
                shards=done.records,
                section=done.section,
            )
        )
    made = assemble(store, reports)
    put_all_once(store, made.documents)
    return made.manifest, made.has_copies


def bytes_of(manifest: Manifest) -> int:
    return sum(shard.size_bytes for shard in manifest.components[0].shards)


# --- who writes ---


def held(number: int, *, size_bytes: int, may_spread: bool, **fields: Any) -> HeldBox:
    name = f"t{number}"
    return HeldBox(
        box=f"{name}@0",
        name=name,
        dtype="uint8",
        shape=(size_bytes,),
        sizes=(size_bytes,),
        size_bytes=size_bytes,
        may_spread=may_spread,
        crc32=number,
        **fields,
    )


@st.composite
def groups(draw: st.DrawFn) -> list[Holdings]:
    """Draws up to five ranks and twenty boxes, each held by some of the ranks."""
    world_size = draw(st.integers(1, 5))
    found: list[list[HeldBox]] = [[] for _ in range(world_size)]
    for number in range(draw(st.integers(0, 20))):
        size = draw(st.sampled_from([0, 5, SPREAD_FROM_BYTES - 1, SPREAD_FROM_BYTES, 7 * MIB]))
        box = held(number, size_bytes=size, may_spread=draw(st.booleans()))
        for rank in draw(st.sets(st.integers(0, world_size - 1), min_size=1)):
            found[rank].append(box)
    return [Holdings.of(draw(st.permutations(boxes)), values={}) for boxes in found]


def writers_of(ranks: list[Holdings]) -> dict[str, int]:
    """Returns the writer of each box. Each rank is told those of the boxes that it holds, as all other holders are."""
    writers: dict[str, int] = {}
    for holdings, agreement in zip(ranks, agree(ranks), strict=True):
        assert agreement.writers.keys() == {box.box for box in holdings.held}
        assert all(writers.setdefault(box, writer) == writer for box, writer in agreement.writers.items())
    return writers


@given(groups())
def test_every_box_has_exactly_one_writer_that_holds_it(ranks: list[Holdings]):
    writers = writers_of(ranks)

    holders: dict[str, set[int]] = {}
    for rank, holdings in enumerate(ranks):
        for box in holdings.held:
            holders.setdefault(box.box, set()).add(rank)
    assert writers.keys() == holders.keys()
    assert all(writers[box] in ranks_with_it for box, ranks_with_it in holders.items())


@given(groups())
def test_the_agreement_does_not_depend_on_the_order_in_which_a_rank_lists_its_boxes(ranks: list[Holdings]):
    turned = [Holdings.of(holdings.held[::-1], values={}) for holdings in ranks]

    assert agree(turned) == agree(ranks)


@given(st.lists(st.integers(SPREAD_FROM_BYTES, 9 * MIB), min_size=1, max_size=30), st.integers(1, 6))
def test_large_replicas_are_spread_by_bytes_and_small_ones_stay_with_the_first(sizes: list[int], world_size: int):
    large = [held(number, size_bytes=size, may_spread=True) for number, size in enumerate(sizes)]
    small = [held(100 + number, size_bytes=1000, may_spread=True) for number in range(20)]
    buffers = [held(200 + number, size_bytes=9 * MIB, may_spread=False) for number in range(2)]

    writers = writers_of([Holdings.of([*large, *small, *buffers], values={})] * world_size)

    assert {writers[box.box] for box in (*small, *buffers)} == {0}
    load = [sum(box.size_bytes for box in large if writers[box.box] == rank) for rank in range(1, world_size)]
    # The spread is greedy, so no rank is ahead of another by more than one tensor; the first also has the buffers.
    assert not load or max(load) - min(load) <= max(sizes)


def test_a_weight_that_is_tied_on_one_rank_and_apart_on_another_is_refused_by_name():
    def two(*, tied: bool) -> nn.Module:
        model = nn.ModuleDict({"a": nn.Linear(2, 2, bias=False), "b": nn.Linear(2, 2, bias=False)})
        with torch.no_grad():
            model["a"].weight.fill_(1)
            model["b"].weight.fill_(7)
        if tied:
            model["b"].weight = model["a"].weight
        return model

    ranks = [TrainState({"model": two(tied=rank == 0)}, rank=rank, world_size=2) for rank in range(2)]

    with pytest.raises(ConfigError, match=r"tensor model\.b\.weight is not the same on ranks 0 and 1"):
        agreed(ranks)


# --- who writes when ranks are about to be taken away ---


@given(groups(), st.sets(st.integers(0, 4)))
def test_leaving_ranks_write_nothing_that_others_have_and_may_write_and_the_others_keep_theirs(
    ranks: list[Holdings], leaving: set[int]
) -> None:
    before, told = writers_of(ranks), agree(ranks, leaving=leaving)
    after = {box: writer for agreement in told for box, writer in agreement.writers.items()}

    assert all(after[box] == writer for agreement in told for box, writer in agreement.writers.items()), "one writer"
    for holdings in ranks:
        for box in holdings.held:
            holders = {rank for rank, other in enumerate(ranks) if box.box in {found.box for found in other.held}}
            assert after[box.box] in holders
            if before[box.box] not in leaving or not box.may_spread:
                assert after[box.box] == before[box.box]
            elif holders - leaving and box.size_bytes:
                assert after[box.box] not in leaving


def test_what_leaving_ranks_would_write_is_spread_over_those_that_stay() -> None:
    boxes = [held(number, size_bytes=4 * MIB, may_spread=True) for number in range(12)]
    small = [held(100 + number, size_bytes=1000, may_spread=True) for number in range(8)]

    told = agree([Holdings.of([*boxes, *small], values={})] * 4, leaving={0, 3})[1].writers

    assert sorted(told[box.box] for box in boxes) == [1] * 6 + [2] * 6
    assert {told[box.box] for box in small} == {1}, "each other rank would be one more object for every reader"


def test_a_copy_that_a_mesh_leaves_to_another_rank_is_written_once_that_rank_leaves() -> None:
    """And a frozen box stays where the bucket has it."""
    shard = {"size_bytes": 4 * MIB, "may_spread": True}
    first = [held(1, **shard, by_mesh="writer"), held(2, **shard, by_mesh="writer", may_move=False)]
    second = [held(1, **shard, by_mesh="spare"), held(2, **shard, by_mesh="spare", may_move=False)]
    ranks = [Holdings.of(boxes, values={}) for boxes in (first, second)]

    assert [agreement.writers for agreement in agree(ranks)] == [{"t1@0": 0, "t2@0": 0}] * 2
    assert [agreement.writers for agreement in agree(ranks, leaving={1})] == [{"t1@0": 0, "t2@0": 0}] * 2
    assert [agreement.writers for agreement in agree(ranks, leaving={0})] == [{"t1@0": 1, "t2@0": 0}] * 2
    assert [agreement.writers for agreement in agree(ranks, leaving={0, 1})] == [{"t1@0": 0, "t2@0": 0}] * 2


def test_what_a_mesh_places_changes_no_other_writer() -> None:
    """Or frozen boxes would be uploaded again by others."""
    plain = [held(number, size_bytes=4 * MIB, may_spread=True, may_move=False) for number in range(8)]
    placed = [held(100 + rank, size_bytes=9 * MIB, may_spread=True, by_mesh="writer") for rank in range(2)]
    spare = [box._replace(by_mesh="spare") for box in placed]

    before = writers_of([Holdings.of(plain, values={})] * 4)
    ranks = [Holdings.of([*plain, box], values={}) for box in (*placed, *spare)]
    after = agree(ranks, leaving={0})

    assert {box.box: after[3].writers[box.box] for box in plain} == before
    assert [after[rank].writers[f"t{100 + rank % 2}@0"] for rank in range(4)] == [2, 1, 2, 1]


def test_a_copy_whose_writer_is_missing_has_no_writer() -> None:
    """Its rank does not write it, and the commit fails by its name."""
    lonely = held(1, size_bytes=5, may_spread=True, by_mesh="spare")

    assert agree([Holdings.of([lonely], values={}), Holdings.of([], values={})], leaving={1})[0].writers == {}


def test_the_ranks_learn_how_much_only_one_of_them_can_write() -> None:
    shared = held(1, size_bytes=4 * MIB, may_spread=True)
    buffer = held(2, size_bytes=3 * MIB, may_spread=False)
    own = held(3, size_bytes=2 * MIB, may_spread=True)
    frozen = held(4, size_bytes=64 * MIB, may_spread=True, may_move=False)

    def alone(*ranks: list[HeldBox], sharded: int = 0) -> list[int | None]:
        told = agree([Holdings.of(boxes, values={}, alone_bytes=sharded) for boxes in ranks])
        return [agreement.alone_bytes for agreement in told]

    assert alone([shared], [shared]) == [0, 0]
    assert alone([shared, frozen], [shared]) == [0, 0]
    assert alone([shared, own], [shared]) == [2 * MIB] * 2
    assert alone([shared, buffer], [shared, buffer]) == [3 * MIB] * 2, "the first rank's counts"
    assert alone([shared], [shared], sharded=MIB) == [MIB] * 2


@pytest.mark.parametrize("own", [{}, {"cache": PerRank({"rows": torch.ones(600, 600)})}])
def test_parameters_of_replicas_have_copies_and_what_is_given_per_rank_has_none(own: State) -> None:
    ranks = []
    for rank in range(2):
        torch.manual_seed(1)
        ranks.append(TrainState({"model": nn.Linear(600, 600), **own}, rank=rank, world_size=2))

    (found, _) = agree([rank.replica_checksums() for rank in ranks])

    assert found.alone_bytes == (600 * 600 * 4 if own else 0)
