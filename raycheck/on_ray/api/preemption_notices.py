"""Receives preemption notices from Ray: the only place where a group with Ray learns that a node will be taken away.

The path of a notice: the cloud's metadata service announces the end of the machine. `raycheck watch-node`
(watch_node/), or the cluster's operator, has Ray drain the node. A call below learns of the drain from Ray. It is the
group's `notice`, which rank 0 calls in group/worker/save_triggers.py, and group/worker/preemption.py decides whether a
save still fits.
"""

import math
import time
from collections.abc import Collection, Sequence
from threading import Thread

import ray
import ray.train

NOTICE_PAUSE_S = 1.0


def preemption_deadline() -> float | None:
    """Return when Ray Train says that a node of this group will be preempted, in unix seconds.

    It is inf without a time, and None without a notice. Every rank must call it equally often.
    """
    if not hasattr(ray.train, "get_preemption_info"):
        return None
    info = ray.train.get_preemption_info()
    if info is None:
        return None
    return math.inf if info.deadline_ms is None else info.deadline_ms / 1000.0


class PreemptionNotices:
    """The same for a group of actors without Ray Train: asks Ray about their nodes in the background once a second.

    A callable, as Group's `notice` is. nodes: their ids.
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
        self._newest = _drain_deadline(self._nodes)


def _drain_deadline(nodes: Collection[str]) -> float | None:
    """Return when the first of these nodes will be drained, in unix seconds: inf without a time, None if none will."""
    try:
        from ray._private.state import state

        draining = state.get_draining_nodes()
    except (ImportError, AttributeError, ray.exceptions.RayError):
        return None
    return min((ms / 1000.0 if ms else math.inf for node, ms in draining.items() if node in nodes), default=None)
