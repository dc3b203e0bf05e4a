"""`python -m tests.bench.goodput`: the share of a training's time that stands while its workers are killed.

Seeded traces of kills are replayed over each way to checkpoint one training (goodput_job.py), in rounds, on one Ray of
several nodes: after so many seconds of training, that rank gets a SIGKILL. Ray restarts the workers, and what each way
restores decides which steps are done again. Each way saves as often as Daly's formula says for what its save costs, which
is measured before. Beside each share stands its limit: what is left on the very traces, by Young's and Daly's model, when
only saves, restarts and the steps since the last save cost anything. torchft saves nothing and has no limit: there the
other rank goes on, and Ray restarts the killed one alone.
"""

import argparse
import json
import os
import random
import shlex
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import asdict, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, TypeVar

import fsspec
from rich.console import Console
from rich.table import Table

from tests.bench.ceilings import Raw
from tests.bench.goodput_job import BARE, OURS, ROOM, TORCHFT, WAYS, WORKERS
from tests.bench.goodput_rows import (
    CALIBRATION_EVERY,
    DISTANT,
    FULL,
    QUICK,
    Event,
    Kill,
    Scale,
    Watched,
    counted,
    counted_replicas,
    first_step,
    overlooked,
    rows,
    step_cost,
    steps_between,
    trace,
)
from tests.bench.place import new_folder, plain_uri, s3fs_options
from tests.bench.plots import OURS as OUR_COLOR
from tests.bench.plots import PEERS as PEER_COLOR
from tests.bench.scale import RESULTS
from tests.bench.servers import started
from tests.support.processes.ray_cluster import arena
from tests.support.servers.http_fault_proxy import fault_proxy

ROOT = Path(__file__).parents[2]
SEED = 7
UP_WITHIN_S = 300.0
LOOK_EVERY_S = 0.2
NEVER = 1_000_000
DISTANT_S, DISTANT_BYTES_PER_S = 0.04, 4_000_000
"""How long a distant store takes for an answer, and how much it takes or gives per second."""
OBJECT_STORE_BYTES = 512 * 1024 * 1024
"""Above 70 % of it Ray has each process collect its garbage, which stops all ranks for a second or so."""
ENV = {
    "RAY_AUTH_MODE": "disabled",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_worker_niceness": "0",
    "AWS_REQUEST_CHECKSUM_CALCULATION": "when_required",  # by default pyarrow sends what RGW turns down
    "PYTHONPATH": str(ROOT),
    "PYTHONDONTWRITEBYTECODE": "",  # installed packages have their byte code
}
T = TypeVar("T")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.goodput", description=__doc__)
    ways = [way for way in WAYS if way != BARE]
    size = parser.add_mutually_exclusive_group()
    size.add_argument("--quick", action="store_true", help="some 10 minutes instead of 55")
    distant = f"a store at {1000 * DISTANT_S:.0f} ms and {DISTANT_BYTES_PER_S / 1e6:.0f} MB/s, and fewer kills"
    size.add_argument("--distant", action="store_true", help=distant)
    parser.add_argument("--ways", nargs="+", choices=ways, default=ways, metavar="WAY", help=f"of: {', '.join(ways)}")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures here too")
    parser.add_argument("--server", choices=("auto", "ceph", "ministack", "moto"), default="auto")
    arguments = parser.parse_args()
    scale = QUICK if arguments.quick else DISTANT if arguments.distant else FULL
    left_out = {way: why for way, why in missing().items() if way in arguments.ways}
    for way, why in left_out.items():
        print(f"{way} is left out: {why}", flush=True)
    ways = [way for way in WAYS if way == BARE or (way in arguments.ways and way not in left_out)]
    cores = os.sched_getaffinity(0)
    with tempfile.TemporaryDirectory(prefix="goodput-") as scratch, started(arguments.server) as server:
        os.sched_setaffinity(0, cores)  # Ray's nodes need the server's core too
        with distance(server.uri) if arguments.distant else nullcontext(server.uri) as uri:
            raw_get_s = raw_get(uri, scale)
            with arena(ENV, num_cpus=1) as nodes:
                nodes.add(WORKERS, object_store_memory=OBJECT_STORE_BYTES, resources={ROOM: 1})
                # A store that takes longer than the interval must not stop the training each time.
                when_busy = "skip" if arguments.distant else "wait"
                bench = Bench(nodes.address, uri, Path(scratch), scale, ways, when_busy=when_busy)
                found = bench.measure()
        command = shlex.join(["python", "-m", "tests.bench.goodput", *sys.argv[1:]])
        about = {"command": command, "server": server.name, "seed": SEED, "cores": os.cpu_count(), **asdict(scale)}
    bare_s = statistics.median(restart_s for one in found.pop(BARE) for restart_s in one.restarts_s)
    about |= {"pace_s": bench.pace_s, "bare_s": bare_s, "raw_get_s": raw_get_s, "left_out": left_out}
    table = rows(found, bench.traces, bench.every, pace_s=bench.pace_s, bare_s=bare_s, raw_get_s=raw_get_s)
    doc = {"about": about, "rows": table}
    show(doc)
    for path in (RESULTS / "goodput.json", arguments.json):
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(doc, indent=1) + "\n")
    try:
        plot(doc, RESULTS / "goodput.png")
    except ImportError as error:
        print(f"no plot: {error.name} is not installed (pip install 'raycheck[bench]')")
    return 0


