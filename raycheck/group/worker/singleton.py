"""One process holds at most one open Checkpointer per run and rank: two of them would supersede each other in turn."""

from typing import Protocol
from weakref import WeakValueDictionary

from raycheck.bucket.store.address import shown_uri
from raycheck.errors import ConfigError


class _Closable(Protocol):
    @property
    def is_closed(self) -> bool: ...


_open: "WeakValueDictionary[tuple[str, int], _Closable]" = WeakValueDictionary()


def register_open(checkpointer: _Closable, *, uri: str, rank: int) -> None:
    """Register the open Checkpointer of a run and rank. Raises ConfigError when this process has another open one."""
    other = _open.get((uri, rank))
    if other is not None and not other.is_closed:
        raise ConfigError(
            f"{shown_uri(uri)}: this process already has an open Checkpointer of this run. One holds the whole state "
            "(give it all models and optimizers); close it before making another"
        )
    _open[uri, rank] = checkpointer
