"""Runs the calls of a history's actors: to their end, or until they stop, crash or fail where hypothesis says.

A call that was suspended waits in `paused` until a rule wakes it, like a slow request or a frozen machine. At most
MAX_PAUSED wait there, as each is a thread.
"""

from collections.abc import Callable, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple, NoReturn, TypeVar

from raycheck.bucket.format.latest import Entry
from raycheck.errors import (
    ConfigError,
    CorruptError,
    DamagedError,
    FencedError,
    NotFoundError,
    RaycheckError,
    StoreError,
    SupersededError,
)
from tests.support.histories.history_actors import WAITING, Coordinator, Driver, Group, Process, Save, read_whole
from tests.support.histories.history_checks import Ledger
from tests.support.histories.stepped_processes import Task, play, simulated
from tests.support.servers.fault_injection import Call, Crashed, Mode, World

MAX_PAUSED = 10
T = TypeVar("T")


class Fate(NamedTuple):
    """Says how a call goes: it runs, or at its `at`-th store call it crashes, pauses, or meets a fault.

    A fault waits for a store call that it is possible for.
    """

    kind: str | Mode = "runs"
    at: int = 0


RUNS = Fate()


def _ignored(answer: Any) -> None:
    del answer


def _unexpected(error: RaycheckError) -> NoReturn:
    raise AssertionError(f"{type(error).__name__}: {error}") from error


@dataclass(eq=False, kw_only=True)
class Job:
    """Describes one call of one process. then, failed: take its answer, or the error that it ends with.

    never: faults that it never meets. task: its thread, once it has been suspended.
    """

    process: Process
    work: Callable[[Any], Any]
    then: Callable[[Any], object] = _ignored
    failed: Callable[[RaycheckError], object] = _unexpected
    reads_only: bool = False
    never: tuple[Mode, ...] = ()
    task: Task | None = None


