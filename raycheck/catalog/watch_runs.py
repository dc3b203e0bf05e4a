"""Watches runs from outside, and tells people when one is silent, has died, or has finished.

A run cannot tell that its machines are gone; whoever watches it elsewhere can. What it tells is marked in the run as
what the run tells itself, so nobody is told twice (alerts.py).
"""

from collections.abc import Iterator

from raycheck.alerts import AlertSender, Happening, check_command, died, finished, given_up, is_death, silent
from raycheck.bucket.attempt_records import AttemptRecord, read_record
from raycheck.bucket.store import Store, open_store
from raycheck.bucket.store.address import shown_uri
from raycheck.catalog.listing import RunFolder, RunSummary
from raycheck.errors import NotFoundError, RaycheckError
from raycheck.log import event, logger
from raycheck.run import read_run
from raycheck.settings import Alerts
from raycheck.storage_settings import StorageSettings

OLD_S = 24 * 3600.0
"""What was so for longer than this when it is first seen is nobody's news."""
MAX_ATTEMPTS = 100
"""How many ended attempts of a run are looked at."""


class RunsWatch:
    """A watch of all runs below a prefix."""

    def __init__(self, uri: str, alerts: Alerts, storage: StorageSettings | None = None) -> None:
        """Raises ConfigError that says what is wrong with the URI, or if the command is not on this machine."""
        self._folder = RunFolder(uri, storage)
        self._alerts = alerts
        self._storage = storage
        self._opened: dict[str, tuple[Store, AlertSender]] = {}
        self._seen: dict[str, RunSummary] = {}
        self._old: set[tuple[str, str]] = set()  # by run, the happenings that are nobody's news
        self._unread: dict[str, int] = {}  # by run, the first attempt whose end may still have to be told
        check_command(alerts)

    def look(self) -> list[str]:
        """Look at every run once, and send what is new. Return the texts of the alerts that were sent.

        A run that cannot be read now is looked at the next time. Raises StoreError when the prefix cannot be read, and
        NotFoundError when there is no run.
        """
        sent = []
        for found in self._runs():
            before, self._seen[found.uri] = self._seen.get(found.uri), found
            known = None if before is None else (before.state, before.committed_at)
            if known == ("finished", found.committed_at) and found.state == "finished":
                continue
            store, sender = self._open(found.uri)
            try:
                happenings = [
                    item for item in self._happenings(found, store) if (found.uri, item.name) not in self._old
                ]
            except RaycheckError as error:
                logger.warning(event("a run could not be read", cause=error, run=found.uri))
                continue
            sent += [happening.text for happening in happenings if sender.tell(happening)]
        return sent

    def _runs(self) -> tuple[RunSummary, ...]:
        found = self._folder.runs()
        if not found:
            raise NotFoundError(
                f"{shown_uri(self._folder.uri)}: no run is here or in the folders under it, so nothing is watched; "
                "correct the address, or repeat this once the first run has started"
            )
        return found

    def _open(self, uri: str) -> tuple[Store, AlertSender]:
        if uri not in self._opened:
            store = open_store(uri, self._storage)
            self._opened[uri] = store, AlertSender(store, self._alerts)
        return self._opened[uri]

    def _happenings(self, found: RunSummary, store: Store) -> Iterator[Happening]:
        if found.state not in ("running", "silent", "died", "finished", "uncommitted"):
            return
        run = read_run(store)
        status, head = run.status(), None if run.head is None else run.head.key
        is_first = store.uri not in self._unread
        yield from self._deaths(store, run.attempt, now=status.now)
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

    def _deaths(self, store: Store, live: int, *, now: float) -> Iterator[Happening]:
        """Yield the deaths before the live attempt, oldest first, by the attempts' records.

        The first look yields those of the last day; the marks say which of them were told. A record is written soon
        after the next attempt has begun; if it is missing, the next look tries again.
        """
        deaths, missing = [], live
        for number in reversed(range(max(self._unread.get(store.uri, 1), live - MAX_ATTEMPTS), live)):
            record = read_record(store, number)
            if record is None:
                missing = number
            elif now - record.ended_at > OLD_S:
                break
            elif (death := _death(record)) is not None:
                deaths.append(death)
        self._unread[store.uri] = missing
        yield from reversed(deaths)


def _death(record: AttemptRecord) -> Happening | None:
    """Return the death of an ended attempt, None if nobody has to be told of its end."""
    number = record.attempt.number
    if not record.attempt.world_size or not is_death(record.cause):
        return None
    return (given_up if record.ended_by_attempt == number else died)(number, record.cause)
