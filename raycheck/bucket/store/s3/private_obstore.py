"""Loads a private copy of obstore, with its own threads, apart from the `obstore` that a training script imports.

A process has one set of obstore's threads. The first request starts them, and they do not survive a fork: a forked
DataLoader worker that reads with obstore waits forever once anything in its parent has used obstore. raycheck uploads
from the training process. So it loads the compiled part of obstore a second time, from its own file in memory. To the
dynamic loader this is a different library, with its own threads, and raycheck's uploads do not start those of the
script's obstore. A forked child that needs raycheck's copy loads another one.
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

_NAME = "_obstore"
"""The name of the module, after which the library's start function is named."""


def own_obstore() -> Any:
    """Return this process's copy. Raises ImportError or OSError where the system allows no library in memory."""
    with _here.lock:
        if _here.module is None:
            _here.module = _load()
        return _here.module


class _Process:
    """The modules that this process has loaded. forks: how many forks there are between it and the first process."""

    def __init__(self) -> None:
        self.forks = -1
        self.start_anew()

    def start_anew(self) -> None:
        """Forget the parent's copy. Called in a forked child, which has none of its threads."""
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
        raise ImportError("only Linux can load a library from a file in memory")
    memory = os.memfd_create("raycheck-obstore")
    with os.fdopen(memory, "wb") as copy, Path(original.origin).open("rb") as source:
        shutil.copyfileobj(source, copy, 1024 * 1024)
        copy.flush()
        # The dynamic loader identifies libraries by path. If a child's file had the number of the parent's, it would
        # return the parent's copy. So each generation of processes spells the path differently.
        path = f"/proc/self/fd/{'./' * _here.forks}{memory}"
        name = f"{__package__}.{_NAME}"
        spec = spec_from_file_location(name, path, loader=ExtensionFileLoader(name, path))
        assert spec is not None, "a loader was given"
        assert spec.loader is not None, "a loader was given"
        with _names_kept():
            module = module_from_spec(spec)
            spec.loader.exec_module(module)
    return module


@contextmanager
def _names_kept() -> Iterator[None]:
    """Keep the script's own copy in sys.modules: the copy loaded in the block uses the same names."""
    before = {name: module for name, module in sys.modules.items() if name.partition(".")[0] == "obstore"}
    yield
    for name in [name for name in sys.modules if name.partition(".")[0] == "obstore"]:
        del sys.modules[name]
    sys.modules.update(before)
