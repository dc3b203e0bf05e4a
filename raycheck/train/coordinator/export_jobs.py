"""Exports of a run's checkpoints: behind the training, from the bucket into the bucket, one after the other.

Ray tasks on the ranks' nodes, at most one per rank, write a share of the files each, straight from the objects of all
ranks: nothing is gathered, nothing lies on a disk, the training processes lend neither memory nor time, and a node that
goes costs a task. The index, without which no reader finds the rest, comes last. An export that fails costs a warning
and nothing else: its checkpoint is committed, and `raycheck export-hf` can do it again.
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
from raycheck.train.log import logger, name_of
from raycheck.train.ray_api.calls import results


class ExportJobs:
    """Checkpoints on their way to Hugging Face directories. nodes: of the ranks, by id; "" for any."""

    def __init__(self, store: Store, uri: str) -> None:
        """uri: what a task opens the same store with."""
        self.nodes: Sequence[str] = [""]
        self._store = store
        self._uri = uri
        self._lock = Lock()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="raycheck-export")
        self._begun: dict[str, tuple[Future[None], tuple[str, ...]]] = {}  # with what each one reads besides

    def start(self, key: str, progress: Progress, settings: ExportSettings) -> None:
        """Export a committed checkpoint, after the one that is under way and in place of those that have not begun.
        Again for the same one: nothing."""
        if key in self._begun:
            return
        entry, problem = None, "it was dropped meanwhile"
        try:
            entry = read_latest(self._store).entry(key)
        except Exception as error:  # noqa: BLE001  the checkpoint is committed, whatever becomes of its export
            problem = str(error)
        if entry is None:
            logger.warning("%s: %s was not exported: %s", name_of(self._store.uri), key, problem)
            return
        with self._lock:
            if key in self._begun:
                return
            for earlier, (future, _) in self._begun.items():
                if not future.cancelled() and future.cancel():
                    logger.warning(
                        "%s: %s is not exported: the next one is due already", name_of(self._store.uri), earlier
                    )
            self._begun[key] = self._thread.submit(self._export, entry, progress, settings), entry.refs

    @property
    def keys(self) -> frozenset[str]:
        """Checkpoints that are still being read, so that nothing of them may be deleted."""
        with self._lock:
            reading = [(key, *refs) for key, (future, refs) in self._begun.items() if not future.done()]
        return frozenset(name for names in reading for name in names)

    async def wait(self, timeout_s: float, but: str) -> int:
        """Wait for what is under way, that of a checkpoint excepted; returns how many are left at the deadline."""
        with self._lock:
            left = [future for key, (future, _) in self._begun.items() if key != but and not future.done()]
        if not left:
            return 0
        return len((await asyncio.wait([asyncio.wrap_future(future) for future in left], timeout=timeout_s))[1])

    def _export(self, entry: Entry, progress: Progress, settings: ExportSettings) -> None:
        at = {"step": progress.step, "epoch": progress.epoch, "epoch_step": progress.epoch_step}
        name = settings.directory(entry.key, **at)
        job = _ExportJob(
            uri=self._uri,
            entry=entry,
            prefix=f"{name}/" if settings.to else object_keys.exports_prefix(name),
            settings=settings,
            nodes=tuple(self.nodes),
        )
        began = time.monotonic()
        try:
            if job.is_done():
                logger.info("%s: %s is there already, and stays as it is", name_of(self._store.uri), job.prefix)
                self._prune(job)
                return
            (size,) = results([_on(job.nodes[0], _export).remote(job)])
        except Exception as error:  # noqa: BLE001  whatever it was, it is this export that failed, and nothing else
            cause = getattr(error, "cause", None) or error  # of Ray's error for what is none of raycheck's
            text = f"{type(cause).__name__}: {cause}"
            logger.warning("%s: %s was not exported to %s: %s", name_of(self._store.uri), entry.key, job.prefix, text)
        else:
            text = f"{size / 1e6:.1f} MB in {time.monotonic() - began:.1f} s"
            logger.info("%s: exported %s to %s, %s", name_of(self._store.uri), entry.key, job.prefix, text)
            self._prune(job)

    def _prune(self, job: "_ExportJob") -> None:
        """By ExportSettings(keep_last=...). In the thread that exports, so that none of this coordinator's is under
        way; one of another's is not whole, and left alone."""
        keep_last = job.settings.keep_last
        if keep_last is None:
            return
        prefix = "" if job.settings.to else object_keys.EXPORTS_PREFIX
        try:
            gone = prune_exports(job.dest, prefix, read_latest(self._store), keep_last=keep_last)
        except RaycheckError as error:
            logger.warning("%s: older exports could not be deleted yet: %s", name_of(self._store.uri), error)
        else:
            for place in gone:
                logger.info("%s: deleted the export %s", name_of(self._store.uri), place)


