"""Knows how much memory is left for buffers, and claims it so that ranks of a node do not take more than there is.

The system counts memory as available until it is touched, and buffers are touched some time after they are allocated.
Ranks of one node allocate theirs at the same step: each would see all that is available, and together they would take
more, until the system kills one of them. So what is claimed and not touched yet is seen by the other processes of the
user in the container. A claim is a lock on a range of an empty file: the kernel gives it up when its process ends,
however that ends, and forks do not inherit it. Without such locks (on other systems than Linux) each process sees its
own claims alone.

A share of what is left for each rank of the node would not do. Ranks need unequal amounts, and those that come later
would get a share of what the first ones left. Other runs, and the actor that holds memory checkpoints, are none of
these ranks.
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
"""How long a rank that starts waits for others that are just touching what they have claimed: until the claim is over,
that may count twice."""
_LOOK_EVERY_S = 0.05
_GUARD_S = 2.0
"""How long a process waits for another that claims now, which takes a millisecond: it may have been stopped."""
_UNIT = 1024
_RANGE = 1 << 40
"""The places of a claim in the file are multiples of this, and each of its bytes stands for 1 KiB."""
_FLOCK = "@hhqqi"
"""Linux's struct flock."""
_Names = tuple[str, str, tuple[str, ...]]


class MemoryClaim:
    """Claims memory that is about to be allocated.

    size_bytes: how much. patience_s: how many seconds to wait, at most, where only other claims are in the way. Raises
    ConfigError when the host, its control groups or a limit of this process have not that much left, or others have
    claimed it.
    """

    def __init__(self, size_bytes: int, *, patience_s: float = 0.0) -> None:
        self._place = _claims.take(size_bytes, patience_s)
        self._end = weakref.finalize(self, _claims.give_up, self._place)
        self._end.atexit = False

    def shrink(self, touched_bytes: int) -> None:
        """Claim so many bytes less, since they are touched. It must not have ended."""
        _claims.shrink(self._place, touched_bytes)

    def end(self) -> None:
        """End the claim, since the memory is touched, or not needed any more."""
        self._end()


def unclaimed_bytes() -> int | None:
    """Returns the bytes that this process may claim now; None where the system does not tell."""
    return _claims.unclaimed()


class _Claims:
    """Holds the claims of this process, and sees those of others."""

    def __init__(self) -> None:
        self._pid = os.getpid()
        self._lock = threading.RLock()  # a claim may be collected while this thread has it
        self._own: dict[int, int] = {}  # bytes by place
        self._file: int | None = None
        self._is_opened = False

    def take(self, size_bytes: int, patience_s: float) -> int:
        """Returns the place of a new claim. Raises ConfigError."""
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
        """End a claim. A fork has none of its parent's."""
        if os.getpid() != self._pid:
            return
        with self._lock:
            self._unlock(_length(self._own.pop(place)), place)

    def _left(self) -> tuple[int | None, int | None]:
        """Returns the bytes that may be claimed now, and those that might be if there were no claims."""
        available, own_limit = available_bytes(), _address_space_bytes()
        claimed = sum(self._own.values()) + self._of_others()
        unclaimed = None if available is None else max(0, available - claimed)
        return _least(unclaimed, own_limit), _least(available, own_limit)

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Keeps other processes and threads from claiming."""
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
        """Open the file, if the system has such locks. It is never closed: that would end all claims."""
        if self._is_opened or sys.platform != "linux":
            return
        self._is_opened = True
        with suppress(OSError):
            # Processes of other containers may share the folder, but not the limits.
            container = Path("/proc/self/ns/pid").stat().st_ino
            path = f"/dev/shm/raycheck-claims-{os.getuid()}-{container}"  # noqa: S108  nothing is written into it
            file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
            _lock_in(file, _RANGE, 1 << 62)
            self._file = file

    def _of_others(self) -> int:
        """Returns the bytes that other processes have claimed. The kernel tells one lock of a range at a time."""
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
        """Returns the place of a claim that fits."""
        while True:
            place = (1 + secrets.randbelow(1 << 20)) * _RANGE  # the random generator of the training is left alone
            if place not in self._own and not self._is_taken(_length(size_bytes), place):
                self._own[place] = size_bytes
                return place

    def _is_taken(self, length: int, start: int) -> bool:
        """Lock a range. Returns whether another process has locked some of it."""
        if self._file is None:
            return False
        try:
            fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB, length, start)
        except OSError as error:  # such as too many locks: this claim is then not seen
            return error.errno in (errno.EAGAIN, errno.EACCES)
        return False

    def _unlock(self, length: int, start: int) -> None:
        if self._file is not None and length:
            with suppress(OSError):
                fcntl.lockf(self._file, fcntl.LOCK_UN, length, start)


def _lock_in(file: int, start: int, stop: int) -> tuple[int, int] | None:
    """Returns start and length of a lock of another process in a range of the file; None when there is none."""
    asked = struct.pack(_FLOCK, fcntl.F_WRLCK, os.SEEK_SET, start, stop - start, 0)
    kind, _, at, length, _ = struct.unpack(_FLOCK, fcntl.fcntl(file, fcntl.F_GETLK, asked))
    return None if kind == fcntl.F_UNLCK else (at, length)


def _length(size_bytes: int) -> int:
    return -(-size_bytes // _UNIT) or 1


def _least(*sizes: int | None) -> int | None:
    """Returns the smallest of the sizes that are known."""
    return min((size for size in sizes if size is not None), default=None)


_claims = _Claims()


def _start_anew() -> None:
    """Forget the parent's claims: called in a forked child."""
    global _claims  # noqa: PLW0603
    _claims = _Claims()


os.register_at_fork(after_in_child=_start_anew)


def shortage(size_bytes: int, available: int | None) -> str:
    """Says in words that `size_bytes` do not fit into the bytes `available`, and what helps."""
    return (
        f"staging this rank's shard needs {size_bytes} bytes of host memory, and {available} are available: "
        "shard the state over more ranks, run fewer of them on a node, or give the node more memory"
    )


def available_bytes(root: Path = Path("/")) -> int | None:
    """Returns the bytes that the host and its control groups have left, the smallest number of these.

    None where the system does not tell. root: the root of the file system, for tests.
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
    """Returns the bytes that this process may still map (ulimit -v); None without a limit, or where nobody tells."""
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit == resource.RLIM_INFINITY:
        return None
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[0])
    except (OSError, ValueError, IndexError):
        return None
    return max(0, limit - pages * mmap.PAGESIZE)


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