@contextmanager
def distance(uri: str) -> Iterator[str]:
    """Yields the store's URI as it looks from far away."""
    with fault_proxy(uri) as proxy:
        proxy.rule("delay", ".*", "", times=sys.maxsize, delay_s=DISTANT_S)
        proxy.throttle(DISTANT_BYTES_PER_S)
        yield proxy.uri


def missing() -> dict[str, str]:
    """Returns why a way cannot run here. With torchft 0.2.0 of PyPI a replica on gloo dies with the one beside it."""
    try:
        version("torchft-nightly")
    except PackageNotFoundError:
        return {TORCHFT: "torchft-nightly is not installed (pip install 'raycheck[bench]', on Linux x86-64)"}
    return {}


def raw_get(uri: str, scale: Scale) -> float:
    """Seconds of a raw GET of what one rank restores: weights and two moments of AdamW in float32."""
    size_bytes = 3 * 4 * scale.layers * scale.width * (scale.width + 1) // WORKERS
    turns = Raw(uri, size_bytes).shapes(lambda: None).values()
    return min(statistics.median(turn()["load"] for _ in range(3)) for turn in turns)


class Bench:
    """Measures what a save costs in each way, and then hurts all ways, round by round, in a shuffled order.

    pace_s: what a step takes when nothing is saved. every: steps between saves, by way, for those that save.
    """

    def __init__(
        self, address: str, uri: str, scratch: Path, scale: Scale, ways: Sequence[str], *, when_busy: str = "wait"
    ) -> None:
        """when_busy: what raycheck does when a save falls due while the one before is under way; see SaveSettings."""
        self._address, self._uri, self._scratch, self._scale, self._ways = address, uri, scratch, scale, ways
        self._when_busy = when_busy
        self._drivers = 0
        self.pace_s = 0.0
        self.every: dict[str, int] = {}
        self.traces = [trace(scale, ranks=WORKERS, seed=SEED + number) for number in range(scale.rounds)]

    def measure(self) -> dict[str, list[Watched]]:
        scale, order = self._scale, list(self._ways)
        self.pace_s = self._calibrated(BARE, _median_step)
        for way in self._ways:
            if way not in (BARE, TORCHFT):
                cost_s = self._calibrated(way, self._cost)
                self.every[way] = steps_between(cost_s, pace_s=self.pace_s, scale=scale)
                print(f"{way}: a save costs {cost_s:.3f} s: every {self.every[way]} steps", flush=True)
        found: dict[str, list[Watched]] = {way: [] for way in self._ways}
        chance = random.Random(SEED)
        for number, kills in enumerate(self.traces):
            chance.shuffle(order)
            for way in order:
                if way == BARE and number:
                    continue
                # Without saves nothing is lost by a kill but the restart, which is all that is asked of this way.
                hurt = [replace(kill, after_s=1.0) for kill in kills] if way == BARE else kills
                with self.driver(way, self.every.get(way, 1)) as run:
                    found[way].append(watch_replicas(run, hurt) if way == TORCHFT else watch(run, hurt))
                    if lost := overlooked(run.events()):
                        raise RuntimeError(f"{way}: listed memory checkpoints were not restored: {lost}")
                print(f"round {number + 1}, {way}: {found[way][-1].steps_lost:g} steps lost", flush=True)
        return found

    def _calibrated(self, way: str, find: Callable[[list[Event]], float | None]) -> float:
        with self.driver(way, CALIBRATION_EVERY, bucket_every=NEVER) as run:
            run.first_step(since=0.0)
            return run.wait_for(lambda: find(run.events()), within_s=UP_WITHIN_S)

    def _cost(self, events: list[Event]) -> float | None:
        return step_cost(events, saves=self._scale.calibrated, pace_s=self.pace_s)

    @contextmanager
    def driver(self, way: str, every: int, *, bucket_every: int = 0) -> Iterator["Driver"]:
        """bucket_every: of raycheck with memory checkpoints; by default a tenth as often, since what memory does not
        survive is rarer."""
        self._drivers += 1
        folder = self._scratch / str(self._drivers)
        folder.mkdir()
        uri = new_folder(self._uri)
        facts = {
            "way": way,
            "every": every,
            "bucket_every": bucket_every or 10 * every,
            "when_busy": self._when_busy,
            "folder": str(folder),
        }
        with driver(self._address, {**facts, "uri": uri, **asdict(self._scale)}) as run:
            yield run
        files, path = fsspec.url_to_fs(plain_uri(uri), **s3fs_options(uri))
        if files.exists(path):  # the store keeps all in memory
            files.rm(path, recursive=True)


