"""Runs one start of a driver as a program of its own, so that a test can kill or pause it anywhere.

It claims, then commits as fast as it can until it is told that its attempt is over. Every write of `latest` is logged
before it is sent, with the body that it replaces, and again when it was acknowledged; so the logs of all drivers
together hold the whole history.

    python -m tests.support.histories.concurrent_driver LIFE-AS-JSON
"""

import json
import os
import random
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

from raycheck.bucket.attempt_records import record_end
from raycheck.bucket.format import object_keys
from raycheck.bucket.format.latest import Entry, load_latest
from raycheck.bucket.protocol.preflight import probe
from raycheck.bucket.protocol.removal.prune_and_sweep import prune
from raycheck.bucket.reading import Checkpoint
from raycheck.bucket.store import Got, Store, open_store
from raycheck.bucket.store.interface import MAX_WHOLE_BYTES, Written
from raycheck.errors import FencedError, SupersededError
from tests.support.samples.sample_checkpoints import Around, Driver, write_checkpoint

KEEP_LAST = 3
GRACE_S = 1.0
PRUNES_EVERY = 6
ENDED, FAILED = 0, 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Life:
    """Describes one start of a driver.

    is_known: the group has claimed before, so this is a coordinator that Ray started again with empty memory.
    """

    uri: str
    log: str
    owner: str
    coordinator: str
    group: str
    is_known: bool = False
    seed: int = 0


class Logged(Around):
    """Wraps the store of one driver, and logs every write of `latest`."""

    def __init__(self, inner: Store, path: str, writer: str) -> None:
        super().__init__(inner)
        self._log = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        self._writer = writer
        self._read = ("", "")  # version and digest of the newest body read

    def tell(self, kind: str, **facts: Any) -> None:
        """Write one line at once, so that it stays when the process is killed right after."""
        os.write(self._log, json.dumps({"kind": kind, "writer": self._writer, **facts}).encode() + b"\n")

    def get(self, key: str, max_bytes: int = MAX_WHOLE_BYTES) -> Got:
        got = self.inner.get(key, max_bytes)
        if key == object_keys.LATEST_KEY:
            self._read = (got.version, digest(got.data))
        return got

    def put_if_absent(self, key: str, data: bytes) -> Written:
        return self._put(key, data, "", lambda: self.inner.put_if_absent(key, data))

    def put_if_match(self, key: str, data: bytes, version: str) -> Written:
        if key == object_keys.LATEST_KEY:
            assert self._read[0] == version, "a swap replaces the body that was read last"
        return self._put(key, data, self._read[1], lambda: self.inner.put_if_match(key, data, version))

    def _put(self, key: str, data: bytes, before: str, put: Callable[[], Written]) -> Written:
        if key != object_keys.LATEST_KEY:
            return put()
        self.tell("sent", before=before, **facts_of(data))
        written = put()
        self.tell("acknowledged", digest=digest(data))
        self._read = (written.version, digest(data))
        return written


def digest(data: bytes) -> str:
    return blake2b(data, digest_size=8).hexdigest()


def facts_of(data: bytes) -> dict[str, Any]:
    """Return the facts of a body by which the history is judged."""
    body = load_latest(data, what="a body")
    return {
        "digest": digest(data),
        "counter": body.counter,
        "attempt": body.attempt.number,
        "owner": body.attempt.owner,
        "coordinator": body.attempt.coordinator,
        "head": body.head,
        "live": [entry.key for entry in body.live],
        "evicted": [item.key for item in body.evicted],
        "owners": body.owners,
    }


def drop_evicted(driver: Driver, *, grace_s: float) -> None:
    prune(driver.register, grace_s=grace_s)


def run(life: Life) -> None:
    """Claim, then commit until FencedError or SupersededError is raised."""
    store = Logged(open_store(life.uri), life.log, f"{life.owner}-{life.coordinator}")
    driver = Driver(store, life.owner, life.coordinator)
    chance = random.Random(life.seed)
    store.tell("started")
    try:
        number, save = begin(driver, life)
        while True:
            save += 1
            manifest = write_checkpoint(store, attempt=number, save=save)
            if driver.commit(manifest, keep_last=KEEP_LAST):
                store.tell("committed", key=manifest.key)
            if chance.randrange(PRUNES_EVERY) == 0:
                drop_evicted(driver, grace_s=GRACE_S)
    except (FencedError, SupersededError) as error:
        store.tell("ended", why=type(error).__name__)
        raise


def begin(driver: Driver, life: Life) -> tuple[int, int]:
    """Claim, or take the attempt over. Returns the attempt's number and its last save."""
    if life.is_known:
        attempt = driver.take_over(life.group)
        driver.store.tell("taken over", attempt=attempt.number)
        return attempt.number, attempt.last_save
    probe(driver.store)
    before = driver.register.read()
    attempt, entry = driver.claim(life.group)
    driver.store.tell("claimed", attempt=attempt.number)
    if before is not None and before[0].attempt.number < attempt.number:
        record_end(driver.store, before[0].attempt, by=attempt, cause="a rival came")
    if entry is not None:
        restore(driver, entry)
    return attempt.number, attempt.last_save


def restore(driver: Driver, entry: Entry) -> None:
    """Read and compare all bytes of a checkpoint, steps 24 and 25. A missing object must have been dropped by then."""
    problems = [finding for finding in Checkpoint(driver.store, entry).verify() if finding.problem]
    assert not problems or driver.look().entry(entry.key) is None, problems


def command(life: Life) -> list[str]:
    return [sys.executable, "-m", "tests.support.histories.concurrent_driver", json.dumps(asdict(life))]


FOLDER = Path(__file__).parents[3]
"""The folder in which the command must run."""


if __name__ == "__main__":
    try:
        run(Life(**json.loads(sys.argv[1])))
    except (FencedError, SupersededError):
        os._exit(ENDED)  # without waiting for the clients to close
