"""R12: whatever is done to a checkpoint's bytes is noticed, by `verify` and by a restore, and named down to the sub-block.

And what is wrong on the way only, or once only, is no damage.
"""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from raycheck.bucket.format import object_keys
from raycheck.bucket.format.progress import Progress
from raycheck.bucket.reading import Checkpoint, Documents
from raycheck.bucket.store import Store, open_store
from raycheck.bucket.store.interface import MAX_WHOLE_BYTES
from raycheck.errors import CorruptError, DamagedError, SupersededError
from raycheck.state.train_state import TrainState
from tests.support.processes.played_ranks import check_restore, save_played
from tests.support.processes.save_without_ray import claimed, committed, save_state, upload
from tests.support.samples.sample_checkpoints import Around

ROWS = 2 * 1024 * 5  # of 1 KiB: two ranks have 5 MiB of it each, two sub-blocks
WEIGHTS = {"a": torch.rand(ROWS, 256), "b": torch.rand(8)}


@pytest.fixture(scope="module")
def saved() -> tuple[Checkpoint, dict[str, bytes]]:
    store = open_store("memory://damaged")
    checkpoint = save_played(store, WEIGHTS, world_size=2)
    return checkpoint, {item.key: store.get(item.key).data for item in store.list_objects("")}


@pytest.fixture
def checkpoint(saved) -> Checkpoint:
    """Makes the checkpoint whole again before each test."""
    checkpoint, objects = saved
    for key, data in objects.items():
        checkpoint.store.put(key, data)
    return checkpoint


def shard(checkpoint: Checkpoint, rank: int, component: str = "train") -> str:
    return object_keys.shard_key(checkpoint.entry.key, component, rank)


def flip(store: Store, key: str, at: int) -> None:
    data = bytearray(store.get(key).data)
    data[at] ^= 0x10
    store.put(key, bytes(data))


def problems(checkpoint: Checkpoint) -> dict[str, tuple[str, ...]]:
    return {finding.key: finding.where for finding in checkpoint.verify() if finding.problem}


def test_a_whole_checkpoint_has_no_problem(checkpoint):
    assert problems(checkpoint) == {}
    check_restore(checkpoint, WEIGHTS, world_size=2)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_flipped_bit_is_named_by_rank_component_tensor_and_sub_block(checkpoint, rank):
    chunk = next(
        chunk
        for chunk in checkpoint.read_index(checkpoint.read_manifest()).chunks
        if chunk.rank == rank and chunk.payload_size > 2**20 and chunk.component == "train"
    )
    name = checkpoint.read_index(checkpoint.read_manifest()).tensors[chunk.tensor].name
    flip(checkpoint.store, shard(checkpoint, rank), chunk.payload_offset + chunk.payload_size - 1)

    where = problems(checkpoint)

    assert list(where) == [shard(checkpoint, rank)]
    (line,) = where[shard(checkpoint, rank)]
    assert line.startswith(f"rank {rank}, component train: tensor {name} at ")
    assert line.endswith("1 of 2 sub-blocks, the first one 1")
    with pytest.raises(DamagedError, match=rf"rank {rank}, component train: tensor {name}, sub-block 1 "):
        check_restore(checkpoint, WEIGHTS, world_size=2)


def test_a_flipped_bit_between_the_tensors_matters_to_stock_torch_only_and_is_said_so(checkpoint):
    flip(checkpoint.store, shard(checkpoint, 0), 10)

    ((line,),) = problems(checkpoint).values()

    assert "no tensor" in line
    check_restore(checkpoint, WEIGHTS, world_size=2)


