"""How the saves of a rank stand, for a driver that decides about them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

from raycheck.train.worker.save_queue import SaveQueue


@dataclass(frozen=True, kw_only=True, slots=True)
class SaveStatus:
    """is_busy: the next save would have to wait. busy_s: how long those under way may still take; None: none is.
    blocked_s: how long the newest one has held up training. save_s: how long the newest commit took."""

    is_busy: bool = False
    busy_s: float | None = None
    blocked_s: float = 0.0
    save_s: float = 0.0

    @classmethod
    def of(cls, saver: SaveQueue | None, blocked_s: float) -> Self:
        """None: nothing was restored yet, and nothing saved."""
        if saver is None:
            return cls()
        return cls(is_busy=saver.is_busy, busy_s=saver.busy_s, blocked_s=blocked_s, save_s=saver.save_s)

    @classmethod
    def joined(cls, ranks: Sequence["SaveStatus"]) -> Self:
        """Of a group: that of its slowest rank."""
        return cls(
            is_busy=any(rank.is_busy for rank in ranks),
            busy_s=max((rank.busy_s for rank in ranks if rank.busy_s is not None), default=None),
            blocked_s=max(rank.blocked_s for rank in ranks),
            save_s=max(rank.save_s for rank in ranks),
        )
