"""The coordinator actor: one per driver and run, it turns the ranks' reports into commits.

It is not the source of truth. When it dies, Ray starts it again with empty memory; the ranks repeat their calls until
they are told a decision, and the first call of the live group makes it take the attempt over. This module gathers the
ranks' calls in its event loop and waits; protocol_calls.py talks to the bucket, in threads.
"""

import asyncio
import time
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any
from uuid import uuid4

from raycheck.bucket.assembly.plan_cache import PlanCache
from raycheck.bucket.assembly.replica_agreement import Agreement, DecodedBoxes, Holdings, agree
from raycheck.bucket.assembly.save_report import SAVE_ALIKE, Report
from raycheck.bucket.format.progress import Progress
from raycheck.bucket.protocol.claim import Identity
from raycheck.bucket.protocol.resume import AUTO, Resume
from raycheck.bucket.protocol.swap import Register
from raycheck.bucket.store import Store, open_store
from raycheck.data.proof_agreement import SourceProof, agreed_data
from raycheck.errors import ConfigError, DamagedError, RaycheckError, SaveFailedError, SupersededError
from raycheck.group.coordinator.background_deletes import BackgroundDeletes
from raycheck.group.coordinator.base_calls import BaseCalls
from raycheck.group.coordinator.cluster import Cluster
from raycheck.group.coordinator.commit_tasks import CommitTasks
from raycheck.group.coordinator.history_writer import HistoryWriter
from raycheck.group.coordinator.memory_checkpoints import MemoryCheckpoints
from raycheck.group.coordinator.messages import (
    Arrival,
    BaseAnswer,
    BaseMatch,
    BaseWish,
    Claim,
    HeartbeatMessage,
    NodeCheck,
    Outcome,
    Pending,
    PlanWanted,
    RankFailure,
    RankProgress,
    RankProof,
    RankRestore,
    RestoreDecision,
    SaveFailure,
    StepRows,
)
from raycheck.group.coordinator.node_agents import NodeAgents
from raycheck.group.coordinator.protocol_calls import ProtocolCalls
from raycheck.group.coordinator.rendezvous import WAIT_S, Kind, Rendezvous, RendezvousTable
from raycheck.group.coordinator.requested_saves import RequestedSaves
from raycheck.group.coordinator.run_alerts import RunAlerts
from raycheck.group.coordinator.run_log import RunLog
from raycheck.group.coordinator.slow_ranks import SlowRanks
from raycheck.log import event, logger, show_log
from raycheck.settings import Alerts, BuiltIn

LAST_COMMITS_S = 30.0
"""How long a claim waits for commits of the previous attempt."""
LAST_UPLOADS_S = 120.0
"""How long a claim waits for a save that all ranks of the previous attempt have staged and their nodes upload."""
LARGE_PLAN_BYTES = 64 * 1024
"""A smaller plan is parsed in the event loop: that takes less than a thread would."""
STARTED_AGAIN = "the coordinator was started again while the ranks asked for the base"
NOT_COMPARED = "this rank saved before the replicas were compared; they will be compared before the next save"


