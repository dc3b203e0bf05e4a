"""The task behind every logger: finds the checkpoints of a run that a tracker does not list yet, and adds them.

Checkpoints are added in the order of their commits, so those that are listed come first. Neither a restart nor a
tracker that failed for a while leaves a gap, unless retention has dropped the checkpoint meanwhile.

A tracker lists a checkpoint once, and has one value of each metric for a step: if a step was trained again after a
rewind, its first commit counts.
"""

import importlib.util
from abc import ABC, abstractmethod
from bisect import bisect_left
from contextlib import AbstractContextManager
from typing import ClassVar

from raycheck.errors import ConfigError
from raycheck.run import CommittedCheckpoint, Run, open_run

AT_ONCE = 100
"""How many checkpoints one task adds at most; the next one continues."""


class TrackedRun(ABC):
    """A training run in a tracker."""

    @abstractmethod
    def has(self, checkpoint: CommittedCheckpoint) -> bool:
        """Return whether the tracker lists the checkpoint."""

    @abstractmethod
    def add(self, checkpoint: CommittedCheckpoint) -> None:
        """Add a checkpoint that is not listed yet, or that an interrupted task has listed in part."""


class CheckpointList(ABC):
    """A tracker, as an after-commit task: called with a run's URI and a checkpoint's key.

    package: the one that the task needs.
    """

    package: ClassVar[str]

    @abstractmethod
    def opened(self, run: Run) -> AbstractContextManager[TrackedRun]:
        """Begin or resume the run in the tracker."""

    def __call__(self, uri: str, key: str) -> None:
        """Add what the tracker misses, including the checkpoint `key`."""
        del key
        run = open_run(uri)
        lasting = [item for item in run.checkpoints if not item.is_rolling and item.damaged is None]
        with self.opened(run) as tracked:
            first = bisect_left(lasting, True, key=lambda checkpoint: not tracked.has(checkpoint))
            for checkpoint in lasting[first : first + AT_ONCE]:
                tracked.add(checkpoint)

    def check(self) -> None:
        """Raise ConfigError where the task's package is not installed."""
        if importlib.util.find_spec(self.package) is None:
            raise ConfigError(
                f"raycheck.loggers.{self.package}: the package is not installed here, where rank 0 runs: "
                f"pip install {self.package}"
            )


def name_of(run: Run) -> str:
    """Return the run's name: the last part of its address."""
    return run.uri.partition("?")[0].rstrip("/").rpartition("/")[2]


def identity_of(checkpoint: CommittedCheckpoint) -> str:
    """Return a name that no other checkpoint of the run has, even in a copy of the run that was trained on."""
    return f"{checkpoint.key}.{checkpoint.digest.partition(':')[2]}"
