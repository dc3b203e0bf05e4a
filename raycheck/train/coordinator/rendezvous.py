"""Where the ranks meet: what they hand in for one save or restore, until all have, and what all of them are told.

Lives in the coordinator's event loop. Every answer is an outcome, never a receipt.
"""

import asyncio
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from raycheck.bucket.assembly.replica_agreement import Agreement, Holdings, agree
from raycheck.bucket.assembly.save_report import SAVE_ALIKE, Report
from raycheck.bucket.attempt_records import ResumeRecord
from raycheck.bucket.format.latest import Entry
from raycheck.errors import ConfigError, DamagedError, RaycheckError, SaveFailedError

OnCorrupt = Literal["previous", "raise"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Claim:
    """The answer to a claim: the attempt's number, and the one checkpoint all ranks restore (None: start fresh).
    documents: Ray's reference to those of it, in a list; empty when each rank has to read them itself. claims: when the
    run's listed attempts began, this one last. resume: how it goes on when there is nothing to restore. is_finished:
    with that checkpoint the run had come to its end."""

    attempt: int
    restore: Entry | None
    documents: list[Any]
    claims: tuple[float, ...]
    resume: ResumeRecord | None = None
    is_finished: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """What became of a save. "pending" names the ranks that have not reported; ask again. wants_plan: with the plan,
    of which this coordinator does not know the hash. agree_anew: before the next save, since ranks wrote the same
    thing. places: of what is committed, the checkpoint that holds each component; empty when that is not known."""

    kind: Literal["committed", "superseded", "failed", "pending"]
    key: str
    message: str = ""
    agree_anew: bool = False
    wants_plan: bool = False
    places: Mapping[str, str] = field(default_factory=dict)


class PendingSave:
    """One save that is being reported."""

    def __init__(self) -> None:
        self.reports: dict[int, Report] = {}
        self.outcome: asyncio.Future[Outcome] = asyncio.get_running_loop().create_future()
        self.is_started = False
        self._task: asyncio.Task[None] | None = None

    def start(self, conclude: Coroutine[Any, Any, Outcome], *, then: Callable[[], None]) -> None:
        self.is_started = True
        self._task = asyncio.create_task(self._run(conclude, then))

    async def _run(self, conclude: Coroutine[Any, Any, Outcome], then: Callable[[], None]) -> None:
        try:
            self.outcome.set_result(await conclude)
            then()
        except Exception as error:  # noqa: BLE001  every waiting rank is told, whatever it was (I9)
            self.outcome.set_exception(error)


class End:
    """The ranks that have come to the end of training, until all have and `latest` says so."""

    def __init__(self) -> None:
        self.ranks: set[int] = set()
        self.put_down: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._task: asyncio.Task[None] | None = None

    def come(self, rank: int, world_size: int, put_down: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """put_down: called once, when this is the last rank."""
        self.ranks.add(rank)
        if len(self.ranks) == world_size and self._task is None:
            self._task = asyncio.create_task(self._run(put_down()))

    async def _run(self, put_down: Coroutine[Any, Any, None]) -> None:
        try:
            await put_down
            self.put_down.set_result(None)
        except Exception as error:  # noqa: BLE001  every waiting rank is told, whatever it was (I9)
            self.put_down.set_exception(error)


class Meeting:
    """The ranks' holdings before a save, until all are there."""

    def __init__(self) -> None:
        self.holdings: dict[int, Holdings] = {}
        self._checkpoint = ""
        self.result: asyncio.Future[Agreement] = asyncio.get_running_loop().create_future()

    def come(self, report: Report, holdings: Holdings) -> None:
        if self.result.done():
            return
        self._checkpoint = self._checkpoint or report.checkpoint
        if report.checkpoint != self._checkpoint:
            text = f"this rank saves {report.checkpoint} while another one saves {self._checkpoint}: {SAVE_ALIKE}"
            self.fail(replace(report, failure=text))
            return
        self.holdings[report.rank] = holdings
        if len(self.holdings) == report.world_size:
            try:
                self.result.set_result(agree([self.holdings[rank] for rank in range(report.world_size)]))
            except ConfigError as error:
                self.result.set_exception(error)
            self.holdings = {}

    def fail(self, report: Report) -> None:
        """A rank has given the save up: the others must not wait for it."""
        if not self.result.done():
            self.result.set_exception(SaveFailedError(f"rank {report.rank}: {report.failure}"))
            self.result.exception()  # looked at, so that asyncio does not report it when nobody else comes


@dataclass(frozen=True, kw_only=True, slots=True)
class Arrival:
    """Where a rank's restore has brought it, in how many seconds since the claim. trained_s: see Manifest. what: its
    report in words."""

    step: int = 0
    trained_s: float = 0.0
    seconds: float = 0.0
    bytes_fetched: int = 0
    what: str = "nothing was restored"


@dataclass(frozen=True, kw_only=True, slots=True)
class RankRestore:
    """What a rank's restore of checkpoint `key` came to, or its peek at it. damage: the proof that it is damaged;
    failure: what else went wrong. Neither: all is well, and it has arrived."""

    group: str
    rank: int
    world_size: int
    key: str
    damage: str = ""
    failure: RaycheckError | None = None
    arrival: Arrival = Arrival()
    on_corrupt: OnCorrupt = "previous"
    is_peek: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class RestoreDecision:
    """What the ranks are told. "done": all have arrived, with `resume`. "again": restore that of `claim`, for
    `message`. "pending": ask again."""

    kind: Literal["done", "again", "pending"]
    claim: Claim | None = None
    resume: ResumeRecord | None = None
    message: str = ""


class Restoring:
    """The ranks' verdicts on one checkpoint, at a peek or at a restore, until they are ruled on. Lives in the
    coordinator's event loop."""

    def __init__(self) -> None:
        self.arrivals: dict[int, Arrival] = {}
        self.ruling: asyncio.Future[RestoreDecision] = asyncio.get_running_loop().create_future()
        self._task: asyncio.Task[None] | None = None

    def come(
        self,
        verdict: RankRestore,
        go_back: Callable[[], Coroutine[Any, Any, RestoreDecision]],
        go_on: Callable[[list[Arrival]], RestoreDecision],
    ) -> None:
        """The first bad verdict decides; without one, all must have come. `go_back`: rules on a damaged checkpoint,
        `go_on` on a good one."""
        self.arrivals[verdict.rank] = verdict.arrival
        if self.ruling.done() or self._task is not None:
            return
        whose = f"rank {verdict.rank}: {'peek at' if verdict.is_peek else 'restore of'} {verdict.key}: "
        if verdict.failure:
            self.fail(type(verdict.failure)(f"{whose}{verdict.failure}"))
        elif verdict.damage and verdict.on_corrupt == "raise":
            self.fail(DamagedError(whose + verdict.damage))
        elif verdict.damage:
            self._task = asyncio.create_task(self._rule(go_back()))
        elif len(self.arrivals) == verdict.world_size:
            self.ruling.set_result(go_on([self.arrivals[rank] for rank in range(verdict.world_size)]))

    async def _rule(self, ruling: Coroutine[Any, Any, RestoreDecision]) -> None:
        try:
            result = await ruling
            if not self.ruling.done():
                self.ruling.set_result(result)
        except Exception as error:  # noqa: BLE001  every waiting rank is told, whatever it was (I9)
            self.fail(error)

    def fail(self, error: Exception) -> None:
        """Every rank is told this. What was ruled before stands."""
        if not self.ruling.done():
            self.ruling.set_exception(error)
            self.ruling.exception()  # looked at, so that asyncio does not report it when nobody else comes
