"""Reads a checkpoint before anything is restored: the progress of training, its entries, and values without tensors.

Frameworks need the step before the optimizer, the schedule and the loaders exist that a restore would fill.
"""

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from raycheck.bucket.format.class_values import loaded
from raycheck.bucket.format.index import Index
from raycheck.bucket.format.progress import Progress
from raycheck.bucket.format.values import decode
from raycheck.bucket.reading import Checkpoint
from raycheck.errors import ConfigError
from raycheck.state.entries.module import module_entry
from raycheck.state.entries.optimizer import optimizer_entry
from raycheck.state.entries.saved_entry import HELD
from raycheck.state.entries.state_entry import ASSETS, OWN_ENTRIES
from raycheck.state.restore_matching import corrupt_if_odd
from raycheck.state.restore_selection import EVERYTHING, Selection


class SavedValues(Mapping[str, Any]):
    """The saved values of entries without tensors, by entry. Each access decodes a new copy.

    A value whose class this process has not loaded becomes a plain structure: an enum's value, a dict, a tuple.
    """

    def __init__(self, trees: Mapping[str, Any]) -> None:
        self._trees = dict(trees)

    def __getitem__(self, name: str) -> Any:
        tree = self._trees[name]
        is_bare = isinstance(tree, dict) and HELD in tree
        return decode(tree[HELD] if is_bare else tree, _no_tensor, loaded)

    def __iter__(self) -> Iterator[str]:
        return iter(self._trees)

    def __len__(self) -> int:
        return len(self._trees)

    def __repr__(self) -> str:
        return f"SavedValues({dict(self)!r})"


@dataclass(frozen=True, kw_only=True, slots=True)
class Preview:
    """The checkpoint that the next `restore` will find; all counts are zero in a run without one.

    step, epoch, epoch_step, samples, tokens, episodes: where training will resume, as `restore` will report.
    checkpoint: its name, None in a run without one. attempt: this life of the worker group. saved_world_size: the
    number of ranks that wrote it. entries: names of all its entries, except "rng" and "progress". shapes: the shape of
    every saved tensor, by its name ("model.head.weight"). metrics: those saved with it. values: the saved values of
    entries without tensors, by entry: a plain dict, a scheduler's state_dict. rank_values: those of PerRank entries
    without tensors, by entry, of each rank that saved. refused: newer checkpoints that are damaged, each with the
    proof. selection: the entries that the restore will include. partial: see Manifest.
    """

    step: int = 0
    epoch: int = 0
    epoch_step: int = 0
    samples: int = 0
    tokens: int = 0
    episodes: int = 0
    checkpoint: str | None = None
    attempt: int
    saved_world_size: int = 0
    entries: tuple[str, ...] = ()
    shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    metrics: Mapping[str, float] = field(default_factory=dict)
    values: Mapping[str, Any] = field(default_factory=lambda: SavedValues({}))
    rank_values: tuple[Mapping[str, Any], ...] = ()
    refused: tuple[str, ...] = ()
    selection: Selection = EVERYTHING
    partial: tuple[str, ...] = ()

    @property
    def is_fresh(self) -> bool:
        """Return whether there is no checkpoint to restore."""
        return self.checkpoint is None

    @classmethod
    def of(
        cls, checkpoint: Checkpoint, selection: Selection, *, attempt: int, rank: int, refused: tuple[str, ...]
    ) -> "Preview":
        """Read a checkpoint for this rank. Raises DamagedError, CorruptError, or NotFoundError if it is evicted."""
        manifest = checkpoint.read_manifest()
        index = checkpoint.read_index(manifest)
        with corrupt_if_odd(checkpoint.entry.key):
            progress = Progress.of(index.values["progress"])
            trees = _trees(index, rank)
            per_rank = tuple(SavedValues(_own_trees(values)) for values in index.rank_values)
            names = {*index.values, *(name for values in index.rank_values for name in values)}
        here = cls(
            checkpoint=checkpoint.entry.key,
            attempt=attempt,
            saved_world_size=manifest.world_size,
            entries=tuple(sorted(names - {ASSETS, *OWN_ENTRIES})),
            shapes={tensor.name: tensor.shape for tensor in index.tensors},
            metrics=dict(manifest.metrics),
            values=SavedValues(trees),
            rank_values=per_rank,
            refused=refused,
            selection=selection,
            partial=manifest.partial,
            **asdict(progress),
        )
        return here if here.will_restore("progress") else replace(here, **asdict(Progress()))

    def will_restore(self, name: str) -> bool:
        """Return whether the next `restore` takes the entry `name`, if the checkpoint has it."""
        return not self.is_fresh and self._takes(name, self.selection)

    def _takes(self, name: str, selection: Selection) -> bool:
        """Return whether a restore of this selection includes an entry.

        A selection is applied once: a checkpoint that was saved after it was applied is restored completely.
        """
        return str(selection) in self.partial or selection.takes(name)

    def check(self, selection: Selection) -> None:
        """Raise ConfigError if a restore of `selection` would start at another step than this preview shows."""
        if not self.is_fresh and self._takes("progress", selection) != self.will_restore("progress"):
            raise ConfigError(
                f"peek() returned step {self.step}, but this restore() would start at another step: only one of "
                'them includes "progress". Pass the same only and skip to both'
            )


def _own_trees(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the trees of one rank's PerRank entries, each of which is wrapped in a list."""
    return {name: tree[0] for name, tree in values.items() if isinstance(tree, list) and len(tree) == 1}


def saved_values(index: Index) -> Mapping[str, Any]:
    """Return the saved values of entries without tensors, by entry; rank 0's if ranks have their own."""
    return SavedValues(_trees(index, 0))


def _trees(index: Index, rank: int) -> dict[str, Any]:
    """Return the saved trees of entries without tensors: this rank's own if there are any, otherwise the first rank's.

    Modules and optimizers are left out, since their values are in raycheck's own format. A checkpoint does not record
    what kind of object an entry was, so they are recognized by the keys that they always have.
    """
    own = index.rank_values[rank] if rank < len(index.rank_values) else {}
    trees = {**index.values, **{name: tree[0] if isinstance(tree, list) else tree for name, tree in own.items()}}
    own_keys = module_entry.VALUE_KEYS, optimizer_entry.VALUE_KEYS
    with_tensors = {prefix for tensor in index.tensors for prefix in _prefixes(tensor.name)}
    return {
        name: tree
        for name, tree in trees.items()
        if name not in {ASSETS, *OWN_ENTRIES, *with_tensors}
        and not (isinstance(tree, dict) and any(tree.keys() >= keys for keys in own_keys))
    }


def _prefixes(name: str) -> Iterator[str]:
    """Return the name of a tensor and of everything that may contain it: for "a.b.c" also "a.b" and "a"."""
    while name:
        yield name
        name = name.rpartition(".")[0]


def _no_tensor(name: str) -> object:
    raise KeyError(name)
