"""One rank's saves: staged in the training thread, then uploaded, reported and concluded in one background thread.

No more saves are in flight than there are buffers, and they are uploaded one by one. That bounds memory, and it is what
makes a buffer safe to reuse: the thread ends a save only after every request that reads its buffer has ended.
"""

import time
from collections import deque
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeoutError
from contextlib import suppress
from dataclasses import dataclass, replace

from raycheck.bucket.assembly.plan_cache import Section
from raycheck.bucket.assembly.save_report import Report
from raycheck.bucket.format import object_keys
from raycheck.bucket.format.document import dump
from raycheck.bucket.format.progress import Progress
from raycheck.bucket.format.ray_pointer import Pointer
from raycheck.bucket.store.retry import ends_by
from raycheck.errors import RaycheckError, SaveFailedError, StoreError
from raycheck.settings import SaveSettings
from raycheck.shards.state.train_state import TrainState
from raycheck.shards.transfer.incremental import StagedState
from raycheck.shards.transfer.local_box import TRAIN
from raycheck.train.coordinator.messages import Outcome, PlanWanted
from raycheck.train.group import Group, ask_until_decided
from raycheck.train.log import logger, name_of
from raycheck.train.worker.save_triggers import SaveKind, UnreportedCommit
from raycheck.train.worker.step_metrics import numbers_of

