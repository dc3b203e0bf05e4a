"""Starts, kills and pauses drivers of one run in two slots, again and again, while a reader watches `latest`.

A driver that is paused may be replaced before it wakes: then it acts as the driver of a node that was lost for a while.
"""

import random
import signal
import subprocess
import threading
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Self

from raycheck.bucket.format import object_keys
from raycheck.bucket.format.latest import Entry, load_latest
from raycheck.bucket.reading import Checkpoint, read_latest
from raycheck.bucket.store import Store, open_store
from raycheck.errors import CorruptError, FencedError, NotFoundError, SupersededError
from tests.support.histories.concurrent_driver import ENDED, FOLDER, Life, Logged, command, digest
from tests.support.samples.sample_checkpoints import Driver

KILLED = -signal.SIGKILL
LONGEST_PAUSE_S = 2.5
END_S = 45.0
FIGHT_S = 150.0
LINES = 20
LOOK_S = 0.01
MUST_HAPPEN = ("killed", "paused", "replaced while paused", "fenced")
VERIFY_EVERY_S = 0.5


@dataclass(kw_only=True)
class Started:
    """Holds a driver's process.

    wake_at: the time at which it goes on, while it is paused. lines: the lines of its log after which it is disturbed;
    counted in lines, so that it gets as far on a slow machine as on a quick one.
    """

    life: Life
    process: "subprocess.Popen[bytes]"
    errors: Path
    lines: int
    wake_at: float | None = None

    def log(self) -> str:
        path = Path(self.life.log)
        return path.read_text() if path.exists() else ""

    def is_due(self) -> bool:
        return self.wake_at is None and self.log().count("\n") >= self.lines

    def pause(self, seconds: float) -> None:
        self.process.send_signal(signal.SIGSTOP)
        self.wake_at = time.monotonic() + seconds

    def wake(self) -> None:
        self.wake_at = None
        self.process.send_signal(signal.SIGCONT)

    def check(self) -> int:
        """Return its exit code. Raises AssertionError with the end of its log when the protocol has no such end."""
        code = self.process.returncode
        assert code in (ENDED, KILLED), f"{self.life}\n{self.log()[-2000:]}\n{self.errors.read_text()}"
        return code


