"""Writes the history of a run in the background, while it trains: after each claim and commit, and at the end. Step 41.

No rank waits for it, except for a few seconds at the end of training. What cannot be written stays for the next try;
what a driver that dies had not written, the next claim reads from `latest`, except the metrics of steps.
"""

import asyncio
import threading

from raycheck.bucket.assembly.save_report import Report
from raycheck.bucket.format.latest import Latest
from raycheck.bucket.history.attempt_facts import catch_up, facts_of
from raycheck.bucket.history.facts import Facts
from raycheck.bucket.history.metric_rows import TIME, MetricRows
from raycheck.bucket.history.segments import record_facts
from raycheck.bucket.protocol.swap import Register
from raycheck.bucket.reading import read_newest
from raycheck.errors import CorruptError
from raycheck.group.coordinator.messages import StepRows
from raycheck.log import event, logger

LAST_WRITE_S = 10.0
"""How long the end of training waits until the history is written."""


class HistoryWriter:
    """The facts of a run's past that its coordinator has not written yet."""

    def __init__(self, register: Register) -> None:
        self._register = register
        self._lock = threading.Lock()
        self._pending = Facts()
        self._seen = Facts()  # what the body listed that was noted last
        self._must_catch_up = False
        self._has_failed = False
        self._task: asyncio.Task[None] | None = None

    def claimed(self) -> None:
        """Have everything written that the history lacks: the attempt that was ended, above all."""
        self._must_catch_up = True
        self.start()

    def reported(self, report: Report | StepRows, now: float) -> None:
        """Take the rows that a rank has sent. now: the store's time in unix seconds, by which rows get their times.

        It makes no difference if they are sent again.
        """
        if report.rows:
            ahead_s = report.sent_at - now
            series = {
                (report.attempt, name): {
                    step: value - ahead_s if name == TIME else value for step, value in zip(steps, values, strict=True)
                }
                for name, (steps, values) in report.rows.items()
            }
            self._add(Facts(rows=MetricRows(series=series)))

    def committed(self) -> None:
        """Note a commit, and what it evicted, as the body says that the register has just written."""
        body = self._register.newest
        if body is not None:
            facts = facts_of(body)
            new = facts.without(self._seen)
            self._seen = facts
            self._add(new)

    def _add(self, facts: Facts) -> None:
        with self._lock:
            self._pending = self._pending.joined(facts).thinned()

    def start(self) -> None:
        """Start writing if there is anything to write, and return at once. Call it in the event loop."""
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(asyncio.to_thread(self._write))

    async def flush(self) -> bool:
        """Write what there is to write, and wait for LAST_WRITE_S at most. Return whether that pass has ended."""
        self.start()
        assert self._task is not None
        done, _ = await asyncio.wait([self._task], timeout=LAST_WRITE_S)
        return bool(done)

    async def finish(self) -> None:
        """Write what is left, for twice LAST_WRITE_S at most."""
        if await self.flush() and (self._pending or self._must_catch_up):  # it was added after that pass had begun
            await self.flush()

    def _body(self) -> Latest:
        """Return the body, whole, or without its pages if one of them is lost."""
        try:
            return self._register.read_existing()[0]
        except CorruptError:
            return read_newest(self._register.store)

    def _write(self) -> None:
        facts = Facts()
        try:
            if self._must_catch_up:
                catch_up(self._register.store, self._body())
                self._must_catch_up = False
            while (body := self._register.newest) is not None:
                with self._lock:
                    facts, self._pending = self._pending, Facts()
                if not facts:
                    break
                record_facts(self._register.store, facts, run_id=body.run_id, counter=body.counter)
            self._has_failed = False
        except Exception as error:  # noqa: BLE001  whatever it was, training continues without the history
            self._add(facts)
            if not self._has_failed:
                text = f"the history could not be written yet: {type(error).__name__}: {error}"
                logger.warning(event(text, run=self._register.store.uri))
            self._has_failed = True
