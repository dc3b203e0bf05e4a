"""Tests that a training writes its history: every step's metrics and every commit, over restarts and a rewind."""

import math
from collections.abc import Iterator
from uuid import uuid4

import pytest
import torch

import raycheck
from raycheck.bucket.format.object_keys import HISTORY_PREFIX
from raycheck.bucket.store import open_store
from raycheck.group.coordinator.messages import StepRows
from tests.support.histories.invariants import assert_invariants
from tests.support.processes.background_call import InThread
from tests.support.processes.coordinator_in_thread import InProcess, again, group_of


@pytest.fixture
def uri() -> str:
    return f"memory://{uuid4().hex}"


class DiedError(Exception):
    """The training function raises."""


def loss_of(attempt: int, step: int) -> float:
    return math.nan if step == 7 else attempt + 1 / step


def metrics_of(attempt: int, step: int) -> dict[str, object]:
    """A tensor that the script changes afterwards, and a plain number at some steps."""
    some = {"eval": step * 0.1} if step % 5 == 0 else {}
    return {"loss": torch.tensor(loss_of(attempt, step), dtype=torch.float64), **some}


def train(groups: list[InProcess], *, until: int, dies_at: int | None = None, every: int = 4) -> list[int]:
    """Train on all ranks to step `until`, with a save every few steps. Returns the attempt's number, by rank."""

    def rank(group: InProcess) -> int:
        state = {"model": torch.nn.Linear(2, 2, bias=False)}
        torch.nn.init.ones_(state["model"].weight)
        settings = raycheck.SaveSettings(every_steps=every, keep_last=2)
        with raycheck.Checkpointer(state, settings, group=group) as ckpt:
            at = ckpt.restore()
            for step in range(at.step + 1, until + 1):
                if step == dies_at:
                    ckpt.wait()
                    raise DiedError
                metrics = metrics_of(at.attempt, step)
                ckpt.end_step(metrics)
                metrics["loss"].zero_()
        return at.attempt

    threads = [InThread(lambda g=group: rank(g)) for group in groups]
    if dies_at is None:
        return [thread.join() for thread in threads]
    for thread in threads:
        with pytest.raises((DiedError, raycheck.errors.RaycheckError)):
            thread.join()
    return []


def curve(run: raycheck.Run, name: str, *, abandoned: bool = False) -> dict[tuple[int, int], str]:
    lines = run.history().curve(name)
    return {
        (line.attempt, step): value.hex()
        for line in lines
        if line.is_abandoned == abandoned
        for step, value in zip(line.steps, line.values, strict=True)
    }


def test_the_whole_loss_curve_is_there_over_restarts_and_a_rewind(uri: str) -> None:
    groups = group_of(uri, world_size=2)
    train(groups, until=20, dies_at=15)  # committed: 4, 8, 12
    groups = again(groups)
    assert train(groups, until=20) == [2, 2]  # from 12
    raycheck.open_run(uri).rewind(16)
    assert train(group_of(uri, world_size=1, owner="another"), until=24) == [4]  # from 16

    run = raycheck.open_run(uri)
    history = run.history()

    line = {**dict.fromkeys(range(1, 13), 1), **dict.fromkeys(range(13, 17), 2), **dict.fromkeys(range(17, 25), 4)}
    assert curve(run, "loss") == {(attempt, step): loss_of(attempt, step).hex() for step, attempt in line.items()}
    assert curve(run, "eval") == {
        (attempt, step): (step * 0.1).hex() for step, attempt in line.items() if step % 5 == 0
    }
    left = {**dict.fromkeys(range(13, 15), 1), **dict.fromkeys(range(17, 21), 2)}
    assert curve(run, "loss", abandoned=True) == {
        (attempt, step): loss_of(attempt, step).hex() for step, attempt in left.items()
    }
    assert [item.number for item in history.attempts] == [1, 2, 3, 4]
    assert [item.ending for item in history.attempts][2:] == ["by hand", "finished"]
    assert [(commit.step, commit.state, commit.is_abandoned) for commit in history.commits] == [
        (4, "dropped", False),
        (8, "dropped", False),
        (12, "dropped", False),
        (16, "dropped", False),
        (20, "dropped", True),
        (20, "kept", False),
        (24, "kept", False),
    ]
    assert {commit.why for commit in history.commits if not commit.is_live} == {"retention keeps the newest 2"}
    assert history.every == 1
    assert history.problems == ()
    rows = history.rows()
    assert [(row["attempt"], row["step"]) for row in rows] == sorted(line_and_left(line))
    times = [row["time"] for row in rows if row["attempt"] == 4]
    assert times == sorted(times)
    assert None not in times
    assert_invariants(open_store(uri))


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize(("every", "dies_at"), [(4, 4), (4, 6), (100, 7)])
def test_the_metrics_up_to_the_error_that_ends_training_are_there(
    uri: str, world_size: int, every: int, dies_at: int
) -> None:
    train(group_of(uri, world_size=world_size), until=20, dies_at=dies_at, every=every)

    assert curve(raycheck.open_run(uri), "loss", abandoned=False) == {
        (1, step): loss_of(1, step).hex() for step in range(1, dies_at)
    }


