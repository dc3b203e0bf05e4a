"""`python -m tests.bench.goodput`: the share of a training's time that stands while its workers are killed.

One seeded trace of kills is replayed over three ways to checkpoint one training (goodput_job.py), one after the other on
one Ray of several nodes: after so many seconds of training, that rank gets a SIGKILL. Ray restarts the workers, and what
each way restores decides which steps are done again. Beside each share stands its limit: what is left on the very trace,
by Young's and Daly's model, when only saves, restarts and the steps since the last save cost anything.
"""

import argparse
import json
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar

from rich.console import Console
from rich.table import Table

from tests.bench.goodput_job import BARE, OURS, WAYS, WORKERS
from tests.bench.goodput_rows import FULL, QUICK, Event, Kill, Scale, Watched, counted, first_step, rows, trace
from tests.bench.place import new_folder
from tests.bench.plots import OURS as OUR_COLOR
from tests.bench.plots import PEERS as PEER_COLOR
from tests.bench.scale import RESULTS
from tests.bench.servers import started
from tests.support.ray_cluster import arena

ROOT = Path(__file__).parents[2]
SEED = 7
UP_WITHIN_S = 300.0
LOOK_EVERY_S = 0.2
ENV = {
    "RAY_AUTH_MODE": "disabled",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_worker_niceness": "0",
    "AWS_REQUEST_CHECKSUM_CALCULATION": "when_required",  # by default pyarrow sends what RGW turns down
    "PYTHONPATH": str(ROOT),
}
T = TypeVar("T")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.goodput", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="about 10 minutes instead of 70")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures here too")
    parser.add_argument("--server", choices=("auto", "ceph", "ministack", "moto"), default="auto")
    arguments = parser.parse_args()
    scale = QUICK if arguments.quick else FULL
    kills = trace(scale, ranks=WORKERS, seed=SEED)
    cores = os.sched_getaffinity(0)
    with tempfile.TemporaryDirectory(prefix="goodput-") as scratch, started(arguments.server) as server:
        os.sched_setaffinity(0, cores)  # Ray's nodes need the server's core too
        with arena(ENV) as nodes:
            nodes.add(WORKERS)
            watched = {}
            for number, way in enumerate(WAYS):
                folder = Path(scratch, str(number))
                folder.mkdir()
                config = {"way": way, "folder": str(folder), "uri": new_folder(server.uri), **asdict(scale)}
                with driver(nodes.address, config) as run:
                    watched[way] = watch(run, kills, scale)
                print(f"{way}: {len(watched[way].restarts_s)} kills", flush=True)
        command = shlex.join(["python", "-m", "tests.bench.goodput", *sys.argv[1:]])
        about = {"command": command, "server": server.name, "seed": SEED, "cores": os.cpu_count(), **asdict(scale)}
    doc = {"about": about, "rows": rows(watched, kills, scale, bare=BARE)}
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


class Driver:
    """The driver process of one way, and the stories of its ranks."""

    def __init__(self, process: "subprocess.Popen[bytes]", folder: Path) -> None:
        self._process, self._folder = process, folder

    def events(self, rank: int = 0) -> list[Event]:
        path = self._folder / f"story-{rank}.jsonl"
        lines = path.read_text().splitlines(keepends=True) if path.exists() else []
        return [json.loads(line) for line in lines if line.endswith("\n")]

    def first_step(self, *, since: float) -> float:
        """When the group that started after `since` has done its first step."""
        return self.wait_for(lambda: first_step(self.events(), since=since), within_s=UP_WITHIN_S)

    def kill(self, rank: int) -> float:
        """When it happened."""
        pid = [event["pid"] for event in self.events(rank) if event["kind"] == "start"][-1]
        at = time.time()
        with suppress(ProcessLookupError):  # it went by itself
            os.kill(pid, signal.SIGKILL)
        return at

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
def driver(address: str, config: dict[str, Any]) -> Iterator[Driver]:
    folder = Path(config["folder"])
    command = [sys.executable, "-m", "tests.bench.goodput_job", json.dumps(config)]
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


def watch(run: Driver, kills: Sequence[Kill], scale: Scale) -> Watched:
    first = up = run.first_step(since=0.0)
    end, restarts_s = first + scale.wall_s, []
    for kill in kills:
        until = min(up + kill.after_s, end)
        run.wait_for(lambda until=until: time.time() >= until or None, within_s=scale.wall_s + UP_WITHIN_S)
        if until == end:
            break
        at = run.kill(kill.rank)
        up = run.first_step(since=at)
        restarts_s.append(up - at)
        end = max(end, up)  # a restart is not cut off
    return counted(run.events(), end=end, restarts_s=restarts_s)


def show(doc: dict[str, Any]) -> None:
    about = doc["about"]
    table = Table(title=f"{about['server']}, {about['cores']} cores; a save every {about['every']} steps")
    for name in ("", "goodput", "limit", "kills", "steps lost", "save blocks, s", "restart, s", "/ bare"):
        table.add_column(name)
    for way, row in doc["rows"].items():
        seconds = (f"{row['save_s']:.2f}", f"{row['restart_s']:.1f}", f"{row['restart_ratio']:.2f}")
        counts = (f"{row['kills']}", f"{row['steps_lost']}")
        table.add_row(way, f"{row['goodput']:.3f}", f"{row['limit']:.3f}", *counts, *seconds)
    Console(width=None if Console().is_terminal else 160).print(table)


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
        axis.plot([row["limit"]] * 2, [place - 0.4, place + 0.4], color="black", linewidth=2)
    axis.set_xlim(0, 1)
    axis.invert_yaxis()
    axis.set_title("share of the time that stands; black: the limit of its saves and restarts")
    figure.savefig(path, dpi=120, bbox_inches="tight")


if __name__ == "__main__":
    sys.exit(main())
