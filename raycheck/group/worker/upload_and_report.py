"""Uploads one staged save, and reports it to the coordinator: in the rank's save thread, or in its node's actor.

A save always ends in an outcome that all ranks are told, or in an error at the deadline: any failure here is reported,
since the other ranks must not wait for this one (I9).
"""

import time
from collections.abc import Callable
from dataclasses import replace

from raycheck.bucket.assembly.plan_cache import Section
from raycheck.bucket.assembly.save_report import Report
from raycheck.bucket.format import object_keys
from raycheck.errors import ConfigError, DeniedError, SaveFailedError, StoreError
from raycheck.group.coordinator.messages import Outcome, PlanWanted
from raycheck.group.group import Group, ask_until_decided
from raycheck.group.worker.slow_progress import slow_progress
from raycheck.transfer.incremental_upload import StagedState
from raycheck.transfer.stage.local_box import TRAIN
from raycheck.transfer.stage.shared_memory import MemoryPlace


class Uploader:
    """The uploads of one rank's saves, each reported before the next one begins.

    refusal: why this process may not upload at all, as the newest save has shown; "" when it may.
    """

    def __init__(
        self,
        group: Group,
        *,
        timeout_s: float,
        hold: Callable[[str, memoryview, MemoryPlace | None], None] | None = None,
    ) -> None:
        """timeout_s: how long a save may take; errors name it. hold: stores each shard for a memory checkpoint, given
        its key, bytes and place; None: the shards are uploaded.
        """
        self._group = group
        self._timeout_s = timeout_s
        self._hold = hold
        self.refusal = ""
        self._known = (b"", b"")  # hashes of what the coordinator has, unless it was started again

    def save(self, staged: StagedState, report: Report, deadline: float) -> Outcome:
        """Upload a save, report it, and return the outcome that all ranks are told. deadline: by time.monotonic.

        Raises SaveFailedError at the deadline, StoreError when the coordinator does not answer at all, and FencedError
        and SupersededError when the attempt is over.
        """
        key = object_keys.shard_key(report.checkpoint, TRAIN, report.rank)
        how_far = ""
        began = time.monotonic()
        self.refusal = ""
        try:
            staged.wait()
            report = replace(report, staged_s=report.staged_s or report.blocked_s + time.monotonic() - began)
            if self._hold is not None:
                for sealed in staged.seal(report.checkpoint):
                    self._hold(*sealed)
            else:
                limit_s = self._timeout_s
                with slow_progress(
                    self._group, report.checkpoint, save=report.save, until=deadline, limit_s=limit_s
                ) as told:
                    try:
                        staged.upload(self._group.store, report.checkpoint)
                    except StoreError:
                        how_far = f" ({told})"
                        raise
            if staged.slices:
                blocked_s = report.blocked_s + staged.sliced_s
                report = replace(report, blocked_s=blocked_s, staged_s=blocked_s)
            section = Section.of(staged.section(), staged.replica_digests())
            is_known = section.hashes == self._known
            report = replace(report, shards=staged.records, references=staged.references)
            report = replace(report, section=section.without_plan() if is_known else section)
        except Exception as error:  # noqa: BLE001  whatever it was, the other ranks must not wait for this one (I9)
            self.refusal = str(error) if isinstance(error, ConfigError | DeniedError) else ""
            report = replace(report, failure=f"upload of {key}: {type(error).__name__}: {error}{how_far}")
        report = replace(report, upload_s=time.monotonic() - began, sent_at=time.time())
        outcome = self._outcome_of(report, deadline, key)
        if isinstance(outcome, PlanWanted):
            outcome = self._outcome_of(replace(report, section=section), deadline, key)
        assert isinstance(outcome, Outcome), "a report with its plan is never asked for the plan"
        if outcome.kind == "committed" and report.section is not None:
            self._known = report.section.hashes
        return outcome

    def _outcome_of(self, report: Report, deadline: float, key: str) -> Outcome | PlanWanted:
        """Send the report, and wait for the outcome that all ranks are told. key: names this rank's object."""
        what = f"save of step {report.progress.step} ({key})"
        within = f"within {self._timeout_s:.0f} s"
        answer: Outcome | PlanWanted = ask_until_decided(
            self._group,
            "report",
            report,
            deadline=deadline,
            what=what,
            late=lambda missing: SaveFailedError(f"rank {report.rank}: {what} was not committed {within}: {missing}"),
        )
        return answer
