"""The save thread of a rank: it has one staged save after the other uploaded and reported, while training goes on."""

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeoutError
from contextlib import suppress

from raycheck.bucket.assembly.save_report import Report
from raycheck.group.coordinator.messages import Outcome
from raycheck.group.group import Group
from raycheck.group.worker.upload_and_report import Uploader
from raycheck.transfer.incremental_upload import StagedState


class UploadThread:
    """Run the uploads and reports of one rank in a background thread, in the order in which they are given."""

    def __init__(self, group: Group, *, timeout_s: float, by_node: bool) -> None:
        """timeout_s: how long a save may take; errors name it. by_node: let the node's actor upload, if it can."""
        self._own = Uploader(group, timeout_s=timeout_s)
        self._by_node = group.node_sink(timeout_s=timeout_s) if by_node else None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="raycheck-save")
        if self._by_node is not None:
            self._thread.submit(self._by_node.prepare)

    def save(
        self, staged: StagedState, report: Report, *, deadline: float, committed: Callable[[], None]
    ) -> Future[tuple[Outcome, float]]:
        """Upload and report a save in the background. Return its outcome, and when it was received by time.monotonic.

        deadline: by time.monotonic. committed: called in the save thread when the save was committed.
        """

        def run() -> tuple[Outcome, float]:
            by_node = self._by_node if not staged.slices else None  # another process cannot read live tensors
            outcome = by_node.save(staged, report, deadline) if by_node is not None else None
            if outcome is None:
                outcome = self._own.save(staged, report, deadline)
            if outcome.kind == "committed":
                committed()
            return outcome, time.monotonic()

        return self._thread.submit(run)

    def do_next(self, call: Callable[[], object]) -> None:
        """Call a function in the save thread, after the saves that it was given before."""
        self._thread.submit(call)

    def wait_until_idle(self, timeout_s: float) -> None:
        """Wait until the thread has finished everything that it was given, but not longer than this."""
        with suppress(FutureTimeoutError):
            self._thread.submit(int).result(timeout_s)

    def stop(self) -> None:
        """Let the thread end when its save has ended."""
        self._thread.shutdown(wait=False)
