"""Makes the coordinator's calls of the bucket protocol: everything that it reads from and writes to the bucket.

Each call blocks, so the coordinator makes it in a thread. bucket/protocol decides what may become of `latest`. This
module reads what else a call needs, and passes the result to the run log, the tasks that follow a commit, and the
deletes.
"""

import socket
import threading
import time
from contextlib import suppress
from functools import partial
from typing import Any
from uuid import uuid4

from raycheck.bucket.assembly.assemble import Assembled, assemble
from raycheck.bucket.assembly.plan_cache import PlanCache
from raycheck.bucket.assembly.save_report import Report
from raycheck.bucket.choice import resolved
from raycheck.bucket.diagnosis.checks import refuse_unfit_place
from raycheck.bucket.format.latest import Entry, Latest
from raycheck.bucket.pages import PageMissingError
from raycheck.bucket.protocol import claim as claims
from raycheck.bucket.protocol import commit as protocol
from raycheck.bucket.protocol.claim import Identity
from raycheck.bucket.protocol.damage import go_back
from raycheck.bucket.protocol.preflight import probe
from raycheck.bucket.protocol.referred_objects import ReferenceLostError, ReferredObjects
from raycheck.bucket.protocol.resume import AUTO, Resume
from raycheck.bucket.protocol.swap import Register
from raycheck.bucket.protocol.write_once import put_all_once
from raycheck.bucket.reading import Checkpoint
from raycheck.bucket.store.retry import retry
from raycheck.errors import (
    ConfigError,
    CorruptError,
    FencedError,
    RaycheckError,
    SaveFailedError,
    StoreError,
    SupersededError,
)
from raycheck.group.coordinator.background_deletes import BackgroundDeletes
from raycheck.group.coordinator.cluster import Cluster
from raycheck.group.coordinator.commit_tasks import CommitTasks
from raycheck.group.coordinator.history_writer import HistoryWriter
from raycheck.group.coordinator.messages import Claim, Outcome, RankRestore
from raycheck.group.coordinator.run_alerts import RunAlerts
from raycheck.group.coordinator.run_log import RunLog
from raycheck.log import event, logger

PROBE_ATTEMPTS = 3


