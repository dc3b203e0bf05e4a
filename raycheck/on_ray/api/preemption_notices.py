"""Receives preemption notices from Ray: the only place where a group with Ray learns that a node will be taken away.

The path of a notice: the cloud's metadata service announces the end of the machine. `raycheck watch-node`
(watch_node/), or the cluster's operator, has Ray drain the node. A call below learns of the drain from Ray. It is the
group's `notice`, which rank 0 calls in group/worker/save_triggers.py, and group/worker/preemption.py decides whether a
save still fits.
"""

import math
import time
from collections.abc import Sequence
from threading import Thread

import ray
import ray.train

from raycheck.group.ports import PreemptionNotice

NOTICE_PAUSE_S = 1.0


def notice_of_ray_train() -> PreemptionNotice | None:
    """Return what Ray Train says about nodes of this group that will be preempted; None if none will.

    Every rank must call it equally often.
    """
    if not hasattr(ray.train, "get_preemption_info"):
        return None
    info = ray.train.get_preemption_info()
    if info is None:
        return None
    at = math.inf if info.deadline_ms is None else info.deadline_ms / 1000.0
    return PreemptionNotice(at=at, ranks=frozenset(info.preempted_ranks))


class PreemptionNotices:
    """The same for a group of actors without Ray Train: asks Ray about their nodes in the background once a second.

    A callable, as Group's `notice` is. nodes: their ids, in the order of the ranks.
    """

    def __init__(self, nodes: Sequence[str]) -> None:
        self._nodes = tuple(nodes)
        self._asked_at = float("-inf")
        self._newest: PreemptionNotice | None = None
        self._asking = Thread()

    def __call__(self) -> PreemptionNotice | None:
        """Return the newest answer, without waiting for Ray: it does not answer while its head is down."""
        if not self._asking.is_alive() and time.monotonic() - self._asked_at > NOTICE_PAUSE_S:
            self._asked_at = time.monotonic()
            self._asking = Thread(target=self._ask, name="raycheck-notices", daemon=True)
            self._asking.start()
        return self._newest

    def _ask(self) -> None:
        self._newest = _notice_about(self._nodes)


def _notice_about(nodes: Sequence[str]) -> PreemptionNotice | None:
    try:
        from ray._private.state import state

        draining = state.get_draining_nodes()
    except (ImportError, AttributeError, ray.exceptions.RayError):
        return None
    ranks = frozenset(rank for rank, node in enumerate(nodes) if node in draining)
    at = min((draining[nodes[rank]] / 1000.0 or math.inf for rank in ranks), default=math.inf)
    return PreemptionNotice(at=at, ranks=ranks) if ranks else None
