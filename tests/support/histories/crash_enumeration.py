"""Enumerates crashes: every call of an operation, every fault at it, every moment at which a late write can arrive.

A `Scenario` is a world with a past and an operation on it. `explore` runs the operation once per call and fault, with
the process dying there and with the process living on, and then restarts: a coordinator claims, restores what it is
told, saves, commits, prunes and sweeps. Late writes arrive at every later call that they could matter to: one that
touches their object, or lists it. Worlds that are equal are restarted once.

`assert_write` watches every write on the way, so the assertions here are about what a restart finds.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from raycheck.bucket.attempt_records import record_end
from raycheck.bucket.format import object_keys
from raycheck.bucket.format.checksum import crc32
from raycheck.bucket.format.latest import Attempt, Entry
from raycheck.bucket.format.manifest import Manifest
from raycheck.bucket.format.object_keys import CheckpointName
from raycheck.bucket.protocol.preflight import probe
from raycheck.bucket.protocol.removal.prune_and_sweep import prune, sweep
from raycheck.bucket.reading import Checkpoint
from raycheck.errors import FencedError
from tests.support.histories.invariants import assert_invariants, load, needed, whole
from tests.support.histories.stepped_processes import play
from tests.support.samples.sample_checkpoints import Driver, write_checkpoint
from tests.support.servers.fault_injection import Call, Mode, Wire, World

Work = Callable[[Wire], Any]


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """Describes an operation, `work`, on a copy of `world`.

    owners: the drivers that restart after it, each on a copy of its own. again: what an operator does before a restart,
    in case the work was not done. is_new: there may be no checkpoint to restore. head: what the first restart restores
    however the work ended; by default the head just before the restart.
    """

    world: Callable[[], World]
    work: Work
    owners: tuple[str, ...] = ("ann", "zoe")
    again: Work = lambda _: None
    is_new: bool = False
    head: str | None = None


@dataclass
class Tally:
    """Counts what was enumerated.

    faults: (call, mode) pairs, of which `crashes` end the process there. arrivals: late writes at each moment.
    restarts: runs of a restart from a world not seen before.
    """

    calls: int = 0
    crashes: int = 0
    faults: int = 0
    arrivals: int = 0
    restarts: int = 0
    seen: set[Any] = field(default_factory=set)

    def __str__(self) -> str:
        return (
            f"{self.calls} calls, {self.crashes} crashes, {self.faults} faults, {self.arrivals} arrivals of late writes, "
            f"{self.restarts} restarts"
        )


def explore(scenario: Scenario, *, depth: int = 1) -> Tally:
    """Try every single fault of the operation, and the restarts after it.

    depth 2: try every crash of it, and crash the first restart, too, at every call and with every write of it still on
    its way, and restart again.
    """
    tally = Tally()
    plain = run(scenario.world(), scenario.work)
    tally.calls = len(plain.calls)
    assert_invariants(plain.world.inner)
    restart_all(scenario, plain, tally, depth=depth)
    for number, call in enumerate(plain.calls):
        for mode in (None,) if depth > 1 else (None, *call.modes[1:]):
            for end in endings(scenario, number, mode, tally):
                restart_all(scenario, end, tally, depth=depth)
    return tally


@dataclass(frozen=True, kw_only=True)
class End:
    """Holds what an operation left: the world, its outcome (a Crashed, perhaps) and the calls it made.

    chances: for each call, which late writes would have changed anything at that time.
    """

    world: World
    outcome: Any
    calls: list[Call]
    chances: list[list[bool]]

    def moments(self, number: int, *, after: int) -> list[int]:
        """Return the calls later than `after` before which the arrival of that late write makes a difference.

        It does when the call looks at what the write changes.
        """
        late = self.world.late[number]
        return [
            place
            for place, (call, chances) in enumerate(zip(self.calls, self.chances, strict=True))
            if place > after and number < len(chances) and chances[number] and is_seen(late.key, call)
        ]


def run(
    world: World,
    work: Work,
    *,
    fault: tuple[int, Mode | None] | None = None,
    dies_at: int | None = None,
    arrives: tuple[int, int] | None = None,
) -> End:
    """Run one process. fault: a call's number and its mode; None: it dies there. dies_at: the call at which it dies.

    arrives: a call's number, and the number of the late write that arrives just before it.
    """
    calls: list[Call] = []
    chances: list[list[bool]] = []

    def choose(number: int, call: Call) -> Mode | None:
        calls.append(call)
        chances.append([world.would_change(write) for write in world.late])
        if arrives and number == arrives[0]:
            world.land(arrives[1])
        if number == dies_at:
            return None
        return fault[1] if fault and fault[0] == number else Mode.APPLY

    outcome = play(world, work, choose)
    return End(world=world, outcome=outcome, calls=calls, chances=chances)


def endings(scenario: Scenario, number: int, mode: Mode | None, tally: Tally) -> Iterator[End]:
    """Yield the ends that the operation can have with one fault at its call `number`.

    It dies of the fault, or goes on, while the write is late until the end or arrives at one of its further calls.
    """
    tally.crashes += 1
    if mode is None:
        yield run(scenario.world(), scenario.work, fault=(number, None))
        return
    tally.faults += 1
    yield run(scenario.world(), scenario.work, fault=(number, mode), dies_at=number + 1)
    lives = run(scenario.world(), scenario.work, fault=(number, mode))
    yield lives
    if lives.world.late:
        for place in lives.moments(0, after=number):
            tally.arrivals += 1
            yield run(scenario.world(), scenario.work, fault=(number, mode), arrives=(place, 0))


def restart_all(scenario: Scenario, end: End, tally: Tally, *, depth: int) -> None:
    acknowledged = end.outcome if isinstance(end.outcome, tuple) else ()
    assert_kept(end.world, acknowledged)
    state = (state_of(end.world), acknowledged)
    if state in tally.seen:
        return
    tally.seen.add(state)
    for owner in scenario.owners:
        for calls in restarts(scenario, end.world, owner, tally):
            if depth > 1:
                restart_twice(scenario, end.world, owner, calls, tally)


def restarts(scenario: Scenario, world: World, owner: str, tally: Tally, *, start: str = "r1") -> Iterator[list[Call]]:
    """Restart while late writes never arrive, and while each arrives at each moment: before, in the middle, after.

    Yields the calls of the first restart.
    """
    plain = restart(scenario, world.copy(), owner, start)
    tally.restarts += 1
    yield plain.calls
    for number in range(len(world.late)):
        for place in dict.fromkeys([*plain.moments(number, after=-1), len(plain.calls)]):
            tally.arrivals += 1
            tally.restarts += 1
            restart(scenario, world.copy(), owner, start, arrives=(place, number))


def restart_twice(scenario: Scenario, world: World, owner: str, calls: list[Call], tally: Tally) -> None:
    """Let the restart die at each of its calls, and with each of its writes still on its way; then restart again."""
    for number, call in enumerate(calls):
        modes = (None, Mode.APPLY_LATE) if call.is_write else (None,)
        for mode in modes:
            tally.crashes += 1
            dies_at = None if mode is None else number + 1
            end = run(world.copy(), restarting(scenario, owner, "r1"), fault=(number, mode), dies_at=dies_at)
            state = (state_of(end.world), ())
            if state not in tally.seen:
                tally.seen.add(state)
                for _ in restarts(scenario, end.world, owner, tally, start="r2"):
                    pass


def is_seen(key: str, call: Call) -> bool:
    return key.startswith(call.key) if call.verb.startswith("list_") else key == call.key


def state_of(world: World) -> Any:
    """Return a value that is equal for worlds that cannot be told apart from here on.

    Scratch objects and the history do not count: no process decides anything by them.
    """
    there = {key: data for key, data in world.objects.items() if not key.startswith(("probes/", "history/"))}
    uploads = tuple(world.inner.list_uploads(""))
    return (
        frozenset(there.items()),
        uploads,
        tuple(item for item in world.late if not item.key.startswith(("probes/", "history/"))),
    )


# --- the restart ---


@dataclass(frozen=True, kw_only=True)
class Restarted:
    """Says what a restart was told to restore, and what it saved after that."""

    head_before: str | None
    restored: Entry | None
    saved: str


def restart(scenario: Scenario, world: World, owner: str, start: str, *, arrives: tuple[int, int] | None = None) -> End:
    """Start `owner`'s coordinator anew, until it has committed a checkpoint, and assert what must be true of it.

    An owner that finds itself fenced is followed by one that nobody knows.
    """
    body = whole(world, world.bodies[-1]) if world.bodies else None
    is_fenced = body is not None and owner in body.owners and body.attempt.owner != owner
    end = run(world, restarting(scenario, owner, start), arrives=arrives)
    assert isinstance(end.outcome, FencedError) or not is_fenced, "another driver owns the run"
    if arrives and arrives[0] >= len(end.calls):
        while world.late:
            world.land()
    outcome = end.outcome
    if isinstance(outcome, FencedError):
        assert load(world.bodies[-1]).attempt.owner != owner, "fenced by itself"
        outcome = run(world, restarting(scenario, "eve", start)).outcome
    assert isinstance(outcome, Restarted), f"{owner} cannot go on: {outcome!r}"
    assert_restarted(scenario, world, outcome, is_first=start == "r1")
    return end


def assert_restarted(scenario: Scenario, world: World, done: Restarted, *, is_first: bool) -> None:
    assert done.restored is not None or scenario.is_new, "I7: a start from zero"
    assert (done.restored.key if done.restored else None) == done.head_before, "the newest committed is restored"
    if done.restored is None:
        number = CheckpointName.parse(done.saved).attempt
        bodies = [whole(world, body) for body in world.bodies]
        assert not any(body.live for body in bodies if body.attempt.number < number), "I7: a start from zero"
    if scenario.head and is_first:
        assert done.restored.key == scenario.head, "what is newest and whole is restored"
    body = whole(world, world.objects[object_keys.LATEST_KEY])
    assert body.head == done.saved
    assert all(key in world.objects for entry in body.live for key in needed(world, entry))
    outside = [key for key in world.deleted if not key.startswith(("checkpoints/", "history/", "pages/", "probes/"))]
    assert not outside, "I6"


def assert_kept(world: World, acknowledged: tuple[str, ...]) -> None:
    """Assert that every acknowledged commit is in the list, or was."""
    listed = {entry.key for body in world.bodies for entry in whole(world, body).live}
    assert set(acknowledged) <= listed, "a commit that was acknowledged is nowhere"


def restarting(scenario: Scenario, owner: str, start: str) -> Work:
    """Make the work of one new process: claim, restore, save, commit, prune and sweep."""

    def work(wire: Wire) -> Restarted:
        scenario.again(wire)
        driver = Driver(wire, owner, start)
        bodies = wire.world.bodies
        attempt, restored = claim(driver, f"{owner}-{start}")
        before = next(
            (load(body).head for body in reversed(bodies) if load(body).attempt.number < attempt.number), None
        )
        base = None if restored is None else only_train(restore(Checkpoint(wire, restored)))
        manifest = write_checkpoint(wire, attempt=attempt.number, save=1, base=base)
        assert driver.commit(manifest, keep_last=1)
        prune(driver.register, grace_s=0.0)
        sweep(wire, also_whole=True)
        return Restarted(head_before=before, restored=restored, saved=manifest.key)

    return work


def claim(driver: Driver, group: str) -> tuple[Attempt, Entry | None]:
    """Claim as a coordinator does: probe, read, claim, write the record of the attempt that it ended."""
    probe(driver.store)
    before = driver.register.read()
    attempt, entry = driver.claim(group)
    if before is not None and before[0].attempt.number < attempt.number:
        record_end(driver.store, before[0].attempt, by=attempt, cause="a test")
    return attempt, entry


def restore(checkpoint: Checkpoint) -> Manifest:
    """Restore as all ranks together do: read and check every object. Only reads (I8)."""
    manifest = checkpoint.read_manifest()
    checkpoint.read_index(manifest)
    for key, record in manifest.objects():
        assert crc32(checkpoint.store.get_range(key, 0, record.size_bytes)) == record.crc32, key
    return manifest


def only_train(manifest: Manifest) -> Manifest:
    """Return the manifest with `train` only, the component that the next checkpoint refers to."""
    return replace(manifest, components=tuple(it for it in manifest.components if it.name == "train"))
