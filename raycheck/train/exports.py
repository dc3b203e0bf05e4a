"""Exports of a run's checkpoints: behind the training, from the bucket into the bucket, one after the other.

A Ray task on the node of each rank writes its share of the files, straight from the objects of all ranks: nothing is
gathered, nothing lies on a disk, the training processes lend neither memory nor time, and a node that goes costs a
task. The index, without which no reader finds the rest, comes last. An export that fails costs a warning and nothing
else: its checkpoint is committed, and `raycheck export-hf` can do it again.
"""

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from raycheck.bucket import layout
from raycheck.bucket.catalog import Checkpoint, read_latest
from raycheck.bucket.latest import Entry
from raycheck.bucket.store import Store, open_store
from raycheck.errors import RaycheckError
from raycheck.settings import ExportSettings
from raycheck.shards.progress import Progress
from raycheck.train.log import logger


class Exports:
    """Checkpoints on their way to Hugging Face directories. nodes: of the ranks, by id; "" for any."""

    def __init__(self, store: Store, uri: str) -> None:
        """uri: what a task opens the same store with."""
        self.nodes: Sequence[str] = [""]
        self._store = store
        self._uri = uri
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="raycheck-export")
        self._running: dict[tuple[str, ...], Future[None]] = {}  # by what each reads

    def start(self, key: str, progress: Progress, settings: ExportSettings) -> None:
        """Export a committed checkpoint, when those before it are."""
        try:
            entry = read_latest(self._store).entry(key)
        except RaycheckError as error:
            logger.warning("run %s: %s is committed, but was not exported: %s", self._uri, key, error)
            return
        if entry is not None:
            self._running = {names: future for names, future in self._running.items() if not future.done()}
            self._running[key, *entry.refs] = self._thread.submit(self._export, entry, progress, settings)

    @property
    def keys(self) -> frozenset[str]:
        """Checkpoints that are still being read, so that nothing of them may be deleted."""
        return frozenset(name for names, future in list(self._running.items()) if not future.done() for name in names)

    async def wait(self, timeout_s: float) -> int:
        """Wait for what is under way; returns how many are left at the deadline."""
        running = [asyncio.wrap_future(future) for future in self._running.values()]
        return len((await asyncio.wait(running, timeout=timeout_s))[1]) if running else 0

    def _export(self, entry: Entry, progress: Progress, settings: ExportSettings) -> None:
        at = {"step": progress.step, "epoch": progress.epoch, "epoch_step": progress.epoch_step}
        name = settings.directory(entry.key, **at)
        job = _Job(
            uri=self._uri,
            entry=entry,
            dest=settings.to or self._uri,
            prefix=f"{name}/" if settings.to else layout.exports_prefix(name),
            settings=settings,
            nodes=tuple(self.nodes),
        )
        began = time.monotonic()
        try:
            size = ray.get(_on(job.nodes[0], _export).remote(job))
        except Exception as error:  # noqa: BLE001  whatever it was, it is this export that failed, and nothing else
            cause = error.cause if isinstance(error, ray.exceptions.RayTaskError) else error
            text = f"{type(cause).__name__}: {cause}"
            logger.warning("run %s: %s was not exported to %s: %s", self._uri, entry.key, job.prefix, text)
        else:
            text = f"{size / 1e6:.1f} MB in {time.monotonic() - began:.1f} s"
            logger.info("run %s: exported %s to %s, %s", self._uri, entry.key, job.prefix, text)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Job:
    """One export, as tasks are told of it. uri: of the run. dest, prefix: where it goes. nodes: see Exports."""

    uri: str
    entry: Entry
    dest: str
    prefix: str
    settings: ExportSettings
    nodes: tuple[str, ...]

    @property
    def checkpoint(self) -> Checkpoint:
        return Checkpoint(open_store(self.uri), self.entry)

    @property
    def options(self) -> dict[str, Any]:
        """Of the plan."""
        told = self.settings
        return {
            "entry": told.entry,
            "files": told.files,
            "merge_lora": told.merge_lora,
            "dtype": told.dtype,
            "max_shard_bytes": told.file_bytes,
        }


def _export(job: _Job) -> int:
    """In a task: have others write the files, then write what makes a model of them. Returns bytes."""
    from raycheck.shards.export import Planned, export_hf, write_all  # torch, which a coordinator needs nowhere else

    def write(planned: Planned, store: Store, place: str) -> Mapping[str, int]:
        if min(len(planned.files), len(job.nodes)) == 1:
            return write_all(planned, store, place)
        hands = _dealt(planned.sizes, job.nodes)
        parts = ray.get([_on(node, _write).remote(job, files) for node, files in hands])
        return {file: size for part in parts for file, size in part.items()}

    return export_hf(job.checkpoint, open_store(job.dest), prefix=job.prefix, write=write, **job.options).size_bytes


def _write(job: _Job, files: Sequence[str]) -> Mapping[str, int]:
    """In a task: write some of the files. What they hold follows from the checkpoint, and need not be sent."""
    from raycheck.shards.export import plan

    return plan(job.checkpoint, **job.options).write(open_store(job.dest), job.prefix, files)


def _dealt(sizes: Mapping[str, int], nodes: Sequence[str]) -> list[tuple[str, list[str]]]:
    """Each file to who has least so far, the largest first."""
    hands: list[tuple[str, list[str]]] = [(node, []) for node in nodes[: len(sizes)]]
    held = [0] * len(hands)
    for file in sorted(sizes, key=lambda file: (-sizes[file], file)):
        least = held.index(min(held))
        hands[least][1].append(file)
        held[least] += sizes[file]
    return hands


def _on(node: str, task: Callable[..., Any]) -> Any:
    """The task there, or elsewhere when that node is gone."""
    where = NodeAffinitySchedulingStrategy(node, soft=True) if node else "SPREAD"
    remote: Any = ray.remote(task)
    return remote.options(num_cpus=0, scheduling_strategy=where)
