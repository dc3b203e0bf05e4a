"""Pauses Python's cyclic garbage collector while training waits and one object per tensor is made.

A state of 100,000 tensors makes millions of small objects at a save or restore. They hold no cycles, and are freed as
soon as nothing refers to them, but the collector walks all objects of the process several times while they are made.
"""

import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Lock

_lock = Lock()
_paused = 0
_was_on = False


@contextmanager
def collector_paused() -> Iterator[None]:
    """Run a block without automatic collections, then turn them on again if they were on before it.

    The setting belongs to the process. Blocks of several threads may overlap; the last one that ends restores it.
    """
    global _paused, _was_on  # noqa: PLW0603  the collector is the process's
    with _lock:
        if not _paused:
            _was_on = gc.isenabled()
            gc.disable()
        _paused += 1
    try:
        yield
    finally:
        with _lock:
            _paused -= 1
            if not _paused and _was_on:
                gc.enable()


def _resume_in_child() -> None:
    """Turn collections on again in a process that was forked during a pause, where no block will end it."""
    global _lock, _paused  # noqa: PLW0603
    _lock = Lock()
    if _paused and _was_on:
        gc.enable()
    _paused = 0


os.register_at_fork(after_in_child=_resume_in_child)
