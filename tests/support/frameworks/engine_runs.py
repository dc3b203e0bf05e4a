"""Continues trainings with engines in copies of their runs, so that one saved run serves several tests."""

import shutil
from pathlib import Path
from typing import Any

import raycheck


def resumed(training: Any, folder: Path, *, step: int, **changed: Any) -> dict[str, Any]:
    """Continue from the checkpoint of a step with other fresh weights, in a copy of the run, and return what it was.

    training: a dataclass with `uri` (file://), `seed`, `saves_at` and `run()`. changed: further fields that differ.
    """
    shutil.copytree(training.uri.removeprefix("file://"), folder / "run")
    raycheck.open_run(f"file://{folder}/run").rewind(step)
    other = {**vars(training), "uri": f"file://{folder}/run", "seed": 1, "saves_at": 100, **changed}
    found: dict[str, Any] = type(training)(**other).run()
    return found
