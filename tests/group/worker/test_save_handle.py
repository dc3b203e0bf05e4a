"""Tests the handle that `save` returns on every rank, for saves that are delayed, that fail, or were made before."""

from concurrent.futures import Future
from uuid import uuid4

import pytest
import torch

import raycheck
from raycheck.bucket.format.progress import Progress
from raycheck.bucket.store import open_store
from raycheck.bucket.store.address import join_uri
from raycheck.errors import ConfigError, FencedError, SaveFailedError
from raycheck.group.coordinator.messages import Outcome
from raycheck.group.worker.group_restore import claim_run
from raycheck.group.worker.save_handle import CheckpointInfo, SaveHandle
from tests.support.histories.invariants import assert_invariants
from tests.support.processes.background_call import InThread, on_all, start_on_all
from tests.support.processes.coordinator_in_thread import again, group_of
from tests.support.processes.replicated_rank import Holder
from tests.support.servers.http_fault_proxy import FaultProxy


@pytest.fixture
def wired(wire: FaultProxy) -> str:
    """The root of a run that does not exist yet, behind the proxy."""
    return join_uri(wire.uri, uuid4().hex)


class Saver(Holder):
    """Saves when it is told to, and keeps the handle."""

    def train_and_save(self, steps: int) -> SaveHandle:
        self.train(steps)
        return self.ckpt.save({"loss": 1.0})


def savers_at(uri: str, *, world_size: int = 1) -> list[Saver]:
    """Return ranks that have restored, and save only when they are told to."""
    ranks = [Saver(place, at_steps=[10**9]) for place in group_of(uri, world_size=world_size)]
    on_all(ranks, "restore")
    return ranks


def test_every_rank_waits_for_the_commit_and_gets_the_checkpoint(wire: FaultProxy, wired: str) -> None:
    pair = savers_at(wired, world_size=2)
    rule = wire.rule("hold", "PUT", "distcp")
    handles = on_all(pair, "train_and_save", 1)
    rule.wait()

    before = [(handle.is_done, handle.is_committed) for handle in handles]
    with pytest.raises(SaveFailedError, match="rank 1: the save of step 1 has not ended within 0 s; it continues"):
        handles[1].result(0)
    waiting = [InThread(handle.result) for handle in handles]
    rule.release()
    found = [waits.join() for waits in waiting]

    assert before == [(False, False)] * 2
    assert found == [CheckpointInfo(uri=wired, key="step-000000001-a1-s1", step=1, epoch=0)] * 2
    assert [handle.is_committed for handle in handles] == [True, True]
    assert raycheck.open_run(wired).at(found[1].key).step == 1
    on_all(pair, "close")
    assert handles[0].result() == found[0], "also after the end"


def test_one_rank_may_wait_alone_and_training_continues_on_the_others(wire: FaultProxy, wired: str) -> None:
    pair = savers_at(wired, world_size=2)
    handles = on_all(pair, "train_and_save", 1)

    key = handles[1].result().key
    on_all(pair, "train_and_save", 1)
    on_all(pair, "close")

    assert key == "step-000000001-a1-s1"
    assert [entry.step for entry in assert_invariants(open_store(wired)).live] == [1, 2]


def test_a_save_that_failed_raises_why_on_every_rank_and_the_next_is_committed(wire: FaultProxy, wired: str) -> None:
    pair = savers_at(wired, world_size=2)
    wire.rule("deny", "PUT", "step-000000001-.*distcp", times=99)
    handles = on_all(pair, "train_and_save", 1)

    for handle in handles:
        with pytest.raises(SaveFailedError, match=r"the save of step 1 was not committed: .*DeniedError"):
            handle.result()
    assert [(handle.is_done, handle.is_committed) for handle in handles] == [(True, False)] * 2
    again = on_all(pair, "train_and_save", 1)

    assert [handle.result().step for handle in again] == [2, 2]
    on_all(pair, "close")


