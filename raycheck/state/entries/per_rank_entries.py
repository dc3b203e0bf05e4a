"""Creates entries for what belongs to single ranks: each rank's own value, each rank's data loader, or rank 0's object.

Each kind has its rule for a restore with another world size:

- `PerRankEntry`: a rank that existed takes its own value; a new rank keeps its initial value; the values of ranks that
  no longer exist are dropped. The restore report lists which of these happened.
- `LoaderEntry`, for foreign loaders that report their position, such as torchdata's StatefulDataLoader: another number
  of ranks is refused, because the saved positions would mean other samples. raycheck.Batches has one position for all
  ranks.
- `MergedEntry`, for an object whose ranks each have a share of one thing, such as the rows that they have consumed:
  every rank gets the states of all ranks that saved, and derives its own from them.
- `RankZeroEntry`, for an object that exists once, outside the ranks, such as the state of an actor or of the driver:
  rank 0 saves and restores it. A checkpoint from before it was in the state leaves it unchanged, and the restore report
  lists it under `fresh`.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any, NoReturn

import torch
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader

from raycheck.bucket.format.values import decode
from raycheck.errors import ConfigError, StateMismatchError
from raycheck.state.entries.fill_in_place import filled
from raycheck.state.entries.module.module_entry import MERGED, VALUE_KEYS
from raycheck.state.entries.object_entry import ObjectEntry, has_state_dict
from raycheck.state.entries.plain_value_entry import InPlace
from raycheck.state.entries.random_generators import GeneratorState, is_generator
from raycheck.state.entries.saved_entry import Named, SavedEntry, empty_for
from raycheck.state.entries.state_entry import StateEntry, calling
from raycheck.state.entries.unsaved_tensors import refuse_unsaved


class PerRank:
    """A wrapper for an entry of the state whose value differs between ranks: `{"counters":
    raycheck.PerRank(counters)}`.

    value: an object with state_dict/load_state_dict, a random generator, or plain data (numbers, strings, lists, dicts,
    tensors). A restore fills containers and tensors in place if it can, and replaces other values: read it from
    `.value`.
    """

    def __init__(self, value: Any) -> None:
        self.value = value

    @property
    def owner(self) -> Any:
        """Return an object with state_dict and load_state_dict for `value`; None for plain data."""
        if is_generator(self.value):
            return GeneratorState(self.value)
        return self.value if has_state_dict(self.value) else None


class PerRankEntry(StateEntry):
    """An entry that saves tensors into this rank's shard, named by rank, and values into its section of the index.

    The value is wrapped in a list there: it may be None, and no other kind of entry with per-rank values saves a list.
    """

    is_per_rank = True

    def __init__(self, name: str, wrapped: PerRank, *, rank: int) -> None:
        super().__init__(name)
        self._wrapped = wrapped
        self._name_on_rank = f"{name}.rank{rank}"

    def tree(self) -> dict[str, Any]:
        return {}

    def values(self, tree: dict[str, Any], tensors: Named) -> Any:
        del tree
        values = [self.encode(self._state(), self._name_on_rank, tensors)]
        for name, tensor in tensors.items():
            if isinstance(tensor, DTensor):
                raise ConfigError(f"state at {name} is a DTensor, which is one tensor of all ranks; use its to_local()")
        return values

    def match(self, saved: SavedEntry) -> Named:
        if saved.values is None:
            (saved.fresh if saved.rank_values else saved.missing).append(self._name_on_rank)
            return {}
        names: list[str] = []
        (value,) = self.compared(saved, saved.values, names.append)
        self.check_by_object(self._wrapped.owner, saved, value)
        return {name: empty_for(saved.tensors[name]) for name in names}

    def load(self, saved: SavedEntry, tensors: Named) -> None:
        if saved.values is None:
            return
        (value,) = self.decoded(saved.values, tensors.__getitem__)
        obj = self._wrapped.owner
        if obj is not None:
            with calling(self.name, "load_state_dict"):
                obj.load_state_dict(value)
        else:
            self._wrapped.value = filled(self._wrapped.value, value)

    def _state(self) -> Any:
        if isinstance(self._wrapped.value, torch.nn.Module):
            raise ConfigError(f"state[{self.name!r}] is PerRank of a module; put modules into the state directly")
        obj = self._wrapped.owner
        if obj is None:
            return self._wrapped.value
        with calling(self.name, "state_dict"):
            state = obj.state_dict()
        if isinstance(state, dict) and not state:
            refuse_unsaved(self.name, obj)
        return state


class LoaderEntry(PerRankEntry):
    """An entry for each rank's position in a loader that has state_dict and load_state_dict."""

    def __init__(self, name: str, loader: Any, *, rank: int, world_size: int) -> None:
        super().__init__(name, PerRank(loader), rank=rank)
        self._loader = loader
        self._world_size = world_size

    def match(self, saved: SavedEntry) -> Named:
        if saved.rank_values and len(saved.rank_values) != self._world_size:
            saved.mismatched.append(
                f"{self.name}: the positions of {len(saved.rank_values)} loaders were saved, one per rank, and there "
                f"are {self._world_size} ranks now. restore(skip=[{self.name!r}]) starts the loaders over; "
                "raycheck.Batches resumes at any world size"
            )
            return {}
        return super().match(saved)

    def load(self, saved: SavedEntry, tensors: Named) -> None:
        begun: Any = getattr(self._loader, "_iterator", None)
        super().load(saved, tensors)
        if saved.values is not None and begun is not None:
            # The loader has dropped this iterator. A script that still uses it would continue from the old position,
            # while the next save would store the position of the loader, which nothing iterates.
            begun._next_data = partial(_refuse_old_iterator, self.name)  # noqa: SLF001  torch's iterators call it for each batch


