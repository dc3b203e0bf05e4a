"""Deletes what retention dropped and what incomplete saves left: in the background, and one pass at a time."""

import asyncio
import time

from raycheck.bucket.protocol.claim import Identity
from raycheck.bucket.protocol.pin_and_evict import evict
from raycheck.bucket.protocol.removal.prune_and_sweep import GRACE_S, prune, sweep
from raycheck.bucket.protocol.swap import Register
from raycheck.errors import RaycheckError
from raycheck.group.coordinator.commit_tasks import CommitTasks
from raycheck.log import event, logger
from raycheck.settings import Retention

MANY_COMMITS = 200


class BackgroundDeletes:
    """A coordinator's deletes, steps 20 to 23. What cannot be deleted now is tried again later; nothing waits for
    it."""

    def __init__(self, register: Register, me: Identity, tasks: CommitTasks) -> None:
        """tasks: what they still read is not deleted."""
        self._register = register
        self._me = me
        self._tasks = tasks
        self._next_at = float("-inf")
        self._commits = 0
        self._rules: Retention | None = None  # those of the newest commit
        self._must_sweep = False
        self._task: asyncio.Task[None] | None = None

    def claimed(self) -> None:
        """Start a pass with a sweep: the previous attempt may have left incomplete saves. Call it in the event loop."""
        self._must_sweep = True
        self.start()

    def committed(self, rules: Retention) -> None:
        """Count a commit, whose retention `rules` are. After MANY_COMMITS, or with new rules, `start` does not wait for
        the next pass that is due."""
        self._commits += 1
        if rules != self._rules:
            self._rules, self._next_at = rules, float("-inf")

    def start(self) -> None:
        """Start a pass if one is due and none is running, and return at once. Call it in the event loop."""
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(asyncio.to_thread(self._delete))

    def _delete(self) -> None:
        while time.monotonic() >= self._next_at or self._commits >= MANY_COMMITS or self._must_sweep:
            self._make_pass()

    def _make_pass(self) -> None:
        self._commits = 0
        self._next_at = time.monotonic() + GRACE_S / 4
        store = self._register.store
        try:
            if self._rules is not None:  # a commit applies them to the newest checkpoints alone
                evict(self._register, self._rules, coordinator=self._me.coordinator)
            prune(self._register, spare=self._tasks.keys)
        except RaycheckError as error:
            logger.warning(event(f"dropped checkpoints could not be deleted yet: {error}", run=store.uri))
        if not self._must_sweep:
            return
        self._must_sweep = False
        try:
            for item in sweep(store):
                logger.info(event(f"deleted {item.name} ({item.reason})", run=store.uri))
        except RaycheckError as error:
            logger.warning(event(f"what incomplete saves left could not be deleted: {error}", run=store.uri))
