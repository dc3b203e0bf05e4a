"""What only an accelerator shows: copies behind its back, page-locked memory, streams, and its random state.

Needs one device, and neither Ray nor a store server: `pytest --gpu tests/gpu`.
"""

import multiprocessing
import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import raycheck
from raycheck.bucket.format.object_keys import shard_key
from raycheck.bucket.format.progress import Progress
from raycheck.bucket.store import Store, open_store
from raycheck.errors import SaveFailedError
from raycheck.state.random_state import apply_rng, rng_values
from raycheck.state.train_state import TrainState
from raycheck.transfer.incremental_upload import SharedState, StagedState
from raycheck.transfer.stage.local_box import boxes_of
from raycheck.transfer.stage.stager import Stager
from raycheck.transfer.tensor_digest import PendingDigests, digests
from tests.support.processes.background_call import InThread
from tests.support.processes.save_without_ray import claimed, committed, restore_state, save_state, upload

pytestmark = pytest.mark.gpu
LONG = 400_000_000
"""Clock cycles that a kernel sleeps: some 0.2 s."""


@pytest.fixture
def store(tmp_path) -> Store:
    return open_store(f"file://{tmp_path}/run")


@pytest.fixture
def group_of_one(tmp_path) -> Iterator[None]:
    rendezvous = dist.FileStore(str(tmp_path / "rendezvous"), 1)
    dist.init_process_group("cuda:nccl,cpu:gloo", store=rendezvous, rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def build(seed: int, *, sharded: bool = False, **adam: object) -> dict[str, object]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(64, 257), nn.GELU(), nn.LayerNorm(257), nn.Dropout(0.1), nn.Linear(257, 8)).cuda()
    if sharded:
        mesh = init_device_mesh("cuda", (1,), mesh_dim_names=(f"mesh{uuid4().hex}",))
        for layer in (model[0], model[4]):
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, **adam)
    return {"model": model, "optimizer": optimizer, "scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 2)}


def train(state: dict[str, object], steps: int, *, drawn: bool = False) -> list[float]:
    """Losses. drawn: the batches come from the device's random state, as the dropout always does."""
    losses = []
    for step in range(steps):
        chance = None if drawn else torch.Generator("cuda").manual_seed(step)
        batch = torch.randn(16, 64, device="cuda", generator=chance)
        loss = state["model"](batch).pow(2).mean()
        loss.backward()
        state["optimizer"].step()
        state["optimizer"].zero_grad()
        state["scheduler"].step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("sharded", [False, True], ids=["plain", "fsdp2"])
@pytest.mark.parametrize("adam", [{"foreach": True}, {"fused": True}, {"capturable": True}], ids=str)
def test_a_restored_training_goes_on_bit_for_bit(
    store: Store, group_of_one: None, adam: dict[str, bool], *, sharded: bool
) -> None:
    state = build(1, sharded=sharded, **adam)
    train(state, 3, drawn=True)
    checkpoint = save_state(store, state, step=3)
    expected = train(state, 3, drawn=True)

    other = build(2, sharded=sharded, **adam)
    train(other, 1)
    restored = TrainState(other, rank=0, world_size=1).apply(checkpoint)
    restored.apply_rng()

    assert train(other, 3, drawn=True) == expected


@pytest.mark.parametrize("fresh", [False, True], ids=["trained before", "fresh"])
@pytest.mark.parametrize("adam", [{"foreach": True}, {"fused": True}, {"capturable": True}], ids=str)
def test_the_step_waits_for_moments_that_a_thread_brings_to_the_device(
    store: Store, group_of_one: None, adam: dict[str, bool], *, fresh: bool
) -> None:
    """The device is behind with the script's own work meanwhile. Fused and capturable steps count on the device."""
    state = build(1, sharded=True, **adam)
    train(state, 3)
    checkpoint = save_state(store, state, step=3)
    torch.manual_seed(5)  # for the dropout
    expected = train(state, 3)
    other = build(2, sharded=True, **adam)
    train(other, 0 if fresh else 1)
    torch.manual_seed(5)
    live = TrainState(other, rank=0, world_size=1)

    def decide(read: Callable[[], int]) -> None:
        read()

    live.apply(checkpoint, defer_optimizer=True)
    torch.cuda._sleep(LONG)
    live.deferred.begin(decide, lambda _: None)

    assert train(other, 3) == expected


def test_what_the_step_after_a_save_writes_is_not_in_it(store: Store) -> None:
    """The copies wait behind a slow step on the device; the host goes on at once and overwrites all of it."""
    state = {"x": nn.ParameterList([nn.Parameter(torch.full((1 << 20,), float(i), device="cuda")) for i in range(64)])}
    live = TrainState(state, rank=0, world_size=1)
    live.prepare()
    torch.cuda._sleep(LONG)
    with torch.no_grad():
        torch._foreach_add_(list(state["x"]), 1.0)

    staged = live.stage(Progress(step=1))
    is_device_behind = not torch.cuda.current_stream().query()
    with torch.no_grad():
        torch._foreach_add_(list(state["x"]), 1000.0)
    name = claimed(store, world_size=1)
    checkpoint = committed(store, name, [upload(store, staged, name=name)], progress=Progress(step=1))
    found = {"x": nn.ParameterList([nn.Parameter(torch.zeros(1 << 20)) for _ in range(64)])}
    restore_state(checkpoint, found)

    assert is_device_behind, "the host waited for the device, so this shows nothing"
    for i, parameter in enumerate(found["x"]):
        assert parameter.min().item() == parameter.max().item() == i + 1.0


def test_memory_freed_after_a_save_is_not_reused_under_its_copy(store: Store) -> None:
    torch.cuda.empty_cache()
    state = {"m": nn.ParameterDict({"w": nn.Parameter(torch.full((1 << 24,), 7.0, device="cuda"))})}
    live = TrainState(state, rank=0, world_size=1)
    live.prepare()
    torch.cuda._sleep(LONG)

    staged = live.stage(Progress(step=1))
    del state["m"]["w"]
    del live
    for _ in range(8):
        torch.full((1 << 24,), -1.0, device="cuda")
    name = claimed(store, world_size=1)
    checkpoint = committed(store, name, [upload(store, staged, name=name)], progress=Progress(step=1))
    found = {"m": nn.ParameterDict({"w": nn.Parameter(torch.zeros(1 << 24))})}
    restore_state(checkpoint, found)

    assert found["m"]["w"].min().item() == found["m"]["w"].max().item() == 7.0


def test_a_training_on_a_stream_of_its_own_is_saved_and_restored_in_order(store: Store) -> None:
    own = torch.cuda.Stream()
    with torch.cuda.stream(own):
        weight = nn.Parameter(torch.zeros(1 << 22, device="cuda"))
        torch.cuda._sleep(LONG)
        with torch.no_grad():
            weight.fill_(5.0)
        checkpoint = save_state(store, {"m": nn.ParameterDict({"w": weight})})
        torch.cuda._sleep(LONG)
        with torch.no_grad():
            weight.fill_(9.0)  # still waits on the device when the restore begins

        restore_state(checkpoint, {"m": nn.ParameterDict({"w": weight})})
        total = weight.detach().double().sum()

    assert total.item() == 5.0 * (1 << 22)


def test_a_restore_into_strided_memory_is_done_when_it_returns(store: Store) -> None:
    wide = torch.arange(1 << 20, dtype=torch.float32, device="cuda").view(1024, 1024)
    checkpoint = save_state(store, {"m": nn.ParameterDict({"w": nn.Parameter(wide)})})
    turned = torch.zeros(1024, 1024, device="cuda").t()
    own = torch.cuda.Stream()
    own.wait_stream(torch.cuda.current_stream())

    with torch.cuda.stream(own):
        restore_state(checkpoint, {"m": nn.ParameterDict({"w": nn.Parameter(turned)})})
        found = turned.clone()

    assert torch.equal(found, wide)


@pytest.mark.parametrize(
    "dtype",
    [
        torch.float32,
        torch.bfloat16,
        torch.float16,
        torch.float64,
        torch.float8_e4m3fn,
        torch.float8_e5m2,
        torch.int64,
        torch.uint8,
        torch.bool,
        torch.complex64,
    ],
    ids=str,
)
def test_every_dtype_of_the_device_comes_back_bit_for_bit(store: Store, dtype: torch.dtype) -> None:
    chance = torch.Generator("cuda").manual_seed(3)
    bits = torch.randint(0, 2 if dtype is torch.bool else 256, (4096,), device="cuda", generator=chance)
    saved = bits.to(torch.uint8).view(dtype)
    module = nn.Module()
    module.register_buffer("b", saved.clone())
    checkpoint = save_state(store, {"m": module})
    module.b.view(torch.uint8).zero_()

    restore_state(checkpoint, {"m": module})

    assert torch.equal(module.b.view(torch.uint8), saved.view(torch.uint8))


def test_the_staging_memory_is_page_locked(store: Store) -> None:
    live = TrainState(build(1), rank=0, world_size=1)

    staged = live.stage(Progress(step=1))

    (stager,) = live.components._train
    assert stager._buffer.tensor.is_pinned()
    staged.wait()


def test_another_process_uploads_what_the_device_copied_into_page_locked_memory(tmp_path: Path) -> None:
    """The node's actor reads the rank's buffers: those are shared memory, which CUDA has locked afterward."""
    store = open_store(f"file://{tmp_path}/run")
    state = build(1)
    train(state, 2)
    expected = {name: values.clone() for name, values in state["model"].state_dict().items()}
    live = TrainState(state, rank=0, world_size=1, is_shared=True)
    live.prepare()
    torch.cuda._sleep(LONG)

    staged = live.stage(Progress(step=2))
    is_device_behind = not torch.cuda.current_stream().query()
    train(state, 2)
    staged.wait()
    shared = staged.to_share()
    name = claimed(store, world_size=1, step=2)
    context = multiprocessing.get_context("spawn")
    answers = context.Queue()
    actor = context.Process(target=upload_elsewhere, args=(shared, store.uri, name, answers))
    actor.start()
    checkpoint = committed(store, name, [answers.get(timeout=120)], progress=Progress(step=2))
    actor.join(60)

    (stager,) = live.components._train
    assert stager._buffer.tensor.is_pinned()
    assert is_device_behind, "the host waited for the device, so this shows nothing"
    found = build(3)
    restore_state(checkpoint, found)
    for name, values in expected.items():
        assert torch.equal(found["model"].state_dict()[name], values), name


def upload_elsewhere(shared: SharedState, uri: str, name: str, answers: Any) -> None:
    answers.put(upload(open_store(uri), shared.open(), name=name))


def test_a_captured_step_goes_on_from_the_restored_values(store: Store) -> None:
    """A CUDA graph knows addresses only: a restore that put new tensors in their place would be trained past."""
    torch.manual_seed(1)
    model = nn.Linear(64, 64).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, capturable=True)
    state = {"model": model, "optimizer": optimizer}
    batch = torch.randn(16, 64, device="cuda")

    def step() -> None:
        optimizer.zero_grad(set_to_none=False)
        model(batch).square().mean().backward()
        optimizer.step()

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    graph.replay()
    checkpoint = save_state(store, state)
    graph.replay()
    graph.replay()
    expected = [values.clone() for values in model.parameters()]
    for _ in range(3):
        graph.replay()

    restore_state(checkpoint, state)
    graph.replay()
    graph.replay()

    for found, values in zip(model.parameters(), expected, strict=True):
        assert torch.equal(found, values)


