"""obstore as a copy of raycheck's own: its threads are not those of the `obstore` that a training script imports.

A process has one set of obstore's threads, started by its first request, and they do not survive a fork: a forked
DataLoader worker that reads with obstore waits for ever once anything in its parent has used it. raycheck uploads from
the training process. So it loads the compiled part of obstore a second time, from a file of its own in memory: for the
loader of shared libraries that is another library, with threads of its own, and the script's obstore stays as unused
as the script leaves it. A forked child that needs raycheck's copy itself loads one more.
"""

import os
import shutil
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.machinery import ExtensionFileLoader, PathFinder
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

_NAME = "_obstore"  # what the library's start function is named after


def own_obstore() -> Any:
    """The compiled module of this process. Raises ImportError or OSError where a library in memory is not allowed."""
    with _here.lock:
        if _here.module is None:
            _here.module = _load()
        return _here.module


class _Process:
    """What this process has loaded. forks: how many lie between it and the process that first came here."""

    def __init__(self) -> None:
        self.forks = -1
        self.start_anew()

    def start_anew(self) -> None:
        """In a forked child, where the threads of the parent's copy are not."""
        self.forks += 1
        self.lock = threading.Lock()
        self.module: Any = None


_here = _Process()
os.register_at_fork(after_in_child=_here.start_anew)


def _load() -> Any:
    package = find_spec("obstore")
    original = PathFinder.find_spec(f"obstore.{_NAME}", package.submodule_search_locations) if package else None
    if original is None or original.origin is None:
        raise ImportError("obstore has no compiled part")
    if sys.platform != "linux":
        raise ImportError("a file in memory is something that Linux has")
    memory = os.memfd_create("raycheck-obstore")
    with os.fdopen(memory, "wb") as copy, Path(original.origin).open("rb") as source:
        shutil.copyfileobj(source, copy, 1024 * 1024)
        copy.flush()
        # The loader of shared libraries knows them by path. It would answer with the parent's copy where a child's file
        # has the number that the parent's had, so each generation writes the path in a way of its own.
        path = f"/proc/self/fd/{'./' * _here.forks}{memory}"
        name = f"raycheck.bucket.store.{_NAME}"
        spec = spec_from_file_location(name, path, loader=ExtensionFileLoader(name, path))
        assert spec is not None, "a loader was given"
        assert spec.loader is not None, "a loader was given"
        with _names_kept():
            module = module_from_spec(spec)
            spec.loader.exec_module(module)
    return module


@contextmanager
def _names_kept() -> Iterator[None]:
    """obstore enters parts of itself into sys.modules; those of the script's own copy stay what they are."""
    before = {name: module for name, module in sys.modules.items() if name.partition(".")[0] == "obstore"}
    yield
    for name in [name for name in sys.modules if name.partition(".")[0] == "obstore"]:
        del sys.modules[name]
    sys.modules.update(before)
