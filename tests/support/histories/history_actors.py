"""Plays the drivers, coordinators and groups of a run's history. They act on the bucket by the protocol alone.

All that a process remembers is a field here; a restart is a new object. A call is a function `work(wire)` for the
scheduler of stepped_processes.py, so one process can be in the middle of several calls at once, as threads are.
"""

import hashlib
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from raycheck.bucket import reading
from raycheck.bucket.attempt_records import record_end
from raycheck.bucket.format import object_keys
from raycheck.bucket.format.checksum import crc32
from raycheck.bucket.format.document import dump
from raycheck.bucket.format.index_codec import dump_index
from raycheck.bucket.format.latest import Attempt, Entry
from raycheck.bucket.format.manifest import Blob, Component, Manifest, RankRecord, ShardRecord
from raycheck.bucket.protocol import claim as claims
from raycheck.bucket.protocol import commit as protocol
from raycheck.bucket.protocol.claim import Identity
from raycheck.bucket.protocol.damage import go_back
from raycheck.bucket.protocol.resume import parse_resume
from raycheck.bucket.protocol.swap import Register
from raycheck.bucket.protocol.write_once import put_all_once
from raycheck.bucket.reading import Checkpoint
from raycheck.bucket.store import Store
from raycheck.errors import CorruptError, FencedError, NotFoundError, RaycheckError, SupersededError
from raycheck.settings import Retention
from tests.support.samples.sample_checkpoints import SHARD_BYTES, tiny_index

WORLD_SIZE = 2
WAITING = "probes/waiting"


class _Mine:
    """Passes store calls to the wire of the calling thread: a call has its own wire, a process has one register."""

    def __init__(self) -> None:
        self.of_thread = threading.local()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.of_thread.wire, name)


class _Turn:
    """Replaces the register's lock. A waiting call asks the store again and again, so the scheduler stays in charge."""

    def __init__(self, store: _Mine) -> None:
        self.is_taken = False
        self._store = store

    def __enter__(self) -> None:
        while self.is_taken:
            with suppress(RaycheckError):
                self._store.head(WAITING)
        self.is_taken = True

    def __exit__(self, *_: object) -> None:
        self.is_taken = False


class Process:
    """Acts as a process that can stop at any call, and die. It sees `latest` through one register."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.is_dead = False
        self.store = _Mine()
        self.register = Register(self.store)
        self.turn = self.register._lock = _Turn(self.store)

    def does(self, work: Callable[[], Any]) -> Callable[[Store], Any]:
        """Make `work` one call of this process."""

        def on(wire: Store) -> Any:
            self.store.of_thread.wire = wire
            return work()

        return on


class Coordinator(Process):
    """Acts as one start of a driver's actor: it remembers and does what group/coordinator/ does, without waiting."""

    def __init__(self, driver: "Driver", number: int) -> None:
        super().__init__(f"{driver.owner}-c{number}")
        self.driver = driver
        self.me = Identity(owner=driver.owner, coordinator=self.name)
        self.claims: set[str] = set()
        self.adopted: dict[str, int] = {}

    def claim(self, group: str) -> tuple[Attempt, Entry | None]:
        claimed = claims.claim(
            self.register,
            self.me,
            group=group,
            world_size=WORLD_SIZE,
            resume=parse_resume(self.driver.resume),
            run_id="run-of-a-history",
        )
        before, attempt = claimed.before, claimed.attempt
        if before is not None and before[0].attempt.number < attempt.number:
            record_end(self.store, before[0].attempt, by=attempt, cause="a history")
        self.claims = {group}
        return attempt, claimed.entry

    def adopt(self, group: str) -> None:
        if group not in self.claims and group not in self.adopted:
            self.adopted[group] = claims.take_over(self.register, self.me, group=group).last_save

    def go_back(self, group: str, key: str) -> Entry:
        """Act on damage that a rank found in the checkpoint that the group restores."""
        self.adopt(group)
        return go_back(self.register, self.me, group=group, key=key, problem="a history says so")

    def conclude(self, save: "Save") -> str:
        """Conclude a save once all ranks have reported, or one has failed. Returns what the ranks are told."""
        group = save.group.name
        self.adopt(group)
        if save.number <= self.adopted.get(group, 0):
            found = self.register.read()
            return "committed" if found is not None and found[0].entry(save.key) is not None else "superseded"
        if "failed" in save.reports.values():
            return "failed"
        try:
            manifest, documents = save.assemble()
            at = put_all_once(self.store, documents)
            is_committed = protocol.commit(self.register, self.me, manifest, dump(manifest), self.driver.rules, at=at)
        except (FencedError, SupersededError, CorruptError):
            raise
        except RaycheckError:
            return "failed"
        return "committed" if is_committed else "superseded"


