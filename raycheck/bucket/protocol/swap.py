"""Replaces `latest` by compare-and-swap. Steps 1 to 5.

All writes of `latest` are made here, except in repair.py, which replaces a body that cannot be read. The caller passes
a function that computes the new body. It is called with each body that was read, and also decides whether that body
already has the wanted effect. If it asks the body for what may be in a page, it is called again with what that page
lists.
"""

import threading
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TypeVar

from raycheck.bucket.document_reading import again_if_corrupt
from raycheck.bucket.format import object_keys
from raycheck.bucket.format.latest import Latest, dump_latest
from raycheck.bucket.pages import Pages, again_if_missing, read_answer, read_whole
from raycheck.bucket.protocol.paging import fold
from raycheck.bucket.protocol.write_once import put_all_once
from raycheck.bucket.reading import get_latest, no_run_error
from raycheck.bucket.store import Got, Store
from raycheck.bucket.store.address import shown_uri
from raycheck.bucket.store.interface import Written
from raycheck.bucket.store.jitter import CHANCE
from raycheck.errors import ConfigError, ConflictError, CorruptError, DeniedError, NotFoundError, StoreError

T = TypeVar("T")
SWAP_DEADLINE_S = 60.0
CROWDED_DEADLINE_S = 300.0
Decide = Callable[[Latest | None, float], Latest | None]
"""Compute the new body from the current one and the bucket's time. Return None when the current body already has the
effect; raise to stop the swap."""


