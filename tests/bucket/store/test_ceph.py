"""Tests the whole protocol on Ceph RGW, and what remains when its daemons are killed while a writer is active.

These tests run with --all only. They kill processes and do not cut the power: what a daemon had passed to the kernel
survives.
"""

import multiprocessing
import random
import time
from collections import Counter
from pathlib import Path
from uuid import uuid4

import pytest

from raycheck.bucket.format.checksum import crc32
from raycheck.bucket.format.manifest import load_manifest
from raycheck.bucket.format.object_keys import CheckpointName, manifest_key
from raycheck.bucket.protocol.preflight import probe, probe_node
from raycheck.bucket.protocol.removal.prune_and_sweep import prune
from raycheck.bucket.protocol.swap import Register
from raycheck.bucket.store import open_store
from raycheck.bucket.store.address import join_uri
from raycheck.errors import FencedError, StoreError
from tests.support.histories.invariants import assert_invariants
from tests.support.samples.sample_checkpoints import Driver
from tests.support.samples.sample_checkpoints import write_checkpoint as write
from tests.support.servers.ceph_server import ceph_server
from tests.support.servers.http_fault_proxy import fault_proxy

pytestmark = pytest.mark.slow
ROUNDS = 9
VICTIMS = (("osd", "rgw"), ("rgw",), ("osd", "rgw", "mon"))
KEEP_LAST = 20
WAIT_S = 60.0  # for commits to go on after a restart: several requests may sit out their time-outs first


def test_ceph_rgw_is_accepted_and_a_run_on_it_commits_fences_and_prunes(ceph):
    uri = join_uri(ceph, uuid4().hex)
    ann, bob = Driver(open_store(uri), "ann"), Driver(open_store(uri), "bob")
    probe(ann.store)
    probe_node(ann.store, node="n")
    ann.claim("g1")
    kept = [ann.save(1, save, keep_last=2).key for save in range(1, 6)][-2:]
    late = write(ann.store, attempt=1, save=6)

    attempt, restored = bob.claim("g2")
    with pytest.raises(FencedError):
        ann.commit(late)
    before = bob.look()
    gone = prune(bob.register, grace_s=0)
    bob.save(attempt.number, 1)

    assert (attempt.number, restored.key) == (2, kept[-1])
    assert len(gone) == 3
    assert [entry.key for entry in bob.look().live][:2] == kept
    assert sorted(bob.store.list_names("checkpoints/")) == sorted([*kept, late.key, bob.look().head])
    assert_invariants(bob.store, before)


def test_a_swap_asks_once_after_it_was_found_out_how_ceph_writes_etags(ceph):
    with fault_proxy(ceph) as proxy:
        driver = Driver(open_store(join_uri(proxy.uri, uuid4().hex)), "ann")
        driver.claim("g1")
        driver.save(1, 1)
        before = len(proxy.heads)
        driver.save(1, 2)
        puts = [head.target for head in proxy.heads[before:] if head.method == "PUT" and "/latest" in head.target]

    assert len(puts) == 1


def test_no_acknowledged_commit_is_lost_when_daemons_are_killed_in_the_middle_of_commits(tmp_path):
    seed = time.time_ns()
    chance, journal = random.Random(seed), Journal(tmp_path / "journal")
    print(f"seed {seed}")
    spawn = multiprocessing.get_context("spawn")
    with ceph_server("bluestore") as cluster:
        uri, stop = join_uri(cluster.uri, "run"), spawn.Event()
        writer = spawn.Process(target=commit_until, args=(stop, uri, journal), daemon=True)
        writer.start()
        try:
            for i in range(ROUNDS):
                victims = VICTIMS[i % len(VICTIMS)]
                journal.wait_for("committed", chance.randint(1, 30))
                journal.wait_for("commits", 1)
                time.sleep(chance.uniform(0, 0.02))
                cluster.kill(*victims)
                print(f"round {i}: killed {victims} after {journal.path.read_text().splitlines()[-1]}")
                cluster.start(*reversed(victims))
                cluster.wait_until_up()
            journal.wait_for("committed", 5)
        finally:
            stop.set()
            writer.join(2 * WAIT_S)
        assert writer.exitcode == 0
        print(Counter(line.partition(" ")[0] for line in journal.path.read_text().splitlines()))

        check_nothing_acknowledged_is_lost(uri, journal.read("committed"))


def check_nothing_acknowledged_is_lost(uri: str, acknowledged: list[str]) -> None:
    """Check every acknowledged commit. The writer prunes nothing, so dropped checkpoints can still be read."""
    bob = Driver(open_store(uri), "bob")
    before = assert_invariants(bob.store)  # every live one verifies
    live, evicted = [entry.key for entry in before.live], {item.key for item in before.evicted}
    assert len(live) == KEEP_LAST
    assert len(acknowledged) > KEEP_LAST
    assert set(acknowledged) <= evicted | set(live)
    assert CheckpointName.parse(before.head) >= max(map(CheckpointName.parse, acknowledged))
    for key in acknowledged:
        manifest = load_manifest(bob.store.get(manifest_key(key)).data, what=key)
        for name, record in manifest.objects():
            data = bob.store.get(name).data
            assert (len(data), crc32(data)) == (record.size_bytes, record.crc32)

    _, restored = bob.claim("after")
    gone = prune(bob.register, grace_s=0)

    assert restored.key == before.head
    assert set(gone) == evicted
    assert [entry.key for entry in bob.look().live] == live
    assert_invariants(bob.store, before)


class Journal:
    """A file of what the writer knows: one line per event, written immediately."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def note(self, what: str, text: object) -> None:
        with self.path.open("a") as file:
            file.write(f"{what} {text}\n")

    def read(self, what: str) -> list[str]:
        lines = self.path.read_text().splitlines() if self.path.exists() else []
        return [line.partition(" ")[2] for line in lines if line.startswith(f"{what} ")]

    def wait_for(self, what: str, more: int) -> None:
        wanted, deadline = len(self.read(what)) + more, time.monotonic() + WAIT_S
        while len(self.read(what)) < wanted:
            assert time.monotonic() < deadline, self.path.read_text()[-3000:]
            time.sleep(0.005)


def commit_until(stop, uri: str, journal: Journal) -> None:
    """The writer's process: one driver, save after save, through every error of the store. After one error in three it
    goes on as a new group, as when a rank died of it."""
    patient, hasty = Driver(open_store(uri)), Driver(open_store(uri))
    # Every other commit's 60 s are over at its first error, so that its outcome stays unknown.
    hasty.register = Register(hasty.store, monotonic=lambda: 10_000 * time.monotonic())
    attempt, save, groups, failures = None, 0, 1, 0
    while not stop.is_set():
        ann = hasty if save % 2 else patient
        try:
            if attempt is None:
                attempt, save = ann.claim(f"g{groups}")[0].number, 0
                journal.note("claimed", attempt)
            save += 1
            manifest = write(ann.store, attempt=attempt, save=save)
            journal.note("commits", manifest.key)
            assert ann.commit(manifest, keep_last=KEEP_LAST)
            journal.note("committed", manifest.key)
        except StoreError as error:
            journal.note("failed", error)
            failures += 1
            if attempt is not None and failures % 3 == 0:
                attempt, groups = None, groups + 1
