"""Knows how much memory is left for buffers, and claims it so that ranks of a node do not take more than there is.

The system counts memory as available until it is touched, and buffers are touched some time after they are allocated.
Ranks of one node allocate theirs at the same step: each would see all that is available, and together they would take
more, until the system kills one of them. So a claim is seen by the other processes of the user until its memory is
touched. It is a lock on a range of an empty file: the kernel gives it up when its process ends, however that ends, and
forks do not inherit it.
"""

import mmap
import os
import resource
import secrets
import struct
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path

from raycheck.errors import ConfigError

if sys.platform == "linux":
    import fcntl

PATIENCE_S = 30.0
"""How long a claim waits for others that are in its way: they may be counted twice, until all of theirs is touched."""
_LOOK_EVERY_S = 0.05
_UNIT = 1024
_RANGE = 1 << 40
"""The places of a claim in the file are multiples of this, and each of its bytes stands for 1 KiB."""
_FLOCK = "@hhqqi"
"""Linux's struct flock."""
_Names = tuple[str, str, tuple[str, ...]]


class MemoryClaim:
    """Claims memory that is about to be allocated. size_bytes: how much.

    Raises ConfigError when the host, its control groups or a limit of this process have not that much left, or other
    processes of this node have claimed it.
    """

    def __init__(self, size_bytes: int) -> None:
        place = _claims.take(size_bytes)
        self._end = weakref.finalize(self, _claims.give_up, place)
        self._end.atexit = False

    def end(self) -> None:
        """End the claim, since the memory is touched, or not needed any more."""
        self._end()


def unclaimed_bytes(wanted: int = 0) -> int | None:
    """Returns the bytes that this process may claim now; None where the system does not tell.

    wanted: if there are so many but for claims of other processes, it waits a while until these are touched.
    """
    return _claims.unclaimed(wanted)


