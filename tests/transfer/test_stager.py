"""Staging fills one reused buffer that is the object itself, complete and frozen from the moment `stage` returns."""

import contextlib
import copy
import io
import mmap
import pickle
import resource
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from raycheck.bucket.format import object_keys as keys
from raycheck.bucket.format.checksum import crc32
from raycheck.bucket.format.progress import Progress
from raycheck.bucket.store import Store
from raycheck.errors import ConfigError
from raycheck.state.train_state import TrainState
from raycheck.transfer.stage.local_box import TRAIN, LocalBox, boxes_of
from raycheck.transfer.stage.staged_shard import Staged
from raycheck.transfer.stage.stager import ALIGN, Leaves, Stager
from tests.support.processes.save_without_ray import agreed, restore_state, save, save_state, shard_bytes


def all_boxes(tensors: dict[str, torch.Tensor]) -> list[LocalBox]:
    return [box for name, tensor in tensors.items() for box in boxes_of(name, (name,), tensor, may_spread=True)]


def leaves_of(values: dict[str, object]) -> Leaves:
    return {name: ((name,), value) for name, value in values.items()}


def some_tensors(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "matrix": torch.randn(33, 17, generator=generator),
        "empty": torch.empty(0, 4),
        "scalar": torch.randn((), generator=generator),
        "brain": torch.randn(1001, generator=generator).bfloat16(),
        "flags": torch.rand(7, generator=generator) > 0.5,
        "double": torch.randn(3, 5, generator=generator, dtype=torch.float64),
    }


def staged_by(stager: Stager, tensors: dict[str, torch.Tensor], values: dict[str, object]) -> Staged:
    return stager.stage(all_boxes(tensors), leaves_of(values))


def fresh_bytes(tensors: dict[str, torch.Tensor], values: dict[str, object]) -> bytes:
    return shard_bytes(staged_by(Stager("train", 0), tensors, values))


def addresses(staged: Staged) -> list[int]:
    """Returns the parts' addresses in this process's memory."""
    return [torch.frombuffer(part, dtype=torch.uint8).data_ptr() for part in staged.parts(1 << 30)]


def test_the_buffer_is_the_same_one_while_the_form_is_unchanged():
    stager = Stager("train", 0)

    places = [addresses(staged_by(stager, some_tensors(seed), {"step": seed})) for seed in range(4)]

    assert len(places[0]) == 1
    assert places == [places[0]] * 4


def test_a_state_reuses_its_buffer_over_training_steps():
    model = nn.Linear(64, 64)
    optimizer = torch.optim.Adam(model.parameters())
    saver = TrainState({"model": model, "optimizer": optimizer}, rank=0, world_size=1)

    places = []
    for step in range(4):
        model(torch.ones(64)).sum().backward()
        optimizer.step()
        places.append(addresses(saver.stage(Progress(step=step)).staged[0]))

    assert places == [places[0]] * 4


def test_each_save_holds_the_values_of_its_own_moment():
    stager = Stager("train", 0)

    reused = [shard_bytes(staged_by(stager, some_tensors(seed), {"step": seed})) for seed in range(3)]

    assert reused == [fresh_bytes(some_tensors(seed), {"step": seed}) for seed in range(3)]
    assert len(set(reused)) == 3


def test_training_may_change_everything_once_stage_has_returned(store: Store):
    def build() -> dict[str, Any]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        return {
            "model": model,
            "optimizer": optimizer,
            "scheduler": torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 4]),
        }

    def step(state: dict[str, Any]) -> None:
        state["model"](torch.arange(8.0).view(2, 4)).pow(2).sum().backward()
        state["optimizer"].step()
        state["scheduler"].step()

    live, again = build(), build()
    step(live)
    then = {name: copy.deepcopy(part.state_dict()) for name, part in live.items()}

    staged = TrainState(live, rank=0, world_size=1).stage(Progress(step=1))
    for _ in range(3):
        step(live)
    with torch.no_grad():
        for parameter in live["model"].parameters():
            parameter.fill_(torch.nan)
    restore_state(save(store, [staged]), again)

    for name, part in again.items():
        assert str(part.state_dict()) == str(then[name])
    for name, tensor in again["model"].state_dict().items():
        assert torch.equal(tensor, then["model"][name])


def test_equal_state_gives_equal_bytes():
    def build() -> dict[str, Any]:
        torch.manual_seed(0)
        model = nn.Linear(300, 200)
        optimizer = torch.optim.AdamW(model.parameters())
        model(torch.ones(300)).sum().backward()
        optimizer.step()
        return {
            "model": model,
            "optimizer": optimizer,
            "scheduler": torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=10),
        }

    shards = []
    for _ in range(3):
        staged = TrainState(build(), rank=0, world_size=1).stage(Progress(step=7))
        shards.append((shard_bytes(staged), staged.records[0].crc32))

    assert shards == [shards[0]] * 3
    assert shards[0][1] == crc32(shards[0][0])


