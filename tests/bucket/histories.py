"""Histories of one run: who does what next, and what goes wrong at which store call, is hypothesis' to choose.

Each rule is one call of one process. It runs to its end; or it crashes, pauses or meets one of the faults of
tests/faulty.py at its k-th store call. What pauses goes on at any later rule, and what is under way in the network
lands at any later rule. Nothing is mocked but the bucket; the ledger judges every write and every answer.
"""

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from raycheck.bucket.edits import pin
from raycheck.bucket.latest import load_latest
from raycheck.bucket.layout import CheckpointName
from raycheck.bucket.register import Register
from raycheck.bucket.repair import repair
from raycheck.bucket.rewind import rewind
from raycheck.bucket.sweep import GRACE_S, NO_RULES, plan_prune, plan_sweep, prune, sweep
from raycheck.errors import ConfigError, ConflictError, NotFoundError, RaycheckError
from raycheck.settings import Retention
from tests.bucket.actors import WORLD_SIZE, Driver, Group, Process, Save, read_head
from tests.bucket.ledger import directories
from tests.bucket.stage import RUNS, Fate, Job, Stage, picked
from tests.faulty import Mode, Wire

KINDS = (
    *["runs"] * 4,
    *["pauses"] * 4,
    "crashes",
    Mode.LOSE_ANSWER,
    Mode.APPLY_LATE,
    Mode.APPLY_TWICE,
    Mode.FAIL_BEFORE,
    Mode.TRUNCATE,
    Mode.STALE_LISTING,
)
FATES = st.builds(Fate, st.sampled_from(KINDS), st.integers(0, 11))
PICK = st.integers(0, 5)
RULES = st.sampled_from(
    [
        Retention(keep_last=1),
        Retention(keep_last=2),
        Retention(keep_last=3),
        Retention(keep_last=1, keep_every_steps=30),
        Retention(keep_best=("loss", "min", 1)),
        Retention(keep_last=2, expire_after_s=300.0),
        Retention(),
    ]
)
MAX_DRIVERS = 3


