"""A run with any number of live checkpoints goes on: `latest` stays small, and lists all of them with its pages."""

import time
from contextlib import suppress
from dataclasses import replace
from uuid import uuid4

import pytest
import torch

import raycheck
from raycheck.bucket.format import object_keys
from raycheck.bucket.format.document import dump, seal
from raycheck.bucket.format.latest import Entry, Evicted, Latest
from raycheck.bucket.protocol.swap import Register
from raycheck.bucket.reading import read_latest, read_newest
from raycheck.bucket.store import Store, open_store
from raycheck.errors import SaveFailedError
from tests.support.processes.background_call import InThread
from tests.support.processes.command_line import raycheck as command
from tests.support.processes.coordinator_in_thread import InProcess, again, group_of

OLDER = 3000


def train(groups: list[InProcess], *, until: int, **settings: object) -> None:
    """Train every rank to a step, and save at each."""

    def rank(group: InProcess) -> None:
        chosen = raycheck.SaveSettings(**{"every_steps": 1, "keep_last": None} | settings)  # type: ignore[arg-type]
        with raycheck.Checkpointer({"weights": torch.ones(1000)}, chosen, group=group) as ckpt:
            for _ in range(ckpt.restore().step + 1, until + 1):
                with suppress(SaveFailedError):
                    ckpt.wait()
                ckpt.end_step()

    for thread in [InThread(lambda group=group: rank(group)) for group in groups]:
        thread.join()


def entry(number: int, now: float) -> Entry:
    key = f"step-{number:09d}-a0-s{number}"
    return Entry(key=key, step=number, committed_at=now, size_bytes=10**9, metrics={"loss": 0.5}, manifest_crc32=10**9)


def fill(store: Store) -> None:
    """List OLDER checkpoints of a lower attempt, whose objects do not exist."""

    def full(body: Latest, now: float) -> Latest:
        return replace(body, newest=(*(entry(number, now) for number in range(1, OLDER + 1)), *body.live))

    Register(store).edit(full, what="fill")


def steps(store: Store) -> list[int]:
    """Return the steps of the checkpoints that training has made."""
    return [item.step for item in read_latest(store).live if not item.key.startswith("step") or "-a0-" not in item.key]


@pytest.fixture
def store() -> Store:
    return open_store(f"memory://{uuid4().hex}")


@pytest.mark.parametrize("world_size", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_training_goes_on_above_thousands_of_checkpoints_and_latest_stays_small(store: Store, world_size: int) -> None:
    groups = group_of(store.uri, world_size=world_size)
    train(groups, until=2)
    fill(store)

    train(again(groups), until=4)

    assert steps(store) == [1, 2, 3, 4]
    assert len(read_latest(store).live) == OLDER + 4
    assert len(store.get(object_keys.LATEST_KEY).data) < 64 * 1024
    assert raycheck.open_run(store.uri).at(7).key == "step-000000007-a0-s7"


def test_a_prune_beside_the_run_drops_what_pages_list(store: Store) -> None:
    groups = group_of(store.uri)
    train(groups, until=2)
    fill(store)

    assert not command("prune", store.uri, "--keep-last", "3").returncode
    train(again(groups), until=4)

    assert [item.step for item in read_latest(store).live] == [OLDER, 1, 2, 3, 4]
    assert not read_newest(store).pages


def test_settings_that_drop_thousands_drop_them_while_training_goes_on(store: Store) -> None:
    groups = group_of(store.uri)
    train(groups, until=2)
    fill(store)

    train(again(groups), until=4, keep_last=3)

    deadline = time.monotonic() + 60.0
    while (body := read_latest(store)).num_live > 3:  # the rest is dropped in the background
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert [item.step for item in body.live] == [2, 3, 4]
    assert len(store.get(object_keys.LATEST_KEY).data) < 64 * 1024


def test_a_latest_of_the_version_before_that_was_full_goes_on(store: Store) -> None:
    """Version 3 had no pages: its `latest` was full at some 900 checkpoints, and then each commit failed."""
    groups = group_of(store.uri)
    train(groups, until=2)
    body, now = read_latest(store), store.get(object_keys.LATEST_KEY).at
    full = replace(body, format_version=3, newest=(*(entry(number, now) for number in range(1, 860)), *body.live))
    text = dump(full).replace(b'"newest": ', b'"live": ')
    store.put(object_keys.LATEST_KEY, seal(text[: text.rindex(b',\n "crc32"')] + b"\n}"))
    assert len(store.get(object_keys.LATEST_KEY).data) > 220 * 1024

    train(again(groups), until=4)

    assert steps(store) == [1, 2, 3, 4]
    assert len(read_latest(store).live) == 859 + 4
    assert len(store.get(object_keys.LATEST_KEY).data) < 64 * 1024


def test_a_run_whose_dropped_checkpoints_cannot_be_deleted_goes_on(store: Store) -> None:
    groups = group_of(store.uri)
    train(groups, until=1)

    def full(body: Latest, now: float) -> Latest:
        late = now + 10**6
        gone = tuple(Evicted(key=f"step-{number:09d}-a0-s{number}", at=late) for number in range(OLDER))
        return replace(body, newest_evicted=gone)

    Register(store).edit(full, what="fill")

    train(again(groups), until=4, keep_last=1)

    body = read_latest(store)
    assert body.live[-1].step == 4
    assert len(body.evicted) >= OLDER
    assert len(store.get(object_keys.LATEST_KEY).data) < 64 * 1024