def test_the_step_of_a_failed_save_is_saved_again_after_a_wait(wire: FaultProxy, wired: str) -> None:
    (alone,) = savers_at(wired)
    wire.rule("deny", "PUT", "-s1/.*distcp", times=99)
    failed = alone.train_and_save(1)
    with pytest.raises(SaveFailedError):
        failed.result()

    with pytest.raises(SaveFailedError):
        alone.ckpt.wait()

    assert alone.train_and_save(0).result().key == "step-000000001-a1-s2"
    alone.close()


def test_a_save_that_this_step_has_already_is_the_one_that_is_waited_for(uri: str) -> None:
    places = group_of(uri)
    first = Saver(places[0], at_steps=[1])
    first.restore()
    first.train(1)
    key = first.ckpt.save().result().key
    first.close()

    second = Saver(again(places)[0])
    second.restore()
    handle = second.ckpt.save()

    assert key == "step-000000001-a1-s1"
    assert handle.is_committed, "it was restored whole"
    assert handle.result().key == key
    named = second.ckpt.save(name="base").result()
    assert (named.key, named.unnamed) == ("step-000000001-a2-s1", "")
    second.close()


def test_a_name_that_another_step_has_is_said_by_the_result(uri: str) -> None:
    (alone,) = savers_at(uri)
    alone.train(1)
    alone.ckpt.save(name="base")
    alone.train(1)

    assert "WITHOUT the name base" in alone.ckpt.save(name="base").result().unnamed
    alone.close()


def test_a_newer_attempt_ends_the_wait(uri: str) -> None:
    places = group_of(uri)
    old = Saver(places[0])
    old.restore()
    claim_run(again(places)[0])

    with pytest.raises(raycheck.errors.SupersededError):
        old.train_and_save(1).result()


def test_a_save_before_which_the_ranks_do_not_agree_ends_its_waiters_too(uri: str) -> None:
    pair = [Saver(place, seed=place.rank, at_steps=[10**9]) for place in group_of(uri, world_size=2)]
    on_all(pair, "restore")

    for saving in start_on_all(pair, "train_and_save", 1):
        with pytest.raises(ConfigError, match="is not the same on ranks 0 and 1"):
            saving.join()

    for rank in pair:
        with pytest.raises(ConfigError, match="is not the same on ranks 0 and 1"):
            rank.ckpt._live()._queue.begun.result()


def test_a_checkpointer_that_is_turned_off_has_nothing_to_wait_for() -> None:
    ckpt = raycheck.Checkpointer({"model": torch.nn.Linear(1, 1)}, raycheck.SaveSettings(enabled=False))
    ckpt.restore()
    ckpt.end_step()

    handle = ckpt.save()

    assert (handle.is_done, handle.is_committed) == (True, False)
    assert handle.result() == CheckpointInfo(uri="", key="", step=1, epoch=0)


@pytest.mark.parametrize(
    ("outcome", "error", "text"),
    [
        (Outcome(kind="superseded", key="k"), SaveFailedError, "rank 3: the save of step 7 is not in the run"),
        (Outcome(kind="failed", key="k", message="no room"), SaveFailedError, "was not committed: no room"),
        (FencedError("another driver"), FencedError, "another driver"),
    ],
)
def test_each_end_but_a_commit_is_an_error(outcome: object, error: type[Exception], text: str) -> None:
    handle = SaveHandle(CheckpointInfo(uri="u", key="k", step=7, epoch=0), rank=3, longest_s=1.0)
    ended: Future = Future()
    handle.follow(ended)
    ended.set_exception(outcome) if isinstance(outcome, Exception) else ended.set_result((outcome, 0.0))

    with pytest.raises(error, match=text):
        handle.result()
    assert (handle.is_done, handle.is_committed) == (True, False)


def test_a_time_to_wait_is_a_number_of_seconds() -> None:
    with pytest.raises(ConfigError, match=r"result\(timeout_s=-1\)"):
        SaveHandle.committed(uri="u", key="k", progress=Progress()).result(-1)
