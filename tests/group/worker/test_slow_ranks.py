"""Tests that the log, the page and the errors name the rank that others wait for, and that a restore has a deadline."""

import logging
import re
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from uuid import uuid4

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

import raycheck
from raycheck.bucket.attempt_records import SlowRecord
from raycheck.bucket.store import open_store
from raycheck.bucket.store.address import join_uri
from raycheck.errors import SaveFailedError, StoreError
from raycheck.group.worker import group_restore, slow_progress
from raycheck.views.live import LiveRun, RunWatch
from tests.support.processes.background_call import InThread, start_on_all
from tests.support.processes.coordinator_in_thread import InProcess, group_of
from tests.support.processes.gloo_ranks import Ranks
from tests.support.processes.replicated_rank import Holder
from tests.support.servers.http_fault_proxy import FaultProxy

TIMEOUT_S = 16.0
"""Of a save or a restore: time enough for the ranks that are not held, and for a record of the one that is."""
BOUND_S = 90.0
NODE = re.escape(socket.gethostname())
SAVED = "step-000000002-a1-s1"


@pytest.fixture(autouse=True)
def short_deadlines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(group_restore, "LEAST_S", 0.0)
    monkeypatch.setattr(slow_progress, "FIRST_AFTER_S", 1.0)


def look_until(uri: str, is_wanted: Callable[[LiveRun], bool]) -> LiveRun:
    watch, deadline = RunWatch(open_store(uri)), time.monotonic() + BOUND_S
    while not is_wanted(seen := watch.look()):
        assert time.monotonic() < deadline, seen
        time.sleep(0.1)
    return seen


def group_with_a_rank_behind(s3: str, wire: FaultProxy, name: str, world_size: int) -> list[InProcess]:
    """Return the places of a new group, whose last rank reaches the store through the proxy."""
    *others, last = group_of(join_uri(s3, name), world_size=world_size)
    return [*others, replace(last, uri=join_uri(wire.uri, name))]


def saved_by(s3: str, world_size: int) -> str:
    """Return the name of a run that this many ranks have saved at step 2."""
    name = uuid4().hex
    holders = [Holder(place) for place in group_of(join_uri(s3, name), world_size=world_size)]
    for method, args in (("restore", ()), ("train", (2,)), ("close", ())):
        for call in start_on_all(holders, method, *args):
            call.join(BOUND_S)
    return name


def restores(places: list[InProcess], **settings: float) -> list[InThread]:
    holders = [Holder(place, seed=1, **settings) for place in places]
    return start_on_all(holders, "restore")


def error_of(call: InThread, kind: type[Exception]) -> str:
    with pytest.raises(kind) as caught:
        call.join(BOUND_S)
    return str(caught.value)


@pytest.mark.server
@pytest.mark.parametrize(
    ("saved", "world_size"), [(2, 4), *(pytest.param(*sizes, marks=pytest.mark.slow) for sizes in ((2, 2), (4, 2)))]
)
def test_a_restore_that_one_rank_cannot_end_fails_on_all_by_its_deadline(
    s3: str, wire: FaultProxy, caplog: pytest.LogCaptureFixture, saved: int, world_size: int
) -> None:
    """The number per rank is restored only where the numbers of ranks are equal, so it is left out."""
    name = saved_by(s3, saved)
    wire.rule("hold", "GET", r"/train/__\d_0\.distcp", times=1000)
    places = group_with_a_rank_behind(s3, wire, name, world_size)
    slow = world_size - 1

    with caplog.at_level(logging.WARNING, logger="raycheck"):
        calls = [
            InThread(lambda one=holder: one.restore(skip=["number"]))
            for holder in [Holder(place, seed=1, save_timeout_s=TIMEOUT_S) for place in places]
        ]
        seen = look_until(join_uri(s3, name), lambda seen: seen.history.slow is not None).history.slow
        told = [error_of(call, StoreError) for call in calls]

    assert isinstance(seen, SlowRecord)
    assert (seen.rank, seen.node, seen.is_restore) == (slow, socket.gethostname(), True)
    assert (seen.finished, seen.world_size) == (world_size - 1, world_size)
    assert seen.checkpoint.startswith("step-000000002-a1-")
    assert seen.done_bytes == 0
    assert seen.wanted_bytes is not None
    assert 3_603_500 < seen.wanted_bytes < 3_650_000, "the tensors, and what is between them"
    object_ = rf"checkpoints/{seen.checkpoint}/train/__\d_0\.distcp"
    assert re.fullmatch(object_, seen.object)
    for text in told:
        wanted = rf"rank {slow}: restore of {seen.checkpoint}: not done within \d+ s: on node {NODE}, "
        assert re.match(rf"{wanted}read 0\.0 of 3\.6 MB, and is at {object_} ", text), text
        assert "save_timeout_s" in text
    assert caplog.text.count(f"slow restore of {seen.checkpoint}: rank {slow} on node ") == 1
    assert "; the others have finished" in caplog.text


