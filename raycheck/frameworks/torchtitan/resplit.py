"""Divides the rest of an epoch among another number of data-parallel ranks, each sample once.

torchtitan gives each data-parallel rank one contiguous part of a text dataset, and from the second epoch on each rank
shuffles its part. Here the unread rests of these parts are concatenated and divided again. A `base` describes the state
at that moment: the number of ranks, their positions, and the base that their own parts came from. It is valid until the
epoch ends; after that every rank has a plain part again.
"""

from collections.abc import Mapping, Sequence
from typing import Any, cast

from datasets import Dataset, concatenate_datasets
from datasets.distributed import split_dataset_by_node
from torchtitan.hf_datasets.text_datasets import DATASETS, HuggingFaceTextDataset

from raycheck.errors import StateMismatchError


class Resplit:
    """Control over which samples a torchtitan text dataset reads in its current epoch.

    loader: the data loader that reads the dataset. config: the loader's Config, which names the dataset.
    """

    def __init__(self, loader: Any, config: Any) -> None:
        self._loader = loader
        self._config = config
        self._base: dict[str, Any] | None = None
        self._load: Any = None

    @property
    def refusal(self) -> str | None:
        """Return why the data cannot be divided again, or None if it can."""
        dataset = self._loader.dataset
        if type(dataset) is not HuggingFaceTextDataset or self._config is None:
            return f"{type(dataset).__qualname__} does not report which samples are left; HuggingFaceTextDataset does"
        if not isinstance(dataset._original_data, Dataset):
            return "a streamed dataset cannot seek to a sample; load it without streaming=True"
        if self._loader.num_workers:
            return f"num_workers={self._loader.num_workers} loader processes keep separate positions; set 0"
        return None

    @property
    def base(self) -> dict[str, Any] | None:
        """Return the base of this epoch's parts, or None for torchtitan's own parts."""
        is_over = self._base is not None and self._loader.dataset._epoch != self._base["epoch"]
        return None if is_over else self._base

    def use(self, base: Mapping[str, Any] | None) -> None:
        """Make the dataset read this rank's part of the samples that `base` leaves."""
        if base is None:
            return
        self._base = dict(base)
        dataset = self._loader.dataset
        part = self._part(self._base)
        dataset._data = part
        load = dataset.load_state_dict

        def load_and_keep_part(state: dict[str, Any]) -> None:
            load(state)  # from the second epoch on, it sets its own part
            dataset._data = part

        dataset.load_state_dict = load_and_keep_part

    def check(self, saved: Sequence[Mapping[str, Any]]) -> None:
        """Raise StateMismatchError when the unread samples of these ranks cannot be divided again; changes nothing."""
        epochs = {int(_dataset_state(own["state"])["epoch"]) for own in saved}
        if len(epochs) != 1:
            raise StateMismatchError(
                f"the data-parallel ranks were in epochs {sorted(epochs)} of their parts of the data, so the unread "
                "samples belong to several epochs; resume with as many ranks as saved this, or restore another step"
            )

    def share(self, saved: Sequence[Mapping[str, Any]]) -> None:
        """Resume from the positions of other ranks. saved: their positions, by data-parallel rank."""
        states = [_dataset_state(own["state"]) for own in saved]
        base = {
            "dp_size": len(states),
            "epoch": int(states[0]["epoch"]),
            "positions": [int(state["sample_idx"]) for state in states],
            "base": saved[0]["base"],
        }
        dataset, me, size = self._loader.dataset, self._loader.dp_rank, self._loader.dp_world_size
        dataset._epoch = base["epoch"]
        dataset._sample_idx = 0
        mine = states[me::size]  # tokens that were read but do not fill a sequence yet
        dataset._inputs_buffer = [token for state in mine for token in state["inputs_buffer"]]
        dataset._labels_buffer = [token for state in mine for token in state["labels_buffer"]]
        dataset._positions_buffer = [at for state in mine for at in _from_zero(state["positions_buffer"])]
        self.use(base)

    def _part(self, base: Mapping[str, Any]) -> Dataset:
        """Return this rank's part of the samples that `base` leaves."""
        return cast(
            "Dataset", split_dataset_by_node(self._left(base), self._loader.dp_rank, self._loader.dp_world_size)
        )

    def _left(self, base: Mapping[str, Any]) -> Dataset:
        """Return the samples that the ranks of `base` have not read, in their order."""
        size, epoch = int(base["dp_size"]), int(base["epoch"])
        if base["base"] is not None:
            source = self._left(base["base"])
            parts = [split_dataset_by_node(source, rank, size) for rank in range(size)]
        else:
            known = DATASETS[self._config.dataset.lower()]
            source = known.loader(self._config.dataset_path or known.path)
            parts = [split_dataset_by_node(source, rank, size) for rank in range(size)]
            if epoch:
                parts = [part.shuffle(seed=42 + epoch) for part in parts]  # as HuggingFaceTextDataset.reloop does
        left = [part.skip(read) for part, read in zip(parts, base["positions"], strict=True)]
        return cast("Dataset", concatenate_datasets(left))


def _from_zero(positions: Sequence[int]) -> list[int]:
    """Return the positions, with those of the first document, which was cut, renumbered from 0."""
    cut = next((number for number, at in enumerate(positions) if at == 0), len(positions))
    return [at - positions[0] if number < cut else at for number, at in enumerate(positions)]


def _dataset_state(state: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the dataset's state from that of a StatefulDataLoader without workers. Raises StateMismatchError."""
    fetcher = state.get("fetcher_state") or {}
    found = fetcher.get("dataset_iter_state") or state.get("dataset_state")
    if not isinstance(found, Mapping) or "sample_idx" not in found:
        raise StateMismatchError("the saved position has no sample number: it was saved with num_workers above 0")
    return found