def _median_step(events: list[Event]) -> float | None:
    steps = [event["seconds"] for event in events if event["kind"] == "step"]
    return statistics.median(steps) if len(steps) >= 40 else None


class Driver:
    """The driver process of one way, and the stories of its ranks."""

    def __init__(self, process: "subprocess.Popen[bytes]", folder: Path) -> None:
        self._process, self._folder = process, folder

    def events(self, rank: int = 0) -> list[Event]:
        path = self._folder / f"story-{rank}.jsonl"
        lines = path.read_text().splitlines(keepends=True) if path.exists() else []
        return [json.loads(line) for line in lines if line.endswith("\n")]

    def first_step(self, *, since: float, rank: int = 0) -> float:
        """When the group that started after `since` has done its first step; of torchft's replicas, that of `rank`."""
        return self.wait_for(lambda: first_step(self.events(rank), since=since), within_s=UP_WITHIN_S)

    def start_of(self, rank: int) -> Event:
        """What a rank has told when it started last."""
        return [event for event in self.events(rank) if event["kind"] == "start"][-1]

    def kill(self, rank: int) -> float:
        """When it happened."""
        pid = self.start_of(rank)["pid"]
        at = time.time()
        with suppress(ProcessLookupError):  # it went by itself
            os.kill(pid, signal.SIGKILL)
        return at

    def wait_until(self, at: float) -> None:
        self.wait_for(lambda: time.time() >= at or None, within_s=at - time.time() + UP_WITHIN_S)

    def wait_for(self, what: Callable[[], T | None], *, within_s: float) -> T:
        deadline = time.monotonic() + within_s
        while (found := what()) is None:
            if self._process.poll() is not None or time.monotonic() > deadline:
                why = "has ended" if self._process.poll() is not None else f"did not get there in {within_s:.0f} s"
                log = (self._folder / "driver.log").read_text(errors="replace")
                raise RuntimeError(f"the driver {why}:\n{log[-6000:]}")
            time.sleep(LOOK_EVERY_S)
        return found


@contextmanager
def driver(address: str, config: dict[str, Any], *, module: str = "tests.bench.goodput_job") -> Iterator[Driver]:
    folder = Path(config["folder"])
    command = [sys.executable, "-m", module, json.dumps(config)]
    with (
        (folder / "driver.log").open("wb") as log,
        subprocess.Popen(
            command, env={**os.environ, "RAY_ADDRESS": address}, cwd=ROOT, stdout=log, stderr=log
        ) as process,
    ):
        try:
            yield Driver(process, folder)
        finally:
            process.kill()  # all of its job dies with it


