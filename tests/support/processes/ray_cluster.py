"""Starts a Ray of several nodes on this machine and drivers as processes of their own, and reads what their ranks wrote
about each step."""

import json
import os
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from ray._raylet import GcsClient
from ray.cluster_utils import Cluster
from ray.core.generated.autoscaler_pb2 import DrainNodeReason

from raycheck.bucket.store.address import join_uri
from raycheck.data.batches import Batches
from tests.support.processes.forked_ray_workers import script_command
from tests.support.samples.numbered_samples_job import BATCH, SAMPLES, SEED, Numbered

ROOT = Path(__file__).parents[3]
MEMORY_BYTES = 80 * 1024 * 1024
PER_EPOCH = SAMPLES // BATCH
ENV = {
    "RAY_AUTH_MODE": "disabled",
    "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.5",
    "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": "15",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "PYTHONPATH": str(ROOT),
}


def wait_for(what: Callable[[], Any], *, within_s: float, why: str) -> Any:
    deadline = time.monotonic() + within_s
    while time.monotonic() < deadline:
        if found := what():
            return found
        time.sleep(0.1)
    raise TimeoutError(f"{why}: not within {within_s:.0f} s")


def drain(address: str, node_id: str, *, seconds: float) -> float:
    """Gives a node notice that it goes in so many seconds. Returns when that happened."""
    at = time.monotonic()
    accepted, why = GcsClient(address=address).drain_node(
        node_id, DrainNodeReason.DRAIN_NODE_REASON_PREEMPTION, "a test", int((time.time() + seconds) * 1000)
    )
    assert accepted, why
    return at


class Arena:
    """Runs a Ray whose head has no CPUs, so that ranks are on the other nodes, one on each."""

    def __init__(self, **head: Any) -> None:
        self._cluster = Cluster(
            initialize_head=True,
            head_node_args={"num_cpus": 0, "object_store_memory": MEMORY_BYTES, "include_dashboard": False, **head},
        )

    @property
    def address(self) -> str:
        return str(self._cluster.address)

    def add(self, count: int = 1, **options: Any) -> list[Any]:
        facts = {"num_cpus": 1, "object_store_memory": MEMORY_BYTES, **options}
        return [self._cluster.add_node(**facts) for _ in range(count)]

    @property
    def workers(self) -> list[Any]:
        return list(self._cluster.worker_nodes)

    def of_rank(self, driver: "Driver", rank: int, *, attempt: int = 1) -> Any:
        """Returns the node of a rank."""
        node_id = driver.story.attempts[attempt].nodes[rank]
        return next(node for node in self.workers if node.node_id == node_id)

    def kill_head(self) -> float:
        at = time.monotonic()
        self._cluster.remove_node(self._cluster.head_node, allow_graceful=False)
        return at

    def kill(self, node: Any) -> float:
        """Kills a node without notice. Returns when that happened."""
        at = time.monotonic()
        self._cluster.remove_node(node, allow_graceful=False)
        return at

    def drain(self, node: Any, *, seconds: float) -> float:
        return drain(self.address, node.node_id, seconds=seconds)

    def pid_of(self, name: str) -> int:
        """Returns the process of this cluster's one actor of that class."""
        mine = f"RAY_TMPDIR={os.environ['RAY_TMPDIR']}".encode()
        found = []
        for folder in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):  # it ended while we looked
                is_named = (folder / "cmdline").read_bytes().startswith(f"ray::{name}".encode())
                if is_named and mine in (folder / "environ").read_bytes().split(b"\0"):
                    found.append(int(folder.name))
        assert len(found) == 1, found
        return found[0]

    def shutdown(self) -> None:
        for node in self.workers:
            self.kill(node)
        if self._cluster.head_node is not None:
            self.kill_head()

    def drive(self, folder: Path, uri: str, **config: Any) -> "Driver":
        return Driver(self.address, folder, {"uri": uri, "name": "run", "pause_s": 0.1, **config})


@contextmanager
def arena(env: Mapping[str, str] = ENV, **head: Any) -> Iterator[Arena]:
    """Starts a Ray beside the one of the other tests, which must not find it by Ray's file of the current cluster."""
    before = dict(os.environ)
    with tempfile.TemporaryDirectory(prefix="rc-", ignore_cleanup_errors=True) as short:  # sockets lie below it
        os.environ.update(env, RAY_TMPDIR=short)
        os.environ.pop("RAY_ADDRESS", None)
        made = Arena(**head)
        try:
            yield made
        finally:
            made.shutdown()
            os.environ.clear()
            os.environ.update(before)


