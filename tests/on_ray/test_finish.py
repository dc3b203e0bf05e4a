"""A run ends finished, or by a mistake of its program; or it goes on, since what failed can be mended."""

import os
import signal
import time
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
import ray
import ray.train
import ray.train.collective
import ray.train.torch
import torch
from ray._private.state import state as ray_state
from ray.train import TrainingFailedError

import raycheck
from raycheck.bucket.attempt_records import read_resumes
from raycheck.bucket.reading import read_latest
from raycheck.bucket.run_status import read_status
from raycheck.bucket.store import open_store
from raycheck.bucket.store.address import join_uri
from tests.support.histories.invariants import assert_invariants
from tests.support.processes.background_call import InThread
from tests.support.processes.ray_jobs import story, tell

pytestmark = [pytest.mark.ray, pytest.mark.filterwarnings("ignore")]  # Ray itself warns


def train_epochs(config: dict[str, Any]) -> None:
    """Trains by a loop as in the README, and uses the last loss after the loop, as many scripts do."""
    rank = ray.train.get_context().get_world_rank()
    model = ray.train.torch.prepare_model(torch.nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = raycheck.Batches(torch.randn(32, 4), global_batch=8)
    with raycheck.Checkpointer({"model": model, "optimizer": optimizer, "data": data}) as ckpt:
        at = ckpt.restore()
        facts = {"at": at.step, "epoch": at.epoch, "is_finished": at.is_finished}
        tell(Path(config["folder"]), rank, "start", cause=at.resume and at.resume.cause, **facts)
        for epoch in range(at.epoch, config["epochs"]):
            for inputs in data.loader(epoch):
                loss = model(inputs).square().mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                ckpt.end_step({"loss": loss})
            tell(Path(config["folder"]), rank, "epoch", loss=loss.item())
            ckpt.end_epoch()


@pytest.mark.parametrize(
    ("start", "workers"),
    [
        pytest.param(raycheck.fit, 1, id="raycheck"),
        pytest.param(lambda trainer: trainer.fit(), 2, id="ray", marks=pytest.mark.slow),
    ],
)
def test_a_run_that_is_submitted_again_after_its_end_does_nothing_and_says_so(
    job, tmp_path: Path, start, workers: int
) -> None:
    storage, uri = f"file://{tmp_path}/runs", f"file://{tmp_path}/runs/run"
    start(job(storage, "run", workers=workers, train=train_epochs, epochs=2))
    store = open_store(uri)
    once = read_status(store), read_latest(store).head

    start(job(storage, "run", workers=workers, train=train_epochs, epochs=2))
    again = read_status(store), read_latest(store).head
    start(job(storage, "run", workers=workers, train=train_epochs, epochs=3))

    assert once[0].state == again[0].state == "finished"
    assert once[1] == again[1], "the second start had nothing to save"
    began = story(tmp_path, "start")
    assert [item["is_finished"] for item in began] == [False, True, True]
    assert [(item["at"], item["epoch"]) for item in began] == [(0, 0), (8, 2), (8, 2)]
    assert [item["cause"] for item in began[1:]] == ["it had finished"] * 2
    assert len(story(tmp_path, "epoch")) == 3
    body = assert_invariants(store)
    assert read_status(store).text.startswith("finished at step 12")
    assert body.finished.attempt == 3
    assert read_resumes(store, [2])[2].lost_steps == 0


def train_badly(config: dict[str, Any]) -> None:
    """Raises what `config` says, on rank 0, before its first step or after it; or rank 1 dies once."""
    folder, rank = Path(config["folder"]), ray.train.get_context().get_world_rank()
    torch.manual_seed(0)
    model = torch.nn.Linear(2, 2)
    with raycheck.Checkpointer({"model": model}, raycheck.SaveSettings(every_steps=1)) as ckpt:
        at = ckpt.restore()
        tell(folder, rank, "start", at=at.step, attempt=at.attempt)
        ray.train.collective.barrier()
        if config.get("dies") and rank == 1 and at.attempt == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        ray.train.collective.barrier()
        for _ in range(at.step, config.get("after", 0)):
            ckpt.end_step()
        if config.get("after"):
            time.sleep(1.5)  # the heartbeat of rank 0 is a second old at most
            ckpt.end_step()
        if not rank and config.get("error") == "attribute":
            model.no_such_thing()
        if not rank and config.get("error") == "runtime":
            raise RuntimeError("NCCL error: unhandled system error")


def test_a_mistake_of_the_program_before_the_first_step_ends_the_run_at_once(job, tmp_path: Path) -> None:
    storage, store = f"file://{tmp_path}/runs", open_store(f"file://{tmp_path}/runs/run")

    with pytest.raises(AttributeError, match="no attribute 'no_such_thing'") as raised:
        raycheck.fit(job(storage, "run", train=train_badly, error="attribute", max_failures=3))

    assert "model.no_such_thing()" in str(raised.value.__cause__), "the worker's traceback is in what it came from"
    assert len(story(tmp_path, "start")) == 1
    status = read_status(store)
    assert (status.state, status.is_final) == ("died", True)
    assert "AttributeError" in status.text


@pytest.mark.slow
def test_a_mistake_after_a_step_and_an_error_of_the_network_before_it_are_retried(job, tmp_path: Path) -> None:
    for name, options in {"late": {"error": "attribute", "after": 2}, "network": {"error": "runtime"}}.items():
        folder = tmp_path / name
        folder.mkdir()
        trainer = job(f"file://{folder}/runs", "run", train=train_badly, folder=str(folder), max_failures=1, **options)

        with pytest.raises(TrainingFailedError):
            raycheck.fit(trainer)

        assert len(story(folder, "start")) == 2, name
        status = read_status(open_store(f"file://{folder}/runs/run"))
        assert (status.state, status.is_final) == ("died", False), name


@pytest.mark.slow
def test_a_worker_that_dies_before_the_first_step_is_no_mistake_of_the_program(job, tmp_path: Path) -> None:
    raycheck.fit(job(f"file://{tmp_path}/runs", "run", train=train_badly, dies=True, after=2, max_failures=2))

    assert [item["attempt"] for item in story(tmp_path, "start")] == [1, 2]
    assert read_status(open_store(f"file://{tmp_path}/runs/run")).state == "finished"


@pytest.mark.slow
def test_a_controller_that_died_where_no_dashboard_runs_leaves_no_node_taken(job, tmp_path: Path) -> None:
    """The workers take every CPU of this Ray: with the dead controller's placement group nothing could start."""
    uri, seen = f"file://{tmp_path}/runs/run", tmp_path / "enough"
    trainer = job(f"file://{tmp_path}/runs", "run", epochs=10_000, every=2, pause_s=0.2, until=str(seen))
    each = ray.cluster_resources()["CPU"] / 2
    trainer.scaling_config.resources_per_worker = {"CPU": each}
    training = InThread(lambda: raycheck.fit(trainer))
    wait_until(lambda: len(story(tmp_path, "step")) >= 6, why="six steps")

    os.kill(pid_of("TrainController"), signal.SIGKILL)
    wait_until(lambda: len(story(tmp_path, "start")) >= 2, why="the second start")
    seen.touch()

    training.join()
    assert story(tmp_path, "start")[1]["at"] >= 2
    assert assert_invariants(open_store(uri)).is_finished


def pid_of(class_name: str) -> int:
    """Returns the process id of the newest live actor of that class. Those of earlier tests may be alive too."""
    alive = ray_state.actor_table(None, None, "ALIVE").values()
    found = [actor for actor in alive if actor["ActorClassName"] == class_name]
    return int(max(found, key=lambda actor: actor["StartTime"])["Pid"])


def wait_until(is_true, *, why: str, within_s: float = 120.0) -> None:
    deadline = time.monotonic() + within_s
    while not is_true():
        assert time.monotonic() < deadline, f"{why}: not within {within_s:.0f} s"
        time.sleep(0.1)


def test_a_group_of_actors_that_its_driver_leads_finishes_too(cluster: None, tmp_path: Path) -> None:
    @ray.remote(num_cpus=0)
    class Holder:
        def __init__(self) -> None:
            torch.manual_seed(0)
            self.model = torch.nn.Linear(2, 2)

    uri = join_uri(f"file://{tmp_path}", uuid4().hex)
    found = []
    for _ in range(2):
        actors = [Holder.remote() for _ in range(2)]
        with raycheck.ActorCheckpointer(actors, lambda actor: {"model": actor.model}, uri) as ckpt:
            at = ckpt.restore()
            found.append(at.is_finished)
            for _ in range(at.step, 3):
                ckpt.end_step()

    assert found == [False, True]
    assert read_status(open_store(uri)).state == "finished"
