"""Measures what `many_ranks` measures, but with a coordinator that is a Ray actor: `python -m tests.bench.many_ranks
--ray`.

A few processes send the messages of all ranks, each call through Ray, and hold the calls until they are answered. They
run on the same machine as the coordinator, so the times from the last rank's message until the first and until all
answers include what would be the work of thousands of machines. CPU seconds are those of the coordinator's process,
with Ray's own threads in it.
"""

import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import uuid4

import ray

from raycheck.adapters import start_coordinator
from raycheck.group.coordinator.messages import Pending, RankProof
from tests.bench.many_ranks import IDLE_SHARE, PATIENCE_S, Layout, SimulatedRank, tensors_of

SENDERS = 4
IDLE_S = 0.5
LIMIT_S = 300.0
"""No phase takes longer; a slower one is an error."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RayCost:
    """What one exchange of all ranks with the coordinator costs.

    first_answer_s, all_answers_s: seconds from the last rank's call. threads, rss_mib: while all calls but one wait.
    """

    cpu_s: float
    after_the_last_s: float
    first_answer_s: float
    all_answers_s: float
    threads: int
    rss_mib: float


class Sender:
    """A process that calls the coordinator for some of the ranks."""

    def __init__(self, coordinator: Any, name: str, world_size: int, num_tensors: int, ranks: range) -> None:
        layout = Layout.of(name, world_size)
        tensors = tensors_of(num_tensors, layout)
        self._coordinator, self._world_size = coordinator, world_size
        self._ranks = [SimulatedRank(rank, world_size, tensors, layout) for rank in ranks]
        self._sections: list[Any] = []
        self._method = ""
        self._calls: list[tuple[Any, ...]] = []
        self._waiting: list[Any] = []
        self._answers: list[Any] = []

    def prepare(self, phase: str, key: str) -> None:
        """Make the messages of a phase. key: the checkpoint to restore."""
        size = self._world_size
        match phase:
            case "first claim" | "claim":
                group = "group" if phase == "first claim" else "next"
                self._method, self._calls = "claim", [(group, size, it.rank) for it in self._ranks]
            case "data":
                proofs = [
                    RankProof(group="group", rank=it.rank, world_size=size, stream=None, proof=None)
                    for it in self._ranks
                ]
                self._method, self._calls = "compare_data", [(proof, PATIENCE_S) for proof in proofs]
            case "agreement":
                asked = [(it.report(None, 1), it.holdings(), PATIENCE_S) for it in self._ranks]
                self._method, self._calls = "agree", asked
            case "restore":
                told = [(it.restored(key, "next"), PATIENCE_S) for it in self._ranks]
                self._method, self._calls = "restored", told
            case _:
                if phase == "first save":
                    of_rank = zip(self._ranks, self._answers, strict=True)
                    self._sections = [it.section(agreement) for it, agreement in of_rank]
                save = 1 if phase == "first save" else 2
                sections = self._sections if save == 1 else [own.without_plan() for own in self._sections]
                reports = [it.report(own, save) for it, own in zip(self._ranks, sections, strict=True)]
                self._method, self._calls = "report", [(report, PATIENCE_S) for report in reports]
        self._waiting = []

    def send(self, but: int) -> None:
        """Make all calls but some of the last ones."""
        for call in self._calls[len(self._waiting) : len(self._calls) - but]:
            self._waiting.append(getattr(self._coordinator, self._method).remote(*call))

    def finish(self) -> tuple[float, float, float, set[str]]:
        """Make the calls that are left, and wait for all answers. Return when it began, had one answer and had all, and
        the kinds and keys of the answers."""
        began = time.monotonic()
        self.send(but=0)
        ray.wait(self._waiting, timeout=LIMIT_S)
        answered = time.monotonic()
        self._answers = ray.get(self._waiting, timeout=LIMIT_S)
        while again := [at for at, answer in enumerate(self._answers) if isinstance(answer, Pending)]:
            asked = [getattr(self._coordinator, self._method).remote(*self._calls[at]) for at in again]
            for at, answer in zip(again, ray.get(asked, timeout=LIMIT_S), strict=True):
                self._answers[at] = answer
        kinds = {f"{getattr(answer, 'kind', '')} {getattr(answer, 'key', '')}" for answer in self._answers}
        return began, answered, time.monotonic(), kinds


class Process:
    """A process of this machine, by its number."""

    def __init__(self, pid: int) -> None:
        self._folder = Path(f"/proc/{pid}")

    @property
    def cpu_s(self) -> float:
        spent = (self._folder / "stat").read_text().rpartition(")")[2].split()
        return (int(spent[11]) + int(spent[12])) / os.sysconf("SC_CLK_TCK")

    def status(self, name: str) -> int:
        lines = dict(line.split(":", 1) for line in (self._folder / "status").read_text().splitlines())
        return int(lines[name].split()[0])

    def idle(self) -> float:
        """Wait until it does nothing. Return its CPU seconds then."""
        last, deadline = self.cpu_s, time.monotonic() + LIMIT_S
        while time.monotonic() < deadline:
            time.sleep(IDLE_S)
            before, last = last, self.cpu_s
            if last - before <= IDLE_SHARE * IDLE_S:
                return last
        raise TimeoutError("the coordinator is never idle")


def measured(name: str, world_size: int, num_tensors: int) -> dict[str, RayCost]:
    """Measure one world: two claims, the agreement, two saves, and a restore."""
    coordinator = start_coordinator(f"memory://{uuid4().hex}", owner="driver")
    process = Process(ray.get(coordinator.__ray_call__.remote(lambda _: os.getpid())))
    ranks = [range(world_size * at // SENDERS, world_size * (at + 1) // SENDERS) for at in range(SENDERS)]
    sender: Any = ray.remote(num_cpus=0)(Sender)
    senders = [sender.remote(coordinator, name, world_size, num_tensors, own) for own in ranks]
    costs, key = {}, ""
    for phase in ("first claim", "data", "agreement", "first save", "later save", "claim", "restore"):
        ray.get([it.prepare.remote(phase, key) for it in senders], timeout=LIMIT_S)
        began = process.idle()
        ray.get([it.send.remote(it is senders[-1]) for it in senders], timeout=LIMIT_S)
        last = process.idle()
        threads, rss = process.status("Threads"), process.status("VmRSS") / 1024
        waiting = [it.finish.remote() for it in senders[:-1]]
        time.sleep(IDLE_S)
        (sent_at, *_), *_ = told = ray.get([senders[-1].finish.remote(), *waiting], timeout=LIMIT_S)
        ended = process.idle()
        if phase.endswith("save"):
            (said,) = set[str]().union(*(kinds for *_, kinds in told))
            kind, key = said.split()
            assert kind == "committed", said
        costs[phase] = RayCost(
            cpu_s=ended - began,
            after_the_last_s=ended - last,
            first_answer_s=max(0.0, min(first for _, first, *_ in told) - sent_at),
            all_answers_s=max(ended for _, _, ended, _ in told) - sent_at,
            threads=threads,
            rss_mib=rss,
        )
    ray.kill(coordinator)
    for it in senders:
        ray.kill(it)
    return costs


def lines(name: str, world_size: int, num_tensors: int) -> Iterator[str]:
    """Yield the rows of a table for one world."""
    costs = measured(name, world_size, num_tensors)
    yield f"**{name}, {world_size} ranks, {world_size * num_tensors:,} (rank, tensor) pairs, through Ray**"
    yield ""
    yield "| | CPU, s | after the last, s | first answer after, s | all answers after, s | threads | RSS, MiB |"
    yield "|---|---|---|---|---|---|---|"
    for phase, cost in costs.items():
        yield (
            f"| {phase} | {cost.cpu_s:.2f} | {cost.after_the_last_s:.2f} | {cost.first_answer_s:.2f} | "
            f"{cost.all_answers_s:.2f} | {cost.threads} | {cost.rss_mib:.0f} |"
        )
    yield ""


def show(layouts: list[str], worlds: list[int], num_tensors: int) -> None:
    """Print the tables."""
    ray.init("local", num_cpus=SENDERS, include_dashboard=False, log_to_driver=False, object_store_memory=1 << 28)
    for name in layouts:
        for world_size in worlds:
            print("\n".join(lines(name, world_size, num_tensors)), flush=True)
