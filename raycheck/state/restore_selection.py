"""Selects what a restore takes from a checkpoint, by the names that the caller gave in `only` and `skip`."""

import json
from collections.abc import Iterable
from dataclasses import dataclass

from raycheck.errors import ConfigError
from raycheck.state.entries.state_entry import OWN_ENTRIES


@dataclass(frozen=True, slots=True)
class Selection:
    """The names of entries ("optimizer", "rng", "progress") or of places inside a module ("model.head") to restore.

    only: take these and nothing else; None takes all. skip: leave these unchanged; it overrides `only`.
    """

    only: tuple[str, ...] | None = None
    skip: tuple[str, ...] = ()

    @classmethod
    def of(cls, only: Iterable[str] | None, skip: Iterable[str]) -> "Selection":
        """Check and sort the names that the caller gave. Raises ConfigError for anything but a list of names."""
        for given in (only, skip):
            if isinstance(given, str):
                raise ConfigError(f"restore: pass a list of names, not the string {given!r}")
        names = cls(None if only is None else tuple(only), tuple(skip))
        for name in (*(names.only or ()), *names.skip):
            if not isinstance(name, str):
                raise ConfigError(f"restore: pass names of entries, not a {type(name).__qualname__}")
        return cls(None if names.only is None else tuple(sorted(names.only)), tuple(sorted(names.skip)))

    def __str__(self) -> str:
        """Return equal texts for equal selections, and "" for everything.

        Later checkpoints store it in their manifest.
        """
        if self == Selection():
            return ""
        return json.dumps({"only": self.only, "skip": self.skip})

    def takes(self, name: str) -> bool:
        """Return whether this tensor, or all of this entry, is taken."""
        return (self.only is None or any(_covers(given, name) for given in self.only)) and not any(
            _covers(given, name) for given in self.skip
        )

    def touches(self, entry: str) -> bool:
        """Return whether any part of this entry is taken."""
        return (
            self.only is None or any(_covers(given, entry) or _covers(entry, given) for given in self.only)
        ) and not any(_covers(given, entry) for given in self.skip)

    def splits(self, entry: str) -> bool:
        """Return whether the selection names places inside this entry."""
        return any(_covers(entry, given) and given != entry for given in (*(self.only or ()), *self.skip))

    def check(self, names: Iterable[str]) -> None:
        """Raise ConfigError for a selected name that is not in `names`: a typo must not restore less than intended."""
        names = [*names, *OWN_ENTRIES]
        for given in (*(self.only or ()), *self.skip):
            if not any(_covers(given, name) for name in names):
                entries = sorted({name.partition(".")[0] for name in names})
                raise ConfigError(
                    f"restore: there is no {given!r} in the state or the checkpoint, which have {entries}"
                )


EVERYTHING = Selection()


def _covers(given: str, name: str) -> bool:
    return name == given or name.startswith(f"{given}.")
