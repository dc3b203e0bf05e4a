"""What there is once for all ranks and beside them, as an actor's or the driver's state: rank 0 saves and restores it.

Rule for a checkpoint from before it was in the state: it stays as it is, and the restore report lists it under `fresh`.
"""

from typing import Any

from raycheck.shards.entries.state_entry import Named, ObjectEntry, SavedEntry, empty_for


class RankZero:
    """An entry whose owner, anything with state_dict/load_state_dict, is asked on rank 0 only."""

    def __init__(self, owner: Any) -> None:
        self.owner = owner


class RankZeroEntry(ObjectEntry):
    """On the other ranks it holds nothing."""

    compares_values = False

    def __init__(self, name: str, entry: RankZero, *, rank: int) -> None:
        super().__init__(name, entry.owner)
        self._is_mine = rank == 0

    def tree(self) -> dict[str, Any]:
        return super().tree() if self._is_mine else {}

    def prepare(self, saved: SavedEntry) -> Named:
        if saved.values is None:
            saved.fresh.append(f"{self.name} (not in this checkpoint)")
            return {}
        if not self._is_mine:
            return {}
        self.compared(saved, saved.values, lambda _name: None)
        return {name: empty_for(tensor) for name, tensor in saved.tensors.items()}

    def finish(self, saved: SavedEntry, tensors: Named) -> None:
        if self._is_mine:
            super().finish(saved, tensors)