@pytest.mark.filterwarnings("ignore")  # torch's compiler warns of torch
@pytest.mark.parametrize("fresh", [False, True], ids=["trained before", "fresh"])
def test_a_compiled_step_waits_for_deferred_moments(store: Store, *, fresh: bool) -> None:
    def made(seed: int) -> tuple[dict[str, object], Callable[[], None]]:
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(64, 257), nn.GELU(), nn.Linear(257, 8)).cuda()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        return {"model": model, "optimizer": optimizer}, torch.compile(optimizer.step)

    def go_on(state: dict[str, object], step: Callable[[], None], steps: int) -> None:
        batch = torch.randn(16, 64, device="cuda", generator=torch.Generator("cuda").manual_seed(4))
        for _ in range(steps):
            state["model"](batch).square().mean().backward()
            step()
            state["optimizer"].zero_grad()

    state, step = made(1)
    go_on(state, step, 3)
    checkpoint = save_state(store, state, step=3)
    go_on(state, step, 2)
    other, step = made(2)
    go_on(other, step, 0 if fresh else 1)
    live = TrainState(other, rank=0, world_size=1)

    live.apply(checkpoint, defer_optimizer=True)
    torch.cuda._sleep(LONG)
    live.deferred.begin(lambda read: read() and None, lambda _: None)
    go_on(other, step, 2)

    for name, values in state["model"].state_dict().items():
        torch.testing.assert_close(other["model"].state_dict()[name], values, rtol=1e-6, atol=1e-7, msg=name)