LAST_ANSWER_S = 2.0
"""How much longer the end of training waits than a save may take, so that it hears what the save came to."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _UnderWay:
    """is_agreed: the ranks agreed before it. outcome: and when it was told."""

    number: int
    began: float
    is_agreed: bool
    is_news: bool
    news: UnreportedCommit
    staged: StagedState
    outcome: Future[tuple[Outcome, float]]


class SaveQueue:
    """saved_step: the newest step that is committed, in flight, or restored; -1 after a failed save. newest: checkpoint
    that was committed or restored. save_s: how long the newest commit
    took. saves: how many were begun. failed: of them."""

    def __init__(
        self,
        state: TrainState,
        settings: SaveSettings,
        group: Group,
        *,
        attempt: int,
        restored_from: str | None,
        partial: tuple[str, ...],
        saved_step: int,
        began_at: float,
    ) -> None:
        """began_at: see Manifest."""
        self.saved_step = saved_step
        self._pointed: UnreportedCommit | None = None
        self._news: UnreportedCommit | None = None  # of the newest commit of this attempt
        self._validating: set[str] = set()  # checkpoints whose News goes to `to_validate`, and is told in its turn only
        self._to_validate: deque[UnreportedCommit] = deque()
        self._committed: deque[UnreportedCommit] = deque(maxlen=settings.buffers + 1)  # of the save thread
        self.save_s = 0.0
        self.newest = restored_from
        self._has_agreed = group.world_size == 1
        self._must_agree_after: dict[int, bool] = {}  # by the number of a save that has ended
        self._state = state
        self._settings = settings
        self._group = group
        self._report = Report(  # what is the same in all of this attempt
            group=group.id,
            rank=group.rank,
            world_size=group.world_size,
            attempt=attempt,
            save=0,
            progress=Progress(),
            restored_from=restored_from,
            partial=partial,
            began_at=began_at,
            retention=settings.retention,
            node=group.node,
            settings=settings.chosen,
        )
        self.saves = self.failed = self._failures = 0
        self._last_failure = ""
        self._last_failed = 0  # the number of that save
        self._pending: deque[_UnderWay] = deque()
        self._known_plan = b""  # hash of the one that the coordinator has, if it was not started again
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="raycheck-save")

    @property
    def pointed(self) -> UnreportedCommit | None:
        """What Ray can be told of the newest commit; None when its pointer is not written, or it has a turn of its own
        since it is to be validated."""
        return None if self._pointed is None or self._pointed.key in self._validating else self._pointed

    @property
    def is_busy(self) -> bool:
        """Whether the next save would have to wait for a buffer."""
        return sum(not save.outcome.done() for save in self._pending) >= self._settings.buffers

    @property
    def busy_s(self) -> float | None:
        """How long the saves under way may still take, by the newest commit: they go up one by one. None: none is."""
        began = [save.began for save in self._pending if not save.outcome.done()]
        return max(0.0, len(began) * self.save_s - (time.monotonic() - began[0])) if began else None

    def begin(
        self,
        progress: Progress,
        metrics: Mapping[str, object],
        *,
        due: SaveKind = "keep",
        trained_s: float = 0.0,
        is_news: bool = False,
    ) -> str:
        """Stage the state and start its upload, after `wait_for_buffer`. Without a buffer all the same it counts as
        failed, and the other ranks are told. trained_s: see Manifest. is_news: Ray will be told. Returns its name."""
        began = time.monotonic()
        must_have_ended = self._must_have_ended()
        self.saves += 1  # counted even when it comes to nothing: the ranks' counts must stay equal
        report = replace(
            self._report,
            save=self.saves,
            progress=progress,
            trained_s=trained_s,
            is_rolling=due == "roll",
            metrics=numbers_of(metrics),
            exports=self._settings.exports if due == "export" else None,
        )
        if self._pending and self._pending[0].number <= must_have_ended:
            text = f"the save before it has not ended within {self._settings.save_timeout_s:.0f} s"
            self._group.tell("report", replace(report, failure=text))
            self._failed(report.save, f"rank {report.rank}: step {progress.step}: {text}")
            return report.checkpoint
        self.saved_step = progress.step
        # Of later saves some ranks have heard by now and some have not.
        doubt = self._must_agree_after.pop(report.save - self._settings.buffers, False) or not self._has_agreed
        must_agree = doubt and self._group.world_size > 1
        try:
            if must_agree:
                self._agree(report)
            staged = self._state.stage(progress)
        except RaycheckError as error:
            self._group.tell("report", replace(report, failure=str(error)))  # the others must not wait for this rank
            if not isinstance(error, SaveFailedError | StoreError):
                raise
            self._failed(report.save, str(error))
            return report.checkpoint
        report = replace(report, blocked_s=time.monotonic() - began)
        deadline = began + self._settings.save_timeout_s
        is_news = is_news and not any(save.is_news for save in self._pending)
        place = {"step": progress.step, "epoch": progress.epoch}
        news = UnreportedCommit(
            key=report.checkpoint, metrics={**place, **report.metrics}
        )  # the user's own `step` goes first
        save = _UnderWay(
            number=report.save,
            began=began,
            is_agreed=must_agree,
            is_news=is_news,
            news=news,
            staged=staged,
            outcome=self._thread.submit(
                lambda: (self._upload_and_report(staged, report, deadline, news, is_news), time.monotonic())
            ),
        )
        self._pending.append(save)
        return report.checkpoint

    def poll(self) -> str | None:
        """The name of the checkpoint that was committed since the last look, if any; never waits.

        Raises FencedError or SupersededError, and SaveFailedError after too many failed saves in a row.
        """
        return self.wait(0)

    def wait_for_buffer(self) -> str | None:
        """The same, after waiting until the next save can be staged (up to the save time-out)."""
        return self.wait(up_to=self._must_have_ended())

    def _must_have_ended(self) -> int:
        """The number of the last save that has to be over before the next one: its buffer is needed, or an agreement
        or the place of what is frozen, for which there is one buffer only, is in doubt until then."""
        is_alone = any(save.is_agreed or save.staged.written for save in self._pending)
        return self.saves if is_alone else self.saves + 1 - self._settings.buffers

    def wait(self, timeout_s: float | None = None, *, up_to: int | None = None) -> str | None:
        """After waiting (up to the save time-out) until the saves in flight, or those up to a number, ended."""
        last = self.saves if up_to is None else up_to
        deadline = time.monotonic() + (self._settings.save_timeout_s if timeout_s is None else timeout_s)
        newest = None
        while self._pending and (self._pending[0].number <= last or self._pending[0].outcome.done()):
            save = self._pending[0]
            try:
                outcome, ended = save.outcome.result(max(0.0, deadline - time.monotonic()))
            except FutureTimeoutError:
                break
            except (SaveFailedError, StoreError) as error:
                outcome, ended = Outcome(kind="failed", key="", message=str(error)), time.monotonic()
            self._pending.popleft()
            if outcome.kind == "failed":
                self._has_agreed &= not save.is_agreed  # it may be that not all ranks got the agreement
                self._failed(save.number, outcome.message)
            elif outcome.kind == "committed":
                self._failures = 0
                self._must_agree_after[save.number] = outcome.agree_anew
                self.save_s = ended - save.began
                self._state.components.committed(save.staged, outcome.places)
                newest = self.newest = outcome.key
                self._news = save.news
        return newest

    @property
    def longest_s(self) -> float:
        """How long to wait for what any save comes to."""
        return self._settings.save_timeout_s + LAST_ANSWER_S

    @property
    def problem(self) -> str:
        """Why, after `wait`, not all of the newest saves are committed, as many as there are buffers; "" when they are.
        Of an earlier one some ranks have heard before they waited and some not, and all of them must say alike."""
        if self._pending:
            names = ", ".join(str(save.number) for save in self._pending)
            return f"save(s) {names} of this attempt have not ended in time; they go on"
        if self._last_failed > max(0, self.saves - self._settings.buffers):
            return f"not every save was committed: {self._last_failure}"
        return ""

    def finish(self, step: int) -> None:
        """Wait for the last save, that of `step`. Raises SaveFailedError when it is not committed."""
        failures = self._failures
        self.wait(self.longest_s)
        if self._pending or self._failures > failures or self.saved_step != step:
            raise SaveFailedError(
                f"rank {self._group.rank}: the last save, of step {step}, was not committed: "
                f"{self._last_failure or 'it has not ended in time'}"
            )

    def validate(self, checkpoint: str) -> None:
        """Have Ray validate the checkpoint of a save that this object has begun, once it is committed."""
        if checkpoint not in self._validating:
            self._validating.add(checkpoint)
            self._thread.submit(self._validate, checkpoint)  # the thread does one thing after the other: after the save

    def take_validations(self) -> list[UnreportedCommit]:
        """What Ray is to be told of and to validate, each once."""
        return [self._to_validate.popleft() for _ in range(len(self._to_validate))]

    def _validate(self, checkpoint: str) -> None:
        """In the save thread."""
        for news in tuple(self._committed):
            if news.key == checkpoint and self._write_pointer(news):
                self._to_validate.append(replace(news, validate=True))

    def point_ray_to_newest(self) -> None:
        """So that Result.checkpoint is the last commit. Waits for what is to be validated."""
        with suppress(FutureTimeoutError):
            self._thread.submit(int).result(self._settings.save_timeout_s)
        if self._news is not None:
            self._point_ray_to(self._news)

    def _point_ray_to(self, news: UnreportedCommit) -> None:
        """Have Ray told of it with other news, unless it will be as one to validate: Ray must not list it twice, since
        by its retention one of the two would delete the other's pointer."""
        is_there = self._pointed is not None and self._pointed.key == news.key
        if not is_there and news.key not in self._validating and self._write_pointer(news):
            self._pointed = news

    def _write_pointer(self, news: UnreportedCommit) -> bool:
        """What Ray is told of: a directory of its own, which its retention may delete. Of a checkpoint that it is not
        told of, it would never delete it. Whether it could be written; only rank 0 does."""
        if self._group.rank or not self._group.is_ray_train:
            return False
        pointer = Pointer(uri=self._group.uri, key=news.key)
        try:
            self._group.store.put(object_keys.pointer_key(news.key), dump(pointer))
        except RaycheckError as error:
            logger.warning(
                "%s: %s is committed, but Ray's pointer was not written: %s", name_of(self._group.uri), news.key, error
            )
            return False
        return True

    def stop(self) -> None:
        """Let the thread go when its save has ended."""
        self._thread.shutdown(wait=False)

    def _agree(self, report: Report) -> None:
        """Have the ranks settle who writes what they all hold, and find out whether it is the same on all of them."""
        holdings = self._state.replica_checksums()
        deadline = time.monotonic() + self._settings.save_timeout_s
        self._has_agreed = False
        what = f"agreement before the save of step {report.progress.step}"
        agreement = ask_until_decided(
            self._group,
            "agree",
            report,
            holdings,
            deadline=deadline,
            what=what,
            late=lambda missing: SaveFailedError(f"rank {report.rank}: {what}: {missing}"),
        )
        self._state.use_agreement(agreement)
        self._has_agreed = True

    def _upload_and_report(
        self, staged: StagedState, report: Report, deadline: float, news: UnreportedCommit, is_news: bool
    ) -> Outcome:
        """In the save thread. Always ends in an outcome that all ranks are told, or in an error at the deadline."""
        key = object_keys.shard_key(report.checkpoint, TRAIN, report.rank)
        began = time.monotonic()
        try:
            staged.wait()
            report = replace(report, staged_s=report.blocked_s + time.monotonic() - began)
            with ends_by(deadline):
                staged.upload(self._group.store, report.checkpoint)
            section = Section.of(staged.section())
            is_known = section.plan_hash == self._known_plan
            report = replace(report, shards=staged.records, kept=staged.places)
            report = replace(report, section=section.without_plan() if is_known else section)
        except Exception as error:  # noqa: BLE001  whatever it was, the other ranks must not wait for this one (I9)
            report = replace(report, failure=f"upload of {key}: {type(error).__name__}: {error}")
        report = replace(report, upload_s=time.monotonic() - began)
        outcome = self._outcome_of(report, deadline, key)
        if isinstance(outcome, PlanWanted):
            outcome = self._outcome_of(replace(report, section=section), deadline, key)
        assert isinstance(outcome, Outcome), "a report with its plan is never asked for the plan"
        if outcome.kind == "committed":
            self._committed.append(news)
            if is_news:
                self._point_ray_to(news)
        if outcome.kind == "committed" and report.section is not None:
            self._known_plan = report.section.plan_hash
        return outcome

    def _outcome_of(self, report: Report, deadline: float, key: str) -> Outcome | PlanWanted:
        """Hands the report in and waits for what all ranks are told. key: names this rank's object in errors."""
        what = f"save of step {report.progress.step} ({key})"
        within = f"within {self._settings.save_timeout_s:.0f} s"
        answer: Outcome | PlanWanted = ask_until_decided(
            self._group,
            "report",
            report,
            deadline=deadline,
            what=what,
            late=lambda missing: SaveFailedError(f"rank {report.rank}: {what} was not committed {within}: {missing}"),
        )
        return answer

    def _failed(self, number: int, message: str) -> None:
        self._failures += 1
        self.failed += 1
        self._must_agree_after[number] = True  # all ranks hear of the failure, so all of them come
        self._last_failure, self._last_failed = message, max(number, self._last_failed)
        self._state.components.forget()
        if number == self.saves:  # else a later one is in flight
            self.saved_step = -1
        if self._group.rank == 0:  # all ranks are told the same outcome
            logger.warning("%s: save failed (%d in a row): %s", name_of(self._group.uri), self._failures, message)
        if self._failures >= self._settings.max_failed_saves:
            raise SaveFailedError(f"{self._failures} failed save(s) in a row, the last: {message}")
