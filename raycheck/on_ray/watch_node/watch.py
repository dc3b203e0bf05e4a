"""Polls for preemption notices, and has Ray drain this node once for each, until the machine is gone.

The loop survives a metadata service or a Ray that does not answer: this is logged once when it starts and once when it
ends. A failed drain is retried in every iteration until the notice's deadline.
"""

import signal
import sys
import threading
import time
from collections.abc import Callable
from datetime import UTC, datetime
from logging import getLogger
from typing import NoReturn

from raycheck.errors import RaycheckError
from raycheck.on_ray.watch_node.cloud_notices import REBALANCE, Notice, NoticeSource

logger = getLogger("raycheck")
INTERVAL_S = 1.0
"""Seconds between two requests, for all clouds. A notice may leave 30 s (Google, Azure), Azure advises one request per
second and allows five, and a request goes no further than this machine's host."""
FALLBACK_S = 120.0
"""The assumed time until a deadline that the cloud does not report. Ray Train assumes the same for a drain."""
SLACK_S = 1.0
"""Deadlines that differ by no more than this count as equal."""

_terminated = threading.Event()

Drain = Callable[[float, str], None]
"""Drains this node, given the deadline in unix seconds and the reason. Raises RaycheckError or ConnectionError when
the node was not drained."""


def watch(
    source: NoticeSource,
    drain: Drain,
    *,
    interval_s: float = INTERVAL_S,
    rebalance_deadline_s: float | None = None,
    clock: Callable[[], float] = time.time,
    sleep: Callable[[float], None] = time.sleep,
) -> NoReturn:
    """Ask every interval_s, and drain when a notice is due. It ends only with SystemExit: see end_on_sigterm.

    rebalance_deadline_s: also drain at a rebalance recommendation, with a deadline this far ahead. None: only log it.
    """
    state = NodeWatch(source, drain, rebalance_deadline_s=rebalance_deadline_s, clock=clock)
    try:
        while True:
            state.look()
            if (
                _terminated.is_set()
            ):  # Python drops an exception that a signal raises in a finalizer, such as a socket's
                sys.exit(0)
            sleep(interval_s)
    except SystemExit:
        if state.is_source_up:  # a cloud may give notice in the same shutdown that ends this process
            state.look()
        raise


def end_on_sigterm() -> None:
    """Make SIGTERM raise SystemExit(0) in the main thread from now on."""
    signal.signal(signal.SIGTERM, _end)


def _end(*_: object) -> None:
    _terminated.set()
    sys.exit(0)


class NodeWatch:
    """The pending notices and the deadline that was given to Ray; it acts on what is new."""

    def __init__(
        self, source: NoticeSource, drain: Drain, *, rebalance_deadline_s: float | None, clock: Callable[[], float]
    ) -> None:
        self.is_source_up = True
        self._source = source
        self._drain = drain
        self._rebalance_deadline_s = rebalance_deadline_s
        self._clock = clock
        self._pending: dict[tuple[str, str], float | None] = {}
        self._told: float | None = None
        self._is_drain_failing = False

    def look(self) -> None:
        """Ask the metadata service, and drain if a notice is due.

        Raises nothing if the service or Ray does not answer.
        """
        now = self._clock()
        try:
            found = self._source.notices(now)
        except ConnectionError as error:
            if self.is_source_up:
                logger.warning("the metadata service does not answer, so no notice can be seen: %s", error)
            self.is_source_up = False
        else:
            if not self.is_source_up:
                logger.warning("%s: the metadata service answers again", self._source.endpoint)
            self.is_source_up = True
            self._learn(found, now)
        self._drain_if_due()

    def _learn(self, found: tuple[Notice, ...], now: float) -> None:
        """Remember the pending notices, and log those that are new or withdrawn."""
        before, self._pending = self._pending, {}
        for notice in found:
            key = (notice.kind, notice.message)
            self._pending[key] = self._deadline(notice, now, before.get(key))
            if key not in before:
                until = self._pending[key]
                what = f"deadline {_text(until)}" if until else "only logged; --rebalance-deadline S drains the node"
                logger.warning("notice: %s (%s)", notice.message, what)
        if before and not found:
            kept = "" if self._told is None else "; Ray cannot cancel a drain: restart Ray on this node"
            logger.warning("the notice was withdrawn%s", kept)
            self._told = None

    def _deadline(self, notice: Notice, now: float, before: float | None) -> float | None:
        """Return the deadline of a notice; None: only log it.

        It is fixed when the notice is first seen, since some clouds report only how much time is left; after that it
        can only move closer. before: the deadline so far.
        """
        span = FALLBACK_S
        if notice.kind == REBALANCE:
            if self._rebalance_deadline_s is None:
                return None
            span = self._rebalance_deadline_s
        if notice.deadline is None:
            return now + span if before is None else before
        return notice.deadline if before is None else min(before, notice.deadline)

    def _drain_if_due(self) -> None:
        """Drain with the nearest deadline, unless Ray has it already. Each drain replaces the previous one."""
        pending = {until: why for (_, why), until in self._pending.items() if until is not None}
        if not pending:
            return
        until = min((item for item in pending if item > self._clock()), default=max(pending))
        if self._told is not None and abs(until - self._told) <= SLACK_S:
            return
        try:
            self._drain(until, pending[until])
        except (RaycheckError, ConnectionError) as error:
            if not self._is_drain_failing:
                logger.error("could not drain this node; retrying until %s: %s", _text(until), error)  # noqa: TRY400
            self._is_drain_failing = True
            if self._clock() < until:
                return
            logger.error("the deadline %s has passed, and this node was not drained: %s", _text(until), error)  # noqa: TRY400
        else:
            logger.warning("drained this node, deadline %s: %s", _text(until), pending[until])
        self._told, self._is_drain_failing = until, False


def _text(at: float) -> str:
    return datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%d %H:%M:%SZ")