def test_a_sampler_on_the_device_follows_published_weights(store: Store, tmp_path: Path) -> None:
    from tests.published.weights import Trained

    trained = Trained(store, tmp_path / "cache")
    sampler = {name: torch.zeros_like(values, device="cuda") for name, values in trained.weights.items()}
    with raycheck.follow(store.uri, tmp_path / "local") as follower:
        for number in range(3):
            trained.publish()
            follower.update().load_into(sampler, changed_only=number > 0)

            for name, values in trained.weights.items():
                assert torch.equal(sampler[name].cpu(), values), name


def test_slices_from_the_device_wait_for_the_step_before_and_are_the_same_object(store: Store) -> None:
    """The copies wait behind a slow step on the training's own stream. Each part has arrived when it is sent."""
    own = torch.cuda.Stream()
    with torch.cuda.stream(own):
        tensors = {
            "large": torch.zeros(1 << 23, device="cuda"),
            "turned": torch.randn(1001, 1733, device="cuda").t(),
            "brain": torch.randn(1001, device="cuda").bfloat16(),
            "on_the_host": torch.randn(333, 17).t(),
        }
        boxes = [box for name, tensor in tensors.items() for box in boxes_of(name, (name,), tensor, may_spread=True)]
        torch.cuda._sleep(LONG)
        tensors["large"].fill_(5.0)

        sliced = Stager("train", 0).stage_in_slices(boxes, {})
        is_device_behind = not own.query()
    found = [bytes(part) for part in sliced.parts(5 * 1024 * 1024 + 3)]
    expected = Stager("train", 0).stage(boxes, {})

    assert is_device_behind, "the host waited for the device, so this shows nothing"
    assert b"".join(found) == bytes(expected.seal())
    assert sliced.shard() == expected.shard()