class ProtocolCalls:
    """The bucket protocol's calls on behalf of one start of one driver's coordinator."""

    def __init__(
        self,
        register: Register,
        me: Identity,
        *,
        resume: Resume,
        examines: bool,
        plans: PlanCache,
        cluster: Cluster,
        tasks: CommitTasks,
        deletes: BackgroundDeletes,
        history: HistoryWriter,
        run_log: RunLog,
        alerts: RunAlerts,
    ) -> None:
        """resume: applies only to this owner's first claim. examines: refuse what `raycheck doctor` calls wrong before
        that claim."""
        self._register = register
        self._store = register.store
        self.me = me
        self._resume = resume
        self._examines = examines
        self._plans = plans
        self._cluster = cluster
        self._tasks = tasks
        self._deletes = deletes
        self._history = history
        self._run_log = run_log
        self._alerts = alerts
        self._referred = ReferredObjects(register.store)
        self._is_probed = False
        self._refusal: ConfigError | None = None
        self._said_drift = ""
        self._probing = threading.Lock()

    def claim(self, group: str, world_size: int, at: Resume = AUTO) -> Claim:
        """Steps 8 to 11: make `group` the live attempt and name the checkpoint that all its ranks restore.

        at: what the script's restore requests, in place of `fit(resume=...)`. Only the driver's first claim obeys it.
        """
        if AUTO not in (at, self._resume):
            raise ConfigError("restore was given at=... and fit was given resume=...; give only one of them")
        self.probe()
        documents: dict[str, list[Any]] = {}

        def read_ahead(entry: Entry) -> None:
            documents[entry.key] = self.documents(entry)

        claimed = claims.claim(
            self._register,
            self.me,
            group=group,
            world_size=world_size,
            resume=resolved(self._store, self._resume if at == AUTO else at),
            run_id=uuid4().hex,
            read_ahead=read_ahead,
        )
        self._referred.forget()
        attempt, entry, before = claimed.attempt, claimed.entry, claimed.before
        past = before[0].attempts if before is not None else ()
        ended = past[-1] if past and past[-1].number < attempt.number else None
        finished_at = before[0].finished_at if ended is not None and before is not None else None
        self._run_log.claimed(ended, attempt, entry, finished_at=finished_at)
        self._alerts.claimed(ended, self._run_log.cause)
        return Claim(
            attempt=attempt.number,
            restore=entry,
            documents=documents[entry.key] if entry else [],
            claims=(*(item.claimed_at for item in past if item.number < attempt.number), attempt.claimed_at),
            is_finished=claimed.body.ends_with(attempt.restore_key),
        )

    def take_over(self, group: str) -> tuple[int, Entry | None]:
        """Step 12: continue the attempt of `group`, which an earlier start of this coordinator has claimed.

        Returns the number of the attempt's last save that is committed, and the run's newest checkpoint, if any.
        """
        attempt = claims.take_over(self._register, self.me, group=group)
        found = self._register.read_newest()
        assert found is not None, "this process has just swapped latest"
        head = found[0].entry(found[0].head or "")
        self._run_log.adopted(attempt, head, now=found[1].at)
        return attempt.last_save, head

    def conclude(self, reports: dict[int, Report]) -> Outcome:
        """Steps 15 to 18: turn one save's reports, none of which is of a failure, into a checkpoint, and commit it.

        A failed save is an outcome, and leaves `latest` as it was (I10). Raises only what ends the attempt or the run.
        """
        began = time.monotonic()
        first = next(iter(reports.values()))
        name = first.checkpoint
        try:
            checkpoint, at = self._write(reports)
            manifest = checkpoint.manifest
            entry = protocol.commit(
                self._register,
                self.me,
                manifest,
                checkpoint.manifest_bytes,
                reports[0].retention,
                at=at,
                may_move_name=first.label.may_move,
            )
            if entry is None:
                return Outcome(kind="superseded", key=name)
        except (FencedError, SupersededError, CorruptError):
            raise
        except Exception as error:  # noqa: BLE001  whatever it was, it is this save that failed, and nothing else (I10)
            return self._failed(error, reports)
        self._plans.components = manifest.components
        if checkpoint.drift and not self._said_drift:
            self._said_drift = checkpoint.drift
            text = f"{name} holds one replica of several that have drifted apart: {checkpoint.drift}"
            logger.warning(event(text, run=self._store.uri))
        self._deletes.committed(reports[0].retention)
        self._history.committed()
        self._run_log.committed(manifest, seconds=time.monotonic() - began)
        self._tasks.nodes = [reports[rank].node for rank in sorted(reports)]
        self._tasks.start(name, first.progress, reports[0].tasks)
        places = {part.name: part.checkpoint for part in manifest.components}
        unnamed = _why_unnamed(entry, first)
        if unnamed:
            logger.error(event(unnamed, step=entry.step, run=self._store.uri))
        return Outcome(
            kind="committed",
            key=name,
            must_agree_again=checkpoint.has_copies,
            places=places,
            unnamed=unnamed,
        )

    def _write(self, reports: dict[int, Report]) -> tuple[Assembled, float | None]:
        """Step 16: write the documents of a save. Return them, and the store's time of the last response."""
        made = assemble(self._store, [reports[rank] for rank in sorted(reports)], self._plans)
        at, _ = self._store.both(
            partial(put_all_once, self._store, made.documents), partial(self._referred.refuse_lost, made.manifest)
        )
        return made, at

    def _failed(self, error: Exception, reports: dict[int, Report]) -> Outcome:
        """Return the outcome of a failed save, which all ranks are told."""
        first = next(iter(reports.values()))
        if is_lost := isinstance(error, ReferenceLostError):
            logger.error(event(str(error), step=first.progress.step, run=self._store.uri))
        forgets = isinstance(error, SaveFailedError) and any(report.references for report in reports.values())
        return Outcome(
            kind="failed",
            key=first.checkpoint,
            message=f"{type(error).__name__}: {error}",
            forgets_references=forgets or is_lost,
            is_cured_by_next=is_lost,
        )

    def past_outcome(self, report: Report) -> Outcome:
        """Step 15 after a take-over: answer for a save whose outcome some ranks learned before the coordinator died.

        These ranks will not report again, so `latest` says whether the save was committed.
        """
        entry = self._register.ask(lambda body: body.entry(report.checkpoint))
        is_live = entry is not None
        if is_live:
            self._tasks.start(report.checkpoint, report.progress, report.tasks)
        # Whether two ranks wrote the same box is forgotten. A rank that asks for this outcome has to compare replicas
        # again, and the other ranks are then told to do so too.
        return Outcome(
            kind="committed" if is_live else "superseded",
            key=report.checkpoint,
            must_agree_again=True,
            unnamed="" if entry is None else _why_unnamed(entry, report),
        )

    def go_back(self, rank_restore: RankRestore, problem: str) -> tuple[Entry, list[Any]]:
        """Step 26: mark the checkpoint that a rank found damaged, and make the one before it the head.

        Returns the new head, and its documents as `documents` does.
        """
        entry = go_back(self._register, self.me, group=rank_restore.group, key=rank_restore.key, problem=problem)
        logger.error(
            event(
                f"{rank_restore.key} is DAMAGED: it is marked so and kept for inspection, and {entry.key} is restored "
                f"instead. {problem}",
                run=self._store.uri,
            )
        )
        return entry, self.documents(entry)

    def documents(self, entry: Entry) -> list[Any]:
        """Read a checkpoint's documents once for all ranks, and share them. Return what `Group.fetch` takes.

        That is an empty list after an error, or where nothing can be shared: each rank then reads the documents itself,
        and finds and reports the error.
        """
        try:
            return self._cluster.share(Checkpoint(self._store, entry).read_documents)
        except RaycheckError as error:
            logger.warning(event(f"each rank reads the index of {entry.key}: {error}", run=self._store.uri))
            return []

    def check_live(self, group: str) -> None:
        """Step 28: raise FencedError or SupersededError when `latest` says that the attempt of `group` is over."""

        def check(body: Latest) -> None:
            claims.check_current(self._register, body, self.me)
            if body.attempt.group != group:
                raise SupersededError(f"attempt {body.attempt.number} is live now")

        self._register.ask(check)

    def has_run(self) -> bool:
        """Return whether the run exists, and nobody has deleted it. Raises CorruptError when `latest` is gone."""
        found = self._register.read_newest()
        return found is not None and found[0].deleted_at is None

    def finish(self, group: str) -> None:
        """Step 33: write into `latest` that the run has ended."""
        body = protocol.finish(self._register, self.me, group=group)
        self._run_log.finished(body)
        self._alerts.finished(body)

    def record_failure(self, cause: str, *, is_final: bool) -> None:
        """Write into the live attempt's record why this driver gives up the run, if the driver still owns the run."""
        found = self._register.read_newest()
        if found is not None and found[0].attempt.owner == self.me.owner and not found[0].is_finished:
            self._run_log.failed(found[0].attempt, at=found[1].at, cause=cause, is_final=is_final)
            self._alerts.given_up(found[0].attempt.number, cause)

    def probe(self) -> None:
        """Step 6: prove once that the store honors conditions. Raises ConfigError for a place that is unfit."""

        def prove() -> None:
            with self._probing:
                if self._refusal is not None:  # all ranks ask, and nothing has changed
                    raise self._refusal
                if not self._is_probed:
                    self._prove()
                    self._is_probed = True

        # One refused request is no reason to use up one of Ray's retries.
        retry(prove, on=StoreError, pauses_s=[1.0] * (PROBE_ATTEMPTS - 1))

    def _prove(self) -> None:
        self._store.both(self._test_store, self._read_owners)

    def _test_store(self) -> None:
        if not self._examines or self._has_claimed():
            probe(self._store)
            return
        try:
            refuse_unfit_place(self._store, node=socket.gethostname())
        except ConfigError as error:
            self._refusal = error
            raise

    def _has_claimed(self) -> bool:
        """Return whether this driver has claimed the run: then an earlier start of its coordinator has examined it. Not
        of a driver that was fenced so long ago that a page lists it."""
        found = self._register.read_newest()
        return found is not None and self.me.owner in found[0].newest_owners

    def _read_owners(self) -> None:
        """Read the pages of owners, step 9, if the claim will need them, so that it does not wait for them."""
        found = self._register.read_newest()
        if found is not None:
            with suppress(PageMissingError):  # the claim reads `latest` again
                self._register.pages.ask(found[0], lambda body: body.has_owner(self.me.owner))


def _why_unnamed(entry: Entry, report: Report) -> str:
    """Return why a committed checkpoint did not get the name that its save asked for; "" when it did."""
    wanted = report.label.name
    if wanted is None or entry.name == wanted:
        return ""
    return (
        f"{entry.key} is committed WITHOUT the name {wanted}, which a checkpoint of another step has: it is pinned "
        "instead. Name it by 'raycheck name', or give save(overwrite=True) the next time"
    )