@dataclass(eq=False)
class Driver:
    """Acts as one `fit`, with its coordinators and worker groups, the newest last."""

    owner: str
    resume: str | int
    rules: Retention
    coordinators: list[Coordinator] = field(default_factory=list)
    groups: list["Group"] = field(default_factory=list)
    is_over: bool = False

    def start_coordinator(self) -> Coordinator:
        self.coordinators.append(Coordinator(self, len(self.coordinators) + 1))
        return self.coordinators[-1]

    def start_group(self) -> "Group":
        self.groups.append(Group(self, len(self.groups) + 1))
        return self.groups[-1]


class Group(Process):
    """Acts as one start of the ranks. A group that was replaced may go on for any time."""

    def __init__(self, driver: Driver, number: int) -> None:
        super().__init__(f"{driver.owner}-g{number}")
        self.driver = driver
        self.attempt: Attempt | None = None
        self.entry: Entry | None = None
        self.is_restored = False
        self.step = 0
        self.saves: list[Save] = []

    def claimed(self, attempt: Attempt, entry: Entry | None) -> None:
        self.attempt, self.entry = attempt, entry
        self.is_restored = entry is None
        self.step = entry.step if entry else 0

    def begin_save(self, *, steps: int, base: Manifest | None, loss: float) -> "Save":
        self.step += steps
        self.saves.append(Save(self, len(self.saves) + 1, self.step, base, loss))
        return self.saves[-1]


@dataclass(eq=False)
class Save:
    """Acts as one save of a group. reports: each rank's "done" or "failed". told: the outcome that the ranks got."""

    group: Group
    number: int
    step: int
    base: Manifest | None
    loss: float
    reports: dict[int, str] = field(default_factory=dict)
    told: str = ""

    @property
    def key(self) -> str:
        assert self.group.attempt is not None
        name = object_keys.CheckpointName(step=self.step, attempt=self.group.attempt.number, save=self.number)
        return str(name)

    @property
    def is_reported(self) -> bool:
        return "failed" in self.reports.values() or len(self.reports) == WORLD_SIZE

    @property
    def component(self) -> str:
        return "head" if self.base else "train"

    def upload(self, rank: int) -> str:
        key = object_keys.shard_key(self.key, self.component, rank)
        try:
            self.group.store.put_parts(key, [memoryview(_shard(key))], SHARD_BYTES)
        except RaycheckError:
            return "failed"
        return "done"

    def assemble(self) -> tuple[Manifest, dict[str, bytes]]:
        """Make the manifest and all documents, step 16: a pure function of the reports.

        The manifest is the first to be written here, since then a crash leaves one without its index.
        """
        shards = []
        for rank in range(WORLD_SIZE):
            data = _shard(object_keys.shard_key(self.key, self.component, rank))
            shards.append(
                ShardRecord(component=self.component, rank=rank, size_bytes=SHARD_BYTES, crc32=crc32(data)),
            )
        metadata = f"metadata of {self.key}".encode()
        index = _index(self.component)
        own = Component(name=self.component, checkpoint=self.key, metadata=_blob(metadata), shards=tuple(shards))
        assert self.group.attempt is not None
        manifest = Manifest(
            key=self.key,
            step=self.step,
            attempt=self.group.attempt.number,
            save=self.number,
            epoch=0,
            samples=8 * self.step,
            world_size=WORLD_SIZE,
            restored_from=self.group.attempt.restore_key,
            metrics={"loss": self.loss},
            index=_blob(index),
            components=(own, *(it for it in (self.base.components if self.base else ()) if it.name == "train")),
            ranks=tuple(
                RankRecord(rank=rank, blocked_s=0.1, upload_s=0.2, size_bytes=SHARD_BYTES) for rank in range(WORLD_SIZE)
            ),
        )
        return manifest, {
            object_keys.manifest_key(self.key): dump(manifest),
            object_keys.metadata_key(self.key, self.component): metadata,
            object_keys.index_key(self.key): index,
        }


def read_whole(store: Store, entry: Entry) -> Manifest:
    """Read all objects of a checkpoint, as a reader that has it open (step 25).

    Raises NotFoundError when it was evicted meanwhile, CorruptError on damage.
    """
    checkpoint = Checkpoint(store, entry)
    manifest = checkpoint.read_manifest()
    checkpoint.read_index(manifest)
    for key, record in manifest.objects():
        try:
            data = store.get(key).data
        except NotFoundError:
            raise reading.missing_error(store, entry.key, key) from None
        if len(data) != record.size_bytes or crc32(data) != record.crc32:
            raise CorruptError(f"{key} is not what the manifest says")
    return manifest


def read_one(store: Store, pick: int) -> Manifest | None:
    """Read a live checkpoint as a tool outside of the run does. Returns None when there is none yet."""
    live = reading.read_latest(store).live
    return read_whole(store, live[-1 - pick % len(live)]) if live else None


def _shard(key: str) -> bytes:
    return hashlib.blake2b(key.encode(), digest_size=SHARD_BYTES).digest()


@cache
def _index(component: str) -> bytes:
    return dump_index(tiny_index(component, WORLD_SIZE))


def _blob(data: bytes) -> Blob:
    return Blob(size_bytes=len(data), crc32=crc32(data))
