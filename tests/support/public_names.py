"""The public modules of raycheck, and the names in them."""

from collections.abc import Sequence

import raycheck
from raycheck import adapters, catalog, errors, loggers, values

PUBLIC: dict[str, frozenset[str]] = {
    "raycheck": frozenset(raycheck.__all__),
    "raycheck.adapters": frozenset(adapters.__all__),
    "raycheck.catalog": frozenset(catalog.__all__),
    "raycheck.loggers": frozenset(loggers.__all__),
    "raycheck.values": frozenset(values.__all__),
    "raycheck.errors": frozenset(name for name, value in vars(errors).items() if isinstance(value, type)),
}
PUBLIC_MODULE = {name: module for module, names in reversed(PUBLIC.items()) for name in names}
"""Where a user takes a name from: from `raycheck` itself where that has it."""


def public_value(name: str) -> object:
    module = PUBLIC_MODULE[name].removeprefix("raycheck").removeprefix(".")
    return getattr(getattr(raycheck, module) if module else raycheck, name)


def is_public(path: Sequence[str]) -> bool:
    """Whether raycheck.PATH begins with a public name."""
    if path[0] not in raycheck._MODULES:
        return path[0] in raycheck.__all__
    names = PUBLIC.get(f"raycheck.{path[0]}")
    return names is None or len(path) == 1 or path[1] in names