def watch(run: Driver, kills: Sequence[Kill]) -> Watched:
    """Hurt a way. The last of `kills` does not happen: there it ends."""
    up, restarts_s = run.first_step(since=0.0), []
    for kill in kills[:-1]:
        run.wait_until(up + kill.after_s)
        at = run.kill(kill.rank)
        up = run.first_step(since=at)
        restarts_s.append(up - at)
    end = up + kills[-1].after_s
    run.wait_until(end)
    return counted(run.events(), end=end, restarts_s=restarts_s)


def watch_replicas(run: Driver, kills: Sequence[Kill]) -> Watched:
    """Hurt replicas of which the other ones go on. Training counts for the next kill from when all have done a step again:
    so none is killed while it is the only one, which would lose everything."""
    up = max(run.first_step(since=0.0, rank=rank) for rank in range(WORKERS))
    kills_at, restarts_s = [], []
    for kill in kills[:-1]:
        run.wait_until(up + kill.after_s)
        kills_at.append(run.kill(kill.rank))
        up = run.first_step(since=kills_at[-1], rank=kill.rank)
        restarts_s.append(up - kills_at[-1])
    end = up + kills[-1].after_s
    run.wait_until(end)
    stories = [run.events(rank) for rank in range(WORKERS)]
    return counted_replicas(stories, end=end, kills_at=kills_at, restarts_s=restarts_s)


def show(doc: dict[str, Any]) -> None:
    about = doc["about"]
    title = (
        f"{about['server']}, {about['cores']} cores; a kill every {about['mtbf_s']:.0f} s of training; a step takes "
        f"{about['pace_s']:.2f} s, a bare restart {about['bare_s']:.1f} s, a raw GET {about['raw_get_s']:.2f} s"
    )
    table = Table(title=title)
    for name in (
        "",
        "every",
        "goodput",
        "limit",
        "kills",
        "lost a kill",
        "save blocks, s",
        "restart, s",
        "/ bare + GET",
    ):
        table.add_column(name)
    for way, row in doc["rows"].items():
        seconds = (f"{row['save_s']:.3f}", f"{row['restart_s']:.1f}", f"{row['restart_ratio']:.2f}")
        counts = (f"{row['kills']}", f"{row['lost_per_kill']:.1f}")
        every, limit = ("-", "-") if row["every"] is None else (f"{row['every']}", f"{row['limit']:.3f}")
        table.add_row(way, every, f"{row['goodput']:.3f}", limit, *counts, *seconds)
    console = Console(width=None if Console().is_terminal else 160)
    console.print(table)
    if TORCHFT in doc["rows"]:
        row = doc["rows"][TORCHFT]
        console.print(
            f"{TORCHFT}: the other replica's next step came {row['pause_s']:.1f} s after a kill; "
            f"goodput is {row['goodput_of_updates']:.3f} if a step of one replica of two counts whole"
        )
    for way, why in about["left_out"].items():
        console.print(f"{way} is left out: {why}", markup=False)  # the name of an extra is no markup


def plot(doc: dict[str, Any], path: Path) -> None:
    """Goodput of each way, with a mark at its limit."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    ways = list(doc["rows"])
    figure, axis = plt.subplots(figsize=(8, 2.5))
    colors = [OUR_COLOR if way == OURS else PEER_COLOR for way in ways]
    axis.barh(ways, [row["goodput"] for row in doc["rows"].values()], color=colors)
    for place, row in enumerate(doc["rows"].values()):
        if row["limit"] is None:
            continue
        axis.plot([row["limit"]] * 2, [place - 0.4, place + 0.4], color="black", linewidth=2)
    axis.set_xlim(0, 1)
    axis.invert_yaxis()
    axis.set_title("share of the time that stands; black: the limit of its saves and restarts")
    figure.savefig(path, dpi=120, bbox_inches="tight")


if __name__ == "__main__":
    sys.exit(main())
