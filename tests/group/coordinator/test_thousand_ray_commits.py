"""Tests a thousand checkpoints of one run under Ray Train: nothing grows without limit, and Ray's own records stay
correct.

All tests of this file share one run. It has one worker with a tiny state, so that commits follow each other quickly.
"""

import json
import sys
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import ray.cloudpickle
import ray.train
import ray.train.torch
import torch

import raycheck
from raycheck.bucket.format.latest import MAX_BYTES
from raycheck.bucket.store import open_store
from tests.support.histories.invariants import assert_invariants
from tests.support.processes.background_call import InThread

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.filterwarnings("ignore")]  # Ray itself warns
STEPS = 1000
KEEP_LAST = 5
NUM_TO_KEEP = KEEP_LAST  # a smaller one would contradict it
RUN_S = 480.0  # the limit of a single test does not hold for what all share


def train(config: dict[str, Any]) -> None:
    """Save every step, each save after the one before has ended."""
    torch.set_num_threads(1)
    model = torch.nn.Linear(2, 1)
    settings = raycheck.SaveSettings(every_steps=1, keep_last=config["keep_last"])
    with raycheck.Checkpointer({"model": model}, settings) as ckpt:
        at = ckpt.restore()
        pointer = ray.train.get_checkpoint()
        with Path(config["story"]).open("a") as story:
            story.write(json.dumps({"at": at.step, "ray": pointer and Path(pointer.path).name}) + "\n")
        for _ in range(at.step, config["steps"]):
            with torch.no_grad():
                model.weight += 1.0
            ckpt.end_step({"weight": model.weight[0, 0]})


def fit(folder: Path, steps: int) -> Any:
    """Train the run in `folder` until it has done `steps` steps. Returns Ray's Result."""
    trainer = ray.train.torch.TorchTrainer(
        train,
        train_loop_config={"story": str(folder / "story"), "steps": steps, "keep_last": KEEP_LAST},
        scaling_config=ray.train.ScalingConfig(num_workers=1),
        run_config=ray.train.RunConfig(
            name="run",
            storage_path=f"file://{folder}/runs",
            checkpoint_config=ray.train.CheckpointConfig(num_to_keep=NUM_TO_KEEP),
        ),
    )
    return InThread(lambda: raycheck.fit(trainer)).join(RUN_S)


class Sizes:
    """A thread that records the size of `latest` every 20 ms."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._stopped = threading.Event()
        self._seen: list[int] = []
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def stop(self) -> list[int]:
        self._stopped.set()
        self._thread.join(10.0)
        return self._seen

    def _run(self) -> None:
        while not self._stopped.wait(0.02):
            if self._path.exists():
                self._seen.append(len(self._path.read_bytes()))


@dataclass(frozen=True, kw_only=True)
class Ended:
    """A run after its last step. result: Ray's Result. sizes: of `latest` in bytes, throughout the run."""

    folder: Path
    result: Any
    sizes: list[int]

    @property
    def run(self) -> Path:
        return self.folder / "runs/run"

    def starts(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.folder / "story").read_text().splitlines()]

    def pointers_ray_keeps(self) -> set[str]:
        """Return the directories that Ray's own snapshot of its checkpoint manager names."""
        snapshot = json.loads((self.run / "checkpoint_manager_snapshot.json").read_text())
        return {item["checkpoint_dir_name"] for item in snapshot["checkpoint_results"]}


@pytest.fixture(scope="module")
def ended(cluster: None, tmp_path_factory: pytest.TempPathFactory) -> Ended:
    folder = tmp_path_factory.mktemp("thousand")
    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])
    sizes = Sizes(folder / "runs/run/latest")
    try:
        result = fit(folder, STEPS)
    finally:
        seen = sizes.stop()
    return Ended(folder=folder, result=result, sizes=seen)


def test_latest_stays_small_over_a_thousand_commits(ended: Ended) -> None:
    body = assert_invariants(open_store(f"file://{ended.run}"))

    assert body is not None
    assert [start["at"] for start in ended.starts()] == [0], "the workers were restarted"
    assert body.attempt.last_save == STEPS
    assert [entry.step for entry in body.live] == list(range(STEPS - KEEP_LAST + 1, STEPS + 1))
    assert len(ended.sizes) > STEPS / 2
    assert max(ended.sizes) <= MAX_BYTES


def test_rays_result_is_the_newest_of_a_thousand_commits(ended: Ended) -> None:
    checkpoint = raycheck.open_checkpoint(ended.result.checkpoint)

    assert checkpoint.step == STEPS
    assert [finding.problem for finding in checkpoint.verify() if finding.problem] == []
    assert len(ended.pointers_ray_keeps()) == NUM_TO_KEEP
    assert f"ray/{checkpoint.key}" in ended.pointers_ray_keeps()


def test_only_the_pointers_that_ray_keeps_are_left_of_a_thousand(ended: Ended) -> None:
    left = {f"ray/{path.name}" for path in (ended.run / "ray").iterdir()}

    assert len(left) < 10, "a pointer is written for each commit, and Ray is told of few"
    assert left >= ended.pointers_ray_keeps()


def test_a_run_of_a_thousand_commits_goes_on_where_it_was(ended: Ended) -> None:
    result = fit(ended.folder, STEPS + 3)

    assert ended.starts()[-1] == {"at": STEPS, "ray": f"step-{STEPS:09d}-a1-s{STEPS}"}
    assert raycheck.open_checkpoint(result.checkpoint).step == STEPS + 3
    body = assert_invariants(open_store(f"file://{ended.run}"))
    assert body is not None
    assert body.attempt.number == 2
