"""Tests that nothing is uploaded for a save when `latest` has no room for its commit."""

import time
from bisect import bisect_left
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from uuid import uuid4

import pytest
import torch

import raycheck
from raycheck.bucket.format.document import dump
from raycheck.bucket.format.latest import COMMIT_BYTES, Entry, Evicted, Latest
from raycheck.bucket.protocol.swap import Register
from raycheck.bucket.reading import read_latest
from raycheck.bucket.store import Store, open_store
from raycheck.errors import ConfigError, SaveFailedError
from tests.support.processes.background_call import InThread
from tests.support.processes.command_line import raycheck as command
from tests.support.processes.coordinator_in_thread import InProcess, again, group_of

Steps = Callable[[raycheck.Checkpointer, int], object]


def train(groups: list[InProcess], *, until: int, before: Steps = lambda *_: None, **settings: object) -> None:
    """Train every rank to a step, and save at each. before: called by rank 0 before each step ends."""

    def rank(group: InProcess) -> None:
        chosen = raycheck.SaveSettings(**{"every_steps": 1, "keep_last": None} | settings)  # type: ignore[arg-type]
        with raycheck.Checkpointer({"weights": torch.ones(1000)}, chosen, group=group) as ckpt:
            for step in range(ckpt.restore().step + 1, until + 1):
                with suppress(SaveFailedError):
                    ckpt.wait()
                if not group.rank:
                    before(ckpt, step)
                ckpt.end_step()

    for thread in [InThread(lambda group=group: rank(group)) for group in groups]:
        thread.join()


def filled(size: int, body: Callable[[int], Latest]) -> Latest:
    """Return the smallest of these documents that has this size. body: of so many items."""
    sizes = range(COMMIT_BYTES // 40)
    return body(bisect_left(sizes, size, key=lambda count: len(dump(body(count)))))


def fill(store: Store) -> None:
    """List so many checkpoints that there is room for a claim, and for no commit. Theirs is the lowest attempt."""

    def full(body: Latest, now: float) -> Latest:
        def entry(number: int) -> Entry:
            key = f"step-{number:09d}-a0-s{number}"
            return Entry(key=key, step=number, committed_at=now, size_bytes=10**9, metrics={}, manifest_crc32=10**9)

        return filled(
            COMMIT_BYTES - 200, lambda count: replace(body, live=(*map(entry, range(1, count + 1)), *body.live))
        )

    Register(store).edit(full, what="fill")


def shards(store: Store) -> set[str]:
    return {item.key for item in store.list_objects("checkpoints/") if item.key.endswith(".distcp")}


@pytest.fixture
def store() -> Store:
    return open_store(f"memory://{uuid4().hex}")


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_start_is_refused_before_the_first_step_until_a_prune_has_made_room(store: Store, world_size: int) -> None:
    groups = group_of(store.uri, world_size=world_size)
    train(groups, until=2)
    fill(store)
    before, steps = shards(store), []

    with pytest.raises(ConfigError, match="'raycheck prune --keep-last N' makes room at once"):
        train(again(groups), until=4, before=lambda _, step: steps.append(step))
    assert not steps
    assert shards(store) == before
    assert not command("prune", store.uri, "--keep-last", "3").returncode
    train(again(groups), until=4)

    assert [entry.step for entry in read_latest(store).live if entry.step < 100][-2:] == [3, 4]


def test_settings_that_drop_enough_are_no_reason_to_refuse(store: Store) -> None:
    groups = group_of(store.uri)
    train(groups, until=2)
    fill(store)

    train(again(groups), until=4, keep_last=3)

    assert [entry.step for entry in read_latest(store).live] == [2, 3, 4]


def test_names_that_the_next_prune_forgets_are_no_reason_to_refuse(store: Store) -> None:
    groups = group_of(store.uri)
    train(groups, until=1)

    def full(body: Latest, now: float) -> Latest:
        def gone(number: int) -> Evicted:
            return Evicted(key=f"step-{number:09d}-a0-s{number}", at=now)

        return filled(COMMIT_BYTES - 6000, lambda count: replace(body, evicted=tuple(map(gone, range(1, count + 1)))))

    Register(store).edit(full, what="fill")
    deadline = time.monotonic() + 60

    def before(_: raycheck.Checkpointer, step: int) -> None:
        while step == 2 and len(read_latest(store).evicted) > 200:
            assert time.monotonic() < deadline
            time.sleep(0.01)

    train(again(groups), until=3, before=before)

    assert [entry.step for entry in read_latest(store).live] == [1, 2, 3]


def test_a_run_that_is_full_meanwhile_uploads_nothing_more_and_goes_on_when_there_is_room(store: Store) -> None:
    groups = group_of(store.uri)
    counted = []

    def before(_: raycheck.Checkpointer, step: int) -> None:
        if step == 3:
            fill(store)
        counted.append(len(shards(store)))
        if step == 6:
            assert not command("prune", store.uri, "--keep-last", "3").returncode

    train(groups, until=7, before=before, max_failed_saves=9)

    assert [entry.step for entry in read_latest(store).live if entry.step < 100][-2:] == [6, 7]
    assert counted[:4] == [0, 1, 2, 3], "the first save that finds it full has asked for nothing yet"
    assert counted[4:6] == [3, 3]
