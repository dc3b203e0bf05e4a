"""Deleting what retention dropped and torn saves left: behind everybody's back, and one at a time."""

import asyncio
import time

from raycheck.bucket.protocol.prune_and_sweep import GRACE_S, MAX_EVICTED, prune, sweep
from raycheck.bucket.protocol.swap import Register
from raycheck.errors import RaycheckError
from raycheck.train.coordinator.export_jobs import ExportJobs
from raycheck.train.log import logger, name_of


class BackgroundDeletes:
    """Steps 20 to 23 for a coordinator. What cannot be deleted now is tried again later; nothing waits for it."""

    def __init__(self, register: Register, exports: ExportJobs) -> None:
        self._register = register
        self._exports = exports
        self._next_at = float("-inf")
        self._commits = 0
        self._must_sweep = False
        self._task: asyncio.Task[None] | None = None

    def claimed(self) -> None:
        self._must_sweep = True
        self.start()

    def committed(self) -> None:
        self._commits += 1

    def start(self) -> None:
        """In the event loop; returns at once."""
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(asyncio.to_thread(self._tidy))

    def _tidy(self) -> None:
        if time.monotonic() < self._next_at and self._commits < MAX_EVICTED and not self._must_sweep:
            return
        self._commits = 0
        self._next_at = time.monotonic() + GRACE_S / 4
        store = self._register.store
        try:
            prune(self._register, spare=self._exports.keys)
        except RaycheckError as error:
            logger.warning("%s: dropped checkpoints could not be deleted yet: %s", name_of(store.uri), error)
        if not self._must_sweep:
            return
        self._must_sweep = False
        try:
            for item in sweep(store):
                logger.info("%s: deleted %s (%s)", name_of(store.uri), item.name, item.reason)
        except RaycheckError as error:
            logger.warning("%s: what torn saves left could not be deleted: %s", name_of(store.uri), error)
