"""The save thread uploads one staged save after the other, and reports each to the coordinator.

Uploads go one by one, in one background thread. A save always ends in an outcome that all ranks are told, or in an
error at the deadline: whatever fails here is reported, since the other ranks must not wait for this one (I9).
"""

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeoutError
from contextlib import suppress
from dataclasses import replace

from raycheck.bucket.assembly.plan_cache import Section
from raycheck.bucket.assembly.save_report import Report
from raycheck.bucket.format import object_keys
from raycheck.bucket.store.retry import ends_by
from raycheck.errors import SaveFailedError
from raycheck.shards.transfer.incremental_upload import StagedState
from raycheck.shards.transfer.local_box import TRAIN
from raycheck.train.coordinator.messages import Outcome, PlanWanted
from raycheck.train.group import Group, ask_until_decided


class UploadThread:
    """Runs the uploads and reports of one rank in a background thread, in the order in which they are given."""

    def __init__(self, group: Group, *, timeout_s: float) -> None:
        """timeout_s: how long a save may take; errors name it."""
        self._group = group
        self._timeout_s = timeout_s
        self._known_plan = b""  # hash of the plan that the coordinator has, unless it was started again
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="raycheck-save")

    def save(
        self, staged: StagedState, report: Report, *, deadline: float, committed: Callable[[], None]
    ) -> Future[tuple[Outcome, float]]:
        """Upload and report a save in the background. Returns its outcome, and when it was told by time.monotonic.

        deadline: by time.monotonic. committed: called in the save thread when the save was committed.
        """

        def run() -> tuple[Outcome, float]:
            outcome = self._upload_and_report(staged, report, deadline)
            if outcome.kind == "committed":
                committed()
            return outcome, time.monotonic()

        return self._thread.submit(run)

    def do_next(self, call: Callable[[], object]) -> None:
        """Call a function in the save thread, after the saves that it was given before."""
        self._thread.submit(call)

    def wait_until_idle(self, timeout_s: float) -> None:
        """Wait until the thread has done all that it was given, but not longer than this."""
        with suppress(FutureTimeoutError):
            self._thread.submit(int).result(timeout_s)

    def stop(self) -> None:
        """Let the thread end when its save has ended."""
        self._thread.shutdown(wait=False)

    def _upload_and_report(self, staged: StagedState, report: Report, deadline: float) -> Outcome:
        key = object_keys.shard_key(report.checkpoint, TRAIN, report.rank)
        began = time.monotonic()
        try:
            staged.wait()
            report = replace(report, staged_s=report.blocked_s + time.monotonic() - began)
            with ends_by(deadline):
                staged.upload(self._group.store, report.checkpoint)
            section = Section.of(staged.section())
            is_known = section.plan_hash == self._known_plan
            report = replace(report, shards=staged.records, kept=staged.places, references=staged.references)
            report = replace(report, section=section.without_plan() if is_known else section)
        except Exception as error:  # noqa: BLE001  whatever it was, the other ranks must not wait for this one (I9)
            report = replace(report, failure=f"upload of {key}: {type(error).__name__}: {error}")
        report = replace(report, upload_s=time.monotonic() - began)
        outcome = self._outcome_of(report, deadline, key)
        if isinstance(outcome, PlanWanted):
            outcome = self._outcome_of(replace(report, section=section), deadline, key)
        assert isinstance(outcome, Outcome), "a report with its plan is never asked for the plan"
        if outcome.kind == "committed" and report.section is not None:
            self._known_plan = report.section.plan_hash
        return outcome

    def _outcome_of(self, report: Report, deadline: float, key: str) -> Outcome | PlanWanted:
        """Hand the report in, and wait for the outcome that all ranks are told. key: names this rank's object."""
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