def test_slices_are_copied_in_another_thread_while_training_waits_and_not_after(store: Store) -> None:
    tensors = {f"w{number}": torch.full((1 << 22,), float(number), device="cuda") for number in range(16)}
    boxes = [box for name, tensor in tensors.items() for box in boxes_of(name, (name,), tensor, may_spread=True)]
    buffered = Stager("train", 0).stage(boxes, {})
    expected = bytes(buffered.seal())
    save = StagedState(staged=[Stager("train", 0).stage_in_slices(boxes, {})])
    uploading = InThread(lambda: save.upload(store, "step-000000001-a1-s1"))

    save.wait_for_slices(time.monotonic() + 60)
    torch._foreach_add_(list(tensors.values()), 1000.0)
    uploading.join()

    assert store.get(shard_key("step-000000001-a1-s1", "train", 0)).data == expected
    late = Stager("train", 0).stage_in_slices(boxes, {})
    late.slices.let_go()
    with pytest.raises(SaveFailedError):
        list(late.parts(1 << 20))


def test_parts_of_slices_from_the_device_are_page_locked_and_used_again(store: Store) -> None:
    tensors = [torch.randn(1 << 22, device="cuda") for _ in range(8)]
    boxes = [
        box
        for number, tensor in enumerate(tensors)
        for box in boxes_of(f"w{number}", ("w", number), tensor, may_spread=True)
    ]
    places = []

    for part in Stager("train", 0).stage_in_slices(boxes, {}).parts(1 << 24):
        view = torch.frombuffer(part, dtype=torch.uint8)
        assert view.is_pinned()
        places.append(view.data_ptr())

    assert len(set(places)) <= 3 < len(places)


def test_random_state_of_the_device_goes_on_where_it_was(store: Store) -> None:
    torch.cuda.manual_seed(11)
    torch.rand(1000, device="cuda")
    saved = rng_values()
    expected = torch.rand(100, device="cuda"), torch.randn(7, device="cuda"), torch.rand(5), random.random()
    torch.rand(5, device="cuda")

    apply_rng([saved], 0)

    found = torch.rand(100, device="cuda"), torch.randn(7, device="cuda"), torch.rand(5), random.random()
    assert all(torch.equal(a, b) for a, b in zip(found[:3], expected[:3], strict=True))
    assert found[3] == expected[3]


def test_a_new_rank_draws_others_on_the_device_and_always_the_same(store: Store) -> None:
    torch.cuda.manual_seed(11)
    saved = rng_values()
    drawn = []
    for rank in (0, 1, 1, 2):
        apply_rng([saved], rank)
        drawn.append(torch.rand(50, device="cuda"))

    assert torch.equal(drawn[1], drawn[2])
    assert not torch.equal(drawn[0], drawn[1])
    assert not torch.equal(drawn[2], drawn[3])


