"""Registers checkpoints with Weights & Biases: each is a version of one artifact, and its metrics are values of a run.

An offline run cannot be asked what it contains. So a mark for each checkpoint is created in wandb's folder before the
checkpoint is logged: if the task dies in between, that checkpoint is missing in the list, and none is there twice. The
marks are next to the data of the offline runs, and are lost only together with them.
"""

import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from raycheck.errors import ConfigError
from raycheck.loggers.checkpoint_list import CheckpointList, TrackedRun, identity_of, name_of
from raycheck.run import CommittedCheckpoint, Run


@dataclass(frozen=True, kw_only=True)
class WandB(CheckpointList):
    """A project of Weights & Biases. See raycheck.loggers.wandb."""

    project: str
    entity: str | None
    offline: bool
    folder: str | None

    package: ClassVar[str] = "wandb"

    def __post_init__(self) -> None:
        if not isinstance(self.project, str) or not self.project:
            raise ConfigError(f"project={self.project!r}: give the name of a project of Weights & Biases")
        if self.folder is not None and not self.folder.startswith("/"):
            raise ConfigError(f"folder={self.folder!r}: give an absolute path")

    @contextmanager
    def opened(self, run: Run) -> Iterator["WandBRun"]:
        import wandb

        name = name_of(run)
        folder = Path(self.folder) if self.folder else Path.home() / ".cache/raycheck"
        marks = folder / "checkpoints" / run.run_id
        marks.mkdir(parents=True, exist_ok=True)
        tracked = WandBRun(f"{re.sub(r'[^A-Za-z0-9_.-]', '-', name)}-checkpoints", marks)
        settings = wandb.Settings(silent=True, console="off", disable_git=True, save_code=False, x_disable_stats=True)

        def begin() -> Any:
            return wandb.init(
                project=self.project,
                entity=self.entity,
                dir=folder,
                id=f"raycheck-{run.run_id}",
                name=name,
                job_type="checkpoints",
                mode="offline" if self.offline else "online",
                resume=None if self.offline else "allow",
                reinit="create_new",  # the script may have a run of its own in this process
                settings=settings,
            )

        with tracked.begun_by(begin):
            yield tracked


class WandBRun(TrackedRun):
    """The run of one training run at Weights & Biases. It begins with the first checkpoint that is missing."""

    def __init__(self, artifact: str, marks: Path) -> None:
        self._artifact = artifact
        self._marks = marks
        self._begin: Any = None
        self._run: Any = None

    @contextmanager
    def begun_by(self, begin: Any) -> Iterator[None]:
        """Have `begin` start the run when it is needed, and end it with this block."""
        self._begin = begin
        try:
            yield
        finally:
            if self._run is not None:
                self._run.finish()
                time.sleep(1.0 - time.time() % 1.0)  # wandb names a run's files by the second in which it began

    def has(self, checkpoint: CommittedCheckpoint) -> bool:
        return (self._marks / identity_of(checkpoint)).exists()

    def add(self, checkpoint: CommittedCheckpoint) -> None:
        import wandb
        from wandb.sdk.artifacts.artifact_manifest_entry import ArtifactManifestEntry

        self._run = self._run or self._begin()
        step = checkpoint.step
        steps = [int(mark.name.split("-")[1]) for mark in self._marks.iterdir()]
        try:
            (self._marks / identity_of(checkpoint)).touch(exist_ok=False)
        except FileExistsError:  # another driver's task was faster
            return
        if step > max([-1, *steps]) and step >= self._run.step and checkpoint.metrics:
            self._run.log(dict(checkpoint.metrics), step=step)
        facts = {
            "address": checkpoint.address,
            "step": step,
            "digest": checkpoint.digest,
            "size_bytes": checkpoint.size_bytes,
            "metrics": dict(checkpoint.metrics),
        }
        artifact = wandb.Artifact(self._artifact, type="checkpoint", metadata=facts)
        # add_reference would want the client of the bucket's cloud, and ask it for every object.
        artifact.manifest.add_entry(
            ArtifactManifestEntry(path=checkpoint.key, ref=checkpoint.address, digest=checkpoint.digest)
        )
        self._run.log_artifact(artifact, aliases=["latest", f"step-{step}"])
