"""raycheck does not repeat what went wrong in the systems before it. Each test is named after what raycheck prevents;
tests/parity.md says where each weakness was found, and which tests cover it more broadly."""

import ast
import asyncio
import os
from dataclasses import replace
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
import torch
from torch import nn

import raycheck
from raycheck.bucket.format import object_keys
from raycheck.bucket.format.progress import Progress
from raycheck.bucket.reading import Checkpoint, read_latest
from raycheck.bucket.store import Store, open_store
from raycheck.bucket.store.address import join_uri
from raycheck.data.batches import Batches
from raycheck.group.coordinator.actor import Coordinator
from raycheck.settings import SaveSettings
from raycheck.state.train_state import TrainState
from tests.bench.coordinator import simulated
from tests.group.coordinator.test_plan_cache import WORLD_SIZE, reports, tell
from tests.support.processes.background_call import InThread
from tests.support.processes.save_without_ray import claimed, committed, restore_state, save_state, upload
from tests.support.samples.sample_checkpoints import Around, Driver, everything
from tests.support.servers.http_fault_proxy import FaultProxy

PACKAGE = Path(raycheck.__file__).parent


def a_model(value: float) -> nn.Linear:
    model = nn.Linear(3, 2)
    nn.init.constant_(model.weight, value)
    return model


def head(store: Store) -> Checkpoint:
    body = read_latest(store)
    entry = body.entry(body.head or "")
    assert entry is not None
    return Checkpoint(store, entry)


def restored(store: Store) -> float:
    """Returns the value that every weight has after a restore of the head."""
    model = a_model(-1.0)
    restore_state(head(store), {"model": model})
    return model.weight[0, 0].item()


def test_1_the_only_copy_is_not_overwritten_and_a_torn_save_is_not_loaded(memory: Store) -> None:
    save_state(memory, {"model": a_model(1.0)}, save_number=1, step=1)
    first = everything(memory)
    name = claimed(memory, world_size=1, save=2, step=2)
    upload(memory, TrainState({"model": a_model(2.0)}, rank=0, world_size=1).stage(Progress(step=2)), name=name)

    assert restored(memory) == 1.0
    now = everything(memory)
    assert {key: now[key] for key in first if key != object_keys.LATEST_KEY} == {
        key: data for key, data in first.items() if key != object_keys.LATEST_KEY
    }


def test_2_what_is_whole_is_not_guessed_from_counts_or_numbers_and_a_load_deletes_nothing(memory: Store) -> None:
    save_state(memory, {"model": a_model(1.0)}, step=1)
    for number in range(9):
        memory.put(f"checkpoints/step-000000099-a1-s9/train/__{number}_0.distcp", b"more files, and a higher step")
        memory.put(f"checkpoints/step-000000001-a1-s1/stray-{number}", b"a file more than others have")
    before = everything(memory)

    assert restored(memory) == 1.0
    assert everything(memory) == before


class Order(Around):
    """Records the order in which objects are put into the store."""

    def __init__(self, inner: Store) -> None:
        super().__init__(inner)
        self.keys: list[str] = []

    def __getattr__(self, name: str) -> Any:
        verb = getattr(self.inner, name)

        def recorded(key: str, *args: Any) -> Any:
            self.keys.append(key)
            return verb(key, *args)

        return recorded if name.startswith("put") else verb


def test_3_nothing_points_to_data_that_is_not_there_yet_driver_s_state_included(memory: Store) -> None:
    order: Any = Order(memory)
    save_state(order, {"model": a_model(1.0), "driver": {"consumed": 7}}, step=1)
    state = {"consumed": 0}
    restore_state(head(memory), {"model": a_model(0.0), "driver": state})

    assert order.keys[-1] == object_keys.LATEST_KEY
    assert {key.rpartition("/")[2] for key in order.keys} >= {"manifest.json", "index", "__0_0.distcp"}
    assert state == {"consumed": 7}, "it is in the index, which the commit is of"


def test_4_a_storage_error_of_one_rank_strands_no_other_and_is_named() -> None:
    uri = f"memory://{uuid4().hex}"

    async def one_fails_and_one_does_not_come() -> list[Any]:
        coordinator = Coordinator(uri, "driver")
        await coordinator.claim("group", WORLD_SIZE)
        first, second, _ = reports(open_store(uri), simulated(WORLD_SIZE, tensors=2), save=1)
        failed = replace(second, failure="upload of __1_0.distcp: SlowDown")
        return await asyncio.wait_for(tell(coordinator, [first, failed]), timeout=60.0)

    outcomes = asyncio.run(one_fails_and_one_does_not_come())

    assert {outcome.kind for outcome in outcomes} == {"failed"}
    assert all("rank 1: upload of __1_0.distcp: SlowDown" in outcome.message for outcome in outcomes)


