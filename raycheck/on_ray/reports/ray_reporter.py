"""Reports commits to Ray: `Result.checkpoint` and Ray's own list of checkpoints come from this.

Ray is given a small pointer object in place of the checkpoint: a directory that Ray's retention may delete. The save
thread of rank 0 writes it. Then rank 0 names the commit in its next decision, and all ranks report it together, since
Ray's report is a collective.
"""

import time

from raycheck.bucket.format.document import dump
from raycheck.bucket.format.manifest import Manifest
from raycheck.bucket.format.object_keys import CheckpointName, pointed_by, pointer_key, pointer_prefix
from raycheck.bucket.format.ray_pointer import Pointer
from raycheck.errors import RaycheckError
from raycheck.group.group import Group
from raycheck.group.ports import Reporter, UnreportedCommit
from raycheck.log import event, logger
from raycheck.on_ray.api import train_context

RAY_REPORT_PAUSE_S = 5.0
"""Two reports to Ray within 2 s block the training loop."""


class RayReporter(Reporter):
    """The reporter of one rank's commits to Ray Train. Only rank 0 writes pointers and chooses what is reported."""

    is_heard = True

    def __init__(self, group: Group) -> None:
        self._group = group
        self.pointed: UnreportedCommit | None = None
        self._newest: UnreportedCommit | None = None
        self._chosen: UnreportedCommit | None = None  # of rank 0's newest decision
        self._reported: str | None = None
        self._reported_at = float("-inf")

    def point_to(self, commit: UnreportedCommit) -> None:
        """Write the pointer of a commit, unless it exists.

        A pointer is written only for a commit that Ray will be told of: Ray would never delete any other.
        """
        is_there = self.pointed is not None and self.pointed.key == commit.key
        if self._group.rank or is_there:
            return
        pointer = Pointer(uri=self._group.uri, key=commit.key)
        try:
            self._group.store.put(pointer_key(commit.key), dump(pointer))
        except RaycheckError as error:
            text = "a checkpoint is committed, but cannot be reported to Ray: its pointer was not written"
            logger.warning(event(text, checkpoint=commit.key, cause=error, run=self._group.uri))
        else:
            self.pointed = commit

    def committed(self) -> None:
        if self.pointed is None or self.pointed.key != self._reported:
            self._newest = self.pointed

    def can_report_soon(self, chosen: str | None) -> bool:
        is_free = self._newest is None or self._newest.key == chosen
        return is_free and not self._is_pausing(time.monotonic())

    def choose(self, now: float, *, is_last: bool = False) -> UnreportedCommit | None:
        self._chosen = self._newest if is_last or not self._is_pausing(now) else None
        return self._chosen

    def report(self, key: str | None) -> None:
        if key is None:
            return
        self._reported, self._reported_at = key, time.monotonic()
        chosen, self._chosen = self._chosen or UnreportedCommit(key=key), None
        if self._newest is not None and not _is_newer(self._newest.key, key):  # the last one reported is Ray's latest
            self._newest = None
        train_context.report_pointer(pointer_prefix(key), chosen.metrics)

    def restored(self, manifest: Manifest | None) -> None:
        """Warn when a script that also reads ray.train.get_checkpoint() would mix two steps.

        After a hard kill Ray is some commits behind, and it may have checkpoints that the script itself reported.
        """
        if self._group.rank:
            return
        path = train_context.checkpoint_path()
        name = pointed_by(path) if path else None
        if path is None if manifest is None else name is not None and name.step == manifest.step:
            return
        ours = "starts fresh" if manifest is None else f"has restored step {manifest.step}"
        theirs = f"is of step {name.step}" if name else f"is {path}" if path else "is none"
        text = (
            f"raycheck {ours}, while ray.train.get_checkpoint() {theirs}: take step, epoch and weights from restore() "
            "alone"
        )
        logger.warning(event(text, run=self._group.uri))

    def _is_pausing(self, now: float) -> bool:
        return now - self._reported_at < RAY_REPORT_PAUSE_S


def _is_newer(key: str, other: str) -> bool:
    mine, theirs = CheckpointName.parse(key), CheckpointName.parse(other)
    return mine is not None and (theirs is None or theirs < mine)
