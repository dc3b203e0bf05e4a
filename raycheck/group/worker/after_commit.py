"""Does a rank's part of the tasks that follow commits: it checks them before training, begins them and waits for them.

The coordinator runs them (coordinator/commit_tasks.py).
"""

import time
from collections.abc import Collection, Mapping, Sequence

from raycheck.bucket.format.progress import Progress
from raycheck.bucket.store.address import parse_uri
from raycheck.errors import ConfigError, StoreError
from raycheck.group.group import Group
from raycheck.group.worker.heartbeat import FencingWatch
from raycheck.group.worker.save_queue import SaveQueue
from raycheck.log import event, logger
from raycheck.settings import BUILT_IN, AfterCommit, BuiltIn

WAIT_TIMEOUT_S = 3600.0
ASK_TIMEOUT_S = 300.0
WORTH_SAYING_S = 1.0
MAX_FUNCTION_BYTES = 1024 * 1024
"""The limit for a pickled function: it is sent with each save that it follows, and by each rank that waits for it."""


class AfterCommitTasks:
    """The tasks in one Checkpointer's settings: begins them, and waits for them as their modes say.

    of_every_save: the names of those that follow every save that is not a rolling one.
    """

    def __init__(
        self, tasks: Mapping[str, AfterCommit], group: Group, models: Sequence[str], watch: FencingWatch
    ) -> None:
        """models: entries of the state with a Hugging Face configuration. Raises ConfigError when it is not clear which
        one to export or where to write it, or when a function would not work in another process.
        """
        self._tasks = tasks
        self._group = group
        self._watch = watch
        self._newest: dict[str, tuple[str, Progress]] = {}  # by task, the newest checkpoint that it follows
        self.of_every_save = tuple(name for name, task in tasks.items() if task.every_save)
        self._sent = {name: _as_sent(name, task, models, group) for name, task in tasks.items()}

    def of(self, names: Collection[str]) -> Mapping[str, BuiltIn | bytes]:
        """Return these tasks in the form that the coordinator accepts."""
        return {name: task for name, task in self._sent.items() if name in names}

    def begin(self, key: str, progress: Progress, names: Collection[str]) -> None:
        """Begin tasks on a committed checkpoint, unless that was done before. A failure is only a warning."""
        self._ask("after_commit", key, progress, self.of(names))

    def follow(
        self, queue: SaveQueue, key: str, progress: Progress, names: Collection[str], *, is_preempted: bool
    ) -> str | None:
        """Once the save of checkpoint `key` has begun, wait for the tasks that follow it, as their modes say.

        Earlier saves have ended by then, so all ranks wait for the same tasks. is_preempted: wait for none. Returns the
        name of the newest commit, if there was one in the meantime. Raises the error that has ended this attempt.
        """
        before = {name: self._newest[name] for name in names if name in self._newest}
        self._newest |= dict.fromkeys(names, (key, progress))
        modes = {name: self._tasks[name].mode for name in names if not is_preempted}
        waited = [name for name, mode in modes.items() if mode == "sync"]
        eased = [name for name, mode in modes.items() if mode == "auto"]
        newest = None
        if waited or eased:
            newest = queue.wait(up_to=queue.saves - (not waited))
            self._wait(eased, before, but=key)
            self._wait(waited, self._newest)
            if self._watch.over is not None:
                raise self._watch.over
        return newest

    def finish(self, newest: str | None, progress: Progress) -> None:
        """Wait for all tasks when training is over. newest: the checkpoint of its last step."""
        if newest is not None:
            self._newest |= {name: (newest, progress) for name, task in self._tasks.items() if task.at_end}
        self._wait(list(self._tasks), self._newest)

    def _wait(self, names: Collection[str], last: Mapping[str, tuple[str, Progress]], *, but: str = "") -> None:
        """Wait until these tasks have ended, or this attempt is over.

        last: by task, the checkpoint on which it is started again if a new coordinator does not know about it. but: a
        checkpoint whose tasks are not waited for.
        """
        if not names:
            return
        began = time.monotonic()
        for name in names:
            if name in last:
                self.begin(*last[name], [name])
        while (left := self._ask("wait_for_tasks", names, but)) and self._watch.over is None:
            if time.monotonic() > began + WAIT_TIMEOUT_S:
                text = "no longer waiting for the tasks after commits"
                logger.warning(event(text, tasks=left, waited_s=WAIT_TIMEOUT_S, run=self._group.uri))
                return
        if not self._group.rank and (seconds := time.monotonic() - began) > WORTH_SAYING_S:
            logger.info(event(f"waited for {', '.join(names)}", waited_s=seconds, run=self._group.uri))

    def _ask(self, method: str, *args: object) -> int:
        try:
            return int(self._group.ask(method, *args, timeout_s=ASK_TIMEOUT_S, what="tasks after commits"))
        except StoreError as error:
            logger.warning(event("tasks after commits may be missing", cause=error, run=self._group.uri))
            return 0


def _as_sent(name: str, item: AfterCommit, models: Sequence[str], group: Group) -> BuiltIn | bytes:
    """Return the task in the form that is sent to the coordinator. Raises ConfigError for a task that could not run."""
    task = item.task
    if not isinstance(task, BUILT_IN):
        check = getattr(task, "check", None)
        if callable(check) and not group.rank:
            check()
        try:
            sent = group.pickled(name, task)
        except Exception as error:
            raise ConfigError(
                f"{item.chosen} cannot run in another process: {type(error).__name__}: {error}. Open what the "
                "function needs inside it"
            ) from error
        if len(sent) > MAX_FUNCTION_BYTES:
            raise ConfigError(
                f"{item.chosen} is {len(sent)} bytes with all that it holds, and may be {MAX_FUNCTION_BYTES}: load "
                "what it needs inside the function"
            )
        return sent
    if task.entry not in models if task.entry else len(models) != 1:
        which = repr(task.entry) if task.entry else "one model"
        advice = f". Say which: AfterCommit.{item.name}(entry=...)" if models else ""
        raise ConfigError(
            f"{item.chosen} needs {which} with a Hugging Face configuration in the state; there are "
            f"{list(models)}{advice}"
        )
    if task.to is not None:
        parse_uri(task.to)
    return task