class _Claims:
    """Holds the claims of this process, and sees those of others."""

    def __init__(self) -> None:
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._own: dict[int, int] = {}  # bytes by place

    @cached_property
    def _file(self) -> int | None:
        """Returns the file's descriptor; None where there is none. It is never closed: that would end all claims."""
        if sys.platform != "linux":
            return None
        try:
            return os.open(_path(), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        except OSError:
            return None

    def take(self, size_bytes: int) -> int:
        """Returns the place of a new claim. Raises ConfigError."""
        place, left = self._look(size_bytes, is_claim=True)
        if place is None:
            raise ConfigError(shortage(size_bytes, left or 0))
        return place

    def unclaimed(self, wanted: int) -> int | None:
        """Returns what is left; see unclaimed_bytes."""
        return self._look(wanted, is_claim=False)[1]

    def _look(self, size_bytes: int, *, is_claim: bool) -> tuple[int | None, int | None]:
        """Returns the place of a claim, if one is wanted and fits, and how many bytes were left before it.

        Where only other claims are in the way, it waits a while until they are touched.
        """
        deadline = time.monotonic() + PATIENCE_S
        while True:
            with self._alone():
                available = available_bytes()
                left = None if available is None else max(0, available - sum(self._own.values()) - self._of_others())
                fits = left is None or size_bytes <= left
                place = self._note(size_bytes) if is_claim and fits else None
            if fits or available is None or size_bytes > available or time.monotonic() > deadline:
                return place, left
            time.sleep(_LOOK_EVERY_S)

    def give_up(self, place: int) -> None:
        """End a claim. A fork has none of its parent's."""
        if os.getpid() != self._pid:
            return
        with self._lock:
            size_bytes = self._own.pop(place)
            if self._file is not None:
                fcntl.lockf(self._file, fcntl.LOCK_UN, _length(size_bytes), place)

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Keeps other processes and threads from claiming."""
        with self._lock:
            if self._file is not None:
                fcntl.lockf(self._file, fcntl.LOCK_EX, 1, 0)
            try:
                yield
            finally:
                if self._file is not None:
                    fcntl.lockf(self._file, fcntl.LOCK_UN, 1, 0)

    def _of_others(self) -> int:
        """Returns the bytes that other processes have claimed. The kernel tells one lock of a range at a time."""
        if self._file is None:
            return 0
        found, ranges = 0, [(_RANGE, 1 << 62)]
        while ranges:
            start, stop = ranges.pop()
            if start >= stop:
                continue
            asked = struct.pack(_FLOCK, fcntl.F_WRLCK, os.SEEK_SET, start, stop - start, 0)
            kind, _, at, length, _ = struct.unpack(_FLOCK, fcntl.fcntl(self._file, fcntl.F_GETLK, asked))
            if kind != fcntl.F_UNLCK:
                found += length * _UNIT
                ranges += [(start, at), (at + length, stop)]
        return found

    def _note(self, size_bytes: int) -> int:
        """Returns the place of a claim that fits."""
        while True:
            place = (1 + secrets.randbelow(1 << 20)) * _RANGE  # the random generator of the training is left alone
            if place in self._own:
                continue
            if self._file is not None:
                try:
                    fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB, _length(size_bytes), place)
                except OSError:  # another process has taken this place
                    continue
            self._own[place] = size_bytes
            return place


def _length(size_bytes: int) -> int:
    return -(-size_bytes // _UNIT) or 1


def _path() -> Path:
    """Returns the path of the file: one for each user of the node, or of a container that has its own /dev/shm."""
    shared = Path("/dev/shm")  # noqa: S108  the file is the user's own, and nothing is written into it
    folder = shared if os.access(shared, os.W_OK) else Path(tempfile.gettempdir())
    return folder / f"raycheck-claims-{os.getuid()}"


_claims = _Claims()


def _start_anew() -> None:
    """Forget the parent's claims: called in a forked child."""
    global _claims  # noqa: PLW0603
    _claims = _Claims()


os.register_at_fork(after_in_child=_start_anew)


def shortage(size_bytes: int, available: int) -> str:
    """Says in words that `size_bytes` do not fit into the bytes `available`, and what helps."""
    return (
        f"staging this rank's shard needs {size_bytes} bytes of host memory, and {available} are available: "
        "shard the state over more ranks, run fewer of them on a node, or give the node more memory"
    )


def available_bytes(root: Path = Path("/")) -> int | None:
    """Returns the bytes that this process may still claim, of the host's memory, of its control groups' or of its own
    address space (ulimit -v).

    It is the smallest one; None where the system does not tell. root: the root of the file system, for tests.
    """
    try:
        lines = (root / "proc/meminfo").read_text().splitlines()
        total = {name: int(rest.split()[0]) * 1024 for name, _, rest in (line.partition(":") for line in lines)}
        found = [total["MemAvailable"]]
        groups = (root / "proc/self/cgroup").read_text().splitlines()
        limit, _ = resource.getrlimit(resource.RLIMIT_AS)
        if limit != resource.RLIM_INFINITY:
            pages = int((root / "proc/self/statm").read_text().split()[0])
            found.append(max(0, limit - pages * mmap.PAGESIZE))
    except (OSError, KeyError, ValueError, IndexError):
        return None
    for line in groups:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            mount = root / "sys/fs/cgroup"
            names: _Names = ("memory.max", "memory.current", ("inactive_file", "active_file", "slab_reclaimable"))
        elif "memory" in controllers.split(","):
            mount = root / "sys/fs/cgroup/memory"
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", ("total_inactive_file", "total_active_file"))
        else:
            continue
        folder = mount / path.strip("/")
        lefts = [_left(at, names) for at in (folder, *folder.parents) if at.is_relative_to(mount)]
        found += [left for left in lefts if left is not None]
    return min(found)


def _left(folder: Path, names: _Names) -> int | None:
    """Returns the bytes that a control group may still claim when it gives up its page cache. None: it has no limit, or
    none that can be read."""
    limit, usage, cache = names
    try:
        most = int((folder / limit).read_text())
        used = int((folder / usage).read_text())
        stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
        return max(0, most - used + sum(int(stat.get(name, 0)) for name in cache))
    except (OSError, ValueError):
        return None
