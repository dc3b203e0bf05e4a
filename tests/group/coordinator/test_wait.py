"""Tests that all ranks that wait for saves, or for the end of a run, get the same result.

The coordinator is in this process.
"""

import math
import time
from threading import Event
from typing import Any
from uuid import uuid4

import pytest

import raycheck
from raycheck.bucket.protocol import commit as protocol
from raycheck.bucket.protocol.referred_objects import ReferenceLostError
from raycheck.bucket.store import open_store
from raycheck.state.train_state import TrainState
from tests.support.histories.invariants import assert_invariants
from tests.support.processes.background_call import InThread, on_all
from tests.support.processes.coordinator_in_thread import group_of


@pytest.fixture
def uri() -> str:
    return f"memory://{uuid4().hex}"


def ranks_of(uri: str, *, world_size: int = 1, **settings: Any) -> list[raycheck.Checkpointer]:
    settings = {"every_steps": None, **settings}
    made = [
        raycheck.Checkpointer({"own": {"x": 1}}, raycheck.SaveSettings(**settings), group=place)
        for place in group_of(uri, world_size=world_size)
    ]
    on_all(made, "restore")
    on_all(made, "end_step")
    return made


def steps_of(uri: str) -> list[int]:
    return [entry.step for entry in assert_invariants(open_store(uri)).live]


def fail_once(monkeypatch: pytest.MonkeyPatch, *, after: Event | None = None) -> None:
    """Make the next commit fail, as soon as `after` is set."""
    commit = protocol.commit

    def fails(*args: Any, **options: Any) -> bool:
        monkeypatch.setattr(protocol, "commit", commit)
        assert after is None or after.wait(60)
        raise raycheck.errors.StoreError("the store is away")

    monkeypatch.setattr(protocol, "commit", fails)


def test_a_step_whose_save_failed_is_saved_when_it_is_asked_for_again(uri: str, monkeypatch) -> None:
    (ckpt,) = ranks_of(uri)
    fail_once(monkeypatch)
    ckpt.save()
    with pytest.raises(raycheck.errors.SaveFailedError, match="the store is away"):
        ckpt.wait()

    ckpt.save()
    ckpt.wait()

    assert steps_of(uri) == [1]
    ckpt.close()


@pytest.mark.parametrize("timeout_s", [math.inf, 1e12])
def test_a_wait_of_any_length_ends_with_the_save(uri: str, monkeypatch, timeout_s: float) -> None:
    commit = protocol.commit

    def slowly(*args: Any, **options: Any) -> bool:
        time.sleep(0.2)
        return commit(*args, **options)

    monkeypatch.setattr(protocol, "commit", slowly)
    (ckpt,) = ranks_of(uri)
    ckpt.save()

    ckpt.wait(timeout_s)

    assert steps_of(uri) == [1]
    ckpt.close()


def test_a_rank_that_has_heard_of_a_failed_save_before_is_told_like_the_others(uri: str, monkeypatch) -> None:
    ranks, go = ranks_of(uri, world_size=2, when_busy="copy"), Event()
    on_all(ranks, "save")
    on_all(ranks, "wait")  # with it the ranks have agreed, so that the next two saves are under way at once
    on_all(ranks, "end_step")
    fail_once(monkeypatch, after=go)
    on_all(ranks, "save")
    ranks[1].end_step()
    go.set()
    while ranks[0].save_status.busy_s is not None:
        time.sleep(0.01)
    ranks[0].end_step()  # here rank 0 hears of it
    on_all(ranks, "save")

    said = []
    for rank in [InThread(ckpt.wait) for ckpt in ranks]:
        with pytest.raises(raycheck.errors.SaveFailedError, match="the store is away") as error:
            rank.join()
        said.append(str(error.value).partition(": ")[2])

    assert said[0] == said[1]
    assert steps_of(uri) == [1, 3]
    on_all(ranks, "close")


def test_a_save_that_fails_before_its_upload_is_not_made_again_for_the_failure_before_it(uri: str, monkeypatch) -> None:
    """The other ranks are told of that failure, and make no further save either."""
    (ckpt,) = ranks_of(uri)
    commit, take = protocol.commit, TrainState.stage
    fails: list[raycheck.RaycheckError] = [
        ReferenceLostError("an object is missing"),
        raycheck.errors.StoreError("away"),
    ]

    def fail(*_: Any, **__: Any) -> Any:
        monkeypatch.setattr(protocol, "commit", commit)
        if len(fails) == 1:
            monkeypatch.setattr(TrainState, "stage", take)
        raise fails.pop(0)

    monkeypatch.setattr(protocol, "commit", fail)
    ckpt.save()
    with pytest.raises(raycheck.errors.SaveFailedError, match="an object is missing"):
        ckpt.wait()
    monkeypatch.setattr(TrainState, "stage", fail)

    with pytest.raises(raycheck.errors.SaveFailedError, match="away"):
        ckpt.close()

    assert not fails
    assert not assert_invariants(open_store(uri)).live


def test_a_run_that_ended_without_a_step_is_not_finished_for_the_one_who_starts_it_again(uri: str) -> None:
    for _ in range(2):
        (group,) = group_of(uri, owner=uuid4().hex)
        with raycheck.Checkpointer({"own": {"x": 1}}, group=group) as ckpt:
            at = ckpt.restore()

            assert (at.step, at.checkpoint, at.is_finished) == (0, None, False)
    assert assert_invariants(open_store(uri)).is_finished, "the bucket says that it came to its end"
