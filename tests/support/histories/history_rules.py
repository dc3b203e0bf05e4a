"""Defines random histories of one run: hypothesis chooses who acts next, and what goes wrong at which store call.

Each rule is one call of one process. It runs to its end; or it crashes, pauses or meets one of the faults of
fault_injection.py at its k-th store call. A paused call goes on at any later rule, and a write that is still on its way
arrives at any later rule. Nothing is mocked but the bucket; the ledger judges every write and every answer.
"""

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from raycheck.bucket.format.label import Label
from raycheck.bucket.format.latest import load_latest
from raycheck.bucket.format.object_keys import LATEST_KEY, CheckpointName
from raycheck.bucket.protocol import name_and_score
from raycheck.bucket.protocol.pin_and_evict import pin
from raycheck.bucket.protocol.removal.prune_and_sweep import GRACE_S, NO_RULES, plan_prune, plan_sweep, prune, sweep
from raycheck.bucket.protocol.repair import repair
from raycheck.bucket.protocol.rewind import rewind
from raycheck.errors import ConfigError, ConflictError, NotFoundError
from raycheck.settings import Retention
from tests.support.histories.history_actors import WORLD_SIZE, Driver, Group, Save, read_one
from tests.support.histories.history_checks import list_directories
from tests.support.histories.history_machine import RUNS, Fate, Job, Stage, only, picked
from tests.support.servers.fault_injection import Mode

KINDS = (
    *["runs"] * 5,
    *["pauses"] * 5,
    "crashes",
    Mode.LOSE_ANSWER,
    Mode.APPLY_LATE,
    Mode.APPLY_TWICE,
    Mode.FAIL_BEFORE,
    Mode.TRUNCATE,
    Mode.STALE_LISTING,
)
AT = st.sampled_from((3, 4, 2, 5, 1, 0, 6, 9))
FATES = st.builds(Fate, st.sampled_from(KINDS), AT)
PICK, OLDER = st.integers(0, 5), st.sampled_from([0, 0, 1])
STEPS, BASES, LOSSES = st.sampled_from([10, 10, 0]), st.integers(0, 3), st.integers(0, 5)
RULES = st.sampled_from(
    [
        Retention(keep_last=1),
        Retention(keep_last=1),
        Retention(keep_last=2),
        Retention(keep_last=3),
        Retention(keep_last=1, keep_every_steps=30),
        Retention(keep_last=1, keep_every_s=400.0),
        Retention(keep_best={"metric": "loss", "mode": "min", "count": 1}),
        Retention(keep_last=2, expire_after_s=300.0),
        Retention(),
    ]
)
EDITS = ("pin", "unpin", "name", "name for a time", "unname", "score")
"""What a person changes of single checkpoints: refused when they are not live, and a name when another has it."""
MAX_DRIVERS = 3
NOT_LIVE = str(CheckpointName(attempt=0, save=0, step=0))


