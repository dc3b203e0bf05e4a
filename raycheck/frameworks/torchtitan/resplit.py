"""Shares what is left of an epoch among another number of data-parallel ranks, each sample once.

torchtitan gives each data-parallel rank one contiguous part of a text dataset, which it shuffles by itself from the
second epoch on. What the ranks have not read of their parts is put one after the other, and cut anew. A `base` says
where they were: the number of ranks, their positions, and the base that their own parts came from. It holds until the
epoch ends; then every rank has a plain part again.
"""

from collections.abc import Mapping, Sequence
from typing import Any, cast

from datasets import Dataset, concatenate_datasets
from datasets.distributed import split_dataset_by_node
from torchtitan.hf_datasets.text_datasets import DATASETS, HuggingFaceTextDataset

from raycheck.errors import StateMismatchError


class Resplit:
    """Changes which samples a torchtitan text dataset reads in its current epoch.

    loader: the data loader whose dataset it is. config: the loader's Config, which names the dataset.
    """

    def __init__(self, loader: Any, config: Any) -> None:
        self._loader = loader
        self._config = config
        self._base: dict[str, Any] | None = None
        self._load: Any = None

    @property
    def refusal(self) -> str | None:
        """Returns why the data cannot be shared anew; None if it can."""
        dataset = self._loader.dataset
        if type(dataset) is not HuggingFaceTextDataset or self._config is None:
            return f"{type(dataset).__qualname__} does not say which samples are left; HuggingFaceTextDataset does"
        if not isinstance(dataset._original_data, Dataset):
            return "a streamed dataset cannot go to a sample; load it without streaming=True"
        if self._loader.num_workers:
            return f"num_workers={self._loader.num_workers} loader processes have positions of their own; set 0"
        return None

    @property
    def base(self) -> dict[str, Any] | None:
        """Returns where the parts of this epoch come from; None for torchtitan's own parts."""
        is_over = self._base is not None and self._loader.dataset._epoch != self._base["epoch"]
        return None if is_over else self._base

    def use(self, base: Mapping[str, Any] | None) -> None:
        """Let the dataset read this rank's part of what `base` leaves."""
        if base is None:
            return
        self._base = dict(base)
        dataset = self._loader.dataset
        part = self._part(self._base)
        dataset._data = part
        load = dataset.load_state_dict

        def load_and_keep_part(state: dict[str, Any]) -> None:
            load(state)  # from the second epoch on it sets its own part
            dataset._data = part

        dataset.load_state_dict = load_and_keep_part

    def check(self, saved: Sequence[Mapping[str, Any]]) -> None:
        """Raises StateMismatchError when what these ranks left cannot be shared anew; changes nothing."""
        epochs = {int(_dataset_state(own["state"])["epoch"]) for own in saved}
        if len(epochs) != 1:
            raise StateMismatchError(
                f"the data-parallel ranks were in epochs {sorted(epochs)} of their parts of the data, so that what is "
                "left belongs to several epochs; go on with as many ranks as saved this, or restore another step"
            )

    def share(self, saved: Sequence[Mapping[str, Any]]) -> None:
        """Go on where other ranks were. saved: their positions, by data-parallel rank."""
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
        mine = states[me::size]  # tokens that were read and do not fill a sequence yet
        dataset._inputs_buffer = [token for state in mine for token in state["inputs_buffer"]]
        dataset._labels_buffer = [token for state in mine for token in state["labels_buffer"]]
        dataset._positions_buffer = [at for state in mine for at in _from_zero(state["positions_buffer"])]
        self.use(base)

    def _part(self, base: Mapping[str, Any]) -> Dataset:
        """Returns this rank's part of what `base` leaves."""
        return cast(
            "Dataset", split_dataset_by_node(self._left(base), self._loader.dp_rank, self._loader.dp_world_size)
        )

    def _left(self, base: Mapping[str, Any]) -> Dataset:
        """Returns the samples that the ranks of `base` have not read, in their order."""
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
    """Returns the positions with those of the first document, which was cut, counted from 0."""
    cut = next((number for number, at in enumerate(positions) if at == 0), len(positions))
    return [at - positions[0] if number < cut else at for number, at in enumerate(positions)]


def _dataset_state(state: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns the dataset's own state in that of a StatefulDataLoader without workers. Raises StateMismatchError."""
    fetcher = state.get("fetcher_state") or {}
    found = fetcher.get("dataset_iter_state") or state.get("dataset_state")
    if not isinstance(found, Mapping) or "sample_idx" not in found:
        raise StateMismatchError("the saved position has no sample number: it was saved with loader processes")
    return found
