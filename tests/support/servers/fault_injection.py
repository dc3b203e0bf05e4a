"""Simulates a bucket whose every fault the test chooses.

`World` is a bucket with the writes that are still on their way to it: writes whose sender gave up or died may arrive
later, or never. `Wire` is one process's connection to it. Before every call it asks a function for that call's `Mode`;
stepped_processes.py has these functions.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from enum import Enum, auto
from typing import TypeVar

from raycheck.bucket.format import object_keys
from raycheck.bucket.store.interface import MAX_WHOLE_BYTES, Buffer, Got, Listed, Store, Upload, Written
from raycheck.errors import ConflictError, NotFoundError, RaycheckError, StoreError
from tests.support.servers.memory_store import DictStore

STALE_WRITES = 3
Answer = TypeVar("Answer")


class Mode(Enum):
    """Says how one store call goes. A delay needs no mode: let other tasks go first."""

    APPLY = auto()
    FAIL_BEFORE = auto()  # StoreError; not applied
    LOSE_ANSWER = auto()  # applied, or refused; StoreError in any case
    APPLY_LATE = auto()  # StoreError now; the request lies in `World.late`
    APPLY_TWICE = auto()  # applied and answered, and the same request lies in `World.late`, its condition with it
    TRUNCATE = auto()  # half of a put's bytes are there, and StoreError
    STALE_LISTING = auto()  # a listing as it was before the last STALE_WRITES writes


READ_MODES = (Mode.APPLY, Mode.FAIL_BEFORE)
WRITE_MODES = (Mode.APPLY, Mode.FAIL_BEFORE, Mode.LOSE_ANSWER, Mode.APPLY_LATE, Mode.APPLY_TWICE)
LIST_MODES = (*READ_MODES, Mode.STALE_LISTING)
BODY_MODES = {"put": (*WRITE_MODES, Mode.TRUNCATE), "put_parts": (*WRITE_MODES, Mode.TRUNCATE)}


@dataclass(frozen=True, slots=True)
class Call:
    """Describes a store call that has not happened yet. key: an object's key, or the prefix of a listing."""

    verb: str
    key: str

    @property
    def is_write(self) -> bool:
        return self.verb in ("put", "put_parts", "put_if_absent", "put_if_match", "delete", "abort_upload")

    @property
    def modes(self) -> tuple[Mode, ...]:
        """Returns every mode that makes a difference for this verb, APPLY first."""
        if self.verb.startswith("list_"):
            return LIST_MODES
        return BODY_MODES.get(self.verb, WRITE_MODES if self.is_write else READ_MODES)


@dataclass(frozen=True, slots=True)
class Write:
    """Describes a write request on its way. version: for put_if_match the version, for abort_upload the upload's id."""

    verb: str
    key: str
    data: bytes = b""
    version: str = ""

    def apply(self, store: Store) -> Written | None:
        """Send it. Returns the answer of a conditional write."""
        if self.verb == "put_if_absent":
            return store.put_if_absent(self.key, self.data)
        if self.verb == "put_if_match":
            return store.put_if_match(self.key, self.data, self.version)
        if self.verb == "put":
            store.put(self.key, self.data)
        elif self.verb == "put_parts":
            store.put_parts(self.key, [memoryview(self.data)], len(self.data))
        elif self.verb == "delete":
            store.delete(self.key)
        else:
            store.abort_upload(Upload(self.key, self.version))
        return None


class Crashed(BaseException):
    """Raised inside a process that never runs on, at its call and at every later one of its `finally` blocks."""


class World:
    """Holds a bucket, the writes still on their way to it, and its past.

    inner: an empty store, by default a DictStore.
    """

    def __init__(self, inner: Store | None = None) -> None:
        self.inner = DictStore() if inner is None else inner
        self.late: list[Write] = []
        self.bodies: list[bytes] = []  # that `latest` ever had, in order
        self.deleted: list[str] = []
        self.wrote: dict[str, bytes] = {}  # whole bytes first put under each key, deleted ones too
        self.checks: list[Callable[[World, Write], None]] = []  # called after every write that was applied
        self.objects: dict[str, bytes] = {}  # what lies in `inner`, without asking it
        self._past: list[tuple[str, bytes | None]] = []  # per write: what lay at the key before it

    def copy(self) -> "World":
        """Make an independent world in an equal state. Needs a DictStore."""
        assert isinstance(self.inner, DictStore)
        other = World(self.inner.copy())
        for name in ("late", "bodies", "deleted", "wrote", "checks", "objects", "_past"):
            setattr(other, name, getattr(self, name).copy())
        return other

    def open(self) -> "Wire":
        """Make the wire of a process that meets no fault."""
        return Wire(self, lambda _: Mode.APPLY)

    def apply(self, write: Write, *, is_whole: bool = True) -> Written | None:
        """Apply a request. Returns as Write.apply, and raises the errors that the store answers with."""
        written = write.apply(self.inner)
        self._past.append((write.key, self.objects.get(write.key)))
        if write.verb.startswith("put"):
            self.objects[write.key] = write.data
            if is_whole:
                self.wrote.setdefault(write.key, write.data)
        elif write.verb == "delete":
            self.objects.pop(write.key, None)
            self.deleted.append(write.key)
        if write.key == object_keys.LATEST_KEY:
            self.bodies.append(write.data)
        for check in self.checks:
            check(self, write)
        return written

    def land(self, number: int = 0) -> bool:
        """Let a late request arrive. Returns False when its condition is refused by now."""
        try:
            self.apply(self.late.pop(number))
        except (ConflictError, NotFoundError):
            return False
        return True

    def would_change(self, write: Write) -> bool:
        """Return whether its arrival would change the bucket now."""
        there = self.objects.get(write.key)
        if write.verb == "put_if_absent":
            return there is None
        if write.verb == "put_if_match":
            return there is not None and self.inner.get(write.key).version == write.version
        if write.verb == "delete":
            return there is not None
        return write.verb == "abort_upload" or there != write.data

    def listed(self, *, is_stale: bool) -> dict[str, int]:
        """List every key with its size, as they are now or were before the last writes."""
        if isinstance(self.inner, DictStore):  # without an object for each key
            sizes = {key: len(data) for key, data in self.inner.objects.items()}
        else:
            sizes = {item.key: item.size_bytes for item in self.inner.list_objects("")}
        for key, data in reversed(self._past[-STALE_WRITES:] if is_stale else []):
            sizes.pop(key, None)
            if data is not None:
                sizes[key] = len(data)
        return dict(sorted(sizes.items()))


