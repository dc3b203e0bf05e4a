"""Measures how much memory is left for buffers, and claims it, so that the ranks of a node do not take more than
exists.

The system counts memory as available until it is touched, and buffers are touched some time after they are allocated.
The ranks of one node allocate theirs at the same step: each would see everything that is available, and together they
would take more than that, until the system kills one of them. So each process can see the memory that the user's other
processes in the container have claimed and not yet touched. A claim is a lock on a range of an empty file: the kernel
releases it when its process ends, however it ends, and forks do not inherit it. Without such locks (on systems other
than Linux) each process sees only its own claims.

An equal share for each rank of the node would not work. Ranks need unequal amounts, and later ranks would get a share
of what the earlier ones left. Other runs, and the actor that keeps memory checkpoints, are not among these ranks.
"""

import errno
import mmap
import os
import resource
import secrets
import struct
import sys
import threading
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from raycheck.errors import ConfigError

if sys.platform == "linux":
    import fcntl

PATIENCE_S = 30.0
"""How long a starting rank waits for others that are touching the memory they have claimed: until their claims end,
that memory may be counted twice."""
_LOOK_EVERY_S = 0.05
_GUARD_S = 2.0
"""How long a process waits for another that is claiming, which takes a millisecond unless it was stopped (SIGSTOP)."""
_UNIT = 1024
_RANGE = 1 << 40
"""Each claim begins at a multiple of this in the file, and each byte of it stands for 1 KiB."""
_FLOCK = "@hhqqi"
"""Linux's struct flock."""
_Names = tuple[str, str, tuple[str, ...]]


class MemoryClaim:
    """A claim on memory that is about to be allocated.

    size_bytes: how much. patience_s: how many seconds to wait, at most, if only other claims are in the way. Raises
    ConfigError when the host, its control groups or a limit of this process do not have that much left, or other
    processes have claimed it.
    """

    def __init__(self, size_bytes: int, *, patience_s: float = 0.0) -> None:
        self._place = _claims.take(size_bytes, patience_s)
        self._end = weakref.finalize(self, _claims.give_up, self._place)
        self._end.atexit = False

    def shrink(self, touched_bytes: int) -> None:
        """Reduce the claim by this many bytes, which have now been touched. The claim must not have ended."""
        _claims.shrink(self._place, touched_bytes)

    def end(self) -> None:
        """End the claim: the memory has been touched, or is no longer needed."""
        self._end()


def unclaimed_bytes() -> int | None:
    """Return the bytes that this process may claim now, or None if the system does not report them."""
    return _claims.unclaimed()


