"""Tests that training continues while the store is down, and that saves fail by their deadline and say what failed."""

import time
from dataclasses import replace
from uuid import uuid4

import pytest

import raycheck
from raycheck.bucket.store import open_store
from raycheck.bucket.store.address import join_uri
from tests.support.histories.invariants import assert_invariants
from tests.support.processes.background_call import on_all, start_on_all
from tests.support.processes.coordinator_in_thread import group_of
from tests.support.processes.replicated_rank import Holder
from tests.support.servers.http_fault_proxy import FaultProxy

SAVE_TIMEOUT_S = 8.0
BOUND_S = 90.0


def a_pair(uris: tuple[str, str], at: str) -> list[Holder]:
    """Start two ranks that save after every second step. uris: how each reaches the run. at: how the coordinator does."""
    pair = [
        Holder(replace(place, uri=uri), save_timeout_s=SAVE_TIMEOUT_S)
        for place, uri in zip(group_of(at, world_size=2), uris, strict=True)
    ]
    on_all(pair, "restore")
    return pair


def train(pair: list[Holder], steps: int) -> None:
    for method, args in (("train", [steps]), ("wait", [])):
        for call in start_on_all(pair, method, *args):
            call.join(BOUND_S)


def a_saved_run(wire: FaultProxy) -> tuple[str, list[Holder]]:
    """Return a run's name and its two ranks, which have saved step 2. All of them reach the store through the proxy."""
    name = uuid4().hex
    uri = join_uri(wire.uri, name)
    pair = a_pair((uri, uri), uri)
    train(pair, 2)
    return name, pair


def close(pair: list[Holder]) -> list:
    """Close both ranks. Returns for each which threads it has left, or the SaveFailedError that it raised."""
    ends = []
    for call in start_on_all(pair, "close"):
        try:
            ends.append(call.join(BOUND_S))
        except raycheck.errors.SaveFailedError as error:
            ends.append(error)
    return [end or holder.threads_left() for end, holder in zip(ends, pair, strict=True)]


def steps_at(uri: str) -> list[int]:
    return [entry.step for entry in assert_invariants(open_store(uri)).live]


@pytest.mark.slow
def test_training_goes_on_while_the_store_is_away_and_saves_again_when_it_is_back(s3: str, wire: FaultProxy) -> None:
    name, pair = a_saved_run(wire)
    wire.chaos(1, seed=1)
    train(pair, 4)
    wire.chaos(0, seed=1)
    train(pair, 2)

    assert close(pair) == [[], []]
    assert steps_at(join_uri(s3, name)) == [2, 8]


@pytest.mark.slow
def test_one_rank_that_cannot_reach_the_store_strands_no_other(s3: str, wire: FaultProxy) -> None:
    """I9: no rank waits for another one without a deadline."""
    name = uuid4().hex
    uri = join_uri(s3, name)
    pair = a_pair((uri, join_uri(wire.uri, name)), uri)
    wire.rule("hold", "PUT", "step-000000002-.*__1_0.distcp", times=1000)  # its upload stalls

    began = time.monotonic()
    train(pair, 2)
    assert time.monotonic() - began < 3 * SAVE_TIMEOUT_S
    train(pair, 2)

    assert close(pair) == [[], []]
    assert steps_at(uri) == [4]


@pytest.mark.slow
def test_a_store_that_stays_away_ends_training_with_rank_step_and_object(s3: str, wire: FaultProxy) -> None:
    """I9: the error names them. I10: only the third failure in a row ends the training."""
    name, pair = a_saved_run(wire)
    wire.chaos(1, seed=2)

    with pytest.raises(
        raycheck.errors.SaveFailedError,
        match=r"3 failed save\(s\) in a row.*rank \d: upload of checkpoints/step-000000008",
    ):
        train(pair, 6)

    assert steps_at(join_uri(s3, name)) == [2]


@pytest.mark.slow
def test_the_last_save_is_never_lost_silently(s3: str, wire: FaultProxy) -> None:
    name, pair = a_saved_run(wire)
    train(pair, 1)
    wire.chaos(1, seed=3)

    ends = close(pair)

    assert all("the last save, of step 3, was not committed" in str(end) for end in ends), ends
    assert steps_at(join_uri(s3, name)) == [2]
