"""Rank-local values: each rank keeps its own.

Rule for another world size: a rank that existed takes its own value; a new rank keeps what it was created with; the
values of ranks that are gone are dropped. The restore report says which it was.
"""

from typing import Any

import torch
from torch.distributed.tensor import DTensor

from raycheck.errors import ConfigError
from raycheck.shards.entries.generator_entry import GeneratorState, is_generator
from raycheck.shards.entries.plain_value_entry import filled
from raycheck.shards.entries.state_entry import Named, SavedEntry, StateEntry, empty_for
from raycheck.shards.entries.unsaved_tensors import refuse_unsaved


class PerRank:
    """Wrap an entry of the state whose value differs from rank to rank: `{"counters": raycheck.PerRank(counters)}`.

    value: an object with state_dict/load_state_dict, a random generator, or plain data (numbers, strings, lists,
    dicts, tensors). A restore fills containers and tensors in place where it can, and replaces what it cannot: read it
    from `.value`.
    """

    def __init__(self, value: Any) -> None:
        self.value = value

    @property
    def owner(self) -> Any:
        """What has state_dict and load_state_dict; None for plain data."""
        if is_generator(self.value):
            return GeneratorState(self.value)
        methods = (getattr(self.value, name, None) for name in ("state_dict", "load_state_dict"))
        return self.value if all(map(callable, methods)) else None


class PerRankEntry(StateEntry):
    """Tensors go into this rank's shard under its own number, values into its section of the index.

    The value stands in a list there: it may be None, and nothing that a rank of a pipeline keeps is a list.
    """

    is_per_rank = True

    def __init__(self, name: str, owner: PerRank, *, rank: int) -> None:
        super().__init__(name)
        self._owner = owner
        self._at = f"{name}.rank{rank}"

    def tree(self) -> dict[str, Any]:
        return {}

    def values(self, tree: dict[str, Any], tensors: Named) -> Any:
        del tree
        values = [self.encode(self._state(), self._at, tensors)]
        for name, tensor in tensors.items():
            if isinstance(tensor, DTensor):
                raise ConfigError(
                    f"state at {name} is a DTensor, which is one tensor of all ranks; keep its to_local()"
                )
        return values

    def prepare(self, saved: SavedEntry) -> Named:
        if saved.values is None:
            (saved.fresh if saved.apart else saved.missing).append(self._at)
            return {}
        names: list[str] = []
        (value,) = self.compared(saved, saved.values, names.append)
        self.ask(self._owner.owner, saved, value)
        return {name: empty_for(saved.tensors[name]) for name in names}

    def finish(self, saved: SavedEntry, tensors: Named) -> None:
        if saved.values is None:
            return
        (value,) = self.decoded(saved.values, tensors.__getitem__)
        owner = self._owner.owner
        if owner is not None:
            owner.load_state_dict(value)
        else:
            self._owner.value = filled(self._owner.value, value)

    def _state(self) -> Any:
        if isinstance(self._owner.value, torch.nn.Module):
            raise ConfigError(f"state[{self.name!r}] is PerRank of a module; give modules to the state directly")
        owner = self._owner.owner
        if owner is None:
            return self._owner.value
        state = owner.state_dict()
        if isinstance(state, dict) and not state:
            refuse_unsaved(self.name, owner)
        return state