class _Claims:
    """The claims of this process, and a view of the claims of others."""

    def __init__(self) -> None:
        self._pid = os.getpid()
        self._lock = threading.RLock()  # a claim may be garbage-collected while this thread holds the lock
        self._own: dict[int, int] = {}  # bytes by place
        self._file: int | None = None
        self._is_opened = False

    def take(self, size_bytes: int, patience_s: float) -> int:
        """Make a claim and return its place. Raises ConfigError."""
        deadline = time.monotonic() + patience_s
        while True:
            with self._alone():
                left, without_claims = self._left()
                if left is None or size_bytes <= left:
                    return self._note(size_bytes)
            if without_claims is None or size_bytes > without_claims or time.monotonic() > deadline:
                raise ConfigError(shortage(size_bytes, left))
            time.sleep(_LOOK_EVERY_S)

    def unclaimed(self) -> int | None:
        with self._alone():
            return self._left()[0]

    def shrink(self, place: int, touched_bytes: int) -> None:
        with self._lock:
            before = self._own[place]
            self._own[place] = after = max(0, before - touched_bytes)
            self._unlock(_length(before) - _length(after), place + _length(after))

    def give_up(self, place: int) -> None:
        """End a claim. Do nothing in a forked process, which has none of its parent's claims."""
        if os.getpid() != self._pid:
            return
        with self._lock:
            self._unlock(_length(self._own.pop(place)), place)

    def _left(self) -> tuple[int | None, int | None]:
        """Return the bytes that may be claimed now, and those that could be claimed if there were no claims."""
        available, own_limit = available_bytes(), _address_space_bytes()
        claimed = sum(self._own.values()) + self._of_others()
        unclaimed = None if available is None else max(0, available - claimed)
        return _least(unclaimed, own_limit), _least(available, own_limit)

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Keep other processes and threads from claiming during the block."""
        with self._lock:
            self._open()
            deadline = time.monotonic() + _GUARD_S
            while self._is_taken(1, 0) and time.monotonic() < deadline:
                time.sleep(0.001)
            try:
                yield
            finally:
                self._unlock(1, 0)

    def _open(self) -> None:
        """Open the file, if the system has such locks. It is never closed: closing it would end all claims."""
        if self._is_opened or sys.platform != "linux":
            return
        self._is_opened = True
        with suppress(OSError):
            # Processes in other containers may share the folder, but not the limits.
            container = Path("/proc/self/ns/pid").stat().st_ino
            path = f"/dev/shm/raycheck-claims-{os.getuid()}-{container}"  # noqa: S108  nothing is written into it
            file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
            _lock_in(file, _RANGE, 1 << 62)
            self._file = file

    def _of_others(self) -> int:
        """Return the bytes that other processes have claimed. The kernel reports one lock of a range at a time."""
        found, ranges = 0, [(_RANGE, 1 << 62)]
        while ranges and self._file is not None:
            start, stop = ranges.pop()
            lock = _lock_in(self._file, start, stop) if start < stop else None
            if lock is not None:
                at, length = lock
                found += length * _UNIT
                ranges += [(start, at), (at + length, stop)]
        return found

    def _note(self, size_bytes: int) -> int:
        """Record a claim that fits, and return its place."""
        while True:
            place = (1 + secrets.randbelow(1 << 20)) * _RANGE  # does not use training's random generator
            if place not in self._own and not self._is_taken(_length(size_bytes), place):
                self._own[place] = size_bytes
                return place

    def _is_taken(self, length: int, start: int) -> bool:
        """Lock a range. Return whether another process has locked some of it."""
        if self._file is None:
            return False
        try:
            fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB, length, start)
        except OSError as error:  # such as too many locks: others do not see this claim
            return error.errno in (errno.EAGAIN, errno.EACCES)
        return False

    def _unlock(self, length: int, start: int) -> None:
        if self._file is not None and length:
            with suppress(OSError):
                fcntl.lockf(self._file, fcntl.LOCK_UN, length, start)


def _lock_in(file: int, start: int, stop: int) -> tuple[int, int] | None:
    """Return start and length of another process's lock in a range of the file, or None if there is none."""
    asked = struct.pack(_FLOCK, fcntl.F_WRLCK, os.SEEK_SET, start, stop - start, 0)
    kind, _, at, length, _ = struct.unpack(_FLOCK, fcntl.fcntl(file, fcntl.F_GETLK, asked))
    return None if kind == fcntl.F_UNLCK else (at, length)


def _length(size_bytes: int) -> int:
    return -(-size_bytes // _UNIT) or 1


def _least(*sizes: int | None) -> int | None:
    """Return the smallest of the sizes that are known."""
    return min((size for size in sizes if size is not None), default=None)


_claims = _Claims()


def _start_anew() -> None:
    """Forget the parent's claims: called in a forked child."""
    global _claims  # noqa: PLW0603
    _claims = _Claims()


os.register_at_fork(after_in_child=_start_anew)


def shortage(size_bytes: int, available: int | None) -> str:
    """Return a text for an error: `size_bytes` do not fit into the bytes `available`, and what helps."""
    return (
        f"staging this rank's shard needs {size_bytes} bytes of host memory, and {available} are available: "
        "shard the state over more ranks, run fewer of them on a node, or give the node more memory"
    )


def available_bytes(root: Path = Path("/")) -> int | None:
    """Return the bytes that the host and its control groups have left, whichever is least.

    None if the system does not report it. root: the root of the file system, for tests.
    """
    try:
        lines = (root / "proc/meminfo").read_text().splitlines()
        total = {name: int(rest.split()[0]) * 1024 for name, _, rest in (line.partition(":") for line in lines)}
        found = [total["MemAvailable"]]
        groups = (root / "proc/self/cgroup").read_text().splitlines()
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


def _address_space_bytes() -> int | None:
    """Return the bytes that this process may still map (ulimit -v), or None if there is no limit or it is unknown."""
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit == resource.RLIM_INFINITY:
        return None
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[0])
    except (OSError, ValueError, IndexError):
        return None
    return max(0, limit - pages * mmap.PAGESIZE)


def _left(folder: Path, names: _Names) -> int | None:
    """Return the bytes that a control group may still use if it drops its page cache.

    None if it has no limit, or none that can be read.
    """
    limit, usage, cache = names
    try:
        most = int((folder / limit).read_text())
        used = int((folder / usage).read_text())
        stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
        return max(0, most - used + sum(int(stat.get(name, 0)) for name in cache))
    except (OSError, ValueError):
        return None