class Histories(RuleBasedStateMachine):
    """Plays random histories of one run; see the module. Where a number picks one of several, 0 is the newest."""

    def __init__(self) -> None:
        super().__init__()
        self.stage = Stage()
        self.ledger = self.stage.ledger

    # --- rules: few, as hypothesis leaves some of them out of every history; `what` chooses inside of one ---

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

    @precondition(lambda self: self.groups())
    @rule(steps=STEPS, base=BASES, loss=LOSSES, report=FATES)
    def save(self, steps: int, base: int, loss: int, report: Fate) -> None:
        """Save by the newest group. report: the fate of the coordinator's call once all ranks have reported."""
        self.save_of(picked(self.groups(), 0), steps, base, loss, RUNS, report)

    @precondition(lambda self: self.groups())
    @rule(pick=PICK, steps=STEPS, base=BASES, loss=LOSSES, upload=FATES, report=FATES)
    def save_of_any(self, pick: int, steps: int, base: int, loss: int, upload: Fate, report: Fate) -> None:
        """Save by a group that may have been replaced, or whose driver was. upload: the fate of one rank's call."""
        self.save_of(picked(self.groups(), pick), steps, base, loss, upload, report)

    @precondition(lambda self: self.running() and not self.ledger.is_lost)
    @rule(
        at=AT, base=BASES, what=st.sampled_from(["group", "save", "report", "driver", "keep"]), restarts=st.booleans()
    )
    def save_beside(self, at: int, base: int, what: str, restarts: bool) -> None:
        """Stop a coordinator in a commit, let somebody else act, and let it go on: the order that breaks most."""
        driver, paused = picked(self.running(), 0), len(self.stage.paused)
        group = self.stage.live_group(driver)
        if group is None:
            return
        self.save_of(group, 10, base, 2, RUNS, Fate("pauses", at))
        if restarts:
            driver.start_coordinator()
        if what == "group" and not driver.is_over:
            self.stage.claim(driver.start_group(), driver.coordinators[-1])
            self.stage.claim(group, driver.coordinators[-1])  # its call comes late
        elif what == "save" and not group.is_dead:
            self.save_of(group, 10, 0, 1, RUNS, RUNS)
        elif what == "report" and self.saves(driver):
            self.stage.report(self.saves(driver)[-2:][0], driver.coordinators[-1])
        elif what == "driver" and len(self.running()) < MAX_DRIVERS:
            self.start_a_driver(driver.rules, "auto", RUNS)
        elif what == "keep":
            self.person(what, 0, driver.rules, 0.0, RUNS)
        for job in self.stage.paused[paused:]:
            self.stage.paused.remove(job)
            self.stage.wake(job, RUNS)

    @precondition(lambda self: self.running())
    @rule(
        what=st.sampled_from(["group", "group", "restart", "claim", "report", "crash", "damage"]),
        pick=PICK,
        older=OLDER,
        fate=FATES,
    )
    def ray(self, what: str, pick: int, older: int, fate: Fate) -> None:
        """Let Ray start processes anew, repeat calls, or lose processes. A replaced one may go on later."""
        driver = picked(self.running(), pick)
        coordinator = picked(driver.coordinators, older)
        if what == "group":
            self.stage.claim(driver.start_group(), driver.coordinators[-1], fate)
        elif what == "restart":
            driver.start_coordinator()
        elif what == "claim":
            self.stage.claim(picked(driver.groups, pick % 2), coordinator, fate)
        elif what == "report" and self.saves(driver):
            self.stage.report(picked(self.saves(driver), pick), coordinator, fate)
        elif what == "damage" and not self.ledger.is_lost:
            group = driver.start_group()
            self.stage.claim(group, driver.coordinators[-1])
            if group.entry:
                self.stage.go_back(group, coordinator, fate)
        elif what == "crash":
            self.stage.kill(picked([coordinator, picked(driver.groups, older)], pick))

    @precondition(lambda self: self.ledger.body)
    @rule(
        what=st.sampled_from([*["prune", "keep", "keep", "sweep", "sweep torn", "read", "plan", "rewind"], *EDITS]),
        pick=PICK,
        rules=RULES,
        grace_s=st.sampled_from([0.0, GRACE_S]),
        fate=FATES,
    )
    def person(self, what: str, pick: int, rules: Retention, grace_s: float, fate: Fate) -> None:
        """Let a person with a tool act, or a coordinator that prunes after its commits."""
        awake = [item for driver in self.running() for item in driver.coordinators if not item.is_dead]
        who = picked(awake, pick) if what == "prune" and awake else self.stage.person()
        key = picked(self.live(), pick) if self.live() else NOT_LIVE
        store, register = who.store, who.register
        works = {
            "prune": lambda: prune(register, NO_RULES, grace_s=grace_s),
            "keep": lambda: prune(register, rules, grace_s=grace_s),
            "pin": lambda: pin(register, key),
            "unpin": lambda: pin(register, key, pinned=False),
            "name": lambda: name_and_score.name(register, key, Label(name="a", may_move=not grace_s)),
            "name for a time": lambda: name_and_score.name(register, key, Label(name="b", expire_after_s=300.0)),
            "unname": lambda: name_and_score.unname(register, "a"),
            "score": lambda: name_and_score.score(register, key, {"loss": -float(pick)}),
            "sweep": lambda: sweep(store, also_whole=True),
            "sweep torn": lambda: sweep(store),
            "read": lambda: read_one(store, pick),
            "plan": lambda: (plan_prune(register, rules), plan_sweep(store, also_whole=True)),
            "rewind": lambda: rewind(register, key),
        }
        if self.ledger.is_lost and what in ("prune", "keep", *EDITS):
            return  # `latest` was rolled back, and this process cannot see that
        self.stage.run(
            Job(
                process=who,
                work=who.does(works[what]),
                failed=only(NotFoundError, *((ConfigError,) if what.startswith("name") else ()))
                if what in (*EDITS, "read", "rewind")
                else only(),
                reads_only=what in ("read", "plan"),
                never=(Mode.STALE_LISTING,) if what == "rewind" else (),
            ),
            fate,
        )

    @precondition(lambda self: self.stage.paused or self.stage.world.late)
    @rule(what=st.sampled_from(["newest", "oldest", "land"]), pick=PICK, fate=FATES)
    def go_on(self, what: str, pick: int, fate: Fate) -> None:
        paused, late = self.stage.paused, self.stage.world.late
        if late and (what == "land" or not paused):
            self.stage.land(-1 - pick % len(late))
        elif what == "oldest":
            self.stage.wake(paused.pop(0), fate)
        elif paused:
            self.stage.wake(paused.pop(-1 - pick % len(paused)), fate)

    @rule(seconds=st.sampled_from([60.0, 300.0, 700.0]))
    def wait(self, seconds: float) -> None:
        self.stage.world.inner.at += seconds

    @precondition(lambda self: self.live())
    @rule(is_meant=st.booleans(), back=st.integers(0, 3), fate=FATES)
    def lose_or_repair(self, is_meant: bool, back: int, fate: Fate) -> None:
        """Delete `latest` while others run, or put it back to an older attempt's body while nobody runs.

        The next time, repair it.
        """
        if self.ledger.is_lost:
            self.repair(fate)
        elif is_meant:  # not too often: a history with a loss has less of the rest
            self.lose(back)

    def lose(self, back: int) -> None:
        newest = max(CheckpointName.parse(name) for name in list_directories(self.stage.world))
        older = [data for data in self.ledger.past if load_latest(data, what="past").attempt.number < newest.attempt]
        if back and older:
            self.stage.stop_everybody()
            self.ledger.lose(picked(older, back))
            return
        # First claims that found no run are let go before: test_history_findings.py and the model have these.
        for job in [job for job in self.stage.paused if job.process.register._seen == (0, 0)]:
            self.stage.kill(job.process)
        self.stage.world.late = [write for write in self.stage.world.late if write.key != LATEST_KEY]
        self.ledger.lose(None)

    def repair(self, fate: Fate) -> None:
        """Repair `latest` as a person who has stopped everybody first."""
        self.stage.stop_everybody()
        if not self.ledger.is_lost:  # an earlier repair was only slow
            return
        failed = only(ConflictError, ConfigError) if isinstance(fate.kind, Mode) else only()
        never = (Mode.TRUNCATE, Mode.STALE_LISTING)  # a repair cannot tell either from damage
        job = Job(process=self.stage.person(), work=repair, failed=failed, never=never)
        self.stage.run(job, RUNS if fate.kind == "pauses" else fate)

    def save_of(self, group: Group, steps: int, base: int, loss: int, upload: Fate, report: Fate) -> None:
        """Save by a group, which restores first if it has not. base: an earlier save to refer to, 0 for none."""
        if not group.is_restored:
            self.stage.restore(group, group.entry, upload)
        if not group.is_restored or group.is_dead:
            return
        bases = [*([group.entry.key] if group.entry else []), *(it.key for it in group.saves if it.told == "committed")]
        key = picked(bases, base - 1) if bases and base else None
        save = group.begin_save(steps=steps, base=self.ledger.manifests.get(key), loss=float(loss))
        for rank in range(WORLD_SIZE):
            self.stage.upload(save, rank, upload if rank else RUNS)
        if save.is_reported:
            self.stage.report(save, group.driver.coordinators[-1], report)

    # --- the checks ---

    @invariant()
    def every_invariant_holds(self) -> None:
        with self.stage.judged():
            self.ledger.check()

    def teardown(self) -> None:
        """Assert I5: whatever happened, a later driver restores the head and goes on, and no garbage stays."""
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
            self.save_of(group, 10, 0, 1, RUNS, RUNS)
            assert group.saves[-1].told == "committed", "nobody can save any more"
            assert self.ledger.body.head == group.saves[-1].key
            self.person("prune", 0, NO_RULES, GRACE_S, RUNS)
            self.person("sweep", 0, NO_RULES, GRACE_S, RUNS)
        self.ledger.check()
        body = self.ledger.body
        left = list_directories(self.stage.world) - body.held() - {item.key for item in body.evicted}
        assert not left, f"nobody deletes {sorted(left)}"

    # --- the lists that a number picks from ---

    def running(self) -> list[Driver]:
        return [driver for driver in self.stage.drivers if not driver.is_over]

    def groups(self) -> list[Group]:
        """Return the groups whose claim was answered, replaced ones too."""
        known = [group for driver in self.stage.drivers for group in driver.groups[-3:]]
        return [group for group in known if group.attempt and not group.is_dead]

    def saves(self, driver: Driver) -> list[Save]:
        known = [save for group in driver.groups[-3:] for save in group.saves[-3:]]
        return [save for save in known if save.is_reported]

    def live(self) -> list[str]:
        return [entry.key for entry in self.ledger.body.live] if self.ledger.body else []
