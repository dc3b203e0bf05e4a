"""The path of one rank's saves to their sink: staged in the training thread, then kept and reported in the background.

Saves to the bucket have one, and memory checkpoints another, so that neither waits for the other.
"""

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeoutError
from contextlib import suppress
from dataclasses import replace

from raycheck.bucket.assembly.save_report import Report
from raycheck.errors import RaycheckError
from raycheck.group.coordinator.messages import Outcome
from raycheck.group.group import Group
from raycheck.group.ports import Sink
from raycheck.transfer.incremental_upload import StagedState

StagedSave = tuple[StagedState, Future[tuple[Outcome, float]]]
"""What was staged, and in the future its outcome, and when that was received by time.monotonic."""


class SaveThread:
    """A background thread that has one rank's staged saves kept and reported, in the order in which they began."""

    def __init__(self, group: Group, sinks: Sequence[Sink], *, timeout_s: float, name: str) -> None:
        """sinks: a save goes to the first one that takes it. timeout_s: how long one may take. name: the thread's."""
        self._group = group
        self._sinks = sinks
        self._timeout_s = timeout_s
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=name)

    def begin(
        self, report: Report, stage: Callable[[], StagedState], *, began: float, committed: Callable[[], object]
    ) -> StagedSave:
        """Stage a save, and have it kept and reported. An error of `stage` is raised once the other ranks are told.

        began: by time.monotonic. committed: called in the thread when the save was committed.
        """
        try:
            staged = stage()
        except Exception as error:
            text = str(error) if isinstance(error, RaycheckError) else f"{type(error).__name__}: {error}"
            self._group.tell("report", replace(report, failure=text))  # the others must not wait for this rank
            raise
        report = replace(report, blocked_s=time.monotonic() - began)
        return staged, self._thread.submit(self._keep, staged, report, began + self._timeout_s, committed)

    def _keep(
        self, staged: StagedState, report: Report, deadline: float, committed: Callable[[], object]
    ) -> tuple[Outcome, float]:
        outcomes = (sink.save(staged, report, deadline) for sink in self._sinks)
        outcome = next((outcome for outcome in outcomes if outcome is not None), None)
        if outcome is None:
            problem = "its node does not take it"
            self._group.tell("report", replace(report, failure=problem))
            outcome = Outcome(kind="failed", key=report.checkpoint, message=f"rank {report.rank}: {problem}")
        if outcome.kind == "committed":
            committed()
        return outcome, time.monotonic()

    def do_next(self, call: Callable[[], object]) -> None:
        """Call a function in the thread, after the saves that have begun."""
        self._thread.submit(call)

    def wait_until_idle(self, timeout_s: float) -> None:
        """Wait until the thread has finished everything that it was given, but not longer than this."""
        with suppress(FutureTimeoutError):
            self._thread.submit(int).result(timeout_s)

    def stop(self) -> None:
        """Let the thread end when its save has ended."""
        self._thread.shutdown(wait=False)