@pytest.mark.parametrize("part_bytes", [1, 63, 4096, 1 << 20, 1 << 30])
def test_parts_are_the_same_object_however_they_are_cut(part_bytes: int):
    tensors, values = some_tensors(1), {"step": 3, "names": ["a", "b"]}
    staged = staged_by(Stager("train", 0), tensors, values)

    parts = [bytes(part) for part in staged.parts(part_bytes)]

    assert b"".join(parts) == fresh_bytes(tensors, values)
    assert all(len(part) == part_bytes for part in parts[:-1])
    assert sum(map(len, parts)) == staged.size_bytes
    assert staged.crc32 == crc32(b"".join(parts))


def test_every_record_of_the_object_is_what_torch_save_writes():
    tensors, values = some_tensors(4), {"step": 3, "text": "x" * 500}
    staged = staged_by(Stager("train", 0), tensors, values)

    data = shard_bytes(staged)

    section = staged.shard()
    for chunk in section.chunks:
        record = data[chunk.record_offset : chunk.record_offset + chunk.record_size]
        tensor = tensors[section.tensors[chunk.tensor].name]
        assert chunk.record_offset % ALIGN == 0
        assert record == torch_saved(tensor)
        assert torch.equal(torch.load(io.BytesIO(record), weights_only=True), tensor)
        with zipfile.ZipFile(io.BytesIO(record)) as archive:
            assert archive.testzip() is None
    for leaf in section.leaves:
        record = data[leaf.record_offset : leaf.record_offset + leaf.record_size]
        assert torch.load(io.BytesIO(record), weights_only=True) == values[leaf.name]


def test_leaves_that_outgrow_the_slack_get_a_new_buffer_with_the_same_content():
    stager = Stager("train", 0)
    tensors = some_tensors(1)
    sizes = [10, 1000, 100_000, 50, 3_000_000, 0]

    reused = [shard_bytes(staged_by(stager, tensors, {"text": "x" * size, "step": 1})) for size in sizes]

    assert reused == [fresh_bytes(tensors, {"text": "x" * size, "step": 1}) for size in sizes]


def test_a_shard_on_its_way_is_not_touched_by_a_reallocation():
    stager = Stager("train", 0)
    first, second = some_tensors(1), {**some_tensors(2), "more": torch.ones(100_000)}
    staged = staged_by(stager, first, {"step": 1})

    staged_by(stager, second, {"step": 2, "text": "x" * 100_000})

    assert shard_bytes(staged) == fresh_bytes(first, {"step": 1})


def test_a_changed_layout_leaves_no_stale_bytes():
    stager = Stager("train", 0)
    full, small = some_tensors(1), some_tensors(2)
    added = {"new": torch.randn(5), **some_tensors(3), "last": torch.arange(9)}
    del small["brain"]
    reshaped = {**some_tensors(4), "matrix": torch.randn(17, 33)}
    retyped = {**some_tensors(5), "matrix": torch.randn(33, 17).double()}
    nothing: dict[str, torch.Tensor] = {}
    layouts = [full, added, small, full, reshaped, retyped, nothing, full]

    reused = [shard_bytes(staged_by(stager, tensors, {"step": 5})) for tensors in layouts]

    assert reused == [fresh_bytes(tensors, {"step": 5}) for tensors in layouts]


def faults_of_staging(stager: Stager, boxes: list[LocalBox]) -> int:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    stager.stage(boxes, {})
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


def test_a_first_save_that_was_prepared_finds_its_memory_touched_and_its_bytes_right():
    tensors = {f"weight{i}": torch.randn(1 << 20) for i in range(8)}
    boxes = all_boxes(tensors)
    prepared, cold = Stager("train", 0), Stager("train", 0)

    prepared.prepare(boxes, world_size=1)
    prepared._buffer._thread.join()

    pages = (8 << 22) // mmap.PAGESIZE
    assert faults_of_staging(prepared, boxes) < pages / 4
    assert faults_of_staging(cold, boxes) > pages / 4
    assert shard_bytes(prepared.stage(boxes, {})) == fresh_bytes(tensors, {})


def test_preparing_may_be_overtaken_by_a_stage_or_a_change_of_form():
    stager = Stager("train", 0)
    first, second = {"a": torch.randn(1 << 22)}, {"a": torch.randn(1 << 22), "b": torch.randn(3)}

    stager.prepare(all_boxes(first), world_size=1)
    overtaken = shard_bytes(stager.stage(all_boxes(first), leaves_of({"step": 1})))
    stager.prepare(all_boxes(first), world_size=1)
    changed = shard_bytes(stager.stage(all_boxes(second), leaves_of({"step": 2})))

    assert overtaken == fresh_bytes(first, {"step": 1})
    assert changed == fresh_bytes(second, {"step": 2})


def test_a_rank_prepares_its_share_of_what_all_ranks_hold_and_keeps_no_more_than_it_writes():
    stager, boxes = Stager("train", 0), all_boxes({f"w{i}": torch.randn(1 << 20) for i in range(8)})

    stager.prepare(boxes, world_size=4)
    foreseen = stager._buffer
    stager.stage(boxes[:2], {})
    kept = stager._buffer
    wasteful = Stager("train", 0)
    wasteful.prepare(boxes, world_size=1)
    wasteful.stage(boxes[:1], {})

    assert kept is foreseen
    assert foreseen.size_bytes < 3 << 22
    assert wasteful._buffer.size_bytes < 2 << 22


