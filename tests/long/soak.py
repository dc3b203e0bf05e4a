"""A worker group that saves and restores for as long as it is let: nothing that its processes hold may grow.

    python -m tests.long.soak --minutes 120 [--engine s3fs]

Each round the same processes open a Checkpointer, restore, check every value, save after each step, and close it again.
Prints a line a minute, and in the end what grew.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any
from uuid import uuid4

import ray
import torch

import raycheck
from raycheck.bucket.store import open_store
from raycheck.bucket.store.address import join_uri
from raycheck.demo.server import s3_server
from tests.support.histories.invariants import assert_invariants

RANKS = 2
STEPS = 20  # of a round, each of them saved
PARAMETERS = 500_000
ROUND_TIMEOUT_S = 300.0


@dataclass(frozen=True, kw_only=True)
class Held:
    """What a process holds. memory_mb: resident and its own, no file behind it."""

    memory_mb: float
    threads: int
    files: int
    sockets: int

    @classmethod
    def by_this_process(cls) -> "Held":
        status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
        open_files = list(_open_files())
        sockets = sum(name.startswith("socket:") for name in open_files)
        return cls(
            memory_mb=int(status["RssAnon"].split()[0]) / 1024,
            threads=int(status["Threads"]),
            files=len(open_files) - sockets,
            sockets=sockets,
        )


def _open_files() -> Iterator[str]:
    for descriptor in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):  # the one that the folder is listed with
            yield str(descriptor.readlink())


@ray.remote(num_cpus=0)
class Rank:
    """One rank; every element of its model is the number of the step."""

    def __init__(self, rank: int, uri: str, coordinator: Any, engine: str, pause_s: float) -> None:
        torch.set_num_threads(1)
        if engine == "s3fs":
            sys.modules["obstore"] = None  # type: ignore[assignment]  as if it were not installed
        self._rank, self._uri, self._coordinator, self._pause_s = rank, uri, coordinator, pause_s
        self._model = torch.nn.Linear(PARAMETERS, 1, bias=False)

    def round(self, group: str) -> Held:
        place = raycheck.adapters.RayGroup(
            id=group, uri=self._uri, rank=self._rank, world_size=RANKS, coordinator=self._coordinator
        )
        weight = self._model.weight
        with torch.no_grad():
            weight.fill_(-1.0)
        settings = raycheck.SaveSettings(every_steps=1, keep_last=3)
        with raycheck.Checkpointer({"model": self._model}, settings, group=place) as ckpt:
            at = ckpt.restore()
            expected = float(at.step) if at.step else -1.0
            assert torch.equal(weight, torch.full_like(weight, expected)), f"not the values of step {at.step}"
            for step in range(at.step + 1, at.step + STEPS + 1):
                with torch.no_grad():
                    weight.fill_(float(step))
                ckpt.end_step()
                time.sleep(self._pause_s)
        return Held.by_this_process()


@dataclass(frozen=True)
class Soaked:
    """saves: how many were committed. held: of each process after each round."""

    saves: int
    held: dict[str, list[Held]]

    def growth(self) -> dict[str, dict[str, float]]:
        """Per process and kind: the median of the last quarter less that of the second, which is warm by then."""
        return {
            name: {kind: self._grown([getattr(held, kind) for held in all_held]) for kind in KINDS}
            for name, all_held in self.held.items()
        }

    def _grown(self, values: list[float]) -> float:
        quarter = len(values) // 4
        return statistics.median(values[-quarter:]) - statistics.median(values[quarter : 2 * quarter])


KINDS = tuple(spec.name for spec in fields(Held))


def soak(
    bucket: str, *, engine: str, saves: int | None = None, minutes: float | None = None, pause_s: float = 0.0
) -> Soaked:
    """Rounds until so many saves, or minutes. Needs a running Ray. pause_s: after each step."""
    uri = join_uri(bucket, uuid4().hex)
    coordinator = raycheck.adapters.start_coordinator(uri, owner="soak")
    ranks = [Rank.remote(rank, uri, coordinator, engine, pause_s) for rank in range(RANKS)]
    names = [*(f"rank {rank}" for rank in range(RANKS)), "coordinator"]
    held: dict[str, list[Held]] = {name: [] for name in names}
    began, told, done = time.monotonic(), 0.0, 0
    while (saves is None or done < saves) and (minutes is None or time.monotonic() - began < minutes * 60):
        group = uuid4().hex
        now = ray.get([rank.round.remote(group) for rank in ranks], timeout=ROUND_TIMEOUT_S)
        now.append(ray.get(coordinator.__ray_call__.remote(lambda _: Held.by_this_process())))
        for name, one in zip(names, now, strict=True):
            held[name].append(one)
        done += STEPS
        if time.monotonic() - told > 60:
            told = time.monotonic()
            print(
                f"{(told - began) / 60:6.1f} min {done:7d} saves",
                *(f"| {name}: {_said(held[name][-1])}" for name in names),
                flush=True,
            )
    assert len(held[names[0]]) >= 4, "too few rounds to compare quarters"
    body = assert_invariants(open_store(uri))
    assert body is not None
    assert body.entry(body.head).step == done, "a save is missing"
    return Soaked(done, held)


def _said(held: Held) -> str:
    return f"{held.memory_mb:.1f} MB, {held.threads} threads, {held.files} files, {held.sockets} sockets"


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--minutes", type=float, default=120.0)
    options.add_argument("--pause", type=float, default=0.0, help="seconds after each step")
    options.add_argument("--engine", choices=("obstore", "s3fs"), default="obstore")
    asked = options.parse_args()
    with s3_server() as bucket:
        ray.init(num_cpus=8, include_dashboard=False, log_to_driver=False)
        soaked = soak(bucket, engine=asked.engine, minutes=asked.minutes, pause_s=asked.pause)
        print(f"{soaked.saves} saves, {soaked.saves // STEPS} restores; grown since the second quarter:")
        for name, grown in soaked.growth().items():
            print(f"  {name}: " + ", ".join(f"{kind} {by:+.1f}" for kind, by in grown.items()))
        ray.shutdown()


if __name__ == "__main__":
    main()
