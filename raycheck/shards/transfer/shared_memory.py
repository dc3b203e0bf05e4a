"""Memory that another process of this node can map too, and that is gone when no process has it any more.

It is an anonymous file of Linux (memfd). It has no name in /dev/shm and is not bound by that file system's size, and
nothing is left of it however the processes end. Another process opens it through /proc, for which both must belong to
one user and see the same process ids, as Ray's workers in one container do.
"""

import mmap
import os
import weakref
from dataclasses import dataclass

CAN_SHARE = hasattr(os, "memfd_create")
_MAP_POPULATE = 0x8000


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryPlace:
    """Says where another process finds shared memory. fd: the file descriptor of process `pid`. size_bytes: its size.

    device, inode: those of the file, so that it is never taken for another one.
    """

    pid: int
    fd: int
    device: int
    inode: int
    size_bytes: int


class SharedMemory:
    """Holds zeroed memory of this process that others can map. pages: the memory. place: where they find it."""

    def __init__(self, size_bytes: int) -> None:
        """size_bytes: at least 1. Raises OSError where the system has no such memory; see CAN_SHARE."""
        fd = os.memfd_create("raycheck")
        weakref.finalize(self, os.close, fd)
        os.ftruncate(fd, size_bytes)
        self.pages = mmap.mmap(fd, size_bytes)
        status = os.fstat(fd)
        self.place = MemoryPlace(
            pid=os.getpid(), fd=fd, device=status.st_dev, inode=status.st_ino, size_bytes=size_bytes
        )


def open_memory(place: MemoryPlace) -> mmap.mmap:
    """Maps the shared memory of another process, which stays readable when that process ends.

    Raises OSError when this process cannot reach it, or when it is no longer there.
    """
    fd = os.open(f"/proc/{place.pid}/fd/{place.fd}", os.O_RDWR | os.O_CLOEXEC)
    try:
        status = os.fstat(fd)
        if (status.st_dev, status.st_ino, status.st_size) != (place.device, place.inode, place.size_bytes):
            raise OSError(f"process {place.pid} no longer has this memory")
        return mmap.mmap(fd, place.size_bytes, flags=mmap.MAP_SHARED | _MAP_POPULATE)
    finally:
        os.close(fd)
