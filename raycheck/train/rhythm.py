"""When to save and when to tell Ray: decisions that come out the same on every rank.

Step triggers are arithmetic. Time, preemption and news of commits are rank 0's word, handed to all ranks in one small
broadcast every k steps, with k chosen so that it costs under 1 % of the step time. Whether a save is skipped because
the one before is still under way is its word too, asked for at the trigger itself.
"""

import time
from dataclasses import dataclass

from raycheck.bucket.layout import pointer_prefix
from raycheck.errors import ConfigError
from raycheck.settings import SaveSettings
from raycheck.train import ray_names
from raycheck.train.group import Group
from raycheck.train.log import logger

RAY_REPORT_PAUSE_S = 5.0
"""Two of Ray's reports within 2 s block the training loop."""
COST_SHARE = 0.01
MAX_GAP = 1000
MAX_GAP_S = 5.0
"""A notice may leave 30 s: rank 0 speaks at least this often, as far as steps allow."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Word:
    """Rank 0's word: save now or not, which commit to tell Ray of, and after how many steps it speaks again.

    step: where rank 0 stands, None at the end of its loop.
    """

    step: int | None
    save: bool
    news: str | None
    gap: int


def is_multiple(step: int, every: int | None) -> bool:
    return every is not None and step % every == 0


class Rhythm:
    """One rank's sense of time. Every rank calls its methods at the same steps."""

    def __init__(self, settings: SaveSettings, group: Group) -> None:
        if settings.every_seconds is not None and group.broadcast is None and group.world_size > 1:
            raise ConfigError("SaveSettings(every_seconds=...) needs Group(broadcast=...): ranks must decide alike")
        if settings.when_busy == "skip" and group.broadcast is None and group.world_size > 1:
            raise ConfigError('SaveSettings(when_busy="skip") needs Group(broadcast=...): ranks must decide alike')
        self._settings = settings
        self._group = group
        self._saved_at = time.monotonic()
        self._save_s = 0.0
        self._news: str | None = None
        self._told: str | None = None
        self._told_at = float("-inf")
        self._notice: float | None = None
        self._word = _Word(step=None, save=False, news=None, gap=1)
        self._next_sync = 1
        self._synced_at = (0, time.monotonic())
        self._broadcast_s = 1.0

    def start_at(self, step: int) -> None:
        self._next_sync = step + 1
        self._synced_at = (step, time.monotonic())

    def is_due(self, step: int, *, is_busy: bool = False) -> bool:
        """Whether this step's end is a moment to save. is_busy: a save of this rank is under way; rank 0's counts."""
        self._word = _Word(step=None, save=False, news=None, gap=1)
        if self._group.broadcast is not None and step >= self._next_sync:
            self._sync(step, is_busy=is_busy)
        settings = self._settings
        is_round = is_multiple(step, settings.every_steps) or is_multiple(step, settings.export_every_steps)
        if not is_round or self._word.save or settings.when_busy == "wait":
            return is_round or self._word.save
        return self._has_room(step, is_busy=is_busy)

    def saved(self) -> None:
        """A save begins."""
        self._saved_at = time.monotonic()

    def wants_news(self) -> bool:
        """Whether Ray can soon be told of a save that begins now, if rank 0 asks."""
        return self._news in (None, self._word.news) and time.monotonic() - self._told_at >= RAY_REPORT_PAUSE_S

    def committed(self, pointed: str | None, *, save_s: float) -> None:
        """A save of this rank was committed, and took so long. pointed: what Ray can be told of by now."""
        self._save_s = save_s
        if pointed != self._told:
            self._news = pointed

    def tell_ray(self) -> None:
        """Report to Ray the commit that rank 0 named at this step, if any. Every rank calls it at every step."""
        if self._word.news is None or not self._group.is_ray_train:
            return
        self._told_at = time.monotonic()
        self._told = self._word.news
        self._news = None
        ray_names.report_pointer(pointer_prefix(self._word.news), {})

    def tell_ray_at_end(self) -> None:
        """The same for the last commit, so that Result.checkpoint is the newest. Every rank calls it once."""
        if self._group.is_ray_train and self._group.broadcast is not None:
            self._word = self._hear(_Word(step=None, save=False, news=self._news, gap=1), step=None)
            self.tell_ray()

    def _has_room(self, step: int, *, is_busy: bool) -> bool:
        """Rank 0's word at a step trigger. Its save ends when all ranks have reported theirs, or one has failed."""
        if self._group.world_size > 1:
            word = None if self._group.rank else _Word(step=step, save=not is_busy, news=None, gap=1)
            is_busy = not self._hear(word, step=step).save
        if is_busy and self._group.rank == 0:
            logger.warning("run %s: step %d is not saved: the save before it is still under way", self._group.uri, step)
        return not is_busy

    def _sync(self, step: int, *, is_busy: bool) -> None:
        began = time.monotonic()
        leaving = ray_names.preemption_deadline() if self._group.is_ray_train else None
        word: _Word | None = None
        if self._group.rank == 0:
            save = self._is_time(leaving, is_busy=is_busy)
            word = _Word(step=step, save=save, news=self._fresh_news(began), gap=self._gap(step, began))
        self._word = self._hear(word, step=step)
        # The least seen: the rest is waiting for slower ranks, which talking less would not save.
        self._broadcast_s = min(self._broadcast_s, time.monotonic() - began)
        self._next_sync = step + self._word.gap

    def _hear(self, word: _Word | None, *, step: int | None) -> _Word:
        """Rank 0's word, on every rank. Raises ConfigError when the ranks are not at the same point."""
        assert self._group.broadcast is not None, "the callers have checked"
        heard: _Word = self._group.broadcast(word)
        if heard.step != step:
            names = [f"step {at}" if at is not None else "the end of its loop" for at in (step, heard.step)]
            raise ConfigError(
                f"rank {self._group.rank} is at {names[0]} while rank 0 is at {names[1]}: "
                "every rank must take the same number of steps"
            )
        return heard

    def _is_time(self, leaving: float | None, *, is_busy: bool) -> bool:
        now = time.monotonic()
        if leaving is not None and leaving != self._notice:
            # A save that cannot end before the node goes would only cost steps; the one in flight goes on.
            self._notice = leaving
            return time.time() + 1.5 * self._save_s < leaving
        if is_busy and self._settings.when_busy == "skip":
            return False
        every = self._settings.every_seconds
        return every is not None and now - self._saved_at >= every

    def _fresh_news(self, now: float) -> str | None:
        return self._news if now - self._told_at >= RAY_REPORT_PAUSE_S else None

    def _gap(self, step: int, now: float) -> int:
        steps, seconds = step - self._synced_at[0], now - self._synced_at[1]
        self._synced_at = (step, now)
        if self._group.world_size == 1 or seconds <= 0 or steps <= 0:
            return 1
        cheap = self._broadcast_s * steps / (COST_SHARE * seconds)
        return max(1, min(MAX_GAP, round(cheap), round(MAX_GAP_S * steps / seconds)))