def test_the_digest_of_device_memory_shows_one_changed_bit() -> None:
    tensors = [torch.randn(3_000_001, device="cuda"), torch.ones(5, dtype=torch.uint8, device="cuda")]
    before = digests(tensors)
    assert digests(tensors) == before

    for tensor, places in ((tensors[0], (0, 1_048_575, 1_048_576, 3_000_000)), (tensors[1], (0, 4))):
        for place in places:
            words = tensor.view(torch.uint8)
            words[place * tensor.element_size()] ^= 1
            assert digests(tensors) != before
            words[place * tensor.element_size()] ^= 1
    assert digests(tensors) == before


def test_digests_see_the_values_of_before_their_creation_and_hold_up_those_of_after() -> None:
    """The device is behind when they are created, and the copies of a save are enqueued before they are."""
    tensor = torch.zeros(1 << 24, device="cuda")
    torch.cuda._sleep(LONG)
    tensor.fill_(5.0)

    pending = PendingDigests([tensor])
    copy = tensor.to("cpu", non_blocking=True)
    pending.release()
    tensor.fill_(9.0)

    found = pending.result()
    assert found == digests([torch.full((1 << 24,), 5.0, device="cuda")])
    assert copy.min().item() == copy.max().item() == 5.0


def test_a_frozen_base_on_the_device_is_uploaded_once(store: Store) -> None:
    base = nn.Linear(512, 512).cuda().requires_grad_(False)
    state = {"model": nn.ModuleDict({"base": base, "head": nn.Linear(512, 2).cuda()})}
    live = TrainState(state, rank=0, world_size=1)
    stored = []
    for number in (1, 2, 3):
        if number == 3:
            with torch.no_grad():
                base.weight.data[0, 0] += 1
        staged = live.stage(Progress(step=number))
        name = claimed(store, world_size=1, save=number, step=number)
        uploaded = upload(store, staged, name=name)
        checkpoint = committed(store, name, [uploaded], progress=Progress(step=number))
        live.components.committed(
            staged, {item.name: item.checkpoint for item in checkpoint.read_manifest().components}
        )
        referred = {reference.name for reference in uploaded.references}
        stored.append([shard.component for shard in uploaded.records if shard.component not in referred])

    assert stored == [["train", "model.frozen"], ["train"], ["train", "model.frozen"]]


def test_stock_torch_loads_what_the_device_saved(store: Store, tmp_path, group_of_one: None) -> None:
    state = build(1, sharded=True)
    train(state, 2)
    checkpoint = save_state(store, state)
    other = build(2, sharded=True)
    loaded = {"model": other["model"].state_dict()}

    dcp.load(loaded, checkpoint_id=str(tmp_path / "run" / "checkpoints" / checkpoint.entry.key / "train"))

    for name, tensor in state["model"].state_dict().items():
        assert torch.equal(loaded["model"][name].full_tensor(), tensor.full_tensor()), name


def test_a_checkpoint_moves_between_device_and_host(store: Store, group_of_one: None) -> None:
    state = build(1, sharded=True)
    train(state, 2)
    checkpoint = save_state(store, state)
    plain = nn.Sequential(nn.Linear(64, 257), nn.GELU(), nn.LayerNorm(257), nn.Dropout(0.1), nn.Linear(257, 8))

    raycheck.open_run(store.uri).restore(into={"model": plain})

    assert checkpoint.entry.step == 1
    for name, tensor in state["model"].state_dict().items():
        assert torch.equal(plain.state_dict()[name], tensor.full_tensor().cpu()), name


def test_scaler_compiled_module_and_own_values_on_the_device_come_back(store: Store) -> None:
    def made(seed: int) -> dict[str, object]:
        torch.manual_seed(seed)
        model = torch.compile(nn.Linear(32, 32).cuda(), backend="eager")
        scaler = torch.amp.GradScaler("cuda", init_scale=float(seed * 1024))
        own = {"moving": torch.rand(9, device="cuda")}
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        with torch.autocast("cuda"):
            loss = model(torch.randn(4, 32, device="cuda")).sum()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        return {"model": model, "optimizer": optimizer, "scaler": scaler, "own": raycheck.PerRank(own)}

    state, other = made(1), made(2)
    checkpoint = save_state(store, state)

    restore_state(checkpoint, other)

    assert other["scaler"].state_dict() == state["scaler"].state_dict()
    assert torch.equal(other["model"].weight, state["model"].weight)
    assert torch.equal(other["own"].value["moving"], state["own"].value["moving"])
    assert other["own"].value["moving"].device.type == "cuda"
