"""Provides memory that another process of this node can map too, and that is freed when no process has it mapped.

It is an anonymous Linux file (memfd). It has no name in /dev/shm, is not limited by that file system's size, and leaves
nothing behind however the processes end. Another process opens it through /proc, for which both must belong to one user
and see the same process ids, as Ray's workers in one container do. Forked children, such as a data loader's workers,
inherit neither the memory nor its file: they would keep it long after its owner has freed it.
"""

import ctypes
import mmap
import os
import weakref
from dataclasses import dataclass, replace
from typing import Any

CAN_SHARE = hasattr(os, "memfd_create")
_MAP_POPULATE = 0x8000
_DONT_FORK = 10
_files: set[int] = set()
"""The file descriptors of all SharedMemory objects of this process."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryPlace:
    """The place where another process finds shared memory: file descriptor `fd` of process `pid`. size_bytes: its size.

    device, inode: identify the file, so that it is never mistaken for another one.
    """

    pid: int
    fd: int
    device: int
    inode: int
    size_bytes: int


class SharedMemory:
    """Zeroed memory of this process that others can map. place: where they find it.

    pages: the memory. It is freed once nothing refers to any part of it.
    """

    def __init__(self, size_bytes: int) -> None:
        """size_bytes: at least 1. Raises OSError if the system has no such memory, or not that much."""
        if not CAN_SHARE:
            raise OSError("this system has no memfd_create")
        fd = os.memfd_create("raycheck")
        try:
            os.ftruncate(fd, size_bytes)
            status = os.fstat(fd)
            address = _map(fd, size_bytes, mmap.PROT_READ | mmap.PROT_WRITE)
        except BaseException:
            os.close(fd)
            raise
        pages = (ctypes.c_char * size_bytes).from_address(address)
        self.pages = memoryview(pages).cast("B")
        self.place = MemoryPlace(
            pid=os.getpid(), fd=fd, device=status.st_dev, inode=status.st_ino, size_bytes=size_bytes
        )
        _files.add(fd)
        weakref.finalize(pages, _free, self.place, address).atexit = False  # threads may still use it at exit


def _libc() -> Any:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long)
    libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
    libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    return libc


def _map(fd: int, size_bytes: int, protection: int) -> int:
    """Return the address at which a file is mapped; forks do not inherit the mapping. Raises OSError.

    Python's own mmap would keep a second file descriptor, which forks inherit. It would also unmap the address range in
    a fork, where something else may be mapped there by then.
    """
    libc = _libc()
    address = libc.mmap(None, size_bytes, protection, mmap.MAP_SHARED, fd, 0)
    if address is None or address == ctypes.c_void_p(-1).value:
        error = ctypes.get_errno()
        raise OSError(error, f"cannot map {size_bytes} bytes of shared memory: {os.strerror(error)}")
    libc.madvise(address, size_bytes, _DONT_FORK)
    return int(address)


def _free(place: MemoryPlace, address: int) -> None:
    """Free the memory. A forked child has nothing to free."""
    if os.getpid() == place.pid:
        _files.discard(place.fd)
        os.close(place.fd)
    _unmap(place.pid, address, place.size_bytes)


def _unmap(pid: int, address: int, size_bytes: int) -> None:
    """Unmap memory in the process that mapped it. In a forked child something else may be mapped there."""
    if os.getpid() == pid:
        _libc().munmap(address, size_bytes)


def _close_in_child() -> None:
    for fd in _files:
        os.close(fd)
    _files.clear()


if CAN_SHARE:
    os.register_at_fork(after_in_child=_close_in_child)


def open_memory(place: MemoryPlace) -> tuple[memoryview, MemoryPlace]:
    """Map the shared memory of another process, which stays readable when that process ends.

    Return it, and where other processes find it for as long as this process has it mapped. Raises OSError when this
    process cannot reach it, or when it is no longer there.
    """
    fd = _open(place, os.O_RDWR)
    try:
        pages = mmap.mmap(fd, place.size_bytes, flags=mmap.MAP_SHARED | _MAP_POPULATE)
    except BaseException:
        os.close(fd)
        raise
    weakref.finalize(pages, os.close, fd).atexit = False
    return memoryview(pages), replace(place, pid=os.getpid(), fd=fd)


def open_to_read(place: MemoryPlace) -> memoryview:
    """Map the shared memory of another process to read from it. Raises as `open_memory` does.

    Each page is mapped when a thread first reads it.
    """
    fd = _open(place, os.O_RDONLY)
    try:
        address = _map(fd, place.size_bytes, mmap.PROT_READ)
    finally:
        os.close(fd)
    pages = (ctypes.c_char * place.size_bytes).from_address(address)
    weakref.finalize(pages, _unmap, os.getpid(), address, place.size_bytes).atexit = False
    return memoryview(pages).cast("B").toreadonly()


def _open(place: MemoryPlace, mode: int) -> int:
    """Return a new file descriptor of the memory."""
    fd = os.open(f"/proc/{place.pid}/fd/{place.fd}", mode | os.O_CLOEXEC)
    status = os.fstat(fd)
    if (status.st_dev, status.st_ino, status.st_size) != (place.device, place.inode, place.size_bytes):
        os.close(fd)
        raise OSError(f"process {place.pid} no longer has this memory")
    return fd
