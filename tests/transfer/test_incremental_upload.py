"""Tensors that training does not change are uploaded once, and every checkpoint is whole nevertheless."""

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.filesystem import FileSystemReader

from raycheck.bucket.assembly import plan_cache
from raycheck.bucket.assembly.plan_cache import PlanCache, Section
from raycheck.bucket.format import object_keys
from raycheck.bucket.format.index import Chunk, Tensor, index_of
from raycheck.bucket.format.index_codec import load_index
from raycheck.bucket.format.progress import Progress
from raycheck.bucket.protocol.removal.prune_and_sweep import prune
from raycheck.bucket.protocol.swap import Register
from raycheck.bucket.reading import Checkpoint, read_latest
from raycheck.bucket.store import Store
from raycheck.errors import ConfigError, NotFoundError, SaveFailedError
from raycheck.settings import Retention
from raycheck.state.train_state import TrainState
from raycheck.transfer.incremental_upload import RestoredShards, frozen_component
from raycheck.transfer.stage.local_box import TRAIN
from raycheck.transfer.tensor_digest import digests, weighted_sums
from tests.support.processes.save_without_ray import agreed, claimed, committed, places, upload

pytestmark = pytest.mark.filterwarnings(
    "ignore:torch.distributed is disabled, unavailable or uninitialized:UserWarning"
)

BASE = "model.frozen"


class Adapted(nn.Module):
    """A frozen base with a small part that is trained."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.base = nn.Sequential(nn.Linear(64, 48), nn.Linear(48, 64)).requires_grad_(False)
        self.head = nn.Linear(64, 2)
        self.register_buffer("seen", torch.tensor(0))

    def train_a_little(self) -> None:
        with torch.no_grad():
            self.head.weight.add_(1)
            self.seen.add_(1)


class Ranks:
    """The ranks of one group and what the coordinator remembers, over several saves."""

    def __init__(self, store: Store, *models: nn.Module, keep_last: int = 10) -> None:
        self.store = store
        self.keep_last = keep_last
        self.models = models
        self.plans = PlanCache()
        self._saves = 0
        size = len(models)
        self.states = [TrainState({"model": model}, rank=rank, world_size=size) for rank, model in enumerate(models)]
        agreed(self.states)

    def save(self, *, is_told: bool = True) -> Checkpoint:
        self._saves += 1
        progress = Progress(step=self._saves)
        name = claimed(self.store, world_size=len(self.states), save=self._saves, step=self._saves)
        staged = [state.stage(progress) for state in self.states]
        uploads = [upload(self.store, own, name=name) for own in staged]
        checkpoint = committed(self.store, name, uploads, progress=progress, plans=self.plans, keep_last=self.keep_last)
        parts = checkpoint.read_manifest().components
        self.plans.components = parts
        for state, own in zip(self.states, staged, strict=True):
            state.components.committed(own, {part.name: part.checkpoint for part in parts} if is_told else {})
        return checkpoint

    def restore(self, checkpoint: Checkpoint) -> None:
        for state in self.states:
            state.apply(checkpoint)
        self._saves = checkpoint.read_manifest().save


def place_of(checkpoint: Checkpoint, component: str = BASE) -> str:
    """Returns the checkpoint that has a component of this one."""
    return {part.name: part.checkpoint for part in checkpoint.read_manifest().components}[component]


def written(checkpoint: Checkpoint) -> set[str]:
    """Returns the components of which the checkpoint itself has objects."""
    prefix = object_keys.checkpoint_prefix(checkpoint.entry.key)
    keys = [item.key.removeprefix(prefix) for item in checkpoint.store.list_objects(prefix)]
    return {key.split("/")[0] for key in keys if "/" in key}


def check_holds(checkpoint: Checkpoint, model: nn.Module) -> None:
    """Check that raycheck finds the checkpoint whole, and stock torch every component, wherever it lies."""
    assert [finding.problem for finding in checkpoint.verify() if finding.problem] == []
    blank = Adapted(seed=99)
    TrainState({"model": blank}, rank=0, world_size=1).apply(checkpoint)
    expected = model.state_dict()
    assert all(torch.equal(value, expected[name]) for name, value in blank.state_dict().items())
    root = checkpoint.store.uri.removeprefix("file://")
    seen = set()
    for part in checkpoint.read_manifest().components:
        reader = FileSystemReader(f"{root}/{object_keys.component_prefix(part.checkpoint, part.name)}")
        names = [name for name in reader.read_metadata().state_dict_metadata if name.startswith("model.")]
        loaded = {name: torch.full_like(expected[name.removeprefix("model.")], -7) for name in names}
        dcp.load(loaded, storage_reader=reader, no_dist=True)
        assert all(torch.equal(value, expected[name.removeprefix("model.")]) for name, value in loaded.items())
        seen |= set(names)
    assert seen == {f"model.{name}" for name in expected}


def test_a_frozen_base_is_uploaded_once(files: Store) -> None:
    model = Adapted()
    ranks = Ranks(files, model)
    first = ranks.save()
    for _ in range(2):
        model.train_a_little()
        newest = ranks.save()

    assert written(first) == {TRAIN, BASE}
    assert written(newest) == {TRAIN}
    assert place_of(newest) == first.entry.key
    assert newest.entry.refs == (first.entry.key,)
    check_holds(newest, model)
    sizes = [sum(rank.size_bytes for rank in checkpoint.read_manifest().ranks) for checkpoint in (first, newest)]
    base = sum(parameter.nbytes for parameter in model.base.parameters())
    assert sizes[1] < sizes[0] - base


class Odd(Adapted):
    """Has frozen parameters of which staging copies other bytes than those that lie one after the other."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__(seed)
        for name, value in {
            "empty": torch.empty(0, 3),
            "turned": torch.rand(1100, 1000).T,
            "large": torch.rand((1 << 20) + 3),
            "rounded": torch.rand(7).bfloat16(),
            "conjugate": torch.rand(5, dtype=torch.complex64).conj(),
            "scalar": torch.tensor(0.5),
        }.items():
            self.register_parameter(name, nn.Parameter(value, requires_grad=False))