class Histories(RuleBasedStateMachine):
    """See the module. Wherever a number picks one of several, 0 is the newest."""

    def __init__(self) -> None:
        super().__init__()
        self.stage = Stage()
        self.ledger = self.stage.ledger

    # --- drivers, coordinators, groups ---

    @initialize(rules=RULES, fate=FATES)
    def start_the_first_driver(self, rules: Retention, fate: Fate) -> None:
        self.start_a_driver(rules, "auto", fate)

    @precondition(lambda self: len(self.running()) < MAX_DRIVERS)
    @rule(rules=RULES, resume=st.sampled_from(["auto", "auto", "auto", "must", "never", 10]), fate=FATES)
    def start_a_driver(self, rules: Retention, resume: str | int, fate: Fate) -> None:
        driver = Driver(f"driver{len(self.stage.drivers) + 1}", resume, rules)
        self.stage.drivers.append(driver)
        driver.start_coordinator()
        self.stage.claim(driver.start_group(), driver.coordinators[-1], fate)

    @precondition(lambda self: self.running())
    @rule(pick=PICK, fate=FATES)
    def start_a_group(self, pick: int, fate: Fate) -> None:
        """The old group's ranks may be dead, or still on their way: Ray cannot know."""
        driver = picked(self.running(), pick)
        self.stage.claim(driver.start_group(), driver.coordinators[-1], fate)

    @precondition(lambda self: self.running())
    @rule(pick=PICK)
    def restart_a_coordinator(self, pick: int) -> None:
        """The old one may be frozen, with its calls: it lives on."""
        picked(self.running(), pick).start_coordinator()

    @precondition(lambda self: self.running())
    @rule(pick=PICK, group=st.sampled_from([0, 0, 1]), older=st.sampled_from([0, 0, 0, 1]), fate=FATES)
    def claim_again(self, pick: int, group: int, older: int, fate: Fate) -> None:
        """A rank 0 that got no answer asks again, and calls of groups that were replaced come late."""
        driver = picked(self.running(), pick)
        self.stage.claim(picked(driver.groups, group), picked(driver.coordinators, older), fate)

    @precondition(lambda self: self.processes())
    @rule(pick=PICK)
    def crash(self, pick: int) -> None:
        self.stage.kill(picked(self.processes(), pick))

    # --- saves ---

    @precondition(lambda self: self.groups())
    @rule(
        pick=PICK,
        steps=st.sampled_from([10, 10, 0]),
        base=st.integers(0, 3),
        loss=st.integers(0, 5),
        upload=FATES,
        report=FATES,
    )
    def save(self, pick: int, steps: int, base: int, loss: int, upload: Fate, report: Fate) -> None:
        """upload: the fate of one rank's; report: of the coordinator's call once all ranks have reported."""
        group = picked(self.groups(), pick)
        if not group.is_restored:
            self.stage.restore(group, group.entry, upload)
            return
        bases = [*([group.entry.key] if group.entry else []), *(it.key for it in group.saves if it.told == "committed")]
        key = picked(bases, base - 1) if bases and base else None
        save = group.begin_save(steps=steps, base=self.ledger.manifests.get(key), loss=float(loss))
        for rank in range(WORLD_SIZE):
            self.stage.upload(save, rank, upload if rank else RUNS)
        if save.is_reported:
            self.stage.report(save, group.driver.coordinators[-1], report)

    @precondition(lambda self: self.saves())
    @rule(pick=PICK, older=st.sampled_from([0, 0, 1]), fate=FATES)
    def report_again(self, pick: int, older: int, fate: Fate) -> None:
        """Ranks that were not told repeat their reports; others come from long ago."""
        save = picked(self.saves(), pick)
        self.stage.report(save, picked(save.group.driver.coordinators, older), fate)

    # --- anybody ---

    @precondition(lambda self: self.ledger.body and not self.ledger.is_lost)
    @rule(pick=PICK, rules=RULES, grace_s=st.sampled_from([0.0, GRACE_S]), is_person=st.booleans(), fate=FATES)
    def prune(self, pick: int, rules: Retention, grace_s: float, is_person: bool, fate: Fate) -> None:
        """By a coordinator behind its commits, or by somebody beside it."""
        awake = [item for driver in self.stage.drivers for item in driver.coordinators if not item.is_dead]
        who = self.stage.person() if is_person or not awake else picked(awake, pick)
        work = who.does(lambda: prune(who.register, rules if is_person else NO_RULES, grace_s=grace_s))
        self.stage.run(Job(process=who, work=work), fate)

    @precondition(lambda self: self.ledger.body)
    @rule(only_torn=st.booleans(), fate=FATES)
    def sweep(self, only_torn: bool, fate: Fate) -> None:
        self.stage.run(Job(process=self.stage.person(), work=lambda wire: sweep(wire, only_torn=only_torn)), fate)

    @precondition(lambda self: self.live() and not self.ledger.is_lost)
    @rule(pick=PICK, pinned=st.sampled_from([True, True, False]), fate=FATES)
    def pin(self, pick: int, pinned: bool, fate: Fate) -> None:
        who, key = self.stage.person(), picked(self.live(), pick)
        work = who.does(lambda: pin(who.register, key, pinned=pinned))
        self.stage.run(Job(process=who, work=work, failed=only(NotFoundError)), fate)

    @precondition(lambda self: self.live())
    @rule(pick=PICK, fate=FATES)
    def rewind(self, pick: int, fate: Fate) -> None:
        who, key = self.stage.person(), picked(self.live(), pick)
        work = who.does(lambda: rewind(who.register, key))
        self.stage.run(Job(process=who, work=work, failed=only(NotFoundError), never=(Mode.STALE_LISTING,)), fate)

    @precondition(lambda self: self.ledger.body)
    @rule(pick=PICK, plans=st.booleans(), fate=FATES)
    def read(self, pick: int, plans: bool, fate: Fate) -> None:
        """I8 and step 25: what was live when it was opened is whole, or is no longer live."""

        def work(wire: Wire) -> None:
            if plans:
                plan_prune(Register(wire), Retention(keep_last=1))
                plan_sweep(wire)
            read_head(wire, pick)

        self.stage.run(
            Job(process=self.stage.person(), work=work, failed=only(NotFoundError), reads_only=True),
            fate,
        )

    @precondition(lambda self: self.stage.paused)
    @rule(pick=PICK, fate=FATES)
    def wake(self, pick: int, fate: Fate) -> None:
        job = picked(self.stage.paused, pick)
        self.stage.paused.remove(job)
        self.stage.wake(job, fate)

    @precondition(lambda self: self.stage.world.late)
    @rule(pick=PICK)
    def land(self, pick: int) -> None:
        with self.stage.judged():
            self.stage.world.land(-1 - pick % len(self.stage.world.late))

    @rule(seconds=st.sampled_from([60.0, 300.0, 700.0]))
    def wait(self, seconds: float) -> None:
        self.stage.world.inner.at += seconds

    # --- the loss of `latest` ---

    @precondition(lambda self: self.live() and not self.ledger.is_lost)
    @rule(back=st.integers(0, 9), is_meant=st.sampled_from([False, False, False, True]))
    def lose_latest(self, back: int, is_meant: bool) -> None:
        """Deleted beside whoever runs; or put back to a body of an older attempt while nobody does."""
        if not is_meant:  # a history with a loss is a short one
            return
        newest = max(CheckpointName.parse(name) for name in directories(self.stage.world))
        older = [data for data in self.ledger.past if load_latest(data, what="past").attempt.number < newest.attempt]
        if back and older:
            self.stage.stop_everybody()
            self.ledger.lose(picked(older, back))
            return
        # First claims that found no run are let go before: see test_lost_latest.py.
        for job in [job for job in self.stage.paused if job.process.register._seen == (0, 0)]:
            self.stage.kill(job.process)
        self.stage.world.late = [write for write in self.stage.world.late if write.key != "latest"]
        self.ledger.lose(None)

    @precondition(lambda self: self.ledger.is_lost)
    @rule(fate=FATES)
    def repair(self, fate: Fate) -> None:
        """By a person who has stopped everybody first."""
        self.stage.stop_everybody()
        if not self.ledger.is_lost:  # an earlier repair was only slow
            return
        failed = only(ConflictError, ConfigError) if isinstance(fate.kind, Mode) else only()
        job = Job(
            process=self.stage.person(),
            work=repair,
            failed=failed,
            never=(Mode.TRUNCATE, Mode.STALE_LISTING),
        )
        self.stage.run(job, RUNS if fate.kind == "pauses" else fate)

    # --- what must hold ---

    @invariant()
    def every_invariant_holds(self) -> None:
        with self.stage.judged():
            self.ledger.check()

    def teardown(self) -> None:
        """I5: whatever happened, somebody who comes later restores the head and goes on, and no garbage stays."""
        try:
            if not self.stage.is_broken:
                self.goes_on()
        finally:
            self.stage.close()

    def goes_on(self) -> None:
        self.stage.stop_everybody()
        if self.ledger.is_lost:
            self.repair(RUNS)
        for _ in range(2):
            head = self.ledger.body.head if self.ledger.body else None
            self.stage.world.inner.at += 2 * GRACE_S
            self.start_a_driver(Retention(keep_last=2), "auto", RUNS)
            group = self.stage.drivers[-1].groups[-1]
            assert group.attempt, "nobody can claim any more"
            assert head == (group.entry.key if group.entry else None)
            for _ in range(2 if group.entry else 1):  # the first one restores
                self.save(0, 10, 0, 1, RUNS, RUNS)
            assert group.saves[-1].told == "committed", "nobody can save any more"
            assert self.ledger.body.head == group.saves[-1].key
            self.prune(0, NO_RULES, GRACE_S, is_person=False, fate=RUNS)
            self.sweep(only_torn=False, fate=RUNS)
        self.ledger.check()
        body = self.ledger.body
        left = directories(self.stage.world) - body.held() - {item.key for item in body.evicted}
        assert not left, f"nobody deletes {sorted(left)}"

    # --- below: from whom a number picks ---

    def running(self) -> list[Driver]:
        return [driver for driver in self.stage.drivers if not driver.is_over]

    def groups(self) -> list[Group]:
        """Those that have been answered, replaced ones too."""
        known = [group for driver in self.stage.drivers for group in driver.groups[-3:]]
        return [group for group in known if group.attempt and not group.is_dead]

    def saves(self) -> list[Save]:
        known = [save for driver in self.stage.drivers for group in driver.groups[-3:] for save in group.saves[-3:]]
        return [save for save in known if save.is_reported]

    def processes(self) -> list[Process]:
        known = [item for driver in self.running() for item in (*driver.groups[-2:], *driver.coordinators[-2:])]
        return [process for process in known if not process.is_dead]

    def live(self) -> list[str]:
        return [entry.key for entry in self.ledger.body.live] if self.ledger.body else []


def only(*kinds: type[RaycheckError]):
    """An answer to errors that takes these as a matter of course."""

    def failed(error: RaycheckError) -> None:
        assert isinstance(error, kinds), f"{type(error).__name__}: {error}"

    return failed