def truncated(checkpoint: Checkpoint) -> None:
    data = checkpoint.store.get(shard(checkpoint, 0)).data
    checkpoint.store.put(shard(checkpoint, 0), data[: len(data) // 2])


def removed(checkpoint: Checkpoint) -> None:
    checkpoint.store.delete(shard(checkpoint, 0))


def swapped(checkpoint: Checkpoint) -> None:
    first, second = (checkpoint.store.get(shard(checkpoint, rank)).data for rank in range(2))
    checkpoint.store.put(shard(checkpoint, 0), second)
    checkpoint.store.put(shard(checkpoint, 1), first)


def of_another_attempt(checkpoint: Checkpoint) -> None:
    """Returns this rank's shard of a save with other values, which is whole in itself and of equal length."""
    other = open_store("memory://damaged-other")
    twin = save_played(other, {name: tensor + 1 for name, tensor in WEIGHTS.items()}, world_size=2)
    checkpoint.store.put(shard(checkpoint, 0), other.get(shard(twin, 0)).data)


@pytest.mark.parametrize("damage", [truncated, removed, swapped, of_another_attempt])
def test_a_shard_that_is_not_what_was_written_is_named(checkpoint, damage: Callable[[Checkpoint], None]):
    damage(checkpoint)

    where = problems(checkpoint)

    assert shard(checkpoint, 0) in where
    lines = where[shard(checkpoint, 0)]
    assert any("rank 0, component train: tensor optimizer.state.a.exp_avg_sq at [0, 0]: " in line for line in lines), (
        lines
    )
    with pytest.raises(DamagedError, match=r"__0_0\.distcp|rank 0"):
        check_restore(checkpoint, WEIGHTS, world_size=1)


@pytest.mark.parametrize("document", [object_keys.manifest_key, object_keys.index_key])
@pytest.mark.parametrize("edit", [lambda data: data[:-1], lambda data: data[:-1] + b"?", None])
def test_an_edited_document_is_named(checkpoint, document, edit):
    key = document(checkpoint.entry.key)
    if edit is None:
        checkpoint.store.delete(key)
    else:
        checkpoint.store.put(key, edit(checkpoint.store.get(key).data))

    assert key in problems(checkpoint)
    with pytest.raises(DamagedError, match=key):
        check_restore(checkpoint, WEIGHTS, world_size=1)


def test_with_the_index_gone_verify_still_says_which_shard(checkpoint):
    checkpoint.store.delete(object_keys.index_key(checkpoint.entry.key))
    flip(checkpoint.store, shard(checkpoint, 1), 10_000)

    assert problems(checkpoint)[shard(checkpoint, 1)] == (
        "rank 1, component train: the index that describes it is damaged too",
    )


class FlipsOnce(Around):
    """The first answer to each read has a bit flipped; what lies in the bucket is whole."""

    def __init__(self, inner: Store) -> None:
        super().__init__(inner)
        self.seen: set[object] = set()

    def get(self, key: str, max_bytes: int = MAX_WHOLE_BYTES):
        got = self.inner.get(key, max_bytes)
        return replace(got, data=self._once(key, got.data))

    def get_range(self, key: str, start: int, stop: int):
        return self._once((key, start), bytes(self.inner.get_range(key, start, stop)))

    def _once(self, what: object, data: bytes) -> bytes:
        if what == "latest" or what in self.seen:
            return data
        self.seen.add(what)
        return bytes([data[0] ^ 1]) + data[1:-1] + bytes([data[-1] ^ 1])


def test_what_was_changed_on_its_way_is_read_again_and_is_no_damage(checkpoint):
    flipping = FlipsOnce(checkpoint.store)

    check_restore(replace(checkpoint, store=flipping), WEIGHTS, world_size=1)
    assert len(flipping.seen) > 2

    verifying = FlipsOnce(checkpoint.store)
    assert problems(replace(checkpoint, store=verifying)) == {}
    assert len(verifying.seen) > 2


def test_documents_that_were_handed_over_damaged_are_read_from_the_bucket(checkpoint):
    handed = Documents(manifest=b"?", index=b"")

    check_restore(replace(checkpoint, documents=handed), WEIGHTS, world_size=1)


def test_bytes_that_pass_their_checksums_and_make_no_sense_are_no_damage(checkpoint):
    """Somebody wrote them so. Going back would only find the same."""
    store = open_store("memory://odd")
    like_an_optimizers = {"slots": 1, "state": 2, "other": 3}
    odd = save_state(store, {"model": torch.nn.Linear(2, 2), "own": like_an_optimizers})

    with pytest.raises(CorruptError) as caught:
        TrainState(
            {"model": torch.nn.Linear(2, 2), "own": torch.optim.SGD([torch.zeros(1)])}, rank=0, world_size=1
        ).apply(odd)

    assert not isinstance(caught.value, DamagedError)


def test_what_a_damaged_checkpoint_left_in_a_live_tensor_must_be_read_over():
    """The one before it has nothing for that tensor: going on would train from half-read weights."""
    store = open_store("memory://spoilt")
    earlier = save_state(store, {"model": torch.nn.Linear(64, 64, bias=False)})
    state = TrainState({"model": torch.nn.Linear(64, 64)}, rank=0, world_size=1)
    name = claimed(store, world_size=1, save=2, step=2)
    damaged = committed(
        store, name, [upload(store, state.stage(Progress(step=2)), name=name)], progress=Progress(step=2)
    )
    data = store.get(shard(damaged, 0)).data
    store.put(shard(damaged, 0), data[: len(data) // 2])

    with pytest.raises(DamagedError):
        state.apply(damaged)
    with pytest.raises(SupersededError, match=r"model\.bias holds what a damaged checkpoint had"):
        state.apply(earlier, strict=False)
    fresh = TrainState({"model": torch.nn.Linear(64, 64)}, rank=0, world_size=1)
    assert fresh.apply(earlier, strict=False).report.missing == ("model.bias",)
