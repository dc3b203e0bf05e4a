"""Finds the nodes' actors of a Ray, and the memory that ranks share with them."""

import os
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path

import psutil


def agents() -> list[psutil.Process]:
    """Returns the processes that hold memory checkpoints in this test's Ray, by the title that Ray gives them."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            is_agent = "ray::NodeAgent" in " ".join(process.cmdline())
            if is_agent and process.environ().get("RAY_TMPDIR") == os.environ["RAY_TMPDIR"]:
                found.append(process)
    return found


def shared_memory(pid: int) -> Iterator[Path]:
    """Yields the buffers of a process that other processes can map."""
    for fd in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(OSError):
            if "memfd:raycheck" in str(fd.readlink()):
                yield fd


def shared_bytes(pids: Iterable[int]) -> dict[int, int]:
    """Returns how much memory each such buffer of these processes takes, in bytes, by inode."""
    found = {}
    for pid in pids:
        for path in shared_memory(pid):
            with suppress(OSError):
                status = path.stat()
                found[status.st_ino] = status.st_blocks * 512
    return found
