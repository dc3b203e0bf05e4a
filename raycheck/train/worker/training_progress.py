"""How far a training is: what a checkpoint keeps as `progress`."""

from collections.abc import Iterable
from dataclasses import replace

from raycheck.bucket.format.progress import Progress
from raycheck.errors import ConfigError
from raycheck.shards.entries.per_rank_entries import PerRank
from raycheck.train.batches import Batches


class ProgressCounter:
    """Counts steps, tokens and episodes; epochs and samples too where no Batches in the state does. decides: else
    somebody says from outside when to save, and is_hurried, that a node is about to go."""

    decides = True
    is_hurried = False

    def __init__(self, entries: Iterable[object]) -> None:
        self.watch(entries)
        self.progress = Progress()

    def watch(self, entries: Iterable[object]) -> None:
        """Count the epochs and samples of the Batches among these. Raises ConfigError for two of them."""
        entries = list(entries)
        self.data = [value for value in entries if isinstance(value, Batches)]
        if len(self.data) > 1:
            raise ConfigError("the state holds two Batches; a run has one position in its data")
        for data in self.data:
            data.leave_to_state(value.value if isinstance(value, PerRank) else value for value in entries)

    @property
    def step(self) -> int:
        return self.progress.step

    def end_step(self, *, tokens: int, episodes: int) -> None:
        """Raises ConfigError for what is no count."""
        for name, count in (("tokens", tokens), ("episodes", episodes)):
            if type(count) is not int or count < 0:
                raise ConfigError(f"end_step({name}={count!r}): give a whole number of at least 0")
        for data in self.data:
            data.end_step()
        at = self.progress
        counts = {"step": at.step + 1, "epoch_step": at.epoch_step + 1}
        self.go_to(replace(at, **counts, tokens=at.tokens + tokens, episodes=at.episodes + episodes))

    def end_epoch(self) -> None:
        for data in self.data:
            data.end_epoch()
        self.go_to(replace(self.progress, epoch=self.progress.epoch + 1, epoch_step=0))

    def start_at(self, progress: Progress) -> None:
        """Training begins here, after a restore or afresh."""
        for data in self.data:
            data.leave_loaders()
        self.go_to(progress)

    def go_to(self, progress: Progress) -> None:
        """Batches know their own place."""
        for data in self.data:
            progress = replace(progress, epoch=data.epoch, epoch_step=data.epoch_step, samples=data.samples)
        self.progress = progress
