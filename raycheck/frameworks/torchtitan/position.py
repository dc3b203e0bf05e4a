"""Saves the position in torchtitan's data loader, which differs on each data-parallel rank.

torchtitan pickles the position and refuses another number of data-parallel ranks. Here it is saved as plain values,
because no pickle is ever loaded from a bucket. At another number of ranks, the rest of the epoch is divided among them
(resplit.py).
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torchdata.stateful_dataloader import StatefulDataLoader

from raycheck.adapters import DataStream
from raycheck.errors import ConfigError, StateMismatchError
from raycheck.frameworks.torchtitan.resplit import Resplit

ENTRY = "dataloader"
CURE = (
    f'exclude_from_loading=["{ENTRY}"] restarts the data from its beginning and restores everything else; or keep '
    "data_parallel_replicate_degree x data_parallel_shard_degree"
)


class LoaderPosition:
    """This rank's position in the loader, as an entry that differs from rank to rank.

    loader: a ParallelAwareDataloader. resplit: divides data among another number of ranks. Raises ConfigError for a
    loader that cannot report its position.
    """

    def __init__(self, loader: Any, resplit: Resplit) -> None:
        if not isinstance(loader, StatefulDataLoader) or not hasattr(loader, "dp_rank"):
            raise ConfigError(
                f"raycheck.torchtitan: the data loader is a {type(loader).__qualname__}, which is not a "
                "ParallelAwareDataloader, so its position cannot be saved; derive it from that class"
            )
        self.loader: Any = loader
        self._resplit = resplit
        self._saved: Sequence[Mapping[str, Any]] = ()

    def state_dict(self) -> dict[str, Any]:
        return {
            "dp_rank": self.loader.dp_rank,
            "dp_size": self.loader.dp_world_size,
            "state": StatefulDataLoader.state_dict(self.loader),  # torchtitan's own pickles it
            "base": self._resplit.base,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Do nothing: `go` selects the position by data-parallel rank, not by process rank."""

    def check(self, saved: Sequence[Mapping[str, Any]]) -> None:
        """Keep the saved positions for `go`. saved: the values of this entry from each rank that saved.

        Raises StateMismatchError, before anything has changed, when they cannot be used with this number of ranks.
        """
        by_rank = {int(own["dp_rank"]): own for own in saved}
        sizes = {int(own["dp_size"]) for own in saved}
        if sizes != {len(by_rank)} or sorted(by_rank) != list(range(len(by_rank))):
            raise StateMismatchError(
                f"only the positions of data-parallel ranks {sorted(by_rank)} were saved, of {sizes}; {CURE}"
            )
        self._saved = [by_rank[rank] for rank in sorted(by_rank)]
        if len(self._saved) == self.loader.dp_world_size:
            return
        if why_not := self._resplit.refusal:
            raise StateMismatchError(
                f"the data was read by {sizes.pop()} data-parallel ranks and there are {self.loader.dp_world_size}, "
                f"and the rest of it cannot be divided among them: {why_not}. {CURE}"
            )
        self._resplit.check(self._saved)

    def go(self) -> None:
        """Move the loader to the positions that `check` accepted."""
        loader = self.loader
        if len(self._saved) == loader.dp_world_size:
            mine = self._saved[loader.dp_rank]
            self._resplit.use(mine["base"])
            StatefulDataLoader.load_state_dict(loader, mine["state"])
        else:
            self._resplit.share(self._saved)
        loader._iterator, loader._initial_iter_for_state_dict = None, False  # created when the state was read


class Steps(DataStream):
    """A stream that counts steps in one endless epoch, and restores random state when the loader is iterated.

    samples_per_step: sequences in one optimizer step, over all ranks.
    """

    def __init__(self, loader: Any, samples_per_step: int) -> None:
        self._loader = loader
        self._samples_per_step = samples_per_step
        self._steps = 0

    @property
    def epoch(self) -> int:
        return 0

    @property
    def epoch_step(self) -> int:
        return self._steps

    @property
    def samples(self) -> int:
        return self._steps * self._samples_per_step

    def end_step(self) -> None:
        self._steps += 1

    def end_epoch(self) -> None:
        """Do nothing: torchtitan restarts its data automatically and counts steps only."""

    def end_loaders(self) -> None:
        """Do nothing: the trainer iterates its loader only after the restore."""

    def before_first_batch(self, call: Callable[[], object]) -> None:
        if not self._steps:
            return
        loader: Any = self._loader
        begin = loader._get_iterator  # called by StatefulDataLoader's __iter__; draws a seed

        def begin_and_put_back() -> Any:
            del loader._get_iterator
            iterator = begin()
            call()
            return iterator

        loader._get_iterator = begin_and_put_back

    def state_dict(self) -> dict[str, Any]:
        return {"steps": self._steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._steps = int(state["steps"])
