"""Tells Ray of commits: `Result.checkpoint` and Ray's own list of checkpoints come from this.

Ray is given a small pointer object in place of the checkpoint: a directory that Ray's retention may delete. The save
thread of rank 0 writes it (`RayPointers`). Then rank 0 names the commit in its next decision, and all ranks report it
together, since Ray's report is a collective (`RayReports`).
"""

import time
from collections.abc import Mapping
from dataclasses import dataclass, field

from raycheck.bucket.format.document import dump
from raycheck.bucket.format.object_keys import CheckpointName, pointer_key, pointer_prefix
from raycheck.bucket.format.ray_pointer import Pointer
from raycheck.errors import RaycheckError
from raycheck.group.group import Group
from raycheck.log import event, logger
from raycheck.on_ray.api import train_context

RAY_REPORT_PAUSE_S = 5.0
"""Two reports to Ray within 2 s block the training loop."""


@dataclass(frozen=True, kw_only=True, slots=True)
class UnreportedCommit:
    """Describes a commit that Ray has not been told of yet. metrics: rank 0's at its step, with its step and epoch."""

    key: str
    metrics: Mapping[str, float] = field(default_factory=dict)


class RayPointers:
    """Writes the pointer objects of commits that Ray will be told of. Only rank 0 writes, and only under Ray Train.

    pointed: the newest commit that has a pointer; None when there is none.
    """

    def __init__(self, group: Group) -> None:
        self._group = group
        self.pointed: UnreportedCommit | None = None

    def point_to(self, commit: UnreportedCommit) -> None:
        """Write the pointer of a commit, unless it exists. Called in the save thread, and when that has ended."""
        is_there = self.pointed is not None and self.pointed.key == commit.key
        if not is_there and self._write(commit):
            self.pointed = commit

    def _write(self, commit: UnreportedCommit) -> bool:
        """Write a pointer. Returns whether that was done.

        A pointer is written only for a commit that Ray will be told of: Ray would never delete any other.
        """
        if self._group.rank or not self._group.is_ray_train:
            return False
        pointer = Pointer(uri=self._group.uri, key=commit.key)
        try:
            self._group.store.put(pointer_key(commit.key), dump(pointer))
        except RaycheckError as error:
            text = "a checkpoint is committed, but cannot be reported to Ray: its pointer was not written"
            logger.warning(event(text, checkpoint=commit.key, cause=error, run=self._group.uri))
            return False
        return True


class RayReports:
    """Chooses on rank 0 the commit that Ray is told of next, and reports it on every rank."""

    def __init__(self, group: Group) -> None:
        self._group = group
        self._newest: UnreportedCommit | None = None
        self._chosen: UnreportedCommit | None = None  # of rank 0's newest decision
        self._reported: str | None = None
        self._reported_at = float("-inf")

    def committed(self, pointed: UnreportedCommit | None) -> None:
        """Take over the newest commit that has a pointer; it takes the place of an older one that was not reported."""
        if pointed is None or pointed.key != self._reported:
            self._newest = pointed

    def can_report_soon(self, chosen: str | None) -> bool:
        """Returns whether Ray can soon be told of a save that begins now. chosen: the commit of the newest decision."""
        is_free = self._newest is None or self._newest.key == chosen
        return is_free and not self._is_pausing(time.monotonic())

    def choose(self, now: float, *, is_last: bool = False) -> UnreportedCommit | None:
        """Choose the commit that rank 0 names in its next decision; None when none is to be reported to Ray.

        now: by time.monotonic. is_last: training is over, so that there is no pause between two reports.
        """
        self._chosen = self._newest if is_last or not self._is_pausing(now) else None
        return self._chosen

    def report(self, key: str | None) -> None:
        """Report to Ray the commit that rank 0's decision names, if any. Every rank calls it at every step."""
        if key is None or not self._group.is_ray_train:
            return
        self._reported, self._reported_at = key, time.monotonic()
        chosen, self._chosen = self._chosen or UnreportedCommit(key=key), None
        if self._newest is not None and not _is_newer(self._newest.key, key):  # the last one reported is Ray's latest
            self._newest = None
        train_context.report_pointer(pointer_prefix(key), chosen.metrics)

    def _is_pausing(self, now: float) -> bool:
        return now - self._reported_at < RAY_REPORT_PAUSE_S


def _is_newer(key: str, other: str) -> bool:
    mine, theirs = CheckpointName.parse(key), CheckpointName.parse(other)
    return mine is not None and (theirs is None or theirs < mine)
