"""Foreign loaders that can say where they stand, such as torchdata's StatefulDataLoader: each rank has a position.

For another number of ranks these would mean other samples, so that is refused; raycheck.Batches has one position for
all of them.
"""

from functools import partial
from typing import Any, NoReturn

from torch.utils.data import DataLoader

from raycheck.errors import ConfigError
from raycheck.shards.entries.per_rank_entry import PerRank, PerRankEntry
from raycheck.shards.entries.state_entry import Named, SavedEntry


class LoaderEntry(PerRankEntry):
    """A loader with state_dict/load_state_dict."""

    def __init__(self, name: str, loader: Any, *, rank: int, world_size: int) -> None:
        super().__init__(name, PerRank(loader), rank=rank)
        self._loader = loader
        self._world_size = world_size

    def prepare(self, saved: SavedEntry) -> Named:
        if saved.apart and len(saved.apart) != self._world_size:
            saved.mismatched.append(
                f"{self.name}: the positions of {len(saved.apart)} loaders, one per rank, and there are "
                f"{self._world_size} ranks now. restore(skip=[{self.name!r}]) starts the loaders anew; "
                "raycheck.Batches goes on at any world size"
            )
            return {}
        return super().prepare(saved)

    def finish(self, saved: SavedEntry, tensors: Named) -> None:
        begun: Any = getattr(self._loader, "_iterator", None)
        super().finish(saved, tensors)
        if saved.values is not None and begun is not None:
            # The loader has let go of it, and a script that has not would train on at the old position: the next save
            # would take that of the loader, which nobody iterates.
            begun._next_data = partial(_refuse, self.name)  # noqa: SLF001  what torch's iterators ask for each batch


def _refuse(name: str) -> NoReturn:
    raise ConfigError(
        f"state[{name!r}]: this iterator was begun before restore(), so its batches are not those that come next. "
        "Iterate the loader after restore(): `for batch in loader`, or iter(loader)"
    )


def is_loader(name: str, value: object) -> bool:
    """Whether it delivers data and can say where it stands. Raises ConfigError for what does the first alone."""
    is_ray = any(base.__module__.startswith("ray.data.") for base in type(value).__mro__)
    if not isinstance(value, DataLoader) and not is_ray:
        return False
    if callable(getattr(value, "state_dict", None)) and callable(getattr(value, "load_state_dict", None)):
        return True
    advice = (
        "raycheck.Batches(dataset, global_batch=..., seed=...) and its loader(epoch) can, for every world size, and "
        "torchdata's StatefulDataLoader can for the same one"
    )
    if is_ray:
        advice += ". Without it in the state, an epoch that was cut off is begun anew"
    raise ConfigError(f"state[{name!r}] is a {type(value).__qualname__}, which cannot say where it stands; {advice}")