def test_the_checksums_of_an_upload_tell_later_saves_that_nothing_has_changed(memory: Store) -> None:
    model = Odd()
    ranks = Ranks(memory, model)
    first = ranks.save()

    newest = ranks.save()

    assert written(first) == {TRAIN, BASE}
    assert written(newest) == {TRAIN}
    with torch.no_grad():
        model.turned[-1, -1] += 1
    assert written(ranks.save()) == {TRAIN, BASE}


def test_the_checksums_of_a_restore_tell_the_first_save_that_nothing_has_changed(memory: Store) -> None:
    first = Ranks(memory, Odd()).save()
    model = Odd(seed=5)
    again = Ranks(memory, model)
    again.restore(first)

    second = again.save()

    assert written(second) == {TRAIN}
    assert place_of(second) == first.entry.key
    with torch.no_grad():
        model.turned[-1, -1] += 1
    assert written(again.save()) == {TRAIN, BASE}


def test_digests_after_a_restore_are_those_of_the_live_tensors(memory: Store) -> None:
    first = Ranks(memory, Odd()).save()
    model = Odd(seed=5)
    state = TrainState({"model": model}, rank=0, world_size=1)
    state.apply(first)
    boxes = state.frozen_components()[BASE]
    whole = [*boxes, *(replace(box, local=box.local[:1], sizes=(1, *box.sizes[1:])) for box in boxes if box.sizes)]
    manifest = first.read_manifest()

    for box in whole:
        found = RestoredShards.of(manifest, first.read_index(manifest), [box])
        assert found.digests[box.box_name] == digests([box.local])[0]


def through_data(model: Adapted) -> None:
    model.base[0].weight.data[3, 4] += 1