def test_a_stage_that_failed_does_not_spoil_the_next_one():
    stager = Stager("train", 0)
    good = {"a": torch.randn(5), "b": torch.randn(900)}
    ragged = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged)
    shard_bytes(staged_by(stager, good, {}))

    with pytest.raises((ConfigError, RuntimeError)):
        staged_by(stager, {"a": torch.randn(700), "b": torch.randn(3), "ragged": ragged}, {})

    assert shard_bytes(staged_by(stager, good, {})) == fresh_bytes(good, {})


def test_renamed_and_reordered_tensors_are_described_as_they_lie(store: Store):
    def bag(order: str) -> nn.Module:
        module = nn.Module()
        for name in order:
            module.register_parameter(name, nn.Parameter(torch.randn(3)))
        return module

    live, target = bag("abc"), bag("bcd")
    saver = TrainState({"model": live}, rank=0, world_size=1)
    save(store, [saver.stage(Progress(step=1))], save=1)
    del live.a, live.b
    for name in "bd":  # now c, b, d: three tensors of the same form as before
        live.register_parameter(name, nn.Parameter(torch.randn(3)))

    restore_state(save(store, [saver.stage(Progress(step=2))], save=2), {"model": target})

    assert all(torch.equal(target.state_dict()[name], tensor) for name, tensor in live.state_dict().items())


def test_a_shard_with_nothing_in_it_is_an_empty_object(store: Store):
    model, target = nn.Linear(2, 2), nn.Linear(2, 2)
    ranks = agreed([TrainState({"model": model}, rank=rank, world_size=3) for rank in range(3)])
    staged = [rank.stage(Progress(step=1)) for rank in ranks]

    checkpoint = save(store, staged)
    restore_state(checkpoint, {"model": target})

    assert [shard.size_bytes for shard in checkpoint.read_manifest().components[0].shards][1:] == [0, 0]
    assert torch.equal(target.weight, model.weight)


# aiohttp says so of every body over 1 MiB that the S3 store sends
@pytest.mark.filterwarnings("ignore:Sending a large body directly:ResourceWarning")
def test_a_shard_of_many_parts_goes_to_every_store(store: Store):
    model, target = nn.Linear(1 << 11, 1 << 11), nn.Linear(1 << 11, 1 << 11)
    assert model.weight.nbytes == 16 << 20

    restore_state(save_state(store, {"model": model}), {"model": target})

    assert torch.equal(target.weight, model.weight)


class Bomb:
    """A pickle that leaves a file behind wherever it is loaded."""

    def __init__(self, marker: Path) -> None:
        self._marker = marker

    def __reduce__(self) -> Any:
        return Path.touch, (self._marker,)


def test_a_restore_runs_no_pickle_from_the_bucket(store: Store, tmp_path: Path):
    state = {"model": nn.Linear(3, 2), "scheduler": Noted(1)}
    target = {"model": nn.Linear(3, 2), "scheduler": Noted(2)}
    checkpoint = save_state(store, state)
    index = checkpoint.read_index(checkpoint.read_manifest())
    marker = tmp_path / "exploded"
    bomb = pickle.dumps(Bomb(marker))
    metadata_key = keys.metadata_key(checkpoint.entry.key, TRAIN)
    shard_key = keys.shard_key(checkpoint.entry.key, TRAIN, 0)
    shard = bytearray(store.get(shard_key).data)

    store.put(metadata_key, bomb)
    for leaf in index.leaves:
        shard[leaf.record_offset : leaf.record_offset + leaf.record_size] = bomb.ljust(leaf.record_size, b"\0")
    for chunk in index.chunks:  # the record around a payload holds a pickle too
        head = chunk.payload_offset - chunk.record_offset
        shard[chunk.record_offset : chunk.payload_offset] = bomb.ljust(head, b"\0")
    store.put(shard_key, bytes(shard))
    restore_state(checkpoint, target)

    assert not marker.exists()
    assert torch.equal(target["model"].weight, state["model"].weight)
    assert target["scheduler"].number == 1
    # The bombs were live: stock tools set them off.
    leaf = index.leaves[0]
    for data in (
        store.get(metadata_key).data,
        store.get_range(shard_key, leaf.record_offset, leaf.record_offset + leaf.record_size),
    ):
        with contextlib.suppress(Exception):
            torch.load(io.BytesIO(data), weights_only=False)
        assert marker.exists()
        marker.unlink()


class Noted:
    """An object with one leaf."""

    def __init__(self, number: int) -> None:
        self.number = number

    def state_dict(self) -> dict[str, Any]:
        return {"number": self.number, "text": "x" * 2000}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.number = state["number"]


def torch_saved(tensor: torch.Tensor) -> bytes:
    sink = io.BytesIO()
    torch.save(tensor.clone(), sink)
    return sink.getvalue()
