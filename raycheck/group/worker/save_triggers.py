"""Decides when to save: which triggers exist, and when each is due. All ranks come to the same answer.

Step and epoch triggers are arithmetic, which each rank does alone. Time, tokens, preemption and the user's own function
are rank 0's decision, which is broadcast (rank_zero_decision.py). So is whether a save is skipped because the previous
one is still in progress.
"""

import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from raycheck.bucket.format.progress import Progress
from raycheck.errors import ConfigError
from raycheck.group.group import Group
from raycheck.group.ports import PreemptionNotice
from raycheck.group.worker.preemption import Preemption
from raycheck.group.worker.rank_zero_decision import DecisionBroadcast, RankZeroDecision
from raycheck.group.worker.save_kind import SaveKind, strongest
from raycheck.group.worker.young_daly import Interval
from raycheck.log import event, logger
from raycheck.settings import SaveSettings, function_name

SMALL_BYTES = 8 << 20
"""A rank that leaves is assumed to upload this much in however short a time."""
LAST_S = 2.0
"""For how long a rank that leaves is needed for the last save, if others can complete it."""


class SaveTriggers:
    """The decision when to save, which is the same on every rank. Every rank calls its methods at the same steps.

    is_preempted: a node is about to be taken away, so training should wait for nothing but a save. clock_s: rank 0's
    seconds of training in this attempt, as last broadcast. must_reach_memory: a node is about to be taken away, and the
    memory checkpoint that this asks for has not begun yet. skipped: how many saves were skipped because the previous
    one was in progress. tasks: the names of the tasks that follow the commit of the save that the last decision asks
    for. reporter: reports commits to whoever started the ranks.
    """

    def __init__(self, settings: SaveSettings, group: Group) -> None:
        self._settings = settings
        self._group = group
        self._broadcast = DecisionBroadcast(group, is_each_step=settings.when is not None)
        self._refuse_what_needs_a_broadcast()
        self._at_steps = frozenset(settings.at_steps)
        self._saved_at = self._rolled_at = time.monotonic()
        self._tasks = settings.tasks
        self._run_at = dict.fromkeys(self._tasks, self._saved_at)  # by task, when the newest save began that it follows
        self.tasks: tuple[str, ...] = ()
        self._started_at, self.clock_s = self._saved_at, 0.0
        self._saved_tokens = self._tokens = self._epoch = 0
        self._save_s = 0.0
        self._preemption = Preemption()
        self._leaving: frozenset[int] = frozenset()
        self._alone_bytes: int | None = None
        self._interval = Interval(settings.overhead, at_most_s=settings.every_s) if settings.overhead else None
        self.skipped = 0
        self._skipped_step = -1
        self.is_preempted = False
        self._is_wanted = False
        self.must_reach_memory = False
        self._decision = RankZeroDecision(step=None)
        self.reporter = group.reporter()

    def _refuse_what_needs_a_broadcast(self) -> None:
        settings = self._settings
        decided_by_rank_zero = {
            "every_s=...": settings.every_s is not None,
            "every_tokens=...": settings.every_tokens is not None,
            "when=...": settings.when is not None,
            "rolling_every_s=...": settings.rolling_every_s is not None,
            "overhead=...": settings.overhead is not None,
            "after_commit=AfterCommit(every_s=...)": any(task.every_s is not None for task in settings.tasks.values()),
            'when_busy="skip"': settings.when_busy == "skip",
            "memory_every_steps=...": settings.memory_every_steps is not None,
        }
        for name, is_set in decided_by_rank_zero.items():
            if is_set and not self._broadcast.is_possible:
                raise ConfigError(f"SaveSettings({name}) needs Group(broadcast=...): ranks must make the same decision")

    def start_at(self, progress: Progress, claims: Sequence[float]) -> None:
        """Start counting here. claims: when the run's attempts began, by the store's clock, in order."""
        self._broadcast.start_at(progress.step)
        self._started_at = time.monotonic()
        self._saved_tokens = self._tokens = progress.tokens
        self._epoch = progress.epoch
        if self._interval is not None:
            self._interval.start(claims)

    def trained(self, seconds: float, *, is_saving: bool) -> None:
        """Record how long a step took. is_saving: a save was in progress during the step."""
        if self._interval is not None:
            self._interval.step(seconds, is_saving=is_saving)

    def saved(
        self,
        blocked_s: float,
        progress: Progress,
        kind: SaveKind = "keep",
        *,
        began: float,
        tasks: Collection[str] = (),
    ) -> None:
        """Record that a save has begun. began: when, by time.monotonic. blocked_s: how long it has blocked training.

        tasks: what follows its commit.
        """
        self._is_wanted = False
        self._rolled_at = began
        self.tasks_begun(tasks, began=began)
        if kind != "roll":
            self._saved_at, self._saved_tokens = began, progress.tokens
        if self._interval is not None:
            self._interval.saved(blocked_s)

    def tasks_begun(self, tasks: Collection[str], *, began: float) -> None:
        """Record that these tasks follow a save that has begun. began: when they were requested, by time.monotonic."""
        self._run_at |= dict.fromkeys(tasks, began)

    def committed(self, save_s: float) -> None:
        """Record that a save of this rank was committed, save_s seconds after it began."""
        self._save_s = save_s

    def save_soon(self) -> None:
        """Make rank 0's next decision one to save."""
        self._is_wanted = True

    @property
    def leaving(self) -> frozenset[int] | None:
        """Return the ranks that are about to be taken away, if the last decision asks for a save because of that."""
        return self._leaving if self._decision.is_by_notice else None

    @property
    def must_leave(self) -> bool:
        """Return whether all ranks have to end this attempt, so that Ray restarts them elsewhere."""
        return self._decision.leave

    def decide_at_step(
        self,
        progress: Progress,
        *,
        is_busy: bool = False,
        busy_s: float = 0.0,
        metrics: Mapping[str, object] | None = None,
        alone_bytes: int | None = None,
    ) -> SaveKind | None:
        """Decide, together with all ranks, whether to save at the end of this step, and as what.

        progress: rank 0's token count is used. is_busy: the next save would wait for one of this rank. busy_s: how long
        the saves in progress may still take. metrics: the step's. alone_bytes: see Agreement. Raises ConfigError, on
        all ranks, for what the user's own function raised.
        """
        self._decision, self.tasks = RankZeroDecision(step=None), ()
        step, self._tokens, self._alone_bytes = progress.step, progress.tokens, alone_bytes
        if self._broadcast.is_due(step):
            self._hear_rank_zero(step, is_busy=is_busy, busy_s=busy_s, metrics=metrics or {})
        due = dict.fromkeys((*self._tasks_at_epoch(progress.epoch), *self._tasks_at_step(step), *self._decision.tasks))
        kind = strongest(self._kind_at_epoch(progress.epoch), self._kind_at_step(step), "keep" if due else None)
        self._epoch = progress.epoch
        if self._decision.save or self._may_save(step, kind, is_busy=is_busy):
            self.tasks = tuple(due)
            return strongest(kind, self._decision.save)
        return None

    def decide_at_epoch_end(self, progress: Progress, *, is_busy: bool = False) -> SaveKind | None:
        """Decide, together with all ranks, whether to save at the end of an epoch, and as what."""
        due = self._tasks_at_epoch(progress.epoch)
        kind = strongest(self._kind_at_epoch(progress.epoch), "keep" if due else None)
        self._epoch = progress.epoch
        may_save = self._may_save(progress.step, kind, is_busy=is_busy)
        self.tasks = due if may_save else ()
        return kind if may_save else None

    def decide_on_memory(self, step: int, *, is_busy: bool) -> bool:
        """Decide, together with all ranks, whether to make a memory checkpoint of this step.

        It is due at its steps and when a node is about to be taken away, and does not begin while rank 0 is busy. One
        that a notice asks for then begins at a later step at which rank 0 broadcasts. is_busy: this rank cannot begin
        one, because the previous one is in progress.
        """
        is_asked_for = self.must_reach_memory and self._decision.step is not None
        if not is_asked_for and not _is_multiple(step, self._settings.memory_every_steps):
            return False
        if self._group.world_size > 1:
            mine = None if self._group.rank else RankZeroDecision(step=step, save=None if is_busy else "keep")
            is_busy = self._broadcast.share(mine, step=step).save is None
        self.must_reach_memory &= is_busy
        return not is_busy

    def _kind_at_step(self, step: int) -> SaveKind | None:
        settings = self._settings
        return strongest(
            "keep" if _is_multiple(step, settings.step_trigger) or step in self._at_steps else None,
            "roll" if _is_multiple(step, settings.rolling_every_steps) else None,
        )

    def _kind_at_epoch(self, epoch: int) -> SaveKind | None:
        """Return the kind of save that is due for the epochs that ended since the last decision.

        An epoch counts even if the script did not call end_epoch and the data simply continued.
        """
        return "keep" if self._is_passed(epoch, self._settings.every_epochs) else None

    def _is_passed(self, epoch: int, every: int | None) -> bool:
        return every is not None and epoch // every > self._epoch // every

    def _tasks_at_step(self, step: int) -> tuple[str, ...]:
        return tuple(name for name, task in self._tasks.items() if _is_multiple(step, task.every_steps))

    def _tasks_at_epoch(self, epoch: int) -> tuple[str, ...]:
        return tuple(name for name, task in self._tasks.items() if self._is_passed(epoch, task.every_epochs))

    def _may_save(self, step: int, kind: SaveKind | None, *, is_busy: bool) -> bool:
        return kind is None or self._settings.when_busy != "skip" or self._agree_to_save(step, is_busy=is_busy)

    def _agree_to_save(self, step: int, *, is_busy: bool) -> bool:
        """Learn from rank 0 whether it could save now, and count the save as skipped if not.

        Rank 0 decides for all: its save ends when all ranks have reported theirs, or one has failed.
        """
        if self._group.world_size > 1:
            mine = None if self._group.rank else RankZeroDecision(step=step, save=None if is_busy else "keep")
            is_busy = not self._broadcast.share(mine, step=step).save
        if is_busy:
            self._skip(step)
        return not is_busy

    def _skip(self, step: int) -> None:
        """Count a skipped save. A step for which several triggers ask counts once."""
        if step == self._skipped_step:
            return
        self.skipped, self._skipped_step = self.skipped + 1, step
        if self._group.rank == 0:
            logger.warning(event("skipped a save: the previous one is in progress", step=step, run=self._group.uri))

    def _hear_rank_zero(self, step: int, *, is_busy: bool, busy_s: float, metrics: Mapping[str, object]) -> None:
        began = time.monotonic()
        notice = self._group.notice() if self._group.notice is not None else None
        if notice is not None:
            self._leaving = notice.ranks
        decision: RankZeroDecision | None = None
        problem: ConfigError | None = None
        if self._group.rank == 0:
            asked: SaveKind | None = None
            try:
                asked = self._ask_user(step, metrics, is_busy=is_busy)
            except ConfigError as error:
                problem = error  # the other ranks wait for a decision, and are told this one
            decision = self._decide(step, asked, notice, is_busy=is_busy, busy_s=busy_s, began=began)
            decision = replace(decision, problem=str(problem or ""))
        self._decision = self._broadcast.share(decision, step=step)
        if self._decision.problem:
            raise ConfigError(self._decision.problem) from (problem and problem.__cause__)
        self.is_preempted, self.clock_s = self._decision.is_preempted, self._decision.clock_s
        self.must_reach_memory |= self._decision.to_memory
        self._broadcast.schedule(step, self._decision.gap, took_s=time.monotonic() - began)

    def _decide(
        self,
        step: int,
        asked: SaveKind | None,
        notice: PreemptionNotice | None,
        *,
        is_busy: bool,
        busy_s: float,
        began: float,
    ) -> RankZeroDecision:
        """Make rank 0's decision. asked: the kind of save that the user's function asks for."""
        is_new_notice = self._preemption.take_notice(notice)
        is_preempted = self._preemption.is_noticed
        saves_before_loss = self._decide_at_preemption(step, is_new_notice=is_new_notice, busy_s=busy_s)
        tasks = () if saves_before_loss else self._tasks_by_time(is_busy=is_busy)
        commit = self.reporter.choose(began)
        return RankZeroDecision(
            step=step,
            clock_s=began - self._started_at,
            save=strongest(asked, "keep" if saves_before_loss or tasks else self._kind_by_time(is_busy=is_busy)),
            tasks=tasks,
            commit=commit.key if commit else None,
            gap=self._broadcast.choose_gap(step, began, is_preempted=is_preempted),
            is_preempted=is_preempted,
            leave=is_new_notice and self._settings.on_preempt == "restart",
            is_by_notice=saves_before_loss,
            to_memory=is_new_notice or saves_before_loss,
        )

    def _ask_user(self, step: int, metrics: Mapping[str, object], *, is_busy: bool) -> SaveKind | None:
        """Ask the user's own function, on rank 0, whether to save now. Raises ConfigError for what is wrong with it."""
        if self._settings.every_tokens is not None and not self._tokens:
            raise ConfigError("SaveSettings(every_tokens=...): no tokens were counted; give end_step(tokens=...)")
        when = self._settings.when
        if when is None:
            return None
        name = f"SaveSettings(when={function_name(when)})"
        try:
            answer: object = when(step, metrics)
            item = getattr(answer, "item", None)  # numpy and torch have their own booleans
            answer = item() if callable(item) else answer
        except Exception as error:
            raise ConfigError(f"{name} raised at step {step}: {type(error).__name__}: {error}") from error
        if not isinstance(answer, bool):
            raise ConfigError(f"{name} returned {answer!r} at step {step}; it must return True or False")
        if answer and is_busy and self._settings.when_busy == "skip":
            self._skip(step)
            return None
        return "keep" if answer else None

    def _decide_at_preemption(self, step: int, *, is_new_notice: bool, busy_s: float) -> bool:
        """Decide, on rank 0, whether to save now because a node is about to be taken away."""
        if not is_new_notice:
            return self._preemption.is_noticed and self._preemption.take_last_chance(
                save_s=min(self._save_s, LAST_S) if self._can_outlive() else self._save_s,
                busy_s=busy_s,
                again_s=self._broadcast.again_s,
            )
        # If others can complete a save that is late, it costs nothing: without it, these steps are lost anyway.
        save_s = 0.0 if self._can_outlive() else self._save_s
        can_save = self._preemption.can_save_in_time(save_s=save_s, busy_s=busy_s)
        then = "saving" if can_save else "too little time for another save; one in progress continues"
        logger.warning(event(f"a node of this group is about to be taken away: {then}", step=step, run=self._group.uri))
        return can_save

    def _can_outlive(self) -> bool:
        """Return whether a save can be completed without the ranks that leave, once they have reported: other ranks
        have what is large, and actors on the nodes that stay upload that even when Ray ends the group."""
        is_covered = self._alone_bytes is not None and self._alone_bytes <= SMALL_BYTES
        return self._settings.upload_by == "node" and is_covered and 0 < len(self._leaving) < self._group.world_size

    def _tasks_by_time(self, *, is_busy: bool) -> tuple[str, ...]:
        """Return the tasks that are due by time. Rank 0 decides by it."""
        if is_busy and self._settings.when_busy == "skip" and not self._is_wanted:
            return ()
        now = time.monotonic()
        return tuple(n for n, task in self._tasks.items() if _is_over(now - self._run_at[n], task.every_s))

    def _kind_by_time(self, *, is_busy: bool) -> SaveKind | None:
        """Return the kind of save that is due by time, by tokens, or on request. Rank 0 uses it for its decision."""
        settings, now = self._settings, time.monotonic()
        if is_busy and settings.when_busy == "skip" and not self._is_wanted:
            return None
        if self._is_wanted:
            return "keep"
        every_s = self._interval.seconds if self._interval is not None else settings.every_s
        has_enough_tokens = _is_over(self._tokens - self._saved_tokens, settings.every_tokens)
        if has_enough_tokens or _is_over(now - self._saved_at, every_s):
            return "keep"
        return "roll" if _is_over(now - self._rolled_at, settings.rolling_every_s) else None

    def can_report_soon(self) -> bool:
        """Return whether the host can soon be told of a save that begins now, if rank 0 asks."""
        return self.reporter.can_report_soon(self._decision.commit)

    def report_to_host(self) -> None:
        """Tell the host of the commit that rank 0 named at this step, if any. Every rank calls it at every step."""
        self.reporter.report(self._decision.commit)

    def report_all_to_host(self) -> None:
        """Tell the host what it has not been told, with the newest commit last: Ray's Result then points to that one.

        Every rank calls it once, at the end of training.
        """
        if not self.reporter.is_heard or not self._broadcast.is_possible:
            return
        while True:
            commit = self.reporter.choose(time.monotonic(), is_last=True)
            mine = RankZeroDecision(step=None, commit=commit.key if commit else None)
            self._decision = self._broadcast.share(mine, step=None)
            if self._decision.commit is None:
                return
            self.report_to_host()


def _is_over(passed: float, every: float | None) -> bool:
    return every is not None and passed >= every


def _is_multiple(step: int, every: int | None) -> bool:
    return every is not None and step % every == 0
