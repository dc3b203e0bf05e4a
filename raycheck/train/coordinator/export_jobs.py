"""Exports write checkpoints as Hugging Face directories, beside the training, one after the other.

Ray tasks on the ranks' nodes, at most one per rank, write a share of the files each. They read the objects of all ranks
from the bucket and write into a bucket: nothing is gathered, nothing is written to a disk, and the training processes
give neither memory nor time. When a node goes, only its task is repeated. The index, without which no reader finds the
other files, is written last. A failed export only logs a warning: its checkpoint is committed, and
`raycheck export-hf` can export it again.
"""

import asyncio
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from threading import Lock
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from raycheck.bucket.format import object_keys
from raycheck.bucket.format.latest import Entry
from raycheck.bucket.format.progress import Progress
from raycheck.bucket.protocol.exported_directories import prune_exports
from raycheck.bucket.reading import Checkpoint, read_latest
from raycheck.bucket.store import Store, open_store
from raycheck.bucket.store.address import kind_of, parse_uri
from raycheck.errors import NotFoundError, RaycheckError, StoreError
from raycheck.settings import ExportSettings
from raycheck.train.log import event, logger
from raycheck.train.ray_api.calls import results


class ExportJobs:
    """Starts the exports of one run, one at a time, and knows which are under way.

    nodes: the ids of the ranks' nodes, in order of rank; "" means any node.
    """

    def __init__(self, store: Store, uri: str) -> None:
        """uri: the run's root, from which a task opens the store."""
        self.nodes: Sequence[str] = [""]
        self._store = store
        self._uri = uri
        self._lock = Lock()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="raycheck-export")
        self._begun: dict[
            str, tuple[Future[None], tuple[str, ...]]
        ] = {}  # each export, with the other directories that it reads

    def start(self, key: str, progress: Progress, settings: ExportSettings) -> None:
        """Exports a committed checkpoint, after the export that is under way and instead of those that wait.

        Does nothing for a checkpoint whose export was started before.
        """
        if key in self._begun:
            return
        entry, problem = None, "it was dropped meanwhile"
        try:
            entry = read_latest(self._store).entry(key)
        except Exception as error:  # noqa: BLE001  the checkpoint is committed, whatever becomes of its export
            problem = str(error)
        if entry is None:
            self._warn(f"{key} was not exported: {problem}")
            return
        with self._lock:
            if key in self._begun:
                return
            for earlier, (future, _) in self._begun.items():
                if not future.cancelled() and future.cancel():
                    self._warn(f"{earlier} is not exported: the next export is due already")
            self._begun[key] = self._thread.submit(self._export, entry, progress, settings), entry.refs

    @property
    def keys(self) -> frozenset[str]:
        """Returns the names of checkpoint directories that an export still reads: they must not be deleted."""
        with self._lock:
            reading = [(key, *refs) for key, (future, refs) in self._begun.items() if not future.done()]
        return frozenset(name for names in reading for name in names)

    async def wait(self, timeout_s: float, but: str) -> int:
        """Waits for the exports under way, except for that of checkpoint `but`. Returns how many are left."""
        with self._lock:
            left = [future for key, (future, _) in self._begun.items() if key != but and not future.done()]
        if not left:
            return 0
        return len((await asyncio.wait([asyncio.wrap_future(future) for future in left], timeout=timeout_s))[1])

    def _export(self, entry: Entry, progress: Progress, settings: ExportSettings) -> None:
        name = settings.directory(entry.key, step=progress.step, epoch=progress.epoch, epoch_step=progress.epoch_step)
        job = _ExportJob(
            uri=self._uri,
            entry=entry,
            prefix=f"{name}/" if settings.to else object_keys.exports_prefix(name),
            settings=settings,
            nodes=tuple(self.nodes),
        )
        began = time.monotonic()
        try:
            if job.look_whether_done():
                self._info(f"did not export to {job.prefix}: it is there already, and stays as it is", step=entry.step)
                self._prune(job)
                return
            (size,) = results([_on(job.nodes[0], _export).remote(job)])
        except Exception as error:  # noqa: BLE001  whatever it was, it is this export that failed, and nothing else
            cause = getattr(error, "cause", None) or error  # Ray wraps what the task raised
            self._warn(f"{entry.key} was not exported to {job.prefix}: {type(cause).__name__}: {cause}")
        else:
            seconds = time.monotonic() - began
            self._info(f"exported {entry.key} to {job.prefix}", step=entry.step, bytes=size, export_s=seconds)
            self._prune(job)

    def _prune(self, job: "_ExportJob") -> None:
        """Deletes older exports by ExportSettings(keep_last=...).

        It runs in the thread that exports, so that none of this coordinator's exports is under way. One of another
        coordinator is not complete, and left alone.
        """
        keep_last = job.settings.keep_last
        if keep_last is None:
            return
        prefix = "" if job.settings.to else object_keys.EXPORTS_PREFIX
        try:
            gone = prune_exports(job.dest, prefix, read_latest(self._store), keep_last=keep_last)
        except RaycheckError as error:
            self._warn(f"older exports could not be deleted yet: {error}")
        else:
            for place in gone:
                self._info(f"deleted the export {place}")

    def _info(self, what: str, **fields: object) -> None:
        logger.info(event(what, **fields, run=self._store.uri))

    def _warn(self, what: str) -> None:
        logger.warning(event(what, run=self._store.uri))


