"""The loop: look for notices, and have Ray drain this node, once for each, until the machine is gone.

A metadata service or a Ray that is away ends nothing: it is logged once when it goes and once when it is back. A
drain that fails is tried again at every look until the notice's deadline.
"""

import signal
import sys
import time
from collections.abc import Callable
from datetime import UTC, datetime
from logging import getLogger
from typing import NoReturn

from raycheck.errors import RaycheckError
from raycheck.nodes.cloud_notices import REBALANCE, Notice, NoticeSource

logger = getLogger("raycheck")
INTERVAL_S = 1.0
"""For all clouds: a notice may leave 30 s (Google, Azure), Azure itself advises one request per second and limits them
to five, and a request goes no further than this machine's host."""
FALLBACK_S = 120.0
"""What Ray Train assumes, too, when a drain has no deadline."""
SLACK_S = 1.0

Drain = Callable[[float, str], None]
"""Drains this node: deadline in unix seconds, and why. Raises RaycheckError or ConnectionError when it did not."""


def watch(
    source: NoticeSource,
    drain: Drain,
    *,
    interval_s: float = INTERVAL_S,
    rebalance_deadline_s: float | None = None,
    clock: Callable[[], float] = time.time,
    sleep: Callable[[float], None] = time.sleep,
) -> NoReturn:
    """Look every interval_s, and drain. Ends by SystemExit only, which SIGTERM raises after `end_on_sigterm()`.

    rebalance_deadline_s: drain at a rebalance recommendation, too, with a deadline so far ahead; None: only log it.
    """
    state = NodeWatch(source, drain, rebalance_deadline_s=rebalance_deadline_s, clock=clock)
    try:
        while True:
            state.look()
            sleep(interval_s)
    except SystemExit:
        if state.is_source_up:  # a cloud may say it with the very shutdown that ends this process
            state.look()
        raise


def end_on_sigterm() -> None:
    """From now on SIGTERM raises SystemExit(0) in the main thread."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))


class NodeWatch:
    """What is known by now: which notices are pending, and which deadline Ray was told."""

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
        """Ask the metadata service, and drain if something is due. Raises nothing for either being away."""
        now = self._clock()
        try:
            found = self._source.notices(now)
        except ConnectionError as error:
            if self.is_source_up:
                logger.warning("no notice can be seen while the metadata service does not answer: %s", error)
            self.is_source_up = False
        else:
            if not self.is_source_up:
                logger.warning("%s: the metadata service answers again", self._source.endpoint)
            self.is_source_up = True
            self._learn(found, now)
        self._drain_if_due()

    def _learn(self, found: tuple[Notice, ...], now: float) -> None:
        before, self._pending = self._pending, {}
        for notice in found:
            key = (notice.kind, notice.message)
            self._pending[key] = self._deadline(notice, now, before.get(key))
            if key not in before:
                until = self._pending[key]
                what = f"deadline {_text(until)}" if until else "only logged; --rebalance-deadline S drains the node"
                logger.warning("notice: %s (%s)", notice.message, what)
        if before and not found:
            kept = "" if self._told is None else "; Ray takes no drain back: restart it on this node"
            logger.warning("the notice is withdrawn%s", kept)
            self._told = None

    def _deadline(self, notice: Notice, now: float, before: float | None) -> float | None:
        """Fixed when first seen, as some clouds give only a span; after that it moves only nearer."""
        span = FALLBACK_S
        if notice.kind == REBALANCE:
            if self._rebalance_deadline_s is None:
                return None
            span = self._rebalance_deadline_s
        if notice.deadline is None:
            return now + span if before is None else before
        return notice.deadline if before is None else min(before, notice.deadline)

    def _drain_if_due(self) -> None:
        """Tell Ray the nearest deadline, unless it knows. Each drain replaces the one before."""
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
                logger.error("the node is not drained, which is tried again until %s: %s", _text(until), error)  # noqa: TRY400
            self._is_drain_failing = True
            if self._clock() < until:
                return
            logger.error("the deadline %s has passed and the node was not drained: %s", _text(until), error)  # noqa: TRY400
        else:
            logger.warning("the node is drained, deadline %s: %s", _text(until), pending[until])
        self._told, self._is_drain_failing = until, False


def _text(at: float) -> str:
    return datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%d %H:%M:%SZ")
