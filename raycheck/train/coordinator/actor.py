"""The coordinator: one actor per driver and run that turns the ranks' reports into a commit.

It holds no truth. After its own death Ray starts it again with empty memory; the ranks repeat their reports until
they are told an outcome, and the first call of the live group makes it take the attempt over. Every answer is an
outcome, never a receipt. All rules are those of bucket/protocol/; this module only gathers and waits.
"""

import asyncio
import time
from dataclasses import replace
from typing import Any
from uuid import uuid4

import ray

from raycheck.bucket.assembly.assemble import assemble
from raycheck.bucket.assembly.plan_cache import PlanCache
from raycheck.bucket.assembly.replica_agreement import Agreement, Holdings
from raycheck.bucket.assembly.save_report import Report
from raycheck.bucket.format.latest import COMMIT_BYTES, Entry
from raycheck.bucket.format.progress import Progress
from raycheck.bucket.protocol import claim as claims
from raycheck.bucket.protocol import commit as protocol
from raycheck.bucket.protocol.claim import Identity
from raycheck.bucket.protocol.damage import go_back
from raycheck.bucket.protocol.preflight import probe
from raycheck.bucket.protocol.swap import Register
from raycheck.bucket.reading import Checkpoint
from raycheck.bucket.store import Store, open_store
from raycheck.errors import (
    ConfigError,
    CorruptError,
    FencedError,
    RaycheckError,
    StoreError,
    SupersededError,
)
from raycheck.settings import ExportSettings
from raycheck.train.coordinator.background_deletes import BackgroundDeletes
from raycheck.train.coordinator.export_jobs import ExportJobs
from raycheck.train.coordinator.lost_work import HeartbeatMessage
from raycheck.train.coordinator.rendezvous import (
    Arrival,
    Claim,
    End,
    Meeting,
    Outcome,
    PendingSave,
    RankRestore,
    RestoreDecision,
    Restoring,
)
from raycheck.train.coordinator.requested_saves import RequestedSaves
from raycheck.train.coordinator.run_log import RunLog
from raycheck.train.log import logger, name_of, show_log

WAIT_S = 10.0
"""How long one report waits for the outcome before it is answered "pending" and repeated."""
PROBE_ATTEMPTS = 3
NOT_COME = "it saved without coming to this agreement; all ranks agree anew before the next save"


