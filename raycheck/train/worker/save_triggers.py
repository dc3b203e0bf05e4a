"""When to save and when to tell Ray: decisions that come out the same on every rank.

Step triggers are arithmetic. Time, preemption and news of commits are rank 0's word, handed to all ranks in one small
broadcast every k steps, with k chosen so that it costs under 1 % of the step time; k is 1 where the user's own function
is asked. Whether a save is skipped because the one before is still under way is its word too, asked for at the trigger
itself.
"""

import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, get_args

from raycheck.bucket.format.object_keys import CheckpointName, pointer_prefix
from raycheck.bucket.format.progress import Progress
from raycheck.errors import ConfigError
from raycheck.settings import SaveSettings, function_name
from raycheck.train.group import Group, same
from raycheck.train.log import logger, name_of
from raycheck.train.ray_api import train_context
from raycheck.train.worker import ray_reports
from raycheck.train.worker.preemption import Preemption
from raycheck.train.worker.ray_reports import UnreportedCommit
from raycheck.train.worker.young_daly import Interval

COST_SHARE = 0.01
MAX_GAP = 1000
MAX_GAP_S = 5.0
"""A notice may leave 30 s: rank 0 speaks at least this often, as far as steps allow."""
LEAVING_GAP_S = 0.5
"""The same once there is a notice."""


SaveKind = Literal["roll", "keep", "export"]
"""A rolling save, one that retention keeps by its rules, or one that is exported too. Each is also all before it."""


def strongest(*dues: SaveKind | None) -> SaveKind | None:
    """None where there is nothing to save."""
    return max((due for due in dues if due), key=get_args(SaveKind).index, default=None)


def due_of(settings: SaveSettings, *, is_rolling: bool, export: bool) -> SaveKind:
    """What a user asks for. Raises ConfigError for an export without a word on how."""
    if export and settings.exports is None:
        raise ConfigError("save(export=True) needs SaveSettings(exports=ExportSettings(...))")
    return "export" if export else "roll" if is_rolling else "keep"


@dataclass(frozen=True, kw_only=True, slots=True)
class _Decision:
    """Rank 0's word: save now or not, which commit to tell Ray of, and after how many steps it speaks again.

    step: where rank 0 stands, None at the end of its loop. clock_s: how long it has trained in this attempt. validate:
    see News, whose metrics only rank 0 has: a broadcast of Ray's carries 1 kB. is_noticed: a node is about to go.
    leave: end the attempt once what is under way is saved. problem: why the run ends here on all ranks.
    """

    step: int | None
    clock_s: float = 0.0
    save: SaveKind | None = None
    news: str | None = None
    validate: bool = False
    gap: int = 1
    is_noticed: bool = False
    leave: bool = False
    problem: str = ""


def _is_over(passed: float, every: float | None) -> bool:
    return every is not None and passed >= every


def _is_newer(key: str, other: str) -> bool:
    mine, theirs = CheckpointName.parse(key), CheckpointName.parse(other)
    return mine is not None and (theirs is None or theirs < mine)


def is_multiple(step: int, every: int | None) -> bool:
    return every is not None and step % every == 0