class Wire(Store):
    """Is the store as one process sees it. ask: is called before every call; it returns the mode, or raises Crashed."""

    def __init__(self, world: World, ask: Callable[[Call], Mode]) -> None:
        self.uri = world.inner.uri
        self.world = world
        self.calls: list[Call] = []
        self.heard: list[int] = []  # hashes of the answers: all that the process can know
        self._ask = ask

    def get(self, key: str, max_bytes: int = MAX_WHOLE_BYTES) -> Got:
        return self._read("get", key, lambda _: self.world.inner.get(key, max_bytes))

    def get_range(self, key: str, start: int, stop: int) -> Buffer:
        return self._read("get_range", key, lambda _: bytes(self.world.inner.get_range(key, start, stop)))

    def head(self, key: str) -> int:
        return self._read("head", key, lambda _: self.world.inner.head(key))

    def list_objects(self, prefix: str) -> Iterator[Listed]:
        def objects(is_stale: bool) -> list[Listed]:
            sizes = self.world.listed(is_stale=is_stale)
            return [Listed(key, size) for key, size in sizes.items() if key.startswith(prefix)]

        return iter(self._read("list_objects", prefix, objects))

    def list_names(self, prefix: str) -> list[str]:
        def names(is_stale: bool) -> list[str]:
            keys = [key for key in self.world.listed(is_stale=is_stale) if key.startswith(prefix)]
            return sorted({name for name, slash, _ in (key[len(prefix) :].partition("/") for key in keys) if slash})

        return self._read("list_names", prefix, names)

    def list_uploads(self, prefix: str) -> Iterator[Upload]:
        return iter(self._read("list_uploads", prefix, lambda _: list(self.world.inner.list_uploads(prefix))))

    def upload_bytes(self, upload: Upload) -> int:
        return self._read("upload_bytes", upload.key, lambda _: self.world.inner.upload_bytes(upload))

    def put(self, key: str, data: Buffer) -> None:
        self._write("put", key, lambda: bytes(data))

    def put_parts(self, key: str, parts: Iterable[memoryview], size_bytes: int) -> None:
        del size_bytes
        self._write("put_parts", key, lambda: b"".join(parts))

    def part_bytes(self, size_bytes: int) -> int:
        return self.world.inner.part_bytes(size_bytes)

    def put_if_absent(self, key: str, data: bytes) -> Written:
        return self._write_if("put_if_absent", key, data)

    def put_if_match(self, key: str, data: bytes, version: str) -> Written:
        return self._write_if("put_if_match", key, data, version)

    def delete(self, key: str) -> None:
        self._write("delete", key, bytes)

    def abort_upload(self, upload: Upload) -> None:
        self._write("abort_upload", upload.key, bytes, upload.id)

    def _write_if(self, verb: str, key: str, data: bytes, version: str = "") -> Written:
        written = self._write(verb, key, lambda: data, version)
        assert written is not None
        return written

    def _read(self, verb: str, key: str, read: Callable[[bool], Answer]) -> Answer:
        mode = self._asked(verb, key)
        if mode not in (Mode.APPLY, Mode.STALE_LISTING):
            raise StoreError(f"{verb} {key}: {mode.name}")
        try:
            answer = read(mode is Mode.STALE_LISTING)
        except RaycheckError as error:
            self.heard.append(hash(type(error)))
            raise
        if not key.startswith(object_keys.HISTORY_PREFIX):  # by which no process decides anything
            self.heard.append(hash(tuple(answer) if isinstance(answer, list) else answer))
        return answer

    def _write(self, verb: str, key: str, data: Callable[[], bytes], version: str = "") -> Written | None:
        mode = self._asked(verb, key)
        written = None
        if mode is Mode.FAIL_BEFORE:
            raise StoreError(f"{verb} {key}: {mode.name}")
        write = Write(verb, key, data(), version)
        if mode is Mode.TRUNCATE:
            self.world.apply(Write("put", key, write.data[: len(write.data) // 2]), is_whole=False)
        if mode in (Mode.APPLY_LATE, Mode.APPLY_TWICE):
            self.world.late.append(write)
        if mode in (Mode.APPLY, Mode.APPLY_TWICE, Mode.LOSE_ANSWER):
            try:
                written = self.world.apply(write)
                self.heard.append(0)
            except (ConflictError, NotFoundError) as error:
                self.heard.append(hash(type(error)))
                if mode is not Mode.LOSE_ANSWER:
                    raise
        if mode not in (Mode.APPLY, Mode.APPLY_TWICE):
            raise StoreError(f"{verb} {key}: {mode.name}")
        return written

    def _asked(self, verb: str, key: str) -> Mode:
        call = Call(verb, key)
        mode = self._ask(call)
        self.calls.append(call)
        return mode