def test_5_bytes_go_straight_to_the_store_without_a_local_copy_or_a_bucket_call(
    s3: str, wire: FaultProxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    wire.rule("busy", "PUT", "__0_0.distcp", times=2)
    run = uuid4().hex

    save_state(open_store(join_uri(wire.uri, run)), {"model": nn.Linear(600, 500)}, step=1)

    assert restore_step(open_store(join_uri(s3, run))) == 1
    assert not list(tmp_path.rglob("*")), "nothing was written beside the bucket"
    assert all(run in head.target for head in wire.heads), "no request was about the bucket itself"
    assert sum("__0_0.distcp" in request for request in wire.requests) >= 3, "it was asked again when it was busy"


def restore_step(store: Store) -> int:
    model = nn.Linear(600, 500)
    return TrainState({"model": model}, rank=0, world_size=1).apply(head(store)).progress.step


def test_6_another_world_size_goes_on_with_the_data_and_random_state_where_they_were(memory: Store) -> None:
    before = Batches(range(24), global_batch=6, rank=0, world_size=1)
    for _ in zip(before.loader(0), range(2), strict=False):
        before.end_step()
    save_state(memory, {"model": a_model(1.0), "data": before}, step=2)
    rest = [int(index) for batch in before.loader(0) for index in batch]

    seen: list[list[int]] = []
    rules = []
    for rank in range(3):
        data = Batches(range(24), global_batch=6, rank=rank, world_size=3)
        done = TrainState({"model": a_model(0.0), "data": data}, rank=rank, world_size=3).apply(head(memory))
        rules.append(done.apply_rng())
        seen += [[int(index) for index in batch] for batch in data.loader(0)]

    steps = [seen[0], seen[2], seen[4]], [seen[1], seen[3], seen[5]]
    assert [index for step in steps for share in step for index in share] == rest
    assert ["derived" in rule for rule in rules] == [False, True, True], "new ranks get seeds of their own"


def test_7_state_that_is_missing_or_damaged_is_an_error_and_never_a_silent_restart(memory: Store) -> None:
    model = a_model(1.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    save_state(memory, {"model": model, "optimizer": optimizer}, step=1)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    live = a_model(5.0)

    with pytest.raises(raycheck.errors.StateMismatchError, match=r"missing in the checkpoint: schedule"):
        restore_state(head(memory), {"model": live, "optimizer": optimizer, "schedule": schedule})
    assert live.weight[0, 0].item() == 5.0, "nothing was changed"

    memory.put(object_keys.LATEST_KEY, b"{ torn")
    with pytest.raises(raycheck.errors.CorruptError, match="latest"):
        Driver(memory, "another").claim("group")


def test_8_training_does_not_wait_for_the_store(s3: str, wire: FaultProxy) -> None:
    store = open_store(join_uri(wire.uri, uuid4().hex))
    held = wire.rule("hold", "PUT", "__0_0.distcp")
    state = TrainState({"model": (model := a_model(1.0))}, rank=0, world_size=1)

    staged = state.stage(Progress(step=1))
    name = claimed(store, world_size=1)
    sending = InThread(lambda: upload(store, staged, name=name))
    held.wait(30)
    nn.init.constant_(model.weight, 2.0)
    held.release()
    committed(store, name, [sending.join()], progress=Progress(step=1))

    assert restored(store) == 1.0, "the request hung while the training changed what it had been given"


def test_9_retention_deletes_neither_what_is_pointed_to_nor_the_newest_after_going_back(memory: Store) -> None:
    for count in (0, -1):
        with pytest.raises(raycheck.errors.ConfigError, match=f"keep_last={count}"):
            SaveSettings(keep_last=count)
    ann = Driver(memory)
    ann.claim("g1")
    for save, step in ((1, 10), (2, 40), (3, 50)):
        ann.save(1, save, step=step)
    bob = Driver(memory, "bob")
    attempt, _ = bob.claim("g2", resume=10)

    bob.save(attempt.number, 1, step=20, keep_last=2)

    body = read_latest(memory)
    assert body.entry(body.head or "").step == 20
    assert 10 in [entry.step for entry in body.live], "the newest two of the branch that training is on"


def test_10_no_code_comes_out_of_a_checkpoint(memory: Store) -> None:
    with pytest.raises(raycheck.errors.ConfigError, match=r"state at own\.bomb"):
        save_state(memory, {"own": {"bomb": Bomb()}}, step=1)
    calls = {
        f"{node.value.id}.{node.attr}"
        for path in PACKAGE.rglob("*.py")
        if path != PACKAGE / "bucket/store/ray_filesystem.py"  # a process gets it from the one that starts it
        and path != PACKAGE / "data/isolated_call.py"  # from its own child
        and path != PACKAGE / "group/coordinator/task_run.py"  # a function that a rank sends to its coordinator
        and path != PACKAGE / "catalog/importing/torch_file.py"  # tests/catalog/test_import.py holds it to weights_only
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)
    }

    assert not calls & {"pickle.load", "pickle.loads", "torch.load", "cloudpickle.loads"}


class Bomb:
    def __reduce__(self) -> Any:
        return os.abort, ()


def test_a_checkpoint_says_which_step_to_run_next(memory: Store) -> None:
    losses = []
    model = a_model(1.0)
    for step in range(3):
        losses.append(step)
        save_state(memory, {"model": model}, save_number=step + 1, step=step + 1)

    done = TrainState({"model": model}, rank=0, world_size=1).apply(head(memory))

    assert done.progress.step == len(losses), "the next one's index, and not the last one's"
