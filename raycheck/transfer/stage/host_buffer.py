"""Claims host memory for a rank's shard up front, and faults it in while training runs.

The first touch of a page costs ten times as much as copying into it. So a thread touches all pages before the first
save. For copies from an accelerator the memory is page-locked instead, which touches the pages too. No more memory is
claimed than is left (memory_claims.py). If another process is to do the upload, the memory is shared with it.
"""

import contextlib
import ctypes
import logging
import mmap
import sys
import threading
import weakref
from typing import Any

import torch

from raycheck.errors import ConfigError
from raycheck.transfer.stage.memory_claims import MemoryClaim
from raycheck.transfer.stage.shared_memory import MemoryPlace, SharedMemory

_WIPE_ON_FORK, _POPULATE_WRITE = 18, 23
_STRIDE = 4 * 1024 * 1024
"""Bytes faulted in at a time; other threads that map memory wait meanwhile."""


class HostBuffer:
    """Zeroed host memory as one flat uint8 tensor.

    pinned: page-lock it, for copies from an accelerator. shared: let other processes of the node map it, if the system
    and the accelerator support that; `place` is where they find it, or None when they cannot. patience_s: see
    MemoryClaim. Raises ConfigError when the host does not have that much memory left, or refuses it.
    """

    def __init__(self, size_bytes: int, *, pinned: bool, shared: bool = False, patience_s: float = 0.0) -> None:
        self._claim = MemoryClaim(size_bytes, patience_s=patience_s)
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None
        self.place: MemoryPlace | None = None
        pages: mmap.mmap | memoryview
        if shared and (not pinned or torch.cuda.is_available()):
            try:
                memory = SharedMemory(size_bytes)
                pages = memory.pages
                self.tensor = _page_locked(pages) if pinned else torch.frombuffer(pages, dtype=torch.uint8)
                self.place = memory.place
            except (OSError, RuntimeError) as error:  # CUDA's is a RuntimeError
                text = "the node's actor cannot map this rank's staged copies, so this rank uploads them itself: %s"
                logging.getLogger("raycheck").warning(text, error)
        try:
            if self.place is None and pinned:
                self.tensor = torch.zeros(size_bytes, dtype=torch.uint8, pin_memory=True)
            elif self.place is None:
                pages = private_pages(size_bytes)
                self.tensor = torch.frombuffer(pages, dtype=torch.uint8)
        except (OSError, RuntimeError) as error:
            self._claim.end()
            raise ConfigError(f"staging this rank's shard needs {size_bytes} bytes of host memory: {error}") from error
        if pinned:
            self._claim.end()
        else:
            fault_in = self._fault_in
            self._thread = threading.Thread(target=fault_in, args=(pages,), name="raycheck-buffer", daemon=True)

    @property
    def size_bytes(self) -> int:
        """Return the size of the buffer in bytes."""
        return self.tensor.numel()

    def fault_in(self) -> None:
        """Start a thread that touches all pages. Call it once, before anything is written."""
        if self._thread is not None:
            self._thread.start()

    def stop_faulting_in(self) -> None:
        """Stop the thread, so that only the caller writes from now on. Call it before the first write.

        Pages that were not touched by then are faulted in by the caller's writes.
        """
        self._stopped.set()
        if self._thread is not None and self._thread.ident is not None:
            self._thread.join()
        self._thread = None

    def touched(self) -> None:
        """End the memory claim: all pages were written to, so the node's free memory already reflects them."""
        self._claim.end()

    def _fault_in(self, pages: mmap.mmap | memoryview) -> None:
        populate = _populate()
        view = memoryview(pages)
        for at in range(0, len(view), _STRIDE):
            if self._stopped.is_set():
                return
            length = min(_STRIDE, len(view) - at)
            if populate is None or populate(self.tensor.data_ptr() + at, length, _POPULATE_WRITE) != 0:
                touched = view[at : at + length : mmap.PAGESIZE]
                touched[:] = bytes(len(touched))
            self._claim.shrink(length)
        self._claim.end()


def private_pages(size_bytes: int) -> mmap.mmap:
    """Return memory that only this process uses. Raises OSError when the system refuses it."""
    pages = mmap.mmap(-1, size_bytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if sys.platform == "linux":
        # Otherwise every page would be faulted in again, and copied, after a data loader has forked its workers.
        with contextlib.suppress(OSError):  # an older kernel
            pages.madvise(_WIPE_ON_FORK)
    return pages


def _page_locked(pages: memoryview) -> torch.Tensor:
    """Return shared memory as a tensor into which CUDA copies as into memory that it has page-locked itself.

    Raises RuntimeError when CUDA refuses to lock it.
    """
    tensor = torch.frombuffer(pages, dtype=torch.uint8)
    cudart: Any = torch.cuda.cudart()
    at = tensor.data_ptr()
    try:
        torch.cuda.check_error(int(cudart.cudaHostRegister(at, tensor.numel(), 1)))  # 1: for all of the node's devices
    except RuntimeError:
        with contextlib.suppress(RuntimeError):  # CUDA keeps the error: the next kernel would raise it
            torch.ones(1, device="cuda")
        raise
    weakref.finalize(tensor, cudart.cudaHostUnregister, at)
    return tensor


def _populate() -> "ctypes._NamedFuncPointer | None":
    """Return madvise, which ctypes calls without the GIL, or None if the system does not have it."""
    if sys.platform != "linux":
        return None
    try:
        found = ctypes.CDLL(None).madvise
    except (OSError, AttributeError):
        return None
    found.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    return found