def in_place(model: Adapted) -> None:
    with torch.no_grad():
        model.base[1].bias.mul_(2)


def by_another_tensor(model: Adapted) -> None:
    model.base[0].bias = nn.Parameter(torch.randn(48), requires_grad=False)


@pytest.mark.parametrize("change", [through_data, in_place, by_another_tensor])
def test_a_frozen_base_that_is_changed_all_the_same_is_written_again(files: Store, change: Callable[..., None]) -> None:
    model = Adapted()
    ranks = Ranks(files, model)
    first, same = ranks.save(), ranks.save()
    change(model)
    changed, after = ranks.save(), ranks.save()

    assert place_of(same) == first.entry.key
    assert written(changed) == {TRAIN, BASE}
    assert place_of(after) == changed.entry.key
    check_holds(after, model)


def test_what_is_unfrozen_in_the_middle_of_a_run_is_trained_from_then_on(files: Store) -> None:
    model = Adapted()
    ranks = Ranks(files, model)
    ranks.save()
    model.base[1].requires_grad_(True)
    partly = ranks.save()
    model.base.requires_grad_(True)
    whole = ranks.save()
    model.base.requires_grad_(False)
    frozen_again = ranks.save()

    assert place_of(partly) == partly.entry.key
    assert [part.name for part in whole.read_manifest().components] == [TRAIN]
    assert place_of(frozen_again) == frozen_again.entry.key
    for checkpoint in (partly, whole, frozen_again):
        check_holds(checkpoint, model)


def test_the_first_save_after_a_restore_refers_to_what_was_restored(files: Store) -> None:
    first = Ranks(files, Adapted()).save()
    model = Adapted(seed=5)
    again = Ranks(files, model)
    again.restore(first)
    model.train_a_little()
    second = again.save()

    assert place_of(second) == first.entry.key
    check_holds(second, model)


def test_a_base_that_is_replaced_after_the_restore_is_written(files: Store) -> None:
    first = Ranks(files, Adapted()).save()
    model = Adapted(seed=5)
    again = Ranks(files, model)
    again.restore(first)
    through_data(model)
    second = again.save()

    assert place_of(second) == second.entry.key
    check_holds(second, model)


def test_a_small_base_lies_the_same_at_another_world_size(files: Store) -> None:
    first = Ranks(files, Adapted()).save()
    models = [Adapted(seed=5), Adapted(seed=5)]
    again = Ranks(files, *models)
    again.restore(first)
    second = again.save()

    assert place_of(second) == first.entry.key
    check_holds(second, models[1])


class Large(nn.Module):
    """Two frozen tensors, each large enough to be spread over ranks."""

    def __init__(self) -> None:
        super().__init__()
        for name in "ab":
            self.register_parameter(name, nn.Parameter(torch.randn(1 << 18), requires_grad=False))


def test_what_other_ranks_write_now_is_written_again(files: Store) -> None:
    torch.manual_seed(0)
    first = Ranks(files, Large()).save()
    models = [Large(), Large()]
    models[1].load_state_dict(models[0].state_dict())
    again = Ranks(files, *models)
    again.restore(first)
    second = again.save()

    assert place_of(second) == second.entry.key
    assert [shard.rank for part in second.read_manifest().components for shard in part.shards] == [0, 1, 0, 1]
    blank = Large()
    TrainState({"model": blank}, rank=0, world_size=1).apply(second)
    assert all(torch.equal(value, models[1].state_dict()[name]) for name, value in blank.state_dict().items())


def test_when_the_outcome_is_not_known_the_next_save_is_whole(files: Store) -> None:
    ranks = Ranks(files, Adapted())
    ranks.save(is_told=False)
    second = ranks.save()

    assert written(second) == {TRAIN, BASE}