class Driver:
    """Runs one driver as a process, and reads what its ranks have written."""

    def __init__(self, address: str, folder: Path, config: dict[str, Any]) -> None:
        self.story = Story(folder)
        self.uri = join_uri(config["uri"], config["name"])
        self._log = (folder / "driver.log").open("a")
        self.process = subprocess.Popen(
            [
                *script_command("tests.support.processes.driver_process"),
                json.dumps({"folder": str(folder), **config}),
            ],
            env={**os.environ, "RAY_ADDRESS": address},
            stdout=self._log,
            stderr=subprocess.STDOUT,
            cwd=folder,
        )

    def kill(self) -> float:
        at = time.monotonic()
        self.process.kill()
        self.process.wait()
        return at

    def join(self, *, within_s: float) -> int:
        try:
            return self.process.wait(within_s)
        except subprocess.TimeoutExpired:
            raise TimeoutError(f"the driver has not ended in {within_s:.0f} s:\n{self.log[-4000:]}") from None

    @property
    def log(self) -> str:
        return Path(self._log.name).read_text()

    def reaches(self, step: int, *, attempt: int = 1, within_s: float = 120.0) -> None:
        """Wait until rank 0 has done `step` in `attempt`."""

        def there() -> bool:
            assert self.process.poll() is None, f"the driver has ended:\n{self.log[-4000:]}"
            return attempt in self.story.attempts and self.story.attempts[attempt].last_step >= step

        wait_for(there, within_s=within_s, why=f"step {step} of attempt {attempt}\n{self.log[-2000:]}")

    def close(self) -> None:
        if self.process.poll() is None:
            self.kill()
        self._log.close()


@dataclass(frozen=True, slots=True)
class Told:
    """Holds what the ranks of one attempt wrote.

    start: the facts that rank 0 wrote at its start. given: sample numbers by step and rank. at: when rank 0 did each step,
    by the clock that all processes of this machine share. losses: rank 0's, by step. memory_step: of the newest memory
    checkpoint that rank 0 knows. pids, nodes: by rank."""

    start: dict[str, Any]
    given: dict[int, dict[int, list[int]]]
    at: dict[int, float]
    losses: dict[int, float]
    memory_step: int
    pids: dict[int, int]
    nodes: dict[int, str]

    @property
    def last_step(self) -> int:
        return max(self.at, default=int(self.start["step"]))


class Story:
    """Reads what the ranks of one run wrote into `folder`."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    @property
    def attempts(self) -> dict[int, Told]:
        """Returns the attempts whose rank 0 has started, by number."""
        events: dict[int, dict[int, list[dict[str, Any]]]] = {}
        for path in sorted(self._folder.glob("story-*.jsonl")):
            attempt, rank = (int(part) for part in path.stem.split("-")[1:])
            lines = path.read_text().splitlines(keepends=True)
            events.setdefault(attempt, {})[rank] = [json.loads(line) for line in lines if line.endswith("\n")]
        return {attempt: _told(ranks) for attempt, ranks in sorted(events.items()) if ranks.get(0)}

    def lost_steps(self, attempt: int) -> int:
        """Returns how many steps were done before `attempt` and had to be done again."""
        return self.attempts[attempt - 1].last_step - int(self.attempts[attempt].start["step"])

    def first_new_step_s(self, attempt: int, *, since: float) -> float:
        told = self.attempts[attempt]
        return told.at[min(told.at)] - since

    def assert_order(self, steps: int) -> None:
        """Checks that every attempt gave each step the samples that the step's number and the seed decide, to whatever ranks,
        and that all steps were done in the end."""
        attempts = self.attempts
        for number, told in attempts.items():
            done = sorted(told.given)
            assert done == list(range(int(told.start["step"]) + 1, told.last_step + 1)), f"attempt {number}: {done}"
            for step, by_rank in told.given.items():
                given = [index for rank in sorted(by_rank) for index in by_rank[rank]]
                if len(by_rank) == told.start["world_size"]:  # others died in the middle of it
                    assert given == batch_of(step), f"attempt {number}, step {step}"
        assert max(told.last_step for told in attempts.values()) == steps


def _told(ranks: dict[int, list[dict[str, Any]]]) -> Told:
    given: dict[int, dict[int, list[int]]] = {}
    for rank, lines in ranks.items():
        for line in lines:
            if line["kind"] == "step":
                given.setdefault(line["step"], {})[rank] = line["indices"]
    starts = {rank: lines[0] for rank, lines in ranks.items() if lines}
    return Told(
        start=starts[0],
        given=given,
        at={line["step"]: line["at"] for line in ranks[0] if line["kind"] == "step"},
        losses={line["step"]: line["loss"] for line in ranks[0] if line["kind"] == "step"},
        memory_step=max((line["memory_step"] for line in ranks[0] if line["kind"] == "step"), default=-1),
        pids={rank: start["pid"] for rank, start in starts.items()},
        nodes={rank: start["node"] for rank, start in starts.items()},
    )


@cache
def batch_of(step: int) -> list[int]:
    """Returns the samples of a step, in the order of ranks: a function of seed and step alone."""
    epoch, place = divmod(step - 1, PER_EPOCH)
    whole = list(Batches(Numbered(), global_batch=BATCH, seed=SEED, rank=0, world_size=1).loader(epoch))
    return [int(index) for index in whole[place][1]]