class SaveTriggers:
    """One rank's sense of time. Every rank calls its methods at the same steps. is_preempted: a node is about to go, so
    that training should wait for nothing but a save. clock_s: rank 0's, as all ranks heard it last."""

    def __init__(self, settings: SaveSettings, group: Group) -> None:
        by_word = {
            "every_seconds=...": settings.every_seconds is not None,
            "every_tokens=...": settings.every_tokens is not None,
            "when=...": settings.when is not None,
            "rolling_every_seconds=...": settings.rolling_every_seconds is not None,
            "overhead=...": settings.overhead is not None,
            "exports=ExportSettings(every_seconds=...)": settings.exports
            and settings.exports.every_seconds is not None,
            'when_busy="skip"': settings.when_busy == "skip",
        }
        self._broadcast = same if group.broadcast is None and group.world_size == 1 else group.broadcast
        for name, is_set in by_word.items():
            if is_set and self._broadcast is None:
                raise ConfigError(f"SaveSettings({name}) needs Group(broadcast=...): ranks must decide alike")
        self._settings = settings
        self._at_steps = frozenset(settings.at_steps)
        self._group = group
        self._saved_at = self._rolled_at = self._exported_at = time.monotonic()
        self._started_at, self.clock_s = self._saved_at, 0.0
        self._saved_tokens = self._tokens = self._epoch = 0
        self._save_s = 0.0
        self._news: UnreportedCommit | None = None
        self._named: UnreportedCommit | None = None
        self._to_validate: deque[UnreportedCommit] = deque()
        self._told: str | None = None
        self._told_at = float("-inf")
        self._preemption = Preemption()
        self._interval = Interval(settings.overhead, at_most_s=settings.every_seconds) if settings.overhead else None
        self.skipped = 0
        self._skipped_step = -1
        self.is_preempted = False
        self._is_wanted = False
        self._word = _Decision(step=None)
        self._next_sync = 1
        self._synced_at = (0, time.monotonic())
        self._broadcast_s = 1.0
        self._again_s = 0.0

    def start_at(self, progress: Progress, claims: Sequence[float]) -> None:
        """claims: when the run's attempts began, by the store's clock, this one's last."""
        self._next_sync = progress.step + 1
        self._started_at = time.monotonic()
        self._synced_at = (progress.step, time.monotonic())
        self._saved_tokens = self._tokens = progress.tokens
        self._epoch = progress.epoch
        if self._interval is not None:
            self._interval.start(claims)

    def trained(self, seconds: float, *, is_saving: bool) -> None:
        """A step took so long, beside a save or alone."""
        if self._interval is not None:
            self._interval.step(seconds, is_saving=is_saving)

    @property
    def must_leave(self) -> bool:
        """Whether all ranks are to end this attempt, so that Ray restarts them elsewhere."""
        return self._word.leave

    def decide_at_step(
        self,
        progress: Progress,
        *,
        is_busy: bool = False,
        busy_s: float = 0.0,
        metrics: Mapping[str, object] | None = None,
    ) -> SaveKind | None:
        """Whether this step's end is a moment to save, and as what. is_busy: a save of this rank has to end before;
        busy_s: how long those under way may still take; metrics: of the step. Rank 0's count. Raises ConfigError, on
        all ranks, for what the user's own function raised."""
        self._word = _Decision(step=None)
        step, self._tokens = progress.step, progress.tokens
        if self._broadcast is not None and step >= self._next_sync:
            self._sync(step, is_busy=is_busy, busy_s=busy_s, metrics=metrics or {})
        settings = self._settings
        due = strongest(
            self._epoch_due(progress.epoch),
            "export" if settings.exports and is_multiple(step, settings.exports.every_steps) else None,
            "keep" if is_multiple(step, settings.step_trigger) or step in self._at_steps else None,
            "roll" if is_multiple(step, settings.rolling_every_steps) else None,
        )
        if due is None or self._word.save:
            return strongest(due, self._word.save)
        return due if settings.when_busy == "wait" or self._has_room(step, is_busy=is_busy) else None

    def decide_at_epoch_end(self, progress: Progress, *, is_busy: bool = False) -> SaveKind | None:
        """The same for an epoch's end."""
        due = self._epoch_due(progress.epoch)
        if due is None or self._settings.when_busy == "wait":
            return due
        return due if self._has_room(progress.step, is_busy=is_busy) else None

    def _epoch_due(self, epoch: int) -> SaveKind | None:
        """By the epochs that ended since it was asked last, also when nobody has said so and the data just went on."""
        before, self._epoch = self._epoch, epoch

        def is_over(every: int | None) -> bool:
            return every is not None and epoch // every > before // every

        if self._settings.exports and is_over(self._settings.exports.every_epochs):
            return "export"
        return "keep" if is_over(self._settings.every_epochs) else None

    def save_soon(self) -> None:
        """Rank 0: make its next word one to save by."""
        self._is_wanted = True

    def saved(self, blocked_s: float, progress: Progress, due: SaveKind = "keep", *, began: float) -> None:
        """A save has begun, at that moment of time.monotonic, and blocked training for so long."""
        self._is_wanted = False
        self._rolled_at = began
        if due == "export":
            self._exported_at = self._rolled_at
        if due != "roll":
            self._saved_at, self._saved_tokens = self._rolled_at, progress.tokens
        if self._interval is not None:
            self._interval.saved(blocked_s)

    def wants_news(self) -> bool:
        """Whether Ray can soon be told of a save that begins now, if rank 0 asks."""
        is_free = not self._to_validate and (self._news is None or self._news.key == self._word.news)
        return is_free and time.monotonic() - self._told_at >= ray_reports.RAY_REPORT_PAUSE_S

    def committed(self, pointed: UnreportedCommit | None, *, save_s: float) -> None:
        """A save of this rank was committed, and took so long. pointed: what Ray can be told of by now."""
        self._save_s = save_s
        if pointed is None or pointed.key != self._told:
            self._news = pointed

    def must_tell(self, news: Iterable[UnreportedCommit]) -> None:
        """Tell Ray of each of these, in turn: no newer commit takes the place of one that is to be validated."""
        self._to_validate += news

    def tell_ray(self) -> None:
        """Report to Ray the commit that rank 0 named at this step, if any. Every rank calls it at every step."""
        key = self._word.news
        if key is None or not self._group.is_ray_train:
            return
        self._told_at = time.monotonic()
        self._told = key
        named, self._named = self._named or UnreportedCommit(key=key), None
        if self._to_validate and self._to_validate[0] is named:
            self._to_validate.popleft()
        if self._news is not None and not _is_newer(self._news.key, key):  # what is told last is Ray's latest
            self._news = None
        train_context.report_pointer(pointer_prefix(key), named.metrics, validate=self._word.validate)

    def tell_ray_at_end(self) -> None:
        """Report what Ray was not told of yet, the last commit last, so that Result.checkpoint is the newest. Every
        rank calls it once."""
        if not self._group.is_ray_train or self._broadcast is None:
            return
        while True:
            self._word = self._hear(self._with_news(_Decision(step=None), self._next_news()), step=None)
            if self._word.news is None:
                return
            self.tell_ray()

    def _has_room(self, step: int, *, is_busy: bool) -> bool:
        """Rank 0's word at a step trigger. Its save ends when all ranks have reported theirs, or one has failed."""
        if self._group.world_size > 1:
            word = None if self._group.rank else _Decision(step=step, save=None if is_busy else "keep")
            is_busy = not self._hear(word, step=step).save
        if is_busy:
            self._skip(step)
        return not is_busy

    def _skip(self, step: int) -> None:
        """A step that several triggers ask for counts once."""
        if step == self._skipped_step:
            return
        self.skipped, self._skipped_step = self.skipped + 1, step
        if self._group.rank == 0:
            logger.warning(
                "%s: step %d is not saved: the save before it is still under way", name_of(self._group.uri), step
            )

    def _sync(self, step: int, *, is_busy: bool, busy_s: float, metrics: Mapping[str, object]) -> None:
        began = time.monotonic()
        notice = self._group.notice() if self._group.notice is not None else None
        word: _Decision | None = None
        problem: ConfigError | None = None
        if self._group.rank == 0:
            asked: SaveKind | None = None
            try:
                asked = self._asked_due(step, metrics, is_busy=is_busy)
            except ConfigError as error:
                problem = error  # the others wait for a word, and are told this one
            is_news = self._preemption.take_notice(notice)
            leaving = self._saves_before_leaving(step, is_news=is_news, busy_s=busy_s)
            save = strongest(asked, "keep" if leaving else self._time_due(is_busy=is_busy))
            leave = is_news and self._settings.on_preempt == "restart"
            gap, noticed = self._gap(step, began), self._preemption.is_noticed
            word = _Decision(
                step=step,
                clock_s=began - self._started_at,
                save=save,
                gap=gap,
                is_noticed=noticed,
                leave=leave,
                problem=str(problem or ""),
            )
            word = self._with_news(word, self._fresh_news(began))
        self._word = self._hear(word, step=step)
        if self._word.problem:
            raise ConfigError(self._word.problem) from (problem and problem.__cause__)
        self.is_preempted, self.clock_s = self._word.is_noticed, self._word.clock_s
        # The least seen: the rest is waiting for slower ranks, which talking less would not save.
        self._broadcast_s = min(self._broadcast_s, time.monotonic() - began)
        self._next_sync = step + self._word.gap

    def _hear(self, word: _Decision | None, *, step: int | None) -> _Decision:
        """Rank 0's word, on every rank. Raises ConfigError when the ranks are not at the same point."""
        assert self._broadcast is not None, "the callers have checked"
        heard: _Decision = self._broadcast(word)
        if heard.step != step:
            names = [f"step {at}" if at is not None else "the end of its loop" for at in (step, heard.step)]
            raise ConfigError(
                f"rank {self._group.rank} is at {names[0]} while rank 0 is at {names[1]}: "
                "every rank must take the same number of steps"
            )
        return heard

    def _asked_due(self, step: int, metrics: Mapping[str, object], *, is_busy: bool) -> SaveKind | None:
        """Rank 0: whether the user's own function asks for a save now. Raises ConfigError for what is wrong with a
        trigger."""
        if self._settings.every_tokens is not None and not self._tokens:
            raise ConfigError("SaveSettings(every_tokens=...): no tokens were counted; give end_step(tokens=...)")
        when = self._settings.when
        if when is None:
            return None
        name = f"SaveSettings(when={function_name(when)})"
        try:
            answer: object = when(step, metrics)
            item = getattr(answer, "item", None)  # of numpy and torch
            answer = item() if callable(item) else answer
        except Exception as error:
            raise ConfigError(f"{name} raised at step {step}: {type(error).__name__}: {error}") from error
        if not isinstance(answer, bool):
            raise ConfigError(f"{name} returned {answer!r} at step {step}; it must return True or False")
        if answer and is_busy and self._settings.when_busy == "skip":
            self._skip(step)
            return None
        return "keep" if answer else None

    def _saves_before_leaving(self, step: int, *, is_news: bool, busy_s: float) -> bool:
        """Rank 0: whether a node that is about to go makes this a moment to save."""
        if not is_news:
            return self._preemption.is_noticed and self._preemption.take_last_chance(
                save_s=self._save_s, busy_s=busy_s, again_s=self._again_s
            )
        save = self._preemption.can_save_in_time(save_s=self._save_s, busy_s=busy_s)
        then = "saving" if save else "too little time for a save; one that is under way goes on"
        logger.warning("%s: a node of this group is about to go; step %d: %s", name_of(self._group.uri), step, then)
        return save

    def _time_due(self, *, is_busy: bool) -> SaveKind | None:
        settings, now = self._settings, time.monotonic()
        if is_busy and settings.when_busy == "skip" and not self._is_wanted:
            return None
        if settings.exports and _is_over(now - self._exported_at, settings.exports.every_seconds):
            return "export"
        if self._is_wanted:
            return "keep"
        every_s = self._interval.seconds if self._interval is not None else settings.every_seconds
        is_full = _is_over(self._tokens - self._saved_tokens, settings.every_tokens)
        if is_full or _is_over(now - self._saved_at, every_s):
            return "keep"
        return "roll" if _is_over(now - self._rolled_at, settings.rolling_every_seconds) else None

    def _fresh_news(self, now: float) -> UnreportedCommit | None:
        return self._next_news() if now - self._told_at >= ray_reports.RAY_REPORT_PAUSE_S else None

    def _with_news(self, word: _Decision, news: UnreportedCommit | None) -> _Decision:
        self._named = news
        return word if news is None else replace(word, news=news.key, validate=news.validate)

    def _next_news(self) -> UnreportedCommit | None:
        return self._to_validate[0] if self._to_validate else self._news

    def _gap(self, step: int, now: float) -> int:
        steps, seconds = step - self._synced_at[0], now - self._synced_at[1]
        self._synced_at = (step, now)
        if seconds <= 0 or steps <= 0:
            return 1
        if self._group.world_size == 1:
            self._again_s = seconds / steps
            return 1
        cheap = self._broadcast_s * steps / (COST_SHARE * seconds)
        gap_s = LEAVING_GAP_S if self._preemption.is_noticed else MAX_GAP_S
        gap = max(1, min(MAX_GAP, round(cheap), round(gap_s * steps / seconds)))
        if self._settings.when is not None:
            gap = 1
        self._again_s = gap * seconds / steps
        return gap
