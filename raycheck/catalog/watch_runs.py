"""Watches runs from outside, and tells people when one is silent, has died, or has finished.

A run cannot tell that its machines are gone; whoever watches it elsewhere can. What it tells is marked in the run as
what the run tells itself, so nobody is told twice (alerts.py).
"""

from collections.abc import Iterator

from raycheck.alerts import AlertSender, Happening, check_command, died, finished, given_up, is_death, silent
from raycheck.bucket.store import open_store
from raycheck.catalog.listing import RunFolder, RunSummary
from raycheck.errors import RaycheckError
from raycheck.log import event, logger
from raycheck.run import Run, open_run
from raycheck.settings import Alerts
from raycheck.storage_settings import StorageSettings

OLD_S = 24 * 3600.0
"""What was so for longer than this when it is first seen is nobody's news."""


class RunsWatch:
    """A watch of all runs below a prefix."""

    def __init__(self, uri: str, alerts: Alerts, storage: StorageSettings | None = None) -> None:
        """Raises ConfigError that says what is wrong with the URI, or if the command is not on this machine."""
        self._folder = RunFolder(uri, storage)
        self._alerts = alerts
        self._storage = storage
        self._senders: dict[str, AlertSender] = {}
        self._seen: dict[str, RunSummary] = {}
        self._old: set[tuple[str, str]] = set()  # by run, the happenings that are nobody's news
        self._attempts: dict[str, int] = {}  # the first of which it may have to tell
        check_command(alerts)

    def look(self) -> list[str]:
        """Look at every run once, and send what is new. Return the texts of the alerts that were sent.

        A run that cannot be read now is looked at the next time. Raises StoreError when the prefix cannot be read.
        """
        sent = []
        for found in self._folder.runs():
            before, self._seen[found.uri] = self._seen.get(found.uri), found
            known = None if before is None else (before.state, before.committed_at)
            if known == ("finished", found.committed_at) and found.state == "finished":
                continue
            try:
                happenings = [item for item in self._happenings(found) if (found.uri, item.name) not in self._old]
            except RaycheckError as error:
                logger.warning(event("a run could not be read", cause=error, run=found.uri))
                continue
            sent += [happening.text for happening in happenings if self._sender(found.uri).tell(happening)]
        return sent

    def _happenings(self, found: RunSummary) -> Iterator[Happening]:
        if found.state not in ("running", "silent", "died", "finished", "uncommitted"):
            return
        run = open_run(found.uri, self._storage)
        is_first = found.uri not in self._attempts
        yield from self._deaths(run, found.uri)
        status, head = run.status(), None if run.head is None else run.head.key
        now: Happening
        if status.state == "died":
            now = given_up(run.attempt, status.text.partition("its driver gave up: ")[2])
        elif status.state == "silent":
            now = silent(run.attempt, head, status.text)
        elif status.state == "finished":
            now = finished(run.attempt, head)
        else:
            return
        if is_first and status.now - status.at > OLD_S:
            self._old.add((found.uri, now.name))
        yield now

    def _deaths(self, run: Run, uri: str) -> Iterator[Happening]:
        """Yield the attempts that have died since this watch has seen the run. The record says so, once it is there."""
        first = self._attempts.setdefault(uri, run.attempt)
        if first == run.attempt:
            return
        for attempt in run.history().attempts:
            if not first <= attempt.number < run.attempt:
                continue
            if not attempt.cause:
                return
            self._attempts[uri] = attempt.number + 1
            if is_death(attempt.cause):
                yield died(attempt.number, attempt.cause)

    def _sender(self, uri: str) -> AlertSender:
        if uri not in self._senders:
            self._senders[uri] = AlertSender(open_store(uri, self._storage), self._alerts)
        return self._senders[uri]
