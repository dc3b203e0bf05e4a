"""Tests what the history of a copied run says: that of its source, however often it is copied and merged meanwhile."""

from collections.abc import Mapping
from dataclasses import replace
from itertools import count
from pathlib import Path
from threading import Event
from uuid import uuid4

import raycheck
from raycheck.bucket.format.object_keys import HISTORY_PREFIX, segment_key
from raycheck.bucket.history.attempt_facts import catch_up
from raycheck.bucket.history.facts import Facts, dump_segment
from raycheck.bucket.history.metric_rows import MetricRows
from raycheck.bucket.history.segments import MAX_SEGMENTS, record_facts
from raycheck.bucket.protocol.removal.prune_and_sweep import prune
from raycheck.bucket.store import Got, Store, open_store
from raycheck.bucket.store.interface import MAX_WHOLE_BYTES
from raycheck.catalog import copy_run, pack, unpack
from raycheck.catalog.copier import MirrorCopier
from raycheck.catalog.follow import Follower
from tests.support.samples.sample_checkpoints import Around, Driver


def place() -> str:
    return f"memory://{uuid4().hex}"


def trained(uri: str) -> Driver:
    driver = Driver(open_store(uri))
    driver.claim("g1")
    return driver


def train(driver: Driver, saves: range) -> None:
    """Commit these saves, each with the metrics of ten steps, and write the history as a coordinator does."""
    for save in saves:
        driver.save(1, save, keep_last=2)
        rows = MetricRows(series={(1, "loss"): {step: 1 / step for step in range(save * 10 - 9, save * 10 + 1)}})
        record_facts(driver.store, Facts(rows=rows), run_id=driver.look().run_id, counter=driver.look().counter)
        catch_up(driver.store, driver.look())
        prune(driver.register, grace_s=0.0)


def segments(store: Store) -> set[str]:
    return {item.key for item in store.list_objects(HISTORY_PREFIX)}


def told(uri: str) -> Mapping[str, object]:
    """Return what a run's history says, but for the attempt by which a copy follows, and for times of the copy."""
    history = raycheck.open_run(uri).history()
    assert history.problems == ()
    return {
        "curve": [(line.attempt, line.is_abandoned, line.steps, line.values) for line in history.curve("loss")],
        "commits": [replace(commit, state="", dropped_at=None) for commit in history.commits],
        "live": [commit.key for commit in history.commits if commit.is_live],
        "attempts": [(item.number, item.began_at) for item in history.attempts if item.world_size],
    }


def test_a_copy_has_the_whole_history_of_its_source() -> None:
    source, target = place(), place()
    train(trained(source), range(1, 6))

    copy_run(source, target)

    assert told(target) == told(source)
    (line,) = raycheck.open_run(target).history().curve("loss")
    assert line.steps == tuple(range(1, 51))
    assert {commit.why for commit in raycheck.open_run(target).history().commits if not commit.is_live} == {
        "retention keeps the newest 2"
    }
    assert segments(open_store(target)) == segments(open_store(source))


def test_a_copy_that_is_repeated_by_other_processes_does_not_gather_what_its_source_has_merged() -> None:
    source, target = place(), place()
    driver = trained(source)

    for first in range(1, 40, 5):
        train(driver, range(first, first + 5))
        copy_run(source, target)

        assert len(segments(open_store(target))) <= MAX_SEGMENTS
        assert segments(open_store(target)) == segments(driver.store)
        assert told(target) == told(source)


class Read(Around):
    """Lists the segments that are read."""

    def __init__(self, inner: Store) -> None:
        super().__init__(inner)
        self.read: list[str] = []

    def get(self, key: str, max_bytes: int = MAX_WHOLE_BYTES) -> Got:
        if key.startswith(HISTORY_PREFIX):
            self.read.append(key)
        got: Got = self.inner.get(key, max_bytes)
        return got


def test_a_copier_that_follows_deletes_what_its_source_has_merged_without_reading_it() -> None:
    source, target = place(), place()
    driver = trained(source)
    train(driver, range(1, 4))
    reading = Read(open_store(target))
    copier = MirrorCopier(driver.store, reading, stop=Event())
    later = count(0, 10**6)  # seconds, so that each look also tidies up
    follower = Follower(
        copier,
        every_s=0.01,
        news=lambda _: None,
        stop=Event(),
        grace_s=0.0,
        until_finished=False,
        monotonic=lambda: float(next(later)),
    )

    for first in range(4, 40, 5):
        follower.look()
        assert segments(open_store(target)) == segments(driver.store)
        train(driver, range(first, first + 5))
    follower.look()

    assert not reading.read
    assert told(target) == told(source)


def test_a_segment_with_something_that_the_source_lacks_stays_in_the_copy() -> None:
    source, target = place(), place()
    driver = trained(source)
    train(driver, range(1, 6))
    copy_run(source, target)
    other = segment_key(10**6, "0" * 8)
    more = Facts(rows=MetricRows(series={(1, "only here"): {5: 0.5}}))
    open_store(target).put(other, dump_segment(more, driver.look().run_id))

    train(driver, range(6, 20))
    copy_run(source, target)

    assert segments(open_store(target)) == {*segments(driver.store), other}
    (line,) = raycheck.open_run(target).history().curve("only here")
    assert line.values == (0.5,)


def test_a_run_that_begins_with_one_checkpoint_begins_its_own_history(tmp_path: Path) -> None:
    source = place()
    train(trained(source), range(1, 4))
    one, unpacked = place(), place()

    copy_run(source, one, at=30)
    pack(source, f"{tmp_path}/it.tar", at=30)
    unpack(f"{tmp_path}/it.tar", unpacked)

    for uri in (one, unpacked):
        history = raycheck.open_run(uri).history()
        (commit,) = history.commits
        assert (commit.step, commit.state, commit.is_abandoned) == (30, "kept", False)
        assert commit.metrics == raycheck.open_run(source).at(30).metrics
        assert [row["step"] for row in history.rows()] == [30], (
            "the metrics of its commit, not those of the steps before"
        )
        assert not segments(open_store(uri))