def test_the_metrics_of_a_save_that_fails_as_the_last_one_are_there(uri: str, monkeypatch: pytest.MonkeyPatch) -> None:
    (group,) = group_of(uri)
    store = type(open_store(uri))
    put = store.put_parts

    def refuse(self, key, *parts, **more):
        if "step-000000006" in key:
            raise raycheck.errors.StoreError(f"{key}: full")
        return put(self, key, *parts, **more)

    monkeypatch.setattr(store, "put_parts", refuse)

    with pytest.raises(raycheck.errors.SaveFailedError, match="full"):
        train([group], until=6)

    assert curve(raycheck.open_run(uri), "loss") == {(1, step): loss_of(1, step).hex() for step in range(1, 7)}


def test_a_deleted_run_gets_no_history_of_the_training_that_it_ends(uri: str) -> None:
    (group,) = group_of(uri)

    def train_while_it_is_deleted() -> None:
        state, settings = {"model": torch.nn.Linear(2, 2)}, raycheck.SaveSettings(every_steps=100)
        with raycheck.Checkpointer(state, settings, group=group) as ckpt:
            ckpt.restore()
            ckpt.save()
            ckpt.wait()
            group.ask("keep_rows", StepRows(attempt=1, rows={}, sent_at=0.0), timeout_s=30.0, what="history")
            ckpt.end_step({"loss": 0.5})
            raycheck.catalog.delete_run(uri, live=True)
            raise DiedError

    with pytest.raises(DiedError):
        train_while_it_is_deleted()

    assert not list(open_store(uri).list_objects(""))


def line_and_left(line: dict[int, int]) -> Iterator[tuple[int, int]]:
    yield from ((attempt, step) for step, attempt in line.items())
    yield from ((1, step) for step in range(13, 15))
    yield from ((2, step) for step in range(17, 21))


def test_a_history_that_cannot_be_written_fails_no_save(uri: str, monkeypatch: pytest.MonkeyPatch) -> None:
    store = type(open_store(uri))
    put = store.put_if_absent

    def refuse(self, key, data):
        if key.startswith(HISTORY_PREFIX):
            raise raycheck.errors.DeniedError(f"{key}: denied")
        return put(self, key, data)

    monkeypatch.setattr(store, "put_if_absent", refuse)

    train(group_of(uri), until=8)

    run = raycheck.open_run(uri)
    assert [commit.step for commit in run.history().commits] == [4, 8]
    assert run.status().state == "finished"


def test_a_run_whose_history_is_lost_still_has_one(uri: str) -> None:
    train(group_of(uri), until=12)
    store = open_store(uri)

    for item in list(store.list_objects(HISTORY_PREFIX)):
        store.delete(item.key)

    history = raycheck.open_run(uri).history()
    assert [(commit.step, commit.state) for commit in history.commits] == [
        (4, "dropped"),
        (8, "kept"),
        (12, "kept"),
    ]
    assert [row["step"] for row in history.rows()] == [8, 12]
    assert history.attempts[-1].ending == "finished"


def test_what_a_driver_did_not_write_the_next_claim_does(uri: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:  # the driver dies between its commits and its history
        patch.setattr("raycheck.group.coordinator.history_writer.record_facts", lambda *_, **__: None)
        patch.setattr("raycheck.group.coordinator.history_writer.catch_up", lambda *_: None)
        train(group_of(uri), until=12, dies_at=12)
    assert not list(open_store(uri).list_objects(HISTORY_PREFIX))

    train(group_of(uri, owner="another"), until=16)
    for _ in range(2):
        raycheck.open_run(uri).prune(grace_s=0.0)

    found = raycheck.open_run(uri).history()
    assert [(commit.step, commit.state) for commit in found.commits] == [
        (4, "deleted"),
        (8, "deleted"),
        (12, "kept"),
        (16, "kept"),
    ]
    assert [attempt.ending for attempt in found.attempts] == ["driver lost", "finished"]
