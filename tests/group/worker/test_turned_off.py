"""Tests that a script with SaveSettings(enabled=False) trains as before, without a bucket, a coordinator or Ray."""

import stat
from pathlib import Path

import pytest
import ray
import torch

import raycheck
from raycheck.settings import SaveSettings
from tests.support.processes.fork_server import run_code
from tests.support.processes.ray_jobs import SAMPLES, story

SCRIPT = """
import sys, torch, raycheck

def train_fn(settings):
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = raycheck.Batches(torch.utils.data.TensorDataset(torch.ones(12, 2)), global_batch=4)
    before = torch.get_rng_state()
    with raycheck.Checkpointer({"model": model, "nested": {"data": data}}, settings) as ckpt:
        ckpt.add("optimizer", optimizer)
        assert ckpt.peek().is_fresh
        at = ckpt.restore()
        assert (at.step, at.attempt, at.checkpoint) == (0, 1, None)
        for epoch in range(at.epoch, 2):
            for (x,) in data.loader(epoch):
                loss = model(x).sum()
                loss.backward()
                optimizer.step()
                ckpt.end_step({"loss": loss}, tokens=5)
                ckpt.save(after_commit="export")
                ckpt.wait()
            ckpt.end_epoch()
        print(ckpt._counter.progress)
    assert torch.equal(before, torch.get_rng_state())

train_fn(raycheck.SaveSettings(enabled=False, every_tokens=7, at_start=True, when=lambda step, metrics: 1 / 0,
    after_commit=raycheck.AfterCommit.export()))
import ray
print(ray.is_initialized())
"""


def test_a_script_that_is_turned_off_counts_and_starts_nothing() -> None:
    done = run_code(SCRIPT, timeout_s=100)

    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "Progress(step=6, epoch=2, epoch_step=0, samples=24, tokens=30, episodes=0)",
        "False",
    ]
    assert done.stderr.count("raycheck is turned off") == 1, "it is not quiet"


def test_what_a_script_does_wrong_it_does_wrong_when_turned_off_too() -> None:
    ckpt = raycheck.Checkpointer({"x": torch.nn.Linear(1, 1)}, SaveSettings(enabled=False))

    with pytest.raises(raycheck.errors.ConfigError, match="call restore"):
        ckpt.end_step()
    ckpt.restore()
    with pytest.raises(raycheck.errors.ConfigError, match=r"restore\(\) was called before"):
        ckpt.restore()
    with pytest.raises(raycheck.errors.ConfigError, match="comes after restore"):
        ckpt.add("y", {"a": 1})
    with pytest.raises(raycheck.errors.ConfigError, match=r"end_step\(tokens="):
        ckpt.end_step(tokens=-1)
    with pytest.raises(raycheck.errors.ConfigError, match=r"wait\(timeout_s="):
        ckpt.wait(timeout_s=-1)


def test_a_driver_of_actors_that_is_turned_off_keeps_its_own_objects_going(tmp_path: Path) -> None:
    evaluate, data = raycheck.adapters.Periodic(every_steps=2), raycheck.Batches(range(12), global_batch=4)
    early = iter(data.loader())
    next(early)
    state = {"evaluate": evaluate, "data": data}
    ckpt = raycheck.ActorCheckpointer(
        ["nobody calls it"], lambda actor: {}, f"file://{tmp_path}/run", SaveSettings(enabled=False), state=state
    )

    for act in (ckpt.end_step, ckpt.end_epoch, ckpt.save, ckpt.wait):
        with pytest.raises(raycheck.errors.ConfigError, match="call restore"):
            act()
    ckpt.restore()
    with pytest.raises(raycheck.errors.ConfigError, match="started before a restore"):
        next(early)
    due = []
    for _ in data.loader():
        ckpt.end_step()
        due.append(evaluate.take_turn())

    assert due == [False, True, False]


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_a_training_function_is_turned_off_by_fit_alone_or_by_its_settings(job, tmp_path: Path) -> None:
    """Ray itself writes below the run's name; raycheck neither reads nor writes there."""
    for number, (options, settings) in enumerate([({"enabled": False}, {}), ({}, {"enabled": False})]):
        storage, folder = tmp_path / f"runs-{number}", tmp_path / f"story-{number}"
        folder.mkdir()

        raycheck.fit(
            job(f"file://{storage}", "run", mode="plain", workers=1, folder=str(folder), settings=settings), **options
        )

        assert len(story(folder, "step")) == 2 * SAMPLES // 8
        assert story(folder, "start")[0]["attempt"] == 1
        assert not {"latest", "checkpoints", "attempts", "probes"} & {path.name for path in (storage / "run").iterdir()}


@pytest.mark.ray
@pytest.mark.filterwarnings("ignore")
def test_actors_that_are_turned_off_are_left_alone(cluster: None, tmp_path: Path) -> None:
    @ray.remote(num_cpus=0)
    class Rank:
        def __init__(self) -> None:
            self.seen: list[int] = []

        def get(self) -> list[int]:
            return self.seen

    actor = Rank.remote()
    locked = tmp_path / "locked"
    locked.mkdir()
    locked.chmod(stat.S_IRUSR)

    settings = SaveSettings(enabled=False, at_start=True, every_tokens=3)
    with raycheck.ActorCheckpointer([actor], lambda actor: 1 / 0, f"file://{locked}/run", settings) as ckpt:
        at = ckpt.restore(then=lambda actor, at: actor.seen.append(at.step))
        for _ in range(at.step, 3):
            ckpt.end_step({"loss": 1.0})
        ckpt.end_epoch()
        ckpt.save()
        ckpt.wait()

    assert ray.get(actor.get.remote()) == [0]
    assert list(locked.iterdir()) == []
