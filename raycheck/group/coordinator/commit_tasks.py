"""Tasks run on committed checkpoints while training continues: exports, and the user's own functions.

Each task has one thread, which runs it on one checkpoint after the other; if it is due again before it has started, the
earlier checkpoint is given up. The objects that a task reads are not deleted. A failed task only logs a warning; its
checkpoint stays committed. Where a task runs is a port (cluster.py): in Ray tasks, or in the thread itself.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future
from queue import SimpleQueue
from threading import Lock, Thread

from raycheck.bucket.format.progress import Progress
from raycheck.bucket.reading import ask_latest
from raycheck.bucket.store import Store
from raycheck.group.coordinator.export_task import Note
from raycheck.group.coordinator.task_run import TaskRun
from raycheck.log import event, logger
from raycheck.settings import BuiltIn


class CommitTasks:
    """The tasks of one run, each run on one checkpoint at a time, and which of them are in progress.

    nodes: the ids of the ranks' nodes, in order of rank; "" means any node.
    """

    def __init__(self, store: Store, uri: str, run: Callable[[TaskRun], list[Note]] = TaskRun.run) -> None:
        """uri: the run's root, from which a task opens the store. run: runs a job, in this process or elsewhere."""
        self.nodes: Sequence[str] = [""]
        self._store = store
        self._uri = uri
        self._run = run
        self._lock = Lock()
        self._lines: dict[str, SimpleQueue[tuple[TaskRun, Future[None]]]] = {}  # by task
        # By task and checkpoint: its end, and the other directories that the checkpoint refers to.
        self._begun: dict[tuple[str, str], tuple[Future[None], tuple[str, ...]]] = {}

    def start(self, key: str, progress: Progress, tasks: Mapping[str, BuiltIn | bytes]) -> None:
        """Run tasks on a committed checkpoint, each after its current run and in place of a run that still waits.

        A task that was already started for this checkpoint is left alone.
        """
        if all((name, key) in self._begun for name in tasks):
            return
        entry, problem = None, "it is no longer in latest"
        try:
            entry = ask_latest(self._store, lambda body: body.entry(key))
        except Exception as error:  # noqa: BLE001  the checkpoint is committed, whatever becomes of its tasks
            problem = str(error)
        for name, task in tasks.items():
            if entry is None:
                self._warn(f"{name} of {key} was not begun: {problem}")
            else:
                job = TaskRun(
                    uri=self._uri, name=name, task=task, entry=entry, progress=progress, nodes=tuple(self.nodes)
                )
                self._submit(job)

    def _submit(self, job: TaskRun) -> None:
        name, key = job.name, job.entry.key
        with self._lock:
            if (name, key) in self._begun:
                return
            for (other, earlier), (future, _) in self._begun.items():
                if other == name and not future.cancelled() and future.cancel():
                    self._warn(f"{name} of {earlier} is given up: it is due again already")
            if name not in self._lines:
                self._lines[name] = SimpleQueue()
                # No pool: this process must be able to end while a user's function runs in it.
                Thread(target=self._work, args=(self._lines[name],), name=f"raycheck-{name}", daemon=True).start()
            end: Future[None] = Future()
            self._begun[name, key] = end, job.entry.refs
            self._lines[name].put((job, end))

    @property
    def keys(self) -> frozenset[str]:
        """Return the names of checkpoint directories that a task still reads: they must not be deleted."""
        with self._lock:
            reading = [(key, *refs) for (_, key), (end, refs) in self._begun.items() if not end.done()]
        return frozenset(name for names in reading for name in names)

    async def wait(self, names: Collection[str], timeout_s: float, but: str) -> int:
        """Wait for these tasks, except on checkpoint `but`. Returns how many are left."""
        with self._lock:
            left = [
                end for (name, key), (end, _) in self._begun.items() if name in names and key != but and not end.done()
            ]
        if not left:
            return 0
        return len((await asyncio.wait([asyncio.wrap_future(end) for end in left], timeout=timeout_s))[1])

    def _work(self, line: "SimpleQueue[tuple[TaskRun, Future[None]]]") -> None:
        while True:
            job, end = line.get()
            if end.set_running_or_notify_cancel():
                self._do(job)
                end.set_result(None)

    def _do(self, job: TaskRun) -> None:
        began = time.monotonic()
        try:
            notes = self._run(job)
        except Exception as error:  # noqa: BLE001  whatever it was, it is this task that failed, and nothing else
            cause = getattr(error, "cause", None) or error  # Ray wraps what the task raised
            self._warn(f"{job.name} of {job.entry.key} failed: {type(cause).__name__}: {cause}")
            return
        seconds = time.monotonic() - began
        for note in notes:
            text = event(note.text, step=job.entry.step, **note.fields, task_s=seconds, run=self._store.uri)
            logger.log(logging.WARNING if note.is_problem else logging.INFO, text)

    def _warn(self, what: str) -> None:
        logger.warning(event(what, run=self._store.uri))
