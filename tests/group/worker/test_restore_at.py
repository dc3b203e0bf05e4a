"""Tests restore(at=...) in the training function: it means what fit(resume=...) means, is equal on all ranks, and
applies once in each driver."""

from dataclasses import replace
from uuid import uuid4

import pytest
import torch

import raycheck
from raycheck.bucket.protocol.resume import Must
from raycheck.bucket.store import open_store
from raycheck.errors import ConfigError
from tests.support.histories.invariants import assert_invariants
from tests.support.processes.background_call import InThread, on_all
from tests.support.processes.coordinator_in_thread import InProcess, again, group_of
from tests.support.processes.replicated_rank import Holder


def run_with_steps(uri: str, steps: int = 6) -> None:
    """Make a run that has a checkpoint of every second step; that of step 2 has a name."""
    holder = Holder(group_of(uri, owner=uuid4().hex)[0])
    holder.restore()
    holder.train(2)
    holder.ckpt.save(name="early")
    holder.train(steps - 2)
    holder.close()


def steps_of(uri: str) -> list[int]:
    return [entry.step for entry in assert_invariants(open_store(uri)).live]


@pytest.mark.parametrize(("at", "step"), [(4, 4), ("early", 2), ("must", 6), ("auto", 6), (None, 6)])
def test_a_run_begins_where_the_script_says(uri: str, at: str | int | None, step: int) -> None:
    run_with_steps(uri)

    assert Holder(group_of(uri, owner="second")[0]).restore(at=at).step == step


def test_it_is_obeyed_once_in_each_driver_and_a_restart_continues(uri: str) -> None:
    run_with_steps(uri)
    places = group_of(uri, owner="second", world_size=2)
    first = [Holder(place) for place in places]
    assert [at.step for at in on_all(first, "restore", at=2)] == [2, 2]
    on_all(first, "train", 2)
    on_all(first, "wait")
    for holder in first:
        holder.fail()

    second = [Holder(place) for place in again(places)]
    found = [at.checkpoint for at in on_all(second, "restore", at=2)]
    on_all(second, "close")
    third = Holder(group_of(uri, owner="third")[0])

    assert found == ["step-000000004-a2-s1"] * 2, "it went back once"
    assert third.restore(at=2).step == 2, "another driver goes back again"


def test_a_restart_before_the_first_commit_begins_at_the_same_checkpoint(uri: str) -> None:
    run_with_steps(uri)
    places = group_of(uri, owner="second")
    first = Holder(places[0])
    first.restore(at=4)
    first.fail()

    assert Holder(again(places)[0]).restore(at=4).step == 4


def test_ranks_that_ask_for_different_checkpoints_claim_nothing(uri: str) -> None:
    run_with_steps(uri)
    before = assert_invariants(open_store(uri))
    pair = [Holder(place) for place in group_of(uri, owner="second", world_size=2)]

    for restoring in [InThread(lambda: pair[0].restore(at=2)), InThread(lambda: pair[1].restore(at=4))]:
        with pytest.raises(ConfigError, match="all must give the same"):
            restoring.join()

    assert assert_invariants(open_store(uri)) == before


@pytest.mark.parametrize(
    ("at", "message"),
    [
        (5, "no checkpoint of that step; there are: 2, 4, 6"),
        ("nobody", "no checkpoint has that name"),
        ("best", "no metric by which a checkpoint is the best one"),
        ("never", "the run has 3 checkpoints"),
        ("s3://bucket/other", r"^at='s3://bucket/other': only raycheck.fit"),
        (1.5, r"^at=1.5: give"),
    ],
)
def test_what_cannot_be_is_refused_and_nothing_is_claimed(uri: str, at: object, message: str) -> None:
    run_with_steps(uri)
    before = assert_invariants(open_store(uri))

    with pytest.raises(ConfigError, match=message):
        Holder(group_of(uri, owner="second")[0]).restore(at=at)

    assert assert_invariants(open_store(uri)) == before


def test_a_fresh_run_obeys_it_too(uri: str) -> None:
    with pytest.raises(ConfigError, match="resume='must'"):
        Holder(group_of(uri)[0]).restore(at="must")


def test_fit_and_restore_do_not_both_say_it(uri: str) -> None:
    (place,) = group_of(uri)
    place.coordinator._coordinator._protocol._resume = Must()

    with pytest.raises(ConfigError, match=r"^restore was given at=... and fit was given resume="):
        Holder(place).restore(at=3)


def test_a_peek_takes_it_for_the_restore(uri: str) -> None:
    run_with_steps(uri)
    holder = Holder(group_of(uri, owner="second")[0])

    assert holder.ckpt.peek(at=4).step == 4
    with pytest.raises(ConfigError, match="to the first peek"):
        holder.ckpt.peek(at=2)
    with pytest.raises(ConfigError, match="to the first peek"):
        holder.restore(at=2)
    assert holder.restore(at=4).step == 4


@pytest.mark.parametrize(("mode", "step"), [("min", 4), ("max", 2)])
def test_best_is_the_checkpoint_that_the_runs_own_rule_prefers(uri: str, mode: str, step: int) -> None:
    losses = {2: 3.0, 4: 1.0, 6: 2.0}
    best = {"metric": "loss", "mode": mode, "count": 1}

    def rank(group: InProcess) -> int:
        settings = raycheck.SaveSettings(every_steps=2, keep_last=9, keep_best=best)
        with raycheck.Checkpointer({"weights": torch.ones(4)}, settings, group=group) as ckpt:
            at = ckpt.restore(at="best" if group.id == "second" else None)
            for number in range(at.step + 1, 7):
                ckpt.end_step(metrics={"loss": losses.get(number, 9.0)})
        return at.step

    first = group_of(uri, owner="first")[0]
    rank(first)

    assert raycheck.open_run(uri).at("best").step == step
    assert rank(replace(group_of(uri, owner="second")[0], id="second")) == step


def test_best_of_a_run_without_a_rule_says_how_to_have_one(uri: str) -> None:
    run_with_steps(uri)

    with pytest.raises(ConfigError, match="keep_best"):
        raycheck.open_run(uri).at("best")
    with pytest.raises(ConfigError, match="keep_best"):
        Holder(group_of(uri, owner="second")[0]).restore(at="best")