class Stage:
    """Holds a bucket, all drivers of one run, and the calls that are suspended."""

    def __init__(self) -> None:
        self.world = World()
        self.ledger = Ledger(self.world)
        self.drivers: list[Driver] = []
        self.paused: list[Job] = []
        self.is_broken = False
        self._num_people = 0
        self._open = ExitStack()
        self._open.enter_context(simulated())

    def close(self) -> None:
        for job in self.paused:
            job.task.crash()
        self._open.close()

    def person(self) -> Process:
        """Make a person with a tool, who has seen nothing of the run yet."""
        self._num_people += 1
        return Process(f"person{self._num_people}")

    @contextmanager
    def judged(self) -> Any:
        """Note that this history is broken when anything is raised inside."""
        try:
            yield
        except BaseException:
            self.is_broken = True
            raise

    # --- what the actors do ---

    def claim(self, group: Group, coordinator: Coordinator, fate: Fate = RUNS) -> None:
        def then(answer: Any) -> None:
            self.ledger.answered_claim(group, *answer)
            if group.attempt is None:
                group.claimed(*answer)

        def failed(error: RaycheckError) -> None:
            if isinstance(error, FencedError):
                self._fenced(group.driver)
            elif isinstance(error, SupersededError):
                live = self.ledger.body.attempt
                is_current = (live.group, live.coordinator) == (group.name, coordinator.name)
                is_late = "was answered" in str(error)  # a claim repeated after its restore source was evicted
                assert self.ledger.is_lost or is_late or not is_current, "the live group is refused"
            elif isinstance(error, CorruptError):
                # A call that nobody waits for: another was answered, and what was restored is evicted by now.
                assert group.attempt, f"{group.name}: {error}"
                assert not self.ledger.body.entry(group.attempt.restore_key), f"{group.name}: {error}"
            else:
                assert isinstance(error, ConfigError), error
                assert group.driver.resume != "auto", error

        work = coordinator.does(lambda: coordinator.claim(group.name))
        self.run(Job(process=coordinator, work=work, then=then, failed=failed, never=(Mode.STALE_LISTING,)), fate)

    def live_group(self, driver: Driver) -> Group | None:
        """Return the driver's group that holds the live attempt, made now if there is none; None when that fails."""
        group = driver.groups[-1]
        if group.is_dead or not group.attempt or group.attempt.number != self.ledger.body.attempt.number:
            group = driver.start_group()
            self.claim(group, driver.coordinators[-1])
        return group if group.attempt else None

    def restore(self, group: Group, entry: Entry, fate: Fate = RUNS) -> None:
        def then(_: Any) -> None:
            group.is_restored = True

        def failed(error: RaycheckError) -> None:
            current = self.ledger.body.attempt
            assert isinstance(error, NotFoundError), error
            assert current.number != group.attempt.number or current.last_save, f"restore source evicted: {error}"

        work = group.does(lambda: read_whole(group.store, entry))
        self.run(Job(process=group, work=work, then=then, failed=failed, reads_only=True), fate)

    def go_back(self, group: Group, coordinator: Coordinator, fate: Fate) -> None:
        def then(entry: Entry) -> None:
            self.ledger.answered_going_back(group, entry)
            group.claimed(group.attempt, entry)

        def failed(error: RaycheckError) -> None:
            if isinstance(error, FencedError):
                self._fenced(group.driver)
            assert isinstance(error, FencedError | SupersededError | DamagedError), error

        work = coordinator.does(lambda: coordinator.go_back(group.name, group.entry.key))
        self.run(Job(process=coordinator, work=work, then=then, failed=failed), fate)

    def upload(self, save: Save, rank: int, fate: Fate = RUNS) -> None:
        def then(report: str) -> None:
            save.reports[rank] = report

        self.run(Job(process=save.group, work=save.group.does(lambda: save.upload(rank)), then=then), fate)

    def report(self, save: Save, coordinator: Coordinator, fate: Fate = RUNS) -> None:
        def then(outcome: str) -> None:
            self.ledger.answered_save(save, outcome)
            save.told = outcome

        def failed(error: RaycheckError) -> None:
            if isinstance(error, FencedError):
                self._fenced(save.group.driver)
            assert isinstance(error, FencedError | SupersededError), error

        work = coordinator.does(lambda: coordinator.conclude(save))
        self.run(Job(process=coordinator, work=work, then=then, failed=failed), fate)

    def kill(self, process: Process) -> None:
        """End all its calls where they are. Ray starts a coordinator again, with empty memory."""
        process.is_dead = True
        for job in [job for job in self.paused if job.process is process]:
            self.paused.remove(job)
            job.task.crash()
        if isinstance(process, Coordinator) and not process.driver.is_over:
            process.driver.start_coordinator()

    def stop_everybody(self) -> None:
        """Kill every process, and let all late writes arrive."""
        for driver in self.drivers:
            driver.is_over = True
            for process in (*driver.groups, *driver.coordinators[:]):
                self.kill(process)
        for job in self.paused[:]:
            self.kill(job.process)
        while self.world.late:
            self.land()

    def _fenced(self, driver: Driver) -> None:
        driver.is_over = True
        if not self.ledger.is_lost:
            self.ledger.answered_fenced(driver)

    # --- how calls are run ---

    def run(self, job: Job, fate: Fate) -> None:
        if job.process.is_dead:
            return
        if fate.kind == "pauses" or job.process.turn.is_taken:
            job.task = Task(self.world, job.work)
            self.wake(job, fate)
            return
        wanted: str | Mode | None = fate.kind

        def choose(number: int, call: Call) -> Mode | None:
            nonlocal wanted
            self._look_at(job, call)
            if number < fate.at or not _befalls(wanted, job, call):
                return Mode.APPLY
            mode, wanted = wanted, None
            return mode if isinstance(mode, Mode) else None

        with self.judged():
            self._ended(job, play(self.world, job.work, choose))

    def wake(self, job: Job, fate: Fate) -> None:
        """Go on with a call that was suspended."""
        task, number, is_pending = job.task, 0, True
        with self.judged():
            while not task.is_done:
                call = task.pending
                self._look_at(job, call)
                happens = is_pending and number >= fate.at and _befalls(fate.kind, job, call)
                if call.key == WAITING and job.process.turn.is_taken:
                    self.paused.append(job)
                    return
                if happens and fate.kind == "pauses" and len(self.paused) < MAX_PAUSED:
                    self.paused.append(job)
                    return
                if happens and fate.kind == "crashes":
                    task.crash()
                    break
                task.go(fate.kind if happens and isinstance(fate.kind, Mode) else Mode.APPLY)
                is_pending, number = is_pending and not happens, number + 1
            self._ended(job, task.result())

    def land(self, number: int = 0) -> None:
        with self.judged():
            self.ledger.writer = ""
            self.world.land(number)

    def _look_at(self, job: Job, call: Call) -> None:
        self.ledger.writer = job.process.name
        assert not (job.reads_only and call.is_write), f"I8: a reader is about to {call.verb} {call.key}"

    def _ended(self, job: Job, outcome: Any) -> None:
        if isinstance(outcome, Crashed):
            self.kill(job.process)
        elif isinstance(outcome, StoreError):
            pass  # the caller tries again, or not
        elif isinstance(outcome, CorruptError | NotFoundError) and self.ledger.is_lost:
            pass
        elif isinstance(outcome, RaycheckError):
            job.failed(outcome)
        else:
            job.then(outcome)


def picked(items: Sequence[T], pick: int) -> T:
    """Pick an item: 0 is the newest, 1 the one before it, and so on."""
    return items[-1 - pick % len(items)]


def only(*kinds: type[RaycheckError]) -> Callable[[RaycheckError], object]:
    """Make a handler that accepts errors of these kinds only."""

    def failed(error: RaycheckError) -> None:
        assert isinstance(error, kinds), f"{type(error).__name__}: {error}"

    return failed


def _befalls(kind: str | Mode | None, job: Job, call: Call) -> bool:
    if isinstance(kind, Mode):
        return kind in call.modes and kind not in job.never
    return kind in ("pauses", "crashes")