class Register:
    """The `latest` of one run, to read and swap. Remembers what this process has seen of it, and runs one swap at a
    time.

    is_crowded: hundreds of processes may be swapping it right now, so pauses are random and the deadline is later.
    is_dry: decide and check as always, but write nothing. Use it for one swap: what that returns is not in the bucket.
    pages: the pages of this run that this process has read.
    """

    def __init__(
        self,
        store: Store,
        *,
        monotonic: Callable[[], float] = time.monotonic,
        is_crowded: bool = False,
        is_dry: bool = False,
    ) -> None:
        self.store = store
        self.is_dry = is_dry
        self._is_crowded = is_crowded
        self._monotonic = monotonic
        self._lock = threading.Lock()
        self._seen = (0, 0)  # attempt, counter
        self._newest: tuple[Latest, Got] | None = None  # what this process has read or written last
        self._run_id: str | None = None
        self.pages = Pages(store)

    def read(self) -> tuple[Latest, Got] | None:
        """Read the whole body and the store's response. Return None when there is no `latest` and this process has
        never seen one.

        Raises the errors of `read_newest`, and CorruptError when a page is lost or damaged.
        """
        try:
            return read_whole(self._newest_existing, self.pages)
        except _NoRunError:
            return None

    def _newest_existing(self) -> tuple[Latest, Got]:
        found = self.read_newest()
        if found is None:
            raise _NoRunError
        return found

    def read_newest(self) -> tuple[Latest, Got] | None:
        """Read `latest` alone, without its pages: enough for what concerns the newest checkpoints and the attempts.

        Return None when there is no `latest` and this process has never seen one. Raises CorruptError when `latest`
        existed before and is missing, is of an older attempt, or is another run's: it was lost or rolled back, and
        nothing may be based on it (step 4). Each such error needs two readings.
        """
        return again_if_corrupt(self._read)

    def _read(self) -> tuple[Latest, Got] | None:
        seen = self._seen  # before the request: a response may be older than a concurrent swap
        try:
            body, got = get_latest(self.store)
        except NotFoundError:
            if seen[1]:
                raise lost_error(self.store.uri, "is gone") from None
            return None
        now = (body.attempt.number, body.counter)
        if now[0] < seen[0] or now[1] < seen[1]:
            raise lost_error(self.store.uri, f"went back to attempt {now[0]}, write {now[1]}")
        if self._run_id not in (None, body.run_id):
            raise lost_error(self.store.uri, f"is that of another run ({body.run_id}, not {self._run_id})")
        self._run_id = body.run_id
        self._seen = max(self._seen, now)
        self._newest = body, got
        return body, got

    def ask(self, question: Callable[[Latest], T]) -> T:
        """Read `latest`, and return its answer to a question. Only pages on which the answer may depend are read.

        Raises the errors of `read`, and NotFoundError when there is no run.
        """
        try:
            return read_answer(self._newest_existing, self.pages, question)[0]
        except _NoRunError:
            raise no_run_error(self.store) from None

    def read_existing(self) -> tuple[Latest, Got]:
        """Read the whole body and the store's response as `read` does. Raises NotFoundError when there is no run."""
        found = self.read()
        if found is None:
            raise no_run_error(self.store)
        return found

    def swap(self, decide: Decide, *, what: str, at: float | None = None) -> Latest:
        """Replace the body by what `decide` computes from it, and return the body that has the effect. Steps 1 to 5.

        The body that is returned may have pages; `pages.whole` reads them.

        A response that is lost, late or repeated decides nothing: `latest` is read again and shows whether the swap was
        applied (I5). at: the store's time, from a response that has just arrived. With it, the first try starts from
        the body that this process last read or wrote, without reading it again: the condition proves that it is still
        current. what: the purpose, for errors. Raises what `decide` raises, and StoreError when the outcome is still
        unknown after SWAP_DEADLINE_S (CROWDED_DEADLINE_S if is_crowded), or when a permission is missing.
        """
        patience_s = CROWDED_DEADLINE_S if self._is_crowded else SWAP_DEADLINE_S
        deadline = self._monotonic() + patience_s
        pause, is_unknown = 0.05, False
        with self._lock:
            if at is not None and self._newest is not None and (new := self._replace_newest(decide, at)) is not None:
                return new
            while True:
                try:
                    return again_if_missing(self.pages, self.read_newest, partial(self._try, decide))  # 1 to 3
                except (StoreError, _NotSwappedError) as error:  # 4: unknown; read again and judge by effect
                    if isinstance(error, DeniedError) and not is_unknown:
                        raise  # a missing permission would be refused again
                    is_unknown = True
                    if self._monotonic() > deadline:
                        raise StoreError(
                            f"{self.store}: {what}: latest could not be swapped in {patience_s:.0f} s "
                            f"({error}); whether the swap was applied is unknown"
                        ) from error
                    time.sleep(pause * CHANCE.uniform(0.2, 1.8) if self._is_crowded else pause)
                    pause = min(pause * 2, 2.0)

    def _try(self, decide: Decide, found: tuple[Latest, Got] | None) -> Latest:
        """Replace the body that was read, unless it has the effect already. Return the body that has it."""
        body, got = found or (None, None)
        new = self._decide(decide, body, got.at if got else time.time())  # 2; also judges by effect, 4
        if new is None:
            assert body is not None, "only a body can have the effect already"
            return body
        return self._replace(body, new, got)  # 3

    def _decide(self, decide: Decide, body: Latest | None, now: float) -> Latest | None:
        """Return what `decide` computes from `body`, with the pages on which that may depend."""
        return decide(None, now) if body is None else self.pages.ask(body, lambda body: decide(body, now))

    @property
    def newest(self) -> Latest | None:
        """Return the body that this process last read or wrote, perhaps with pages; None before that. Sends no
        request."""
        return None if self._newest is None else self._newest[0]

    def edit(self, change: Callable[[Latest, float], Latest | None], *, what: str, at: float | None = None) -> Latest:
        """Swap as `swap` does, but raise NotFoundError when there is no run."""

        def decide(body: Latest | None, now: float) -> Latest | None:
            if body is None:
                raise no_run_error(self.store)
            return change(body, now)

        return self.swap(decide, what=what, at=at)

    def _replace_newest(self, decide: Decide, at: float) -> Latest | None:
        """Replace the body that this process last read or wrote, if it is still current. Step 1.

        Return None unless this has certainly succeeded. Only a success counts: any other outcome of `decide`, including
        an error, may be due to an old body, so `decide` has to be called again with a body that was just read.
        """
        assert self._newest is not None
        body, got = self._newest
        self._newest = None
        try:
            new = self._decide(decide, body, at)
            return None if new is None else self._replace(body, new, got)
        except Exception:  # noqa: BLE001  the caller reads, and decides again
            return None

    def _replace(self, body: Latest | None, new: Latest, got: Got | None) -> Latest:
        """Write `new` in place of `body`, which came with `got`. Return what was written."""
        new = replace(new, counter=body.counter + 1 if body else 1)
        if self.is_dry:
            return new
        new, pages = fold(new, body, self.pages)
        if pages:
            put_all_once(self.store, pages)
        written = self._write(new, got)
        self._run_id = new.run_id
        self._seen = max(self._seen, (new.attempt.number, new.counter))
        self._newest = new, Got(b"", written.version, written.at)
        return new

    def _write(self, new: Latest, got: Got | None) -> Written:
        data = dump_latest(new)
        try:
            if got is None:
                written = self.store.put_if_absent(object_keys.LATEST_KEY, data)
            else:
                written = self.store.put_if_match(object_keys.LATEST_KEY, data, got.version)
        except ConflictError as error:
            raise _NotSwappedError(str(error)) from error
        return written


class _NoRunError(Exception):
    """There is no `latest`, and this process has never seen one."""


class _NotSwappedError(Exception):
    """The condition was refused, because of another writer or of our own repeated write."""


def lost_error(uri: str, what: str) -> CorruptError:
    """Make the error for a `latest` that was lost or rolled back. A restart would not bring it back."""
    return CorruptError(
        f"{shown_uri(uri)}: latest {what}. It was deleted or rolled back; raycheck does not start from zero over "
        "existing checkpoints. Stop the run and put the object back (bucket versioning) or rebuild it with 'raycheck "
        "repair'; to start from zero, move the run's folder away"
    )


def refuse_mirror(uri: str, body: Latest, what: str) -> None:
    """Raise ConfigError when `body` is a mirror's, which `what` would make different from its source."""
    if body.mirror is not None and body.is_mirror:
        raise ConfigError(f"{shown_uri(uri)}: a mirror keeps what its source keeps; {what} in {body.mirror.source}")
