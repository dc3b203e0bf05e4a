"""Runs a function in a forked child of this process, so that it changes nothing here.

Data sources are read there as a trial. A source may draw random numbers, count, open files on first use, or be a
generator that cannot be read twice: none of that affects the training process. A child that takes too long is killed.

A fork shares open files, and the position in them, with its parent. So the child reopens files, and has no pipes or
sockets: a function that needs these fails in the child.
"""

import fcntl
import gc
import os
import pickle
import select
import signal
import stat
import struct
import sys
import threading
import time
import warnings
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import torch

from raycheck.host import host

T = TypeVar("T")
_CHUNK = 1 << 16
_LENGTH = struct.Struct("<Q")
"""The header of an answer: processes that the function has started may keep the pipe open afterwards."""


class TrialError(Exception):
    """Raised when a function returned no result in a child.

    has_failed: the function raised. Otherwise the child was late, died, or could not be forked, which proves nothing.
    """

    def __init__(self, why: str, *, has_failed: bool = False) -> None:
        super().__init__(why)
        self.has_failed = has_failed


def can_isolate() -> bool:
    """Return whether a child can be forked. On systems other than Linux, libraries do not expect a fork."""
    return sys.platform == "linux"


def isolated(function: Callable[[], T], *, within_s: float) -> T:
    """Call a function in a forked child and return its result, which is pickled.

    Raises TrialError when the function raises, when its result cannot be pickled, and when the child ends or takes
    longer than within_s.
    """
    if not can_isolate():
        raise TrialError(f"no process can be forked on {sys.platform}")
    if not host().can_fork():
        raise TrialError("no process is forked in a Ray driver, which may wait forever for its actors after a fork")
    receive, send = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python's warning about threads; torch's loaders fork too
        child = os.fork()
    if child == 0:
        _run(function, send)
    os.close(send)
    try:
        answer = _read_all(receive, time.monotonic() + within_s)
    finally:
        os.close(receive)
        _kill_group(child)
        with suppress(ChildProcessError):  # a process that ignores SIGCHLD has no children to wait for
            os.waitpid(child, 0)
    if answer is None:
        raise TrialError(f"it took longer than {within_s:.0f} s")
    if not answer:
        raise TrialError("its process died")
    result, error = pickle.loads(answer)  # noqa: S301  our own child's
    if error is not None:
        raise TrialError(error, has_failed=True)
    found: T = result
    return found


def _run(function: Callable[[], Any], send: int) -> NoReturn:
    """Act as the child: call the function, send the outcome, and end without cleaning up the parent's objects."""
    try:
        os.setpgid(0, 0)  # so that processes that the function starts end with this one
        gc.disable()  # must not finalize the parent's objects
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
            if threading.current_thread() is threading.main_thread():
                signal.signal(number, signal.SIG_DFL)
        null = os.open(os.devnull, os.O_RDWR)
        _leave_files_alone(send, null)
        for output in (1, 2):  # progress bars and warnings appear again when training reads the source
            os.dup2(null, output)
        torch.set_num_threads(1)  # OpenMP's threads do not survive a fork
        try:
            answer = pickle.dumps((function(), None))
        except BaseException as error:  # noqa: BLE001  sent to the parent
            answer = pickle.dumps((None, f"{type(error).__name__}: {error}"))
        left = memoryview(_LENGTH.pack(len(answer)) + answer)
        while left:
            left = left[os.write(send, left) :]
    finally:
        os._exit(0)


def _leave_files_alone(send: int, null: int) -> None:
    """Replace what this child shares with its parent.

    Files are reopened read-only at the same position. Pipes, sockets and whatever cannot be reopened become the null
    device.
    """
    for number in [int(link.name) for link in Path("/proc/self/fd").iterdir()]:
        try:
            mode = os.fstat(number).st_mode
        except OSError:  # the descriptor that listed the others
            continue
        if number == send or stat.S_ISCHR(mode) or stat.S_ISBLK(mode) or stat.S_ISDIR(mode):
            continue
        own = _opened_again(number) if stat.S_ISREG(mode) else None
        os.dup2(null if own is None else own, number, inheritable=os.get_inheritable(number))
        if own is not None:
            os.close(own)


def _opened_again(number: int) -> int | None:
    """Return another descriptor of a file, read-only; None if it is only written to, or cannot be opened."""
    if fcntl.fcntl(number, fcntl.F_GETFL) & os.O_ACCMODE == os.O_WRONLY:
        return None
    try:
        at = os.lseek(number, 0, os.SEEK_CUR)
        own = os.open(f"/proc/self/fd/{number}", os.O_RDONLY)
    except OSError:
        return None
    os.lseek(own, at, os.SEEK_SET)
    return own


def _read_all(pipe: int, deadline: float) -> bytes | None:
    """Return the child's answer: empty when it ended without one, None at the deadline."""
    found = bytearray()
    poll = select.poll()
    poll.register(pipe, select.POLLIN)
    while len(found) < _LENGTH.size or len(found) < _LENGTH.size + _LENGTH.unpack_from(found)[0]:
        if not poll.poll(1000 * max(0.0, deadline - time.monotonic())):
            return None
        chunk = os.read(pipe, _CHUNK)
        if not chunk:
            return b""
        found += chunk
    return bytes(found[_LENGTH.size :])


def _kill_group(child: int) -> None:
    for kill in (os.killpg, os.kill):  # the child may not have its own group yet
        try:
            kill(child, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):
            continue
