"""Gives Ray Tune a checkpoint with which to pause and clone a trial: the name of a commit, and no tensor.

Schedulers such as population based training stop a trial and start it again from the checkpoint that it, or a better
trial, last reported. A trial that calls `raycheck.fit` reports, with each of its metrics, which commit is the newest.
If it is started with another trial's checkpoint, `fit` forks that run.
"""

import json
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import ray.tune

from raycheck.bucket.format.object_keys import CheckpointName, pointed_by
from raycheck.errors import ConfigError

_FILE = "raycheck.json"
MAX_BYTES = 64 * 1024
_FIELDS = {"run", "key", "trial"}


@dataclass(frozen=True, kw_only=True, slots=True)
class TunePointer:
    """The name of a commit.

    run: the name of its run, in the storage that all trials share. trial: the one that wrote it.
    """

    run: str
    key: str
    trial: str


def in_tune() -> bool:
    """Return whether this process runs a trial of Ray Tune."""
    try:
        from ray.tune.trainable.trainable_fn_utils import _in_tune_session
    except ImportError:
        return False
    return bool(_in_tune_session())


def trial_id() -> str:
    """Return the id of the trial that this process runs."""
    return str(ray.tune.get_context().get_trial_id())


def given_pointer() -> TunePointer | None:
    """Return the commit from which Tune wants this trial to continue, or None if there is none from raycheck.

    Raises ConfigError for a Tune checkpoint whose pointer is damaged.
    """
    checkpoint = ray.tune.get_checkpoint()
    if checkpoint is None:
        return None
    path = f"{checkpoint.path}/{_FILE}"
    if not checkpoint.filesystem.get_file_info(path).is_file:
        return None
    with checkpoint.filesystem.open_input_stream(path) as stream:
        data = stream.read(MAX_BYTES)
    try:
        found = json.loads(data)
    except ValueError as error:
        raise ConfigError(f"{path} is damaged: {error}") from None
    is_whole = isinstance(found, dict) and found.keys() >= _FIELDS and all(isinstance(found[x], str) for x in _FIELDS)
    if not is_whole or CheckpointName.parse(found["key"]) is None or not _is_plain(found["run"]):
        raise ConfigError(f"{path} is damaged: it names no commit")
    return TunePointer(**{name: found[name] for name in _FIELDS})


def report_commits_of(run: str) -> None:
    """Have this trial report, with each result that names a commit of the run, a checkpoint that points to it.

    The results come from Ray Train's controller through Tune's session in this process.
    """
    from ray.train._internal.session import get_session

    session: Any = get_session()
    report = getattr(session, "raycheck_report", session.report)
    session.raycheck_report = report

    def report_with_pointer(metrics: dict[str, Any], checkpoint: Any = None, **more: Any) -> None:
        name = pointed_by(str(metrics.get("checkpoint_path") or ""))
        if checkpoint is not None or name is None:
            report(metrics, checkpoint=checkpoint, **more)
            return
        with tempfile.TemporaryDirectory() as folder:
            pointer = TunePointer(run=run, key=str(name), trial=trial_id())
            Path(folder, _FILE).write_text(json.dumps(asdict(pointer)))
            report(metrics, checkpoint=ray.tune.Checkpoint.from_directory(folder), **more)

    session.report = report_with_pointer


def _is_plain(name: str) -> bool:
    """Return whether this is a single path segment: a name from a bucket must not lead to another place."""
    return bool(name) and name not in (".", "..") and not set(name) & {"/", "\\", "?", "#", "%"}