@dataclass(frozen=True, kw_only=True, slots=True)
class _ExportJob:
    """One export, as tasks are told of it. uri: of the run. prefix: where it goes in `dest`. nodes: see Exports."""

    uri: str
    entry: Entry
    prefix: str
    settings: ExportSettings
    nodes: tuple[str, ...]

    @property
    def checkpoint(self) -> Checkpoint:
        return Checkpoint(open_store(self.uri), self.entry)

    @property
    def dest(self) -> Store:
        """With the settings of the run's store where it is one of the same kind, and does not say them itself."""
        to = self.settings.to
        if to is None or kind_of(to) != kind_of(self.uri):
            return open_store(to or self.uri)
        return open_store(to, parse_uri(to).said.over(parse_uri(self.uri).said))

    @property
    def options(self) -> dict[str, Any]:
        """Of `plan`."""
        names = ("entry", "files", "merge_lora", "dtype", "max_shard_bytes")
        return {name: getattr(self.settings, name) for name in names}

    def is_done(self) -> bool:
        dest = self.dest
        for last in object_keys.EXPORT_ENDS:
            with suppress(NotFoundError):
                dest.head(object_keys.export_key(self.prefix, last))
                return True
        return False


@ray.remote(num_cpus=0)
def _export(job: _ExportJob) -> int:
    """Have others write the files, then write what makes a model of them. Returns bytes."""
    from raycheck.shards.huggingface.export import (  # torch, which a coordinator needs nowhere else
        Planned,
        export_hf,
        write_all,
    )

    def write(planned: Planned, store: Store, place: str) -> Mapping[str, int]:
        hands = _dealt(planned.sizes, _spread(job.nodes)[: len(planned.heads)])
        if len(hands) == 1:
            return write_all(planned, store, place)
        writing = [_on(node, _write).remote(job, files) for node, files in hands]
        ray.wait(writing, num_returns=len(writing))  # when one has failed, the others do not go on unseen
        written = {file: size for part in results(writing) for file, size in part.items()}
        for file, size in written.items():
            _check_there(store, object_keys.export_key(place, file), size)
        return written

    told = {"prefix": job.prefix, "write": write, "by_training": True, **job.options}
    return export_hf(job.checkpoint, job.dest, **told).size_bytes


@ray.remote(num_cpus=0)
def _write(job: _ExportJob, files: Sequence[str]) -> Mapping[str, int]:
    """Write some of the files. What they hold follows from the checkpoint, and need not be sent."""
    from raycheck.shards.huggingface.export import plan

    return plan(job.checkpoint, **job.options).write(job.dest, job.prefix, files)


def _check_there(store: Store, key: str, size: int) -> None:
    with suppress(NotFoundError):
        if store.head(key) == size:
            return
    raise StoreError(f"{store.uri}: {key} is not there as another node wrote it; a folder must be shared by all nodes")


def _spread(nodes: Sequence[str]) -> list[str]:
    """Each node once before any of them twice."""
    turns = [nodes[:number].count(node) for number, node in enumerate(nodes)]
    return [nodes[number] for number in sorted(range(len(nodes)), key=lambda number: (turns[number], number))]


def _dealt(sizes: Mapping[str, int], nodes: Sequence[str]) -> list[tuple[str, list[str]]]:
    """Each file to who has least so far, the largest first."""
    hands: list[tuple[str, list[str]]] = [(node, []) for node in nodes]
    held = [0] * len(hands)
    for file in sorted(sizes, key=lambda file: (-sizes[file], file)):
        least = held.index(min(held))
        hands[least][1].append(file)
        held[least] += sizes[file]
    return hands


def _on(node: str, task: Any) -> Any:
    """The task there, or elsewhere when that node is gone."""
    return task.options(scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=True) if node else "SPREAD")
