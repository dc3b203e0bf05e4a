"""Watches for preemption notices for a group of actors, by asking Ray in the background once a second."""

import time
from collections.abc import Sequence
from threading import Thread

from raycheck.on_ray.api.train_context import drain_deadline

NOTICE_PAUSE_S = 1.0


class PreemptionNotices:
    """A callable that returns when the first of these nodes will be preempted, as Group's `notice` does.

    nodes: their ids.
    """

    def __init__(self, nodes: Sequence[str]) -> None:
        self._nodes = frozenset(nodes)
        self._asked_at = float("-inf")
        self._newest: float | None = None
        self._asking = Thread()

    def __call__(self) -> float | None:
        """Return the newest answer, without waiting for Ray: it does not answer while its head is down."""
        if not self._asking.is_alive() and time.monotonic() - self._asked_at > NOTICE_PAUSE_S:
            self._asked_at = time.monotonic()
            self._asking = Thread(target=self._ask, name="raycheck-notices", daemon=True)
            self._asking.start()
        return self._newest

    def _ask(self) -> None:
        self._newest = drain_deadline(self._nodes)
