"""One open Checkpointer per run and rank in a process: two of them would take turns at superseding each other."""

from typing import Protocol
from weakref import WeakValueDictionary

from raycheck.errors import ConfigError


class _Closable(Protocol):
    @property
    def is_closed(self) -> bool: ...


_open: "WeakValueDictionary[tuple[str, int], _Closable]" = WeakValueDictionary()


def be_the_only_one(one: _Closable, *, uri: str, rank: int) -> None:
    """Raises ConfigError when another one is open here."""
    other = _open.get((uri, rank))
    if other is not None and not other.is_closed:
        raise ConfigError(
            f"{uri}: there is an open Checkpointer of this run in this process already. One holds the whole state "
            "(give it all models and optimizers); close it before making another"
        )
    _open[uri, rank] = one