class Coordinator:
    """See the module. Every method may be repeated."""

    def __init__(self, uri: str, owner: str, resume: str | int = "auto") -> None:
        show_log()
        self._me = Identity(owner=owner, coordinator=uuid4().hex[:16])
        self._uri = uri
        self._resume = resume
        self._store: Store = open_store(uri)
        self._register = Register(self._store)
        self._lock = asyncio.Lock()
        self._claims: dict[str, Claim] = {}
        self._adopted: dict[str, int] = {}  # group taken over -> last save committed before
        self._saves: dict[tuple[str, int], PendingSave] = {}
        self._agreements: dict[tuple[str, int], Meeting] = {}
        self._restorings: dict[tuple[str, str, bool], Restoring] = {}
        self._ends: dict[str, End] = {}
        self._plans = PlanCache()
        self._probed = False
        self._exports = ExportJobs(self._store, uri)
        self._tidier = BackgroundDeletes(self._register, self._exports)
        self._chronicle = RunLog(self._store)
        self._farewell = RequestedSaves()

    async def claim(self, group: str, world_size: int) -> Claim:
        """Make `group` the live attempt. All its ranks may call; they get one answer."""
        async with self._lock:
            if group not in self._claims:
                await self._finish_commits()
                claim = await asyncio.to_thread(self._claim, group, world_size)
                if claim.restore is None:
                    claim = replace(claim, resume=self._chronicle.resumed(None, []))
                self._claims = {group: claim}
                self._saves = {key: save for key, save in self._saves.items() if key[0] == group}
                self._agreements.clear()
                self._restorings.clear()
                self._ends.clear()
                self._tidier.claimed()
            return self._claims[group]

    async def restored(self, verdict: RankRestore) -> RestoreDecision:
        """Take what a rank's restore, or its peek, came to, and wait a while for the ruling on all of them."""
        await self._adopt(verdict.group)
        if verdict.group in self._adopted:  # who of the others was told what is forgotten
            raise SupersededError("the coordinator was started again while the ranks restored; start the workers again")
        claim, at = self._claims[verdict.group], (verdict.group, verdict.key, verdict.is_peek)
        if at not in self._restorings and claim.restore and claim.restore.key != verdict.key:
            return RestoreDecision(kind="again", claim=claim, message="found damaged before")
        restoring = self._restorings.setdefault(at, Restoring())
        restoring.come(verdict, lambda: self._rule(verdict), lambda arrivals: self._go_on(verdict, arrivals))
        self._refuse_mixed(verdict)
        await asyncio.wait([restoring.ruling], timeout=WAIT_S)
        if restoring.ruling.done():
            return restoring.ruling.result()
        missing = sorted(set(range(verdict.world_size)) - set(restoring.arrivals))
        done = "peeked at" if verdict.is_peek else "restored"
        return RestoreDecision(kind="pending", message=f"ranks {missing} have not {done} it")

    async def report(self, report: Report, patience_s: float = WAIT_S) -> Outcome:
        """Take a rank's report and wait a while, at most patience_s, for the outcome of its save."""
        await self._adopt(report.group)
        if report.save <= self._adopted.get(report.group, 0):
            return await asyncio.to_thread(self._past, report)
        if report.section is not None and not self._plans.remember(report.section):
            return Outcome(kind="pending", key=report.checkpoint, message="its plan is not known", wants_plan=True)
        if (claim := self._claims.get(report.group)) and claim.documents:  # a rank that comes so late reads them itself
            self._claims[report.group] = replace(claim, documents=[])
        at = (report.group, report.save)
        if report.failure:
            self._agreements.setdefault(at, Meeting()).fail(report)
        elif at in self._agreements:
            self._agreements[at].fail(replace(report, failure=NOT_COME))
        pending = self._saves.setdefault(at, PendingSave())
        pending.reports.setdefault(report.rank, report)
        if not pending.is_started and (report.failure or len(pending.reports) == report.world_size):
            pending.start(asyncio.to_thread(self._conclude, dict(pending.reports)), then=self._tidier.start)
        await asyncio.wait([pending.outcome], timeout=min(WAIT_S, patience_s))
        if pending.outcome.done():
            self._forget_before(report)
            outcome = pending.outcome.result()
            if outcome.kind == "committed":
                self._farewell.committed(report.progress.step, save_s=report.blocked_s + report.upload_s)
            return outcome
        missing = sorted(set(range(report.world_size)) - set(pending.reports))
        what = f"ranks {missing} have not reported" if missing else "the commit is under way"
        return Outcome(kind="pending", key=report.checkpoint, message=what)

    async def agree(self, report: Report, holdings: Holdings, patience_s: float = WAIT_S) -> Agreement | Outcome:
        """Take what a rank holds, and wait a while, at most patience_s, for the agreement of all ranks before
        the save of `report`. All of them get the same one, or the ConfigError that names what is not equal on them."""
        await self._adopt(report.group)
        at = (report.group, report.save)
        meeting = self._agreements.setdefault(at, Meeting())
        if at in self._saves:  # of a rank that took the agreement from an earlier start of this coordinator
            meeting.fail(replace(report, failure=NOT_COME))
        meeting.come(report, holdings)
        await asyncio.wait([meeting.result], timeout=min(WAIT_S, patience_s))
        if meeting.result.done():
            return meeting.result.result()
        missing = sorted(set(range(report.world_size)) - set(meeting.holdings))
        return Outcome(kind="pending", key=report.checkpoint, message=f"ranks {missing} have not come")

    async def export(self, key: str, progress: Progress, settings: ExportSettings) -> int:
        """Export a committed checkpoint, unless that was begun."""
        await asyncio.to_thread(self._exports.start, key, progress, settings)
        return 0

    async def wait_for_exports(self, but: str = "") -> int:
        """Wait a while for exports under way, that of a checkpoint excepted; returns how many are left."""
        return await self._exports.wait(WAIT_S, but)

    async def finish(self, group: str, rank: int, world_size: int) -> list[int]:
        """Take a rank's word that it has come to the end of training, with all that it had to save committed. Rank 0
        waits a while until all have and `latest` says so (33). Returns the ranks that are missing; none: it is done."""
        await self._adopt(group)
        end = self._ends.setdefault(group, End())
        end.come(rank, world_size, lambda: self._finish(group))
        if rank:
            return []
        await asyncio.wait([end.put_down], timeout=WAIT_S)
        if end.put_down.done():
            end.put_down.result()
            return []
        return sorted(set(range(world_size)) - end.ranks) or [0]

    async def failed(self, cause: str, is_final: bool) -> None:
        """The driver gives the run up for `cause`. is_final: the same script would fail in the same way again."""
        await asyncio.to_thread(self._fail, cause, is_final=is_final)

    async def has_trained(self) -> bool:
        """Whether any group of this driver has completed a step."""
        return self._chronicle.has_trained

    async def beat(self, group: str, pulse: HeartbeatMessage) -> bool:
        """How far rank 0 is. Whether it should save soon, since Ray is about to change the group."""
        self._chronicle.beat(group, pulse)
        return self._farewell.is_wanted_at(pulse.step, begun=pulse.begun, step_s=pulse.step_s)

    async def save_now(self) -> bool:
        """Have the live group save, and wait a while for the commit. Whether there was one."""
        return await self._farewell.wait()

    async def hurt(self, causes: list[str]) -> None:
        """What Ray's controller saw of the live group."""
        self._chronicle.hurt(causes)

    async def watch(self, group: str) -> None:
        """Look at `latest`. Raises FencedError or SupersededError when the group's attempt is over."""
        await self._adopt(group)
        await asyncio.to_thread(self._look, group)

    async def _adopt(self, group: str) -> None:
        """Step 12: the first call of a group that this start of the coordinator does not know."""
        async with self._lock:
            if group not in self._claims and group not in self._adopted:
                self._adopted[group] = await asyncio.to_thread(self._take_over, group)

    async def _finish_commits(self) -> None:
        """Step 7: a fully reported save of the old attempt is committed before a new claim, within a bound."""
        running = [save.outcome for save in self._saves.values() if save.is_started and not save.outcome.done()]
        if running:
            await asyncio.wait(running, timeout=30.0)

    async def _rule(self, verdict: RankRestore) -> RestoreDecision:
        """Step 26."""
        problem = f"rank {verdict.rank}: {verdict.damage}"
        entry, documents = await asyncio.to_thread(self._go_back, verdict, problem)
        claim = replace(self._claims[verdict.group], restore=entry, documents=documents, is_finished=False)
        self._claims[verdict.group] = claim
        return RestoreDecision(kind="again", claim=claim, message=problem)

    def _refuse_mixed(self, verdict: RankRestore) -> None:
        """Ranks that peek and ranks that restore at once would wait for each other."""
        peek, restore = (self._restorings.get((verdict.group, verdict.key, is_peek)) for is_peek in (True, False))
        if peek is None or restore is None or peek.ruling.done():
            return
        if ahead := sorted(set(restore.arrivals) - set(peek.arrivals)):
            here = sorted(peek.arrivals)
            error = ConfigError(
                f"ranks {here} call peek(), and ranks {ahead} restore(): all ranks must call peek(), or none"
            )
            for waiting in (peek, restore):
                waiting.fail(error)

    def _go_on(self, verdict: RankRestore, arrivals: list[Arrival]) -> RestoreDecision:
        if verdict.is_peek:
            return RestoreDecision(kind="done")
        return RestoreDecision(
            kind="done", resume=self._chronicle.resumed(self._claims[verdict.group].restore, arrivals)
        )

    async def _finish(self, group: str) -> None:
        """Step 33."""
        body = await asyncio.to_thread(protocol.finish, self._register, self._me, group=group)
        self._chronicle.finished(body)

    def _forget_before(self, report: Report) -> None:
        for key in [key for key in self._saves if key[0] == report.group and key[1] < report.save - 2]:
            del self._saves[key]

    # --- below: in threads ---

    def _claim(self, group: str, world_size: int) -> Claim:
        self._probe()
        before = self._register.read()
        attempt, entry = claims.claim(
            self._register, self._me, group=group, world_size=world_size, resume=self._resume, run_id=uuid4().hex
        )
        past = before[0].attempts if before is not None else ()
        ended = past[-1] if past and past[-1].number < attempt.number else None
        body, _ = self._register.look()
        had_finished = ended is not None and before is not None and before[0].is_finished
        self._chronicle.claimed(ended, attempt, entry, had_finished=had_finished)
        if before is not None and len(before[1].data) > COMMIT_BYTES * 9 // 10:
            logger.warning("%s: latest is nearly full; keep fewer checkpoints (raycheck prune)", name_of(self._uri))
        return Claim(
            attempt=attempt.number,
            restore=entry,
            documents=self._documents(entry) if entry else [],
            claims=(*(item.claimed_at for item in past if item.number < attempt.number), attempt.claimed_at),
            is_finished=body.ends_with(attempt.restore_key),
        )

    def _take_over(self, group: str) -> int:
        attempt = claims.take_over(self._register, self._me, group=group)
        found = self._register.read()
        if found is not None:
            self._chronicle.adopted(attempt, found[0].entry(found[0].head or ""), now=found[1].at)
        return attempt.last_save

    def _fail(self, cause: str, *, is_final: bool) -> None:
        found = self._register.read()
        if found is not None and found[0].attempt.owner == self._me.owner and not found[0].is_finished:
            self._chronicle.failed(found[0].attempt, at=found[1].at, cause=cause, is_final=is_final)

    def _go_back(self, verdict: RankRestore, problem: str) -> tuple[Entry, list[Any]]:
        entry = go_back(self._register, self._me, group=verdict.group, key=verdict.key, problem=problem)
        logger.error(
            "%s: %s is DAMAGED and was marked so; it is kept for inspection. Restoring %s instead. %s",
            name_of(self._uri),
            verdict.key,
            entry.key,
            problem,
        )
        return entry, self._documents(entry)

    def _documents(self, entry: Entry) -> list[Any]:
        """Read once for all ranks. What is wrong with them is for the ranks to find out, and to say."""
        try:
            return [ray.put(Checkpoint(self._store, entry).read_documents())]
        except (RaycheckError, ray.exceptions.RayError) as error:
            logger.warning("%s: each rank reads the index of %s: %s", name_of(self._uri), entry.key, error)
            return []

    def _probe(self) -> None:
        for left in reversed(range(PROBE_ATTEMPTS)):
            if self._probed:
                return
            try:
                probe(self._store)
                self._probed = True
            except StoreError:  # one refused request is no reason to use up one of Ray's retries
                if not left:
                    raise
                time.sleep(1.0)

    def _past(self, report: Report) -> Outcome:
        """Step 15 after a take-over: some ranks were told already and will not report again."""
        found = self._register.read()
        is_live = found is not None and found[0].entry(report.checkpoint) is not None
        if is_live and report.exports is not None:
            self._exports.start(report.checkpoint, report.progress, report.exports)
        # Whether ranks wrote something twice is forgotten: those that ask must agree again, which tells the others.
        return Outcome(kind="committed" if is_live else "superseded", key=report.checkpoint, agree_anew=True)

    def _conclude(self, reports: dict[int, Report]) -> Outcome:
        """Steps 15 to 18 for one save. Raises what ends the attempt or the run; a failed save is an outcome."""
        began = time.monotonic()
        first = next(iter(reports.values()))
        name = first.checkpoint
        failures = [f"rank {rank}: {report.failure}" for rank, report in sorted(reports.items()) if report.failure]
        if failures:
            return Outcome(kind="failed", key=name, message="; ".join(failures))
        try:
            manifest, has_copies = assemble(self._store, [reports[rank] for rank in sorted(reports)], self._plans)
            data = protocol.write_manifest(self._store, manifest)
            if not protocol.commit(self._register, self._me, manifest, data, reports[0].retention):
                return Outcome(kind="superseded", key=name)
        except (FencedError, SupersededError, CorruptError):
            raise
        except Exception as error:  # noqa: BLE001  whatever it was, it is this save that failed, and nothing else (I10)
            return Outcome(kind="failed", key=name, message=f"{type(error).__name__}: {error}")
        self._plans.components = manifest.components
        self._tidier.committed()
        self._chronicle.committed(manifest, seconds=time.monotonic() - began)
        self._exports.nodes = [reports[rank].node for rank in sorted(reports)]
        if first.exports is not None:
            self._exports.start(name, first.progress, first.exports)
        places = {part.name: part.checkpoint for part in manifest.components}
        return Outcome(kind="committed", key=name, agree_anew=has_copies, places=places)

    def _look(self, group: str) -> None:
        found = self._register.read()
        assert found is not None, "a group has claimed, so this process has seen latest"
        claims.check_current(self._register, found[0], self._me)
        if found[0].attempt.group != group:
            raise SupersededError(f"attempt {found[0].attempt.number} is live now")