@pytest.mark.server
def test_a_rank_that_is_slow_and_ends_in_time_is_named_only_meanwhile(
    s3: str, wire: FaultProxy, caplog: pytest.LogCaptureFixture
) -> None:
    name = saved_by(s3, 2)
    rule = wire.rule("hold", "GET", r"/train/__\d_0\.distcp", times=1000)

    with caplog.at_level(logging.WARNING, logger="raycheck"):
        calls = restores(group_with_a_rank_behind(s3, wire, name, 2), save_timeout_s=4 * TIMEOUT_S)
        assert not calls[0].ends_within(0.1)
        rule.wait()
        look_until(join_uri(s3, name), lambda seen: seen.history.slow is not None)
        rule.release()
        results = [call.join(BOUND_S) for call in calls]

    assert [result.step for result in results] == [2, 2]
    assert RunWatch(open_store(join_uri(s3, name))).look().history.slow is None, "its record is still there"
    assert list(open_store(join_uri(s3, name)).list_objects("attempts/"))
    assert caplog.text.count("slow restore of ") == 1


@pytest.mark.server
@pytest.mark.parametrize("world_size", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_a_save_that_one_rank_cannot_end_names_it(
    s3: str, wire: FaultProxy, caplog: pytest.LogCaptureFixture, world_size: int
) -> None:
    name, slow = uuid4().hex, world_size - 1
    wire.rule("hold", "PUT", rf"/__{slow}_0\.distcp", times=1000)
    places = group_with_a_rank_behind(s3, wire, name, world_size)
    holders = [Holder(place, save_timeout_s=TIMEOUT_S, max_failed_saves=1) for place in places]
    for call in start_on_all(holders, "restore"):
        call.join(BOUND_S)

    with caplog.at_level(logging.WARNING, logger="raycheck"):
        for call in start_on_all(holders, "train", 2):
            call.join(BOUND_S)
        live = look_until(join_uri(s3, name), lambda seen: seen.history.slow is not None)
        told = [error_of(call, SaveFailedError) for call in start_on_all(holders, "wait")]

    seen = live.history.slow
    assert live.save is not None
    assert (seen.rank, seen.node, seen.is_restore, seen.checkpoint) == (slow, socket.gethostname(), False, SAVED)
    assert (seen.done_bytes, seen.finished) == (0, world_size - 1)
    key = f"checkpoints/{SAVED}/train/__{slow}_0.distcp"
    assert seen.object == key
    assert f"slow save of {SAVED}: rank {slow} on node {socket.gethostname()} has sent 0" in caplog.text
    for text in told:
        assert re.search(
            rf"rank {slow}(: upload of {key}: .*| )on node {NODE},? (has )?sent 0\S* of \S+ k?M?B", text
        ), text


def restore_ddp(rank: int, world_size: int, uri: str, behind: str, steps: int, timeout_s: float) -> str:
    """Restore a model that all ranks of torchrun share, and train. behind: how the last rank reaches the run.

    Return the error, if it was of raycheck.
    """
    group_restore.LEAST_S = 0.0  # this process was forked before the fixture's change
    group = raycheck.torchrun_group(uri)
    if rank == world_size - 1:
        group = replace(group, uri=behind)
    model = DistributedDataParallel(torch.nn.Sequential(*(torch.nn.Linear(300, 300) for _ in range(8))))
    settings = raycheck.SaveSettings(every_steps=1, save_timeout_s=timeout_s)
    try:
        with raycheck.Checkpointer({"model": model}, settings, group=group) as ckpt:
            for _ in range(ckpt.restore().step, steps):
                model(torch.ones(2, 300)).sum().backward()
                ckpt.end_step()
    except StoreError as error:
        return str(error)
    return ""


@pytest.fixture(scope="module")
def gloo(s3: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    ranks = Ranks(4, tmp_path_factory.mktemp("rendezvous"))
    yield ranks
    ranks.stop()


@pytest.mark.server
@pytest.mark.parametrize(
    ("saved", "world_size"), [(2, 4), *(pytest.param(*sizes, marks=pytest.mark.slow) for sizes in ((2, 2), (4, 2)))]
)
def test_under_torchrun_the_ranks_that_wait_in_a_collective_are_told_too(
    gloo: Ranks, s3: str, wire: FaultProxy, saved: int, world_size: int
) -> None:
    """Under DDP each rank reads a part, and broadcasts it: the others wait for the slow one in a collective."""
    name = uuid4().hex
    uri, behind = join_uri(s3, name), join_uri(wire.uri, name)
    assert set(gloo.run(restore_ddp, saved, uri, uri, 1, BOUND_S)) == {""}
    wire.rule("hold", "GET", r"/train/__\d_0\.distcp", times=1000)

    told = gloo.run(restore_ddp, world_size, uri, behind, 1, TIMEOUT_S)

    slow = world_size - 1
    for text in told:
        assert re.search(
            rf"rank {slow}: restore of step-000000001\S+: not done within \d+ s: on node {NODE}, ", text
        ), text
        assert re.search(r"read 0\.0 of \S+ .B, and is at checkpoints/\S+/train/__\d_0\.distcp", text), text
