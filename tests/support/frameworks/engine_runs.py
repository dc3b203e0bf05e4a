"""Starts trainings with engines under torchrun, and continues them in copies of their runs.

The copies let one saved run serve several tests.
"""

import json
import os
import re
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import raycheck


def launched(
    python: Path, file: str, job: Mapping[str, Any], world_size: int, *, variables: Mapping[str, str], within_s: float
) -> tuple[dict[str, Any], str]:
    """Run a file under torchrun on this many ranks, with the job as JSON. Return what rank 0 printed as JSON, and the
    log.

    variables: those of the environment that differ from this process's. Raises RuntimeError, with the errors of the
    ranks, if one has failed.
    """
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[3]), **variables}
    torchrun = [python, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={world_size}"]
    done = subprocess.run(
        [*torchrun, file, json.dumps(job)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=within_s,
        check=False,
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith('{"')]
    if done.returncode or not lines:
        raise RuntimeError("\n".join(_errors_in(done.stderr) or [done.stdout[-2000:], done.stderr[-4000:]]))
    return json.loads(lines[0]), done.stderr


def _errors_in(log: str) -> list[str]:
    """Return the first lines that name an error, each with the three lines after it."""
    lines = log.splitlines()
    is_error = [re.search(r"\b\w*Error\b", line) is not None for line in lines]
    return [line for number, line in enumerate(lines) if any(is_error[max(0, number - 3) : number + 1])][:12]


def resumed(training: Any, folder: Path, *, step: int, **changed: Any) -> dict[str, Any]:
    """Continue from the checkpoint of a step with other fresh weights, in a copy of the run, and return what it was.

    training: a dataclass with `uri` (file://), `seed`, `saves_at` and `run()`. changed: further fields that differ.
    """
    shutil.copytree(training.uri.removeprefix("file://"), folder / "run")
    raycheck.open_run(f"file://{folder}/run").rewind(step)
    other = {**vars(training), "uri": f"file://{folder}/run", "seed": 1, "saves_at": 100, **changed}
    found: dict[str, Any] = type(training)(**other).run()
    return found
