"""Tests two drivers that own the same run, and are killed, paused and restarted at random while they commit.

One seed determines what is done to them, though not to the millisecond; --search draws other seeds. In every case,
`latest` has a single history, which contains every acknowledged write.
"""

import random
from pathlib import Path
from uuid import uuid4

import pytest

from raycheck.bucket.format import object_keys
from raycheck.bucket.store import open_store
from raycheck.bucket.store.address import join_uri
from raycheck.errors import SupersededError
from tests.support.histories.concurrent_driver import digest
from tests.support.histories.concurrent_drivers import Reader, Rivals
from tests.support.histories.invariants import assert_invariants
from tests.support.histories.latest_history import assert_linear, read_logs, walk
from tests.support.samples.sample_checkpoints import Around, Driver

pytestmark = pytest.mark.enumeration

slow = pytest.mark.slow


@pytest.fixture
def root(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "file":
        return f"file://{tmp_path}/run"
    if request.param == "gs":
        request.getfixturevalue("gcs")
        return f"gs://raycheck/{uuid4().hex}"
    return join_uri(request.getfixturevalue(request.param), uuid4().hex)


@pytest.mark.hypothesis  # so that --search runs it
@pytest.mark.parametrize(
    ("root", "seconds"),
    [
        ("file", 3),
        *(pytest.param(name, 60, marks=slow) for name in ("file", "s3", "gs", "ceph")),
    ],
    indirect=["root"],
)
def test_two_drivers_killed_and_restarted_at_random_write_one_history(
    root: str, seconds: float, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    seed = int(request.config.getoption("--hypothesis-seed") or 1)
    logs = tmp_path / "logs"
    logs.mkdir()
    reader = Reader(root)

    with Rivals(uri=root, folder=logs, chance=random.Random(seed)) as rivals:
        rivals.fight(seconds)
        rivals.end(logs / "last.log")
    seen = reader.stop()

    store = open_store(root)
    said = read_logs(sorted(logs.glob("*.log")))
    bodies = walk(said, digest(store.get(object_keys.LATEST_KEY).data))
    assert_linear(said, bodies, seen)
    body = assert_invariants(store)
    assert body is not None
    commits = len(said.of("committed", "key"))
    print(
        f"{body.counter} writes, {body.attempt.number} attempts, {len(body.owners)} owners, {commits} commits "
        f"acknowledged, {len(seen)} bodies seen, {reader.verified} checkpoints verified meanwhile, {dict(rivals.did)}"
    )
    assert commits


def test_a_claim_that_was_paused_while_its_successor_saved_is_superseded_and_not_alarmed() -> None:
    """Ray may start another coordinator of a group between the swap of a claim and the listing after it."""

    class Pauses(Around):
        listings = 0

        def list_names(self, prefix: str) -> list[str]:
            self.listings += 1
            if self.listings == 2:
                successor.claim("g1")
                successor.save(1, 1)
            return self.inner.list_names(prefix)

    store = open_store(f"memory://{uuid4().hex}")
    paused, successor = Driver(Pauses(store), "ann", "c1"), Driver(store, "ann", "c2")

    with pytest.raises(SupersededError):
        paused.claim("g1")

    assert [entry.step for entry in assert_invariants(store).live] == [10]