class Spread(nn.Module):
    """A frozen tensor of each rank's own: what a rank of a pipeline holds."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.register_parameter(f"w{rank}", nn.Parameter(torch.full((4000,), float(rank)), requires_grad=False))


def test_what_one_rank_kept_is_copied_to_where_another_one_has_written(files: Store) -> None:
    models = [Spread(0), Spread(1)]
    ranks = Ranks(files, *models)
    first = ranks.save()
    models[1].w1.data += 5
    mixed, after = ranks.save(), ranks.save()

    assert place_of(mixed) == mixed.entry.key
    assert place_of(after) == mixed.entry.key
    assert first.entry.key not in after.entry.refs
    source, target = (files.get(object_keys.shard_key(key, BASE, 0)).data for key in (first.entry.key, mixed.entry.key))
    assert source == target
    blanks = [Spread(0), Spread(1)]
    for rank, blank in enumerate(blanks):
        blank.get_parameter(f"w{rank}").data.zero_()
        TrainState({"model": blank}, rank=rank, world_size=2).apply(after, strict=False)
        assert torch.equal(blank.get_parameter(f"w{rank}"), models[rank].get_parameter(f"w{rank}"))
    records = [record.size_bytes for record in mixed.read_manifest().ranks]
    assert records[0] < records[1]


def test_what_cannot_be_copied_fails_the_save_and_not_the_run(files: Store) -> None:
    models = [Spread(0), Spread(1)]
    ranks = Ranks(files, *models)
    key = object_keys.shard_key(ranks.save().entry.key, BASE, 0)
    flipped = bytearray(files.get(key).data)
    flipped[len(flipped) // 2] ^= 1
    files.put(key, flipped)
    models[1].w1.data += 5

    with pytest.raises(SaveFailedError, match="checksum"):
        ranks.save()


def test_a_coordinator_without_memory_asks_the_head(files: Store) -> None:
    model = Adapted()
    ranks = Ranks(files, model)
    first = ranks.save()
    ranks.plans = PlanCache()
    second = ranks.save()

    assert place_of(second) == first.entry.key
    assert written(second) == {TRAIN}


def test_what_the_head_does_not_have_is_copied(files: Store) -> None:
    """Ranks that know less than the head does, as after a commit whose answer was lost."""
    model = Adapted()
    ranks = Ranks(files, model)
    first = ranks.save()
    state = ranks.states[0]
    state.components.forget()
    second = ranks.save()
    kept = state.components._known[BASE]
    state.components._known[BASE] = kept.at(first.entry.key)
    third = ranks.save()

    assert place_of(second) == second.entry.key
    assert place_of(third) == third.entry.key
    check_holds(third, model)


def test_what_is_referred_to_outlives_its_checkpoint_until_nobody_refers_to_it(files: Store) -> None:
    model = Adapted()
    ranks = Ranks(files, model)
    first = ranks.save()
    newest = ranks.save()
    prune(Register(files), Retention(keep_last=1), grace_s=0)

    with pytest.raises(NotFoundError):
        files.get(object_keys.manifest_key(first.entry.key))
    check_holds(newest, model)
    model.base[0].weight.data += 1
    newest = ranks.save()
    prune(Register(files), Retention(keep_last=1), grace_s=0)

    assert list(files.list_objects(object_keys.checkpoint_prefix(first.entry.key))) == []
    assert [entry.key for entry in read_latest(files).live] == [newest.entry.key]
    check_holds(newest, model)


def test_readers_of_a_dropped_checkpoint_have_the_grace_for_what_it_refers_to_too(files: Store) -> None:
    model = Adapted()
    ranks = Ranks(files, model, keep_last=1)
    first = ranks.save()
    second = ranks.save()
    early = read_latest(files).evicted
    model.base[0].weight.data += 1
    ranks.save()
    late = read_latest(files).evicted

    assert [item.key for item in early] == [first.entry.key]
    assert [item.key for item in late] == [first.entry.key, second.entry.key]
    assert late[0].at == late[1].at
    prune(Register(files), grace_s=60)
    assert [finding.problem for finding in second.verify() if finding.problem] == []


def test_a_tensor_that_only_some_ranks_have_frozen_is_refused() -> None:
    tensor = Tensor(name="model.a", dtype="float32", shape=(2,), path=("model", "a"))
    sections = []
    for rank, component in enumerate((TRAIN, BASE)):
        chunk = Chunk(
            tensor=0,
            component=component,
            rank=rank,
            offsets=(rank,),
            sizes=(1,),
            record_offset=0,
            record_size=128,
            payload_offset=64,
            payload_size=4,
            crcs=(1,),
        )
        sections.append(Section.of(index_of([tensor], [chunk], rank_values=[{}])))

    with pytest.raises(ConfigError, match=r"tensor model\.a is frozen on some ranks only"):
        PlanCache().merge(sections, [BASE, TRAIN])


def test_values_that_no_reader_would_take_are_not_committed(monkeypatch: pytest.MonkeyPatch) -> None:
    tensor = Tensor(name="model.a", dtype="float32", shape=(0,), path=("model", "a"))
    sections = [Section.of(index_of([tensor], [], values={}, rank_values=[{"own": "x" * 90}])) for _ in range(2)]
    whole = PlanCache().merge(sections, [TRAIN])
    decoded = sum(section.decoded_bytes for section in sections)
    monkeypatch.setattr(plan_cache, "MAX_DECODED_BYTES", decoded)
    assert load_index(whole.index_bytes(sections), what="x").rank_values == ({"own": "x" * 90},) * 2
    monkeypatch.setattr(plan_cache, "MAX_DECODED_BYTES", decoded - 1)

    with pytest.raises(ConfigError, match=f"2 ranks have {decoded} bytes"):
        whole.index_bytes(sections)


def test_what_another_object_changes_while_it_is_restored_is_not_taken_for_what_was_read(files: Store) -> None:
    class Average:
        """Puts what it holds into a model, as some keepers of averages do."""

        def __init__(self, model: nn.Module) -> None:
            self.model = model

        def state_dict(self) -> dict[str, Any]:
            return {"shift": 1}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.model.base[0].bias.data += state["shift"]

    model = Adapted()
    state = TrainState({"model": model, "average": Average(model)}, rank=0, world_size=1)
    name = claimed(files, world_size=1)
    first = committed(files, name, [upload(files, state.stage(Progress(step=1)), name=name)], progress=Progress(step=1))
    state.apply(first)

    assert places(state.stage(Progress(step=2))) == {}


def test_models_change_apart_from_each_other(files: Store) -> None:
    """A reference that is updated now and then does not make the frozen base of another model be written."""
    model, reference = Adapted(), Adapted(seed=1).requires_grad_(False)
    state = TrainState({"model": model, "reference": reference}, rank=0, world_size=1)
    plans = PlanCache()

    def save(number: int) -> Checkpoint:
        name = claimed(files, world_size=1, save=number, step=number)
        staged = state.stage(Progress(step=number))
        checkpoint = committed(
            files, name, [upload(files, staged, name=name)], progress=Progress(step=number), plans=plans
        )
        plan_cache.components = checkpoint.read_manifest().components
        state.components.committed(staged, {part.name: part.checkpoint for part in plan_cache.components})
        return checkpoint

    first = save(1)
    reference.head.weight.data.lerp_(model.head.weight.data, 0.1)
    second, third = save(2), save(3)

    assert written(first) == {TRAIN, BASE, "reference.frozen"}
    assert written(second) == {TRAIN, "reference.frozen"}
    assert written(third) == {TRAIN}
    assert third.entry.refs == (first.entry.key, second.entry.key)


def test_memory_for_what_is_frozen_is_given_back(files: Store) -> None:
    ranks = Ranks(files, Adapted())
    ranks.save()
    stager = ranks.states[0].components._stager(BASE)
    assert stager._buffer is not None
    ranks.save()

    assert stager._buffer is None


def test_saves_under_way_have_memory_of_their_own(files: Store) -> None:
    model = Adapted().requires_grad_(True)
    state = TrainState({"model": model}, rank=0, world_size=1, buffers=2)
    names, under_way, expected = [], [], []
    for number in (1, 2):
        names.append(claimed(files, world_size=1, save=number, step=number))
        under_way.append(state.stage(Progress(step=number)))
        expected.append(copy.deepcopy(model))
        model.train_a_little()

    for number, (name, staged, then) in enumerate(zip(names, under_way, expected, strict=True), 1):
        checkpoint = committed(files, name, [upload(files, staged, name=name)], progress=Progress(step=number))
        check_holds(checkpoint, then)


def test_what_a_save_has_kept_is_known_to_lie_where_that_save_says(files: Store) -> None:
    """A save that was staged while the one before, which writes something else, was under way."""
    model = Adapted()
    ranks = Ranks(files, model)
    first = ranks.save()
    before = model.base[0].weight.detach().clone()
    state = ranks.states[0]
    model.base[0].weight.data += 1
    other = state.stage(Progress(step=2))
    model.base[0].weight.data.copy_(before)
    kept = state.stage(Progress(step=3))
    other.upload(files, "step-000000002-a1-s2")
    state.components.committed(other, {TRAIN: "x", BASE: "step-000000002-a1-s2"})
    state.components.committed(kept, {TRAIN: "x", BASE: first.entry.key})

    assert places(kept) == {BASE: first.entry.key}
    assert places(state.stage(Progress(step=4))) == {BASE: first.entry.key}


@pytest.mark.parametrize("name", ["model", "optimizer.0", "ünï", "a/b.c d", "x" * 300])
def test_any_entry_has_a_component_that_is_a_name_in_the_bucket(name: str) -> None:
    assert object_keys.component_prefix("step-000000001-a1-s1", frozen_component(name))


DTYPES = [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.bool, torch.int64, torch.complex64]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(), (1,), (3,), (7, 5), (0, 4), (1 << 21,)])
def test_equal_bytes_have_equal_digests_and_a_flipped_bit_shows(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = torch.randint(0, 2, shape).to(dtype)
    for digest in (lambda t: digests([t])[0], _on_a_device):
        assert digest(tensor) == digest(tensor.clone())
        plain = tensor.clone().view(-1).view(torch.uint8)
        for at in {0, plain.numel() // 2, plain.numel() - 1} if plain.numel() else ():
            changed = plain.clone()
            changed[at] ^= 1
            assert digest(changed.view(dtype).view(shape)) != digest(tensor)


def _on_a_device(tensor: torch.Tensor) -> Any:
    """Returns the digest that an accelerator would compute."""
    return weighted_sums(tensor.contiguous().view(-1)).tolist() if tensor.numel() else ()


@pytest.mark.parametrize("shape", [(64,), (32, 2), (1 << 17,)])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.complex64])
def test_signs_that_all_change_show(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    """Compare tensors in which only the top bit of each number differs."""
    tensor = torch.randn(shape).to(dtype)
    mask = (torch.rand(shape) < 0.1).to(dtype)

    for digest in (lambda t: digests([t])[0], _on_a_device):
        assert digest(tensor) != digest(tensor.neg())
        assert digest(mask) != digest(mask.roll(2, 0))
    if dtype.is_complex:
        assert _on_a_device(tensor) != _on_a_device(tensor.conj().resolve_conj())


def test_digests_know_what_stands_where() -> None:
    tensor = torch.randn(64, 64)
    moved = tensor.roll(2)

    assert digests([tensor]) != digests([moved])
    assert _on_a_device(tensor) != _on_a_device(moved)
    assert digests([tensor.T]) == digests([tensor.T.contiguous()]) != digests([tensor])
    assert _on_a_device(tensor[1:]) == _on_a_device(tensor[1:].clone())
    assert digests([torch.zeros(2), torch.zeros(0), torch.ones(2)])[1] == ()
