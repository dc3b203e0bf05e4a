"""Decides which classes the values of an entry may have. A checkpoint contains only their names.

A class is looked up first in the live state as it was at the start, then in the modules that this process has loaded.
So a bucket can only choose among classes that exist here anyway, and a save refuses a class that a restart would not
find.
"""

from collections.abc import Callable

from raycheck.bucket.format.class_values import loaded, name_of
from raycheck.errors import ConfigError, StateMismatchError


class KnownClasses:
    """The classes in the live state, collected until `close`.

    learn: encodes the live state, so that `note` is called for each class in it.
    """

    def __init__(self, learn: Callable[[], object]) -> None:
        self._learn = learn
        self._is_open = True
        self._from_start: dict[str, type] = {}

    @property
    def has_any(self) -> bool:
        return bool(self._from_start)

    def close(self) -> None:
        """Stop collecting: a class that appears later was not in the state from the start."""
        self._is_open = False

    def note(self, kind: type, path: str) -> None:
        """Add the class of a value in the live state. Raises ConfigError for a class that a restart would not find."""
        name = name_of(kind)
        known = self._from_start.get(name, kind if self._is_open else loaded(name))
        if known is kind:
            self._from_start[name] = kind
            return
        why = "no value of it was in the state from the start, and it is in no module that could be imported again"
        if known is not None:
            why = "there is another class of this name"
        raise ConfigError(
            f"state at {path} is a {name}, which a restart would not find: {why}. Define the class at the top of a "
            "module, or hold a value of it in this entry before the first restore() or save"
        )

    def find(self, name: str) -> type:
        """Return the class of this name. Raises StateMismatchError if it is not here."""
        if self._is_open and name not in self._from_start:
            self._learn()
        kind = self._from_start.get(name) or loaded(name)
        if kind is None:
            raise StateMismatchError(
                f"holds a {name[:200]}, which is not here: import its module, or hold a value of it in this entry, "
                "before the restore"
            )
        return kind