@dataclass(kw_only=True)
class Rivals:
    uri: str
    folder: Path
    chance: random.Random
    did: Counter[str] = field(default_factory=Counter)
    _slots: dict[str, Started] = field(default_factory=dict)
    _replaced: list[Started] = field(default_factory=list)
    _born: int = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for started in self._all():
            started.process.kill()
            started.process.wait(END_S)

    def fight(self, seconds: float) -> None:
        """Run two drivers, and start a next one for each that ended, for this time, until all has happened once and
        something was committed."""
        for slot in ("a", "b"):
            self._slots[slot] = self._start(self._newcomer(slot))
        until = time.monotonic() + seconds
        while (now := time.monotonic()) < until or not self._has_all_happened():
            assert now < until + FIGHT_S, f"the drivers hardly move: {self.did}"
            for started in self._all():
                if started.wake_at is not None and started.wake_at <= now:
                    started.wake()
            for slot, started in list(self._slots.items()):
                if started.process.poll() is not None:
                    self._replace(slot)
                elif started.is_due():
                    time.sleep(self.chance.uniform(0, 0.03))  # not only right after it has written a line
                    self._disturb(slot)
            time.sleep(0.01)

    def _has_all_happened(self) -> bool:
        return all(self.did[name] for name in MUST_HAPPEN) and any(
            '"committed"' in log.read_text() for log in self.folder.glob("*.log")
        )

    def end(self, log: Path) -> None:
        """Kill the drivers and wake the replaced ones: once a last driver has claimed, none of them may write."""
        for started in self._slots.values():
            started.process.kill()
            started.process.wait(END_S)
            started.check()
        for started in self._replaced:
            started.wake()
        deadline = time.monotonic() + END_S
        last = self._come_last(log, 0)
        while any(started.process.poll() is None for started in self._replaced):
            assert time.monotonic() < deadline, "a fenced driver does not end"
            if last.look().attempt.owner != last.me.owner:
                last = self._come_last(log, self.did["came last"])
            time.sleep(0.02)
        for started in self._replaced:
            self.did["woken to be fenced"] += started.check() == ENDED

    def _come_last(self, log: Path, number: int) -> Driver:
        owner = f"last{number}"
        driver = Driver(Logged(open_store(self.uri), str(log), f"{owner}-c"), owner, "c")
        self.did["came last"] += 1
        with suppress(FencedError, SupersededError):  # by one that was paused before its own claim
            attempt, _ = driver.claim(f"{owner}-g")
            driver.save(attempt.number, 1, keep_last=3)
        return driver

    def _disturb(self, slot: str) -> None:
        started = self._slots[slot]
        started.lines += self._some_lines()
        match self.chance.choice(("kill", "pause", "replace")):
            case "kill":
                started.process.kill()
                self.did["killed"] += 1
            case "replace" if len([item for item in self._replaced if item.process.poll() is None]) < 3:
                started.pause(self.chance.uniform(0.1, 1) * LONGEST_PAUSE_S)
                self._replaced.append(started)
                self._slots[slot] = self._start(self._next(slot, started))
                self.did["replaced while paused"] += 1
            case _:
                started.pause(self.chance.uniform(0, 0.5) * LONGEST_PAUSE_S)
                self.did["paused"] += 1

    def _replace(self, slot: str) -> None:
        started = self._slots[slot]
        if started.check() == ENDED:
            self.did["fenced" if "FencedError" in started.log() else "superseded"] += 1
        self._slots[slot] = self._start(self._next(slot, started))

    def _next(self, slot: str, last: Started) -> Life:
        """Choose the next start: a new fit, this fit's next worker group, or its coordinator started again by Ray."""
        kinds = ["fit", "group", "coordinator"]
        if last.process.poll() == ENDED:
            kinds = ["fit", "fit", "fit", "group"]  # a fenced one that comes again stays fenced
        kind = self.chance.choice(kinds)
        new = self._newcomer(slot)
        self.did[f"new {kind}"] += 1
        if kind == "fit":
            return new
        group = new.group if kind == "group" else last.life.group
        is_known = kind == "coordinator" and (last.life.is_known or '"claimed"' in last.log())
        return Life(
            uri=new.uri,
            log=new.log,
            owner=last.life.owner,
            coordinator=new.coordinator,
            group=group,
            is_known=is_known,
            seed=new.seed,
        )

    def _newcomer(self, slot: str) -> Life:
        self._born += 1
        number = self._born
        return Life(
            uri=self.uri,
            log=str(self.folder / f"{number:04}.log"),
            owner=f"{slot}{number}",
            coordinator=f"c{number}",
            group=f"g{number}",
            seed=self.chance.randrange(1 << 30),
        )

    def _start(self, life: Life) -> Started:
        errors = Path(life.log).with_suffix(".err")
        with errors.open("wb") as file:
            process = subprocess.Popen(command(life), cwd=FOLDER, stderr=file)
        self.did["started"] += 1
        return Started(life=life, process=process, errors=errors, lines=self._some_lines())

    def _some_lines(self) -> int:
        """Draw a number of log lines. A commit writes three."""
        return 1 + int(self.chance.expovariate(1 / LINES))

    def _all(self) -> list[Started]:
        return [*self._slots.values(), *self._replaced]


class Reader:
    """Reads `latest` all the time, and the checkpoints in it now and then.

    `stop` returns counter and digest of all bodies that it saw.
    """

    def __init__(self, uri: str) -> None:
        self._store = open_store(uri)
        self._seen: dict[int, str] = {}
        self._error: BaseException | None = None
        self.verified = 0
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="reader", daemon=True)
        self._thread.start()

    def stop(self) -> list[tuple[int, str]]:
        self._stopped.set()
        self._thread.join(END_S)
        assert not self._thread.is_alive()
        if self._error is not None:
            raise self._error
        return list(self._seen.items())

    def _run(self) -> None:
        verify_at = time.monotonic() + VERIFY_EVERY_S
        try:
            while not self._stopped.wait(LOOK_S):
                self._look()
                if self._seen and time.monotonic() > verify_at:
                    for entry in read_latest(self._store).live:
                        self.verified += is_whole(self._store, entry)
                    verify_at = time.monotonic() + VERIFY_EVERY_S
        except BaseException as error:
            self._error = error

    def _look(self) -> None:
        try:
            data = self._store.get(object_keys.LATEST_KEY).data
        except NotFoundError:
            assert not self._seen, "latest disappeared"
            return
        counter = load_latest(data, what="latest").counter
        assert counter >= max(self._seen, default=0), "latest went back"
        assert self._seen.setdefault(counter, digest(data)) == digest(data), f"two bodies have counter {counter}"


def is_whole(store: Store, entry: Entry) -> bool:
    """Return whether a checkpoint that was listed a moment ago is whole. If not, it must have been dropped since."""
    try:
        problems = [finding for finding in Checkpoint(store, entry).verify() if finding.problem]
    except (NotFoundError, CorruptError) as error:
        problems = [error]
    assert not problems or read_latest(store).entry(entry.key) is None, f"listed and not whole: {problems}"
    return not problems
