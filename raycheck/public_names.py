"""Loads the names of a public module on first use, so that browsing a bucket imports neither torch nor ray."""

import sys
from collections.abc import Callable, Iterable, Mapping
from importlib import import_module


def on_first_use(
    module: str, homes: Mapping[str, Iterable[str]]
) -> tuple[Callable[[str], object], Callable[[], list[str]]]:
    """Return the `__getattr__` and `__dir__` of a public module.

    module: its name. homes: the names that each module of the package defines for it.
    """
    home_of = {name: home for home, names in homes.items() for name in names}

    def load(name: str) -> object:
        if name not in home_of:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        return getattr(import_module(home_of[name]), name)

    def names() -> list[str]:
        return sorted({*vars(sys.modules[module]), *home_of})

    return load, names