class MergedEntry(PerRankEntry):
    """An entry that saves each rank's share of an object, and restores the shares of all ranks to the object on every
    rank.

    The object has `state_dict`, which returns this rank's share; `load_rank_states`, which gets the shares of all ranks
    that saved; and `check_rank_states`, which raises StateMismatchError if they do not fit, and changes nothing. It may
    have `random_rank`, which gets the same, without tensors, and returns the number of the rank whose random state this
    rank takes; a number that no rank had means a new state.
    """

    def __init__(self, name: str, obj: Any, *, rank: int) -> None:
        super().__init__(name, PerRank(obj), rank=rank)
        self._obj = obj

    def match(self, saved: SavedEntry) -> Named:
        saved.unused.clear()  # no rank's share is left out
        if not saved.rank_values:
            saved.missing.append(self.name)
            return {}
        names: list[str] = []
        states = [self.compared(saved, tree, names.append)[0] for tree in saved.rank_values]
        try:
            with calling(self.name, "check_rank_states"):
                self._obj.check_rank_states(states)
        except StateMismatchError as error:
            saved.mismatched.append(f"{self.name}: {error}")
        return {name: empty_for(saved.tensors[name]) for name in names}

    def random_rank(self, states: Sequence[Any]) -> int | None:
        choose = getattr(self._obj, "random_rank", None)
        if choose is None or not states or not all(isinstance(tree, list) for tree in states):
            return None
        with calling(self.name, "random_rank"):
            number: int = choose([decode(tree, lambda _name: None)[0] for tree in states])
        return number

    def load(self, saved: SavedEntry, tensors: Named) -> None:
        if saved.rank_values:
            states = [self.decoded(tree, tensors.__getitem__)[0] for tree in saved.rank_values]
            with calling(self.name, "load_rank_states"):
                self._obj.load_rank_states(states)


def is_merged(value: object) -> bool:
    """Return whether a restore gives this object the states of all ranks: its attribute `merges_ranks`."""
    return getattr(value, "merges_ranks", False) is True


def _refuse_old_iterator(name: str) -> NoReturn:
    raise ConfigError(
        f"state[{name!r}]: this iterator was started before restore(), so its batches are not the next ones. "
        "Iterate the loader after restore(): `for batch in loader`, or iter(loader)"
    )


def is_loader(name: str, value: object) -> bool:
    """Return whether `value` delivers data and reports its position. Raises ConfigError if it only delivers data."""
    is_ray = any(base.__module__.startswith("ray.data.") for base in type(value).__mro__)
    if not isinstance(value, DataLoader) and not is_ray:
        return False
    if has_state_dict(value):
        return True
    advice = (
        "raycheck.Batches(dataset, global_batch=..., seed=...) and its loader(epoch) can, for every world size, and "
        "torchdata's StatefulDataLoader can for the same one"
    )
    if is_ray:
        advice = 'raycheck.RayData("train", id=...) in place of get_dataset_shard can'
    raise ConfigError(f"state[{name!r}] is a {type(value).__qualname__}, which cannot report its position; {advice}")


class RankZero:
    """A wrapper for an object with state_dict and load_state_dict, or a dict of plain values, that only rank 0 uses.

    It is given as `{"log": raycheck.RankZero(log)}`. Its values may differ from those of the other ranks, as the times
    in a log do. Other ranks that need them read them from `Checkpointer.peek().values`.
    """

    def __init__(self, obj: Any) -> None:
        self.obj = obj


def inside(value: Any) -> Any:
    """Return what PerRank or RankZero wraps; any other value unchanged."""
    return value.value if isinstance(value, PerRank) else value.obj if isinstance(value, RankZero) else value


class RankZeroEntry(ObjectEntry):
    """An entry that saves and restores the wrapped object on rank 0, and nothing on the other ranks."""

    compares_values = False

    def __init__(self, name: str, wrapped: RankZero, *, rank: int) -> None:
        obj = InPlace(wrapped.obj) if type(wrapped.obj) is dict else wrapped.obj
        if not has_state_dict(obj):
            raise ConfigError(
                f"state[{name!r}] is RankZero of a {type(obj).__qualname__} without state_dict and load_state_dict. "
                "Plain values go into a dict: raycheck.RankZero({...})"
            )
        super().__init__(name, obj)
        self._is_mine = rank == 0

    def tree(self) -> dict[str, Any]:
        return super().tree() if self._is_mine else {}

    def match(self, saved: SavedEntry) -> Named:
        if saved.values is None:
            saved.fresh.append(f"{self.name} (not in this checkpoint)")
            return {}
        if not self._is_mine:
            return {}
        names: list[str] = []
        self.compared(saved, saved.values, names.append)
        if saved.tensors.keys() - names and not self._fits_module(saved):
            saved.mismatched.append(f"{self.name}: RankZero of an object here, another module or an optimizer saved")
            return {}
        return {name: empty_for(tensor) for name, tensor in saved.tensors.items()}

    def load(self, saved: SavedEntry, tensors: Named) -> None:
        if self._is_mine and saved.tensors and self._fits_module(saved):
            self._obj.load_state_dict({name.removeprefix(f"{self.name}."): tensors[name] for name in tensors})
        elif self._is_mine:
            super().load(saved, tensors)

    def _fits_module(self, saved: SavedEntry) -> bool:
        """Return whether a module with the same tensors was saved under this name, before RankZero wrapped it."""
        is_module = isinstance(saved.values, dict) and saved.values.keys() >= VALUE_KEYS
        if not is_module or any(saved.values.get(key) for key in (*VALUE_KEYS, MERGED)):
            return False
        return {f"{self.name}.{key}" for key in self._obj.state_dict()} == saved.tensors.keys()