@dataclass(frozen=True, kw_only=True, slots=True)
class _ExportJob:
    """Describes one export to the tasks that do it.

    uri: the run's root. prefix: the leading part of the keys that it writes in `dest`. nodes: see `ExportJobs`.
    """

    uri: str
    entry: Entry
    prefix: str
    settings: ExportSettings
    nodes: tuple[str, ...]

    @property
    def checkpoint(self) -> Checkpoint:
        """Returns the checkpoint, in a newly opened store."""
        return Checkpoint(open_store(self.uri), self.entry)

    @property
    def dest(self) -> Store:
        """Opens the store that the files go to.

        Where it is of the same kind as the run's store, it takes those settings from it that its own URI leaves out.
        """
        to = self.settings.to
        if to is None or kind_of(to) != kind_of(self.uri):
            return open_store(to or self.uri)
        return open_store(to, parse_uri(to).said.over(parse_uri(self.uri).said))

    def look_whether_done(self) -> bool:
        """Looks into `dest`, and returns whether the export is there, whole."""
        dest = self.dest
        for last in object_keys.EXPORT_ENDS:
            with suppress(NotFoundError):
                dest.head(object_keys.export_key(self.prefix, last))
                return True
        return False


@ray.remote(num_cpus=0)
def _export(job: _ExportJob) -> int:
    """Has other tasks write the files, and then writes the index that makes them a model. Returns bytes written."""
    from raycheck.shards.huggingface.export import (  # imports torch, which the coordinator must not
        ExportFiles,
        export_hf,
        write_all,
    )

    def write(files: ExportFiles, store: Store, place: str) -> Mapping[str, int]:
        shares = _dealt(files.sizes, _spread(job.nodes)[: len(files.heads)])
        if len(shares) == 1:
            return write_all(files, store, place)
        writing = [_on(node, _write).remote(job, names) for node, names in shares]
        ray.wait(writing, num_returns=len(writing))  # also after one has failed: no task goes on unseen
        written = {file: size for share in results(writing) for file, size in share.items()}
        for file, size in written.items():
            _check_there(store, object_keys.export_key(place, file), size)
        return written

    options = job.settings.options
    return export_hf(job.checkpoint, job.dest, options, prefix=job.prefix, write=write, by_training=True).size_bytes


@ray.remote(num_cpus=0)
def _write(job: _ExportJob, files: Sequence[str]) -> Mapping[str, int]:
    """Writes some of the files. Their contents follow from the checkpoint, so their names are enough."""
    from raycheck.shards.huggingface.export import lay_out

    return lay_out(job.checkpoint, job.settings.options).write(job.dest, job.prefix, files)


def _check_there(store: Store, key: str, size: int) -> None:
    """Raises StoreError when this node does not see what another one wrote."""
    with suppress(NotFoundError):
        if store.head(key) == size:
            return
    raise StoreError(f"{store}: {key} is not there as another node wrote it; a folder must be shared by all nodes")


def _spread(nodes: Sequence[str]) -> list[str]:
    """Returns the nodes in an order in which each comes once before any comes twice."""
    turns = [nodes[:number].count(node) for number, node in enumerate(nodes)]
    return [nodes[number] for number in sorted(range(len(nodes)), key=lambda number: (turns[number], number))]


def _dealt(sizes: Mapping[str, int], nodes: Sequence[str]) -> list[tuple[str, list[str]]]:
    """Returns for each node the files that it writes: about as many bytes on each.

    The largest file goes first, and each goes to the node that has the fewest bytes so far.
    """
    shares: list[tuple[str, list[str]]] = [(node, []) for node in nodes]
    given = [0] * len(shares)
    for file in sorted(sizes, key=lambda file: (-sizes[file], file)):
        least = given.index(min(given))
        shares[least][1].append(file)
        given[least] += sizes[file]
    return shares


def _on(node: str, task: Any) -> Any:
    """Returns the task with the wish to run on that node, or on another one when it is gone."""
    return task.options(scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=True) if node else "SPREAD")