class Coordinator:
    """The coordinator of one driver: answers its worker groups, its controller and its script. Every call may be
    repeated."""

    def __init__(
        self, uri: str, owner: str, resume: Resume = AUTO, cluster: Cluster | None = None, *, examines: bool = False
    ) -> None:
        """owner: the id of the driver in `latest`. resume: only the driver's first claim obeys it. cluster: what this
        process has of the system that started it; by default nothing. examines: before that claim, refuse a place that
        `raycheck doctor` calls wrong; otherwise, the driver has done so."""
        cluster = cluster or Cluster()
        show_log()
        self._store: Store = open_store(uri)
        register = Register(self._store)
        me = Identity(owner=owner, coordinator=uuid4().hex[:16])
        self._lock = asyncio.Lock()
        self._claims: dict[str, Claim] = {}
        self._asked: dict[str, Resume] = {}  # by group, where its ranks want to start
        self._checked_nodes: set[str] = set()
        self._adopted: dict[str, int] = {}  # each group that was taken over -> its last save committed before
        self._table = RendezvousTable()
        self._requested = RequestedSaves()
        # Asks for the save that cures a lost object. It is held here, since asyncio does not hold it.
        self._next_save: asyncio.Task[bool] | None = None
        self._run_log = RunLog(self._store, cluster.metrics(uri))
        self._slow_ranks = SlowRanks(self._run_log)
        self._alerts = RunAlerts(self._store)
        self._plans = PlanCache()
        self._held: DecodedBoxes = {}  # of the agreement that is under way
        self._tasks = CommitTasks(self._store, uri, cluster.run_task)
        self._deletes = BackgroundDeletes(register, me, self._tasks)
        self._history = HistoryWriter(register)
        self._protocol = ProtocolCalls(
            register,
            me,
            resume=resume,
            examines=examines,
            plans=self._plans,
            cluster=cluster,
            tasks=self._tasks,
            deletes=self._deletes,
            history=self._history,
            run_log=self._run_log,
            alerts=self._alerts,
        )
        self._base = BaseCalls(register, self._protocol.me, self._table)
        self._node_agents = NodeAgents(cluster)
        self._memory = MemoryCheckpoints(self._store, self._node_agents, self._run_log, self._plans, self._table)
        self._last_uploads: dict[str, asyncio.Task[None]] = {}  # the wait for them, by the group that claims

    # --- calls of a worker group's ranks ---

    async def node_check(self, node: str) -> NodeCheck:
        """Return when a rank on `node` has to check what that node may do in the bucket."""
        if node in self._checked_nodes:
            return "done"
        return "beside the claim" if self._claims else "before the claim"

    async def node_checked(self, node: str) -> None:
        """Record that `node` has all permissions that a run needs, and sees what this actor writes."""
        self._checked_nodes.add(node)

    async def claim(self, group: str, world_size: int, rank: int | None = None, at: Resume = AUTO) -> Claim | Pending:
        """Make `group` the live attempt. All its ranks may call; they get the same answer.

        rank: who calls. A driver's first claim may fence another driver, so it waits until all ranks have called,
        including those that check their node first. `Pending` means that some have not. None: claim without the others.
        at: where the rank wants to start. Raises ConfigError if another rank wants to start elsewhere.
        """
        self._table.raise_if_failed(group)
        if self._asked.setdefault(group, at) != at:
            raise ConfigError(f"at=...: the ranks ask for {self._asked[group]} and {at}; all must give the same")
        if rank is not None and not (self._claims or self._adopted):
            rendezvous: Rendezvous[None, None]
            rendezvous = self._table.meet(group, "claim", world_size=world_size, awaited="claimed")
            rendezvous.arrive(rank, None)
            if rendezvous.is_due:
                rendezvous.decide(lambda _: None)
            if isinstance(pending := await rendezvous.answer(WAIT_S), Pending) and not self._claims:
                return pending
        if group not in self._claims:
            await self._finish_uploads(group)
        async with self._lock:
            if group not in self._claims:
                await self._finish_commits()
                claim = await asyncio.to_thread(self._protocol.claim, group, world_size, at)
                claim = replace(claim, memory=await self._memory.claimed(claim.attempt, claim.restore))
                if claim.entry is None:
                    claim = replace(
                        claim, resume=self._run_log.resumed(None, [], memory_problem=self._memory.take_problem())
                    )
                self._claims = {group: claim}
                self._table.claimed(group)
                self._plans.forget_senders()
                self._deletes.claimed()
                self._history.claimed()
            return self._claims[group]

    async def alert_by(self, alerts: Alerts) -> None:
        """Tell people by these settings what happens to the run. Raises ConfigError if that cannot work here."""
        self._alerts.send_by(alerts)

    async def save_failed(self, failure: SaveFailure) -> None:
        """Record that a save has failed, as rank 0 counts it."""
        self._alerts.save_failed(failure)

    async def rank_failed(self, failure: RankFailure) -> None:
        """Record that a rank has failed, and report its error to all ranks that wait for it, now or later."""
        self._table.rank_failed(failure)

    async def restored(self, rank_restore: RankRestore, patience_s: float = WAIT_S) -> RestoreDecision | Pending:
        """Record how a rank's restore, or its peek, ended, and wait a while for the decision on all ranks."""
        await self._adopt(rank_restore.group)
        if rank_restore.group in self._adopted:  # a restarted coordinator no longer knows which ranks have a decision
            raise SupersededError("the coordinator was started again while the ranks restored; start the workers again")
        claim, group, key = self._claims[rank_restore.group], rank_restore.group, rank_restore.key
        kind: Kind = "peek" if rank_restore.is_peek else "deferred" if rank_restore.is_deferred else "restore"
        if not self._table.find(group, kind, key) and claim.entry and claim.entry.key != key:
            return RestoreDecision(claim=claim, message="found damaged before")
        awaited = "peeked at it" if rank_restore.is_peek else "restored it"
        rendezvous = self._table.meet(group, kind, key, world_size=rank_restore.world_size, awaited=awaited)
        self._judge(rank_restore, rendezvous)
        self._refuse_mixed(group)
        return self._slow_ranks.named_in(await rendezvous.answer(patience_s), group, key)

    async def compare_data(self, mine: RankProof, patience_s: float = WAIT_S) -> SourceProof | Pending | None:
        """Record what a rank knows about its data source, and wait a while for what applies to all ranks.

        All ranks get the same answer, or the same ConfigError, which names the ranks whose data differ.
        """
        await self._adopt(mine.group)
        if mine.group in self._adopted:  # ranks that had an answer will not ask again
            if mine.stream is None:
                return None
            raise SupersededError("the coordinator was started again while the ranks compared their data; start again")
        rendezvous: Rendezvous[RankProof, SourceProof | None]
        awaited = "read their samples"
        rendezvous = self._table.meet(mine.group, "data", world_size=mine.world_size, awaited=awaited)
        rendezvous.arrive(mine.rank, mine)
        if rendezvous.is_due:
            rendezvous.decide(lambda ranks: agreed_data([(rank.stream, rank.proof) for rank in ranks]))
        self._refuse_mixed(mine.group)
        return await rendezvous.answer(patience_s)

    async def offer_base(self, wish: BaseWish, patience_s: float = WAIT_S) -> BaseAnswer | Pending:
        """Record what a rank wants from the base run, and wait a while for what the base offers to all ranks."""
        await self._adopt(wish.group)
        if wish.group in self._adopted:  # ranks that had an answer will not ask again
            return BaseAnswer(problem=STARTED_AGAIN)
        return await self._base.offer(wish, patience_s)

    async def match_base(self, match: BaseMatch, patience_s: float = WAIT_S) -> BaseAnswer | Pending:
        """Record the result of a rank's comparison with the base, and wait a while for what the run refers to."""
        await self._adopt(match.group)
        if match.group in self._adopted:
            return BaseAnswer(problem=STARTED_AGAIN)
        return await self._base.match(match, patience_s)

    async def agree(self, report: Report, holdings: Holdings, patience_s: float = WAIT_S) -> Agreement | Pending:
        """Record the checksums of a rank's replicas, and wait a while for the agreement before the save of `report`.

        Each rank gets its part of one agreement, or all get the same ConfigError, which names the replicas that differ.
        """
        await self._adopt(report.group)
        rendezvous = self._agreement_of(report)
        # If there is a report, its rank got its agreement from an earlier start of this actor.
        if self._table.find(report.group, *_which(report)):
            rendezvous.fail(_save_failed(report, NOT_COMPARED))
        if rendezvous.is_open:
            self._compare(report, holdings, rendezvous)
        told = await rendezvous.answer(patience_s)
        return told if isinstance(told, Pending) else told[report.rank]

    async def report(self, report: Report, patience_s: float = WAIT_S) -> Outcome | PlanWanted | Pending:
        """Record a rank's report of its upload, and wait a while for the outcome of the save."""
        await self._adopt(report.group)
        if not report.is_in_memory and report.save <= self._adopted.get(report.group, 0):
            return await asyncio.to_thread(self._protocol.past_outcome, report)
        if report.section is not None:
            section = self._plans.complete(report.section, (report.rank, report.is_in_memory))
            if section is None:
                return PlanWanted()
            if len(section.plan) > LARGE_PLAN_BYTES and not self._plans.is_parsed(section):
                await asyncio.to_thread(self._plans.parse, section)
            self._plans.parse(section)
            report = report if section is report.section else replace(report, section=section)
        if report.is_in_memory and (ended := self._memory.overtaken(report)):
            return ended
        if (claim := self._claims.get(report.group)) and claim.documents:
            # The restore is long over: a rank that still asks reads the documents itself.
            self._claims[report.group] = replace(claim, documents=[])
        if report.failure:
            self._agreement_of(report).fail(_save_failed(report, report.failure))
        elif agreement := self._table.find(report.group, "agreement", _which(report)):
            agreement.fail(_save_failed(report, NOT_COMPARED))
        rendezvous: Rendezvous[Report, Outcome]
        size = report.world_size
        rendezvous = self._table.meet(report.group, *_which(report), world_size=size, awaited="reported")
        rendezvous.arrive(report.rank, report)
        if rendezvous.is_open and not report.is_in_memory:
            self._history.reported(report, self._run_log.now)
        if rendezvous.is_open and (report.failure or rendezvous.is_complete):
            rendezvous.decide_later(self._conclude(dict(rendezvous.arrivals)))
        outcome = await rendezvous.answer(patience_s)
        if report.is_in_memory:
            return outcome
        outcome = self._slow_ranks.named_in(outcome, report.group, report.checkpoint)
        if rendezvous.is_decided:
            self._node_agents.ended((report.group, report.save))
            self._table.end_before(report.group, "save", report.save - 2)
        if isinstance(outcome, Outcome) and outcome.kind == "committed":
            # Not the sum: an upload in slices is part of the time for which training is blocked.
            self._requested.committed(report.progress.step, save_s=max(report.blocked_s, report.upload_s))
        return outcome

    async def node_agent(self, kind: type, node: str) -> Any:
        """Return the actor, of this class, that uploads for the ranks on `node`."""
        return self._node_agents.of(node, kind)

    async def handed_over(self, report: Report) -> None:
        """Record that its node's actor has a rank's staged save: the save then continues even if the rank dies."""
        self._node_agents.handed_over(report)

    async def no_memory(self, why: str) -> None:
        """Record why a rank can make no more memory checkpoints in this attempt."""
        self._memory.note_problem(why)

    async def after_commit(self, key: str, progress: Progress, tasks: Mapping[str, BuiltIn | bytes]) -> int:
        """Begin these tasks on a committed checkpoint, except for those that were begun on it before."""
        await asyncio.to_thread(self._tasks.start, key, progress, tasks)
        return 0

    async def wait_for_tasks(self, names: Collection[str], but: str = "") -> int:
        """Wait a while for these tasks, except on checkpoint `but`. Return how many are left."""
        return await self._tasks.wait(names, WAIT_S, but)

    async def finish(self, group: str, rank: int, world_size: int, patience_s: float = WAIT_S) -> Pending | None:
        """Record that a rank has reached the end of training, with everything that it had to save committed.

        Rank 0 waits a while until all ranks have and `latest` says so (step 33). The others are answered at once.
        """
        await self._adopt(group)
        rendezvous: Rendezvous[None, None]
        rendezvous = self._table.meet(group, "end", world_size=world_size, awaited="come to the end of training")
        rendezvous.arrive(rank, None)
        if rendezvous.is_due:
            rendezvous.decide_later(self._finish(group))
        return None if rank else await rendezvous.answer(patience_s)

    async def heartbeat(self, group: str, message: HeartbeatMessage) -> bool:
        """Record how far rank 0 is. Return whether it should save soon, because somebody has requested a save."""
        self._run_log.heartbeat(group, message)
        self._alerts.send_by(message.alerts)
        return self._requested.note_step(message.step, begun=message.begun, step_s=message.step_s)

    async def note_progress(self, progress: RankProgress) -> str:
        """Record how far a rank is that takes long. Return which one is the slowest, in words; "" if not known."""
        which: tuple[Kind, Any]
        which = ("deferred" if progress.is_deferred else "restore", progress.checkpoint)
        if progress.save is not None:
            which = "save", progress.save
        return self._slow_ranks.note(progress, self._table.find(progress.group, *which))

    async def keep_rows(self, rows: StepRows) -> None:
        """Write metrics of steps that no save takes along into the history, if there is still a run, and wait for it.

        It does not matter whether the attempt is over: what it has measured stays true.
        """
        if await asyncio.to_thread(self._protocol.has_run):
            self._history.reported(rows, self._run_log.now)
            await self._history.finish()

    async def check_live(self, group: str) -> None:
        """Read `latest`. Raise FencedError or SupersededError when the group's attempt is over."""
        await self._adopt(group)
        await asyncio.to_thread(self._protocol.check_live, group)

    # --- calls of the driver and of Ray Train's controller ---

    async def prepare(self) -> None:
        """Do the part of the first claim that needs no worker. An error is left to that claim."""
        with suppress(RaycheckError):
            await asyncio.to_thread(self._protocol.probe)

    async def save_now(self) -> bool:
        """Ask the live group for a save, and wait a while. Return whether it was committed."""
        return await self._requested.wait()

    async def has_trained(self) -> bool:
        """Return whether any group of this driver has completed a step."""
        return self._run_log.has_trained

    async def group_failed(self, causes: list[str]) -> None:
        """Record what Ray Train's controller saw happen to the live group, one line for each cause."""
        self._run_log.group_failed(causes)
        self._alerts.group_failed(self._run_log.attempt, causes)

    async def give_up(self, cause: str, is_final: bool) -> None:
        """Record that the driver gives up the run. is_final: the same script would fail in the same way again."""
        await asyncio.to_thread(self._protocol.record_failure, cause, is_final=is_final)
        self._history.claimed()
        await self._history.finish()

    # --- how decisions are made ---

    def _judge(self, rank_restore: RankRestore, rendezvous: Rendezvous[Arrival, RestoreDecision]) -> None:
        """Decide at the first rank that found damage or failed; without one, when all ranks have arrived."""
        rendezvous.arrive(rank_restore.rank, rank_restore.arrival)
        if not rendezvous.is_open:
            return
        whose = f"rank {rank_restore.rank}: {rank_restore.what}: "
        if rank_restore.failure:
            if self._is_from_memory(rank_restore):
                self._memory.forget(f"{whose}{rank_restore.failure}")  # the next attempt does not meet it again
            said = str(rank_restore.failure)
            is_named = said.startswith("rank ") and rank_restore.what in said  # by the rank where it has happened
            rendezvous.fail(type(rank_restore.failure)(said if is_named else whose + said))
        elif rank_restore.damage and self._is_from_memory(rank_restore):
            rendezvous.decide(lambda _: self._go_on_from_the_bucket(rank_restore))
        elif rank_restore.damage and rank_restore.on_corrupt == "raise":
            rendezvous.fail(DamagedError(whose + rank_restore.damage))
        elif rank_restore.damage:
            rendezvous.decide_later(self._go_back(rank_restore))
        elif rendezvous.is_complete:
            rendezvous.decide(lambda arrivals: self._go_on(rank_restore, arrivals))

    async def _go_back(self, rank_restore: RankRestore) -> RestoreDecision:
        """Step 26: have all ranks restore the checkpoint before the damaged one."""
        problem = f"rank {rank_restore.rank}: {rank_restore.damage}"
        entry, documents = await asyncio.to_thread(self._protocol.go_back, rank_restore, problem)
        claim = self._claims[rank_restore.group]
        refused = (*claim.refused, f"{rank_restore.key} ({problem})")
        claim = replace(claim, restore=entry, documents=documents, is_finished=False, refused=refused)
        self._memory.note_head(entry.key, entry.step)
        self._claims[rank_restore.group] = claim  # a rank that claims only now gets it too
        return RestoreDecision(claim=claim, message=problem)

    def _go_on(self, rank_restore: RankRestore, arrivals: list[Arrival]) -> RestoreDecision:
        if rank_restore.is_peek or rank_restore.is_deferred:
            return RestoreDecision()
        if len({arrival.defers for arrival in arrivals}) > 1:
            raise ConfigError("some ranks restore with defer_optimizer=True, and others do not: all must, or none")
        claim = self._claims[rank_restore.group]
        return RestoreDecision(
            resume=self._run_log.resumed(
                claim.entry,
                arrivals,
                is_from_memory=claim.memory is not None,
                memory_problem=self._memory.take_problem(),
            ),
        )

    def _is_from_memory(self, rank_restore: RankRestore) -> bool:
        memory = self._claims[rank_restore.group].memory
        return memory is not None and memory.entry.key == rank_restore.key

    def _go_on_from_the_bucket(self, rank_restore: RankRestore) -> RestoreDecision:
        """Have all ranks restore the checkpoint in the bucket, because a rank could not read the memory checkpoint."""
        problem = f"rank {rank_restore.rank}: {rank_restore.damage}"
        self._memory.forget(f"{rank_restore.key} cannot be restored from memory: {problem}")
        claim = self._claims[rank_restore.group] = replace(self._claims[rank_restore.group], memory=None)
        return RestoreDecision(claim=claim, message=problem)

    def _refuse_mixed(self, group: str) -> None:
        """Fail every rendezvous where some ranks peek and others restore: they would wait for each other."""
        peeks = [peek for peek in self._table.of_kind("peek", group) if not peek.is_decided]
        if not peeks:
            return
        restores = [*self._table.of_kind("data", group), *self._table.of_kind("restore", group)]
        restoring = {rank for rendezvous in restores for rank in rendezvous.came}
        for peek in peeks:
            if ahead := sorted(restoring.difference(peek.came)):
                error = ConfigError(
                    f"ranks {peek.came} call peek(), and ranks {ahead} restore(): all ranks must call peek(), or none"
                )
                for rendezvous in (peek, *restores):
                    rendezvous.fail(error)

    def _agreement_of(self, report: Report) -> Rendezvous[tuple[Report, Holdings], list[Agreement]]:
        return self._table.meet(
            report.group,
            "agreement",
            _which(report),
            world_size=report.world_size,
            awaited="brought their replicas' checksums",
        )

    def _compare(
        self, report: Report, holdings: Holdings, rendezvous: Rendezvous[tuple[Report, Holdings], list[Agreement]]
    ) -> None:
        """Decide who writes each replica, when all ranks are there. Fails when they save different steps."""
        first, _ = next(iter(rendezvous.arrivals.values()), (report, holdings))  # the others have been compared with it
        if first.checkpoint != report.checkpoint:
            text = f"this rank saves {report.checkpoint} while another one saves {first.checkpoint}: {SAVE_ALIKE}"
            rendezvous.fail(_save_failed(report, text))
            return
        if holdings.boxes not in self._held:
            holdings.decoded(self._held)
        rendezvous.arrive(report.rank, (report, holdings))
        if rendezvous.is_complete:
            rendezvous.decide(
                lambda arrivals: agree(
                    [held for _, held in arrivals],
                    self._held,
                    leaving=frozenset(report.rank for report, _ in arrivals if report.leaves),
                )
            )
            self._held = {}

    async def _conclude(self, reports: dict[int, Report]) -> Outcome:
        """Make a checkpoint of the ranks' reports, in the bucket or in memory, unless a rank has failed."""
        first = next(iter(reports.values()))
        if failures := [f"rank {rank}: {report.failure}" for rank, report in sorted(reports.items()) if report.failure]:
            outcome = Outcome(kind="failed", key=first.checkpoint, message="; ".join(failures))
        elif first.is_in_memory:
            outcome = await self._memory.conclude([reports[rank] for rank in sorted(reports)])
        else:
            outcome = await asyncio.to_thread(self._protocol.conclude, reports)
        if first.is_in_memory:
            if outcome.kind == "failed":
                self._memory.note_problem(outcome.message, step=first.progress.step)
            return outcome
        self._deletes.start()
        self._history.start()
        if outcome.is_cured_by_next:
            self._next_save = asyncio.create_task(self._requested.wait())
        if outcome.kind == "committed":
            self._memory.committed(outcome.key, first.progress.step)
        return outcome

    async def _finish(self, group: str) -> None:
        """Step 33, and the last writes of the history: of what was trained before, since a copier stops at the end."""
        await self._history.flush()
        await asyncio.to_thread(self._protocol.finish, group)
        self._history.claimed()
        await self._history.finish()

    async def _adopt(self, group: str) -> None:
        """Step 12: take over the attempt at the first call of a group that this start of the actor does not know."""
        async with self._lock:
            if group not in self._claims and group not in self._adopted:
                self._adopted[group], head = await asyncio.to_thread(self._protocol.take_over, group)
                if head is not None:
                    self._memory.note_head(head.key, head.step)

    async def _finish_uploads(self, group: str) -> None:
        """Step 7: before the claim of a new group, wait once for all of its ranks until the nodes have uploaded."""
        if group not in self._last_uploads:
            self._last_uploads = {group: asyncio.create_task(self._wait_for_uploads())}
        await asyncio.shield(self._last_uploads[group])

    async def _wait_for_uploads(self) -> None:
        """Wait a while for the saves that all ranks of the live group had staged and their nodes upload."""
        deadline = time.monotonic() + LAST_UPLOADS_S
        is_said = False
        while time.monotonic() < deadline:
            saves = [found for group in self._claims or self._adopted for found in self._staged_on_all_ranks(group)]
            answers = await asyncio.gather(*(self._node_agents.ask_whether_saving(found) for found in saves))
            if not any(answers):  # one save that nobody continues says nothing about a later one
                return
            if not is_said:
                step = saves[answers.index(True)][0].progress.step
                text = "waiting for a save that all ranks of the attempt before had staged"
                logger.info(event(text, step=step, run=self._store.uri))
                is_said = True
            await asyncio.sleep(0.1)

    def _staged_on_all_ranks(self, group: str) -> list[list[Report]]:
        """Return, for each undecided save that all ranks have staged, the reports that have not arrived yet."""
        found = []
        for save, handed in sorted(self._node_agents.undecided(group).items()):
            rendezvous = self._table.find(group, "save", save)
            if rendezvous is not None and not rendezvous.is_open:
                continue  # a rank has failed, or all have reported
            came = set(rendezvous.came) if rendezvous is not None else set()
            missing = [report for rank, report in handed.items() if rank not in came]
            if missing and len(came.union(handed)) == missing[0].world_size:
                found.append(missing)
        return found

    async def _finish_commits(self) -> None:
        """Step 7: before a new claim, wait a while until the saves that all ranks have reported are committed."""
        running = [save.answer(LAST_COMMITS_S) for save in self._table.of_kind("save") if save.is_deciding]
        await asyncio.gather(*running, return_exceptions=True)


def _which(report: Report) -> tuple[Kind, int]:
    """Return the kind of a save, and its key among those of that kind: memory checkpoints have no numbers."""
    return ("memory", report.progress.step) if report.is_in_memory else ("save", report.save)


def _save_failed(report: Report, why: str) -> SaveFailedError:
    return SaveFailedError(f"rank {report.rank}: {why}")
