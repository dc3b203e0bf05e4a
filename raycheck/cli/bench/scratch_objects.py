"""Keeps the scratch objects on which a store is measured, and the threads that write and read them.

All keys lie below one prefix of random name, so a run at the same place is never touched. Whatever ends the block, also
an error or Ctrl-C: first all requests end, then all objects are deleted.
"""

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import suppress
from functools import partial
from types import TracebackType
from typing import Self

from raycheck.bucket.format import object_keys
from raycheck.bucket.store import Store
from raycheck.errors import RaycheckError, StoreError

MAX_AT_ONCE = 16


class Scratch:
    """Makes scratch objects, and deletes them all when its `with` block is left.

    Leaving the block raises StoreError when something could not be deleted.
    """

    def __init__(self, store: Store, token: str) -> None:
        self.store = store
        self._token = token
        self._keys: set[str] = set()
        self._count = 0
        self._stopped = threading.Event()
        self._threads = ThreadPoolExecutor(MAX_AT_ONCE, thread_name_prefix="raycheck-bench")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stopped.set()
        self._threads.shutdown(cancel_futures=True)
        if error is not None:
            self._abort_uploads()
        failures = list(filter(None, _at_once(self._failure_to_delete, self._keys)))
        if failures:
            raise StoreError(
                f"{self.store}: {len(failures)} objects below {object_keys.scratch_prefix(self._token)} could not "
                f"be deleted; delete them by hand. {failures[0]}"
            ) from (error or failures[0])

    def new_key(self) -> str:
        """Returns a free key. What is written there is deleted at the end."""
        self._count += 1
        key = object_keys.scratch_key(self._token, self._count)
        self._keys.add(key)
        return key

    def run(self, jobs: Iterable[Callable[[], None]], *, at_once: int = 1) -> None:
        """Do all jobs, `at_once` of them at a time. Raises the first error of any.

        Jobs never run in the calling thread, so that Ctrl-C is heard while a request is under way.
        """
        left = deque(jobs)
        lanes = [self._threads.submit(self._lane, left) for _ in range(min(at_once, MAX_AT_ONCE))]
        for lane in wait(lanes, return_when=FIRST_EXCEPTION).done:
            lane.result()

    def watched(self, parts: Iterable[memoryview]) -> Iterator[memoryview]:
        """Yields `parts`, and raises StoreError once the block is left, so that an upload under way is given up."""
        for part in parts:
            if self._stopped.is_set():
                raise StoreError(f"{self.store}: the measurement was stopped")
            yield part

    def delete(self, keys: Iterable[str]) -> None:
        """Delete these objects before the end, so that little lies in the bucket at a time."""
        gone = list(keys)
        self.run([partial(self.store.delete, key) for key in gone], at_once=MAX_AT_ONCE)
        self._keys.difference_update(gone)

    def _lane(self, left: deque[Callable[[], None]]) -> None:
        try:
            while not self._stopped.is_set():
                try:
                    job = left.popleft()
                except IndexError:
                    return
                job()
        except BaseException:
            self._stopped.set()
            raise

    def _failure_to_delete(self, key: str) -> RaycheckError | None:
        try:
            self.store.delete(key)
        except RaycheckError as error:
            return error
        return None

    def _abort_uploads(self) -> None:
        """Abort uploads that were cut short. The store has already tried to abort those that failed."""
        with suppress(RaycheckError):  # the error that brought us here matters more
            for upload in self.store.list_uploads(object_keys.scratch_prefix(self._token)):
                self.store.abort_upload(upload)


def _at_once(call: Callable[[str], RaycheckError | None], keys: Iterable[str]) -> list[RaycheckError | None]:
    with ThreadPoolExecutor(MAX_AT_ONCE, thread_name_prefix="raycheck-delete") as pool:
        return list(pool.map(call, sorted(keys)))
