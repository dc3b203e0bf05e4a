"""Tests the Checkpointer without Ray Train: the tests pass its place in a group.

Its ranks are threads, except in one test.
"""

from dataclasses import replace
from urllib.parse import urlsplit
from uuid import uuid4

import pytest
import ray
import torch

import raycheck
from raycheck.bucket.store import open_store
from raycheck.bucket.store.address import join_uri
from raycheck.group.worker import heartbeat
from raycheck.group.worker.group_restore import RestoreResult, claim_run
from tests.support.histories.invariants import assert_invariants
from tests.support.processes.background_call import InThread, on_all, start_on_all
from tests.support.processes.coordinator_in_thread import again, group_of
from tests.support.processes.replicated_rank import Holder, train_once
from tests.support.processes.reused_processes import reused
from tests.support.servers.http_fault_proxy import FaultProxy, fault_proxy


def pair_at(uri: str, **settings: object) -> list[Holder]:
    """Return two ranks that have restored."""
    pair = [Holder(place, **settings) for place in group_of(uri, world_size=2)]
    on_all(pair, "restore")
    return pair


def alone_at(uri: str, **settings: object) -> Holder:
    (place,) = group_of(uri)
    return Holder(place, **settings)


def train_and_close(holder: Holder, steps: int) -> None:
    holder.train(steps)
    holder.close()


@pytest.fixture
def wired(wire: FaultProxy) -> str:
    """The root of a run that does not exist yet, behind the proxy."""
    return join_uri(wire.uri, uuid4().hex)


@pytest.mark.ray
@pytest.mark.filterwarnings("ignore")  # Ray itself warns
def test_a_group_of_plain_actors_saves_and_another_world_size_restores(cluster: None, s3: str) -> None:
    actors = reused(Holder)

    def group(name: str, world_size: int) -> list[raycheck.adapters.Group]:
        return [
            raycheck.adapters.RayGroup(id=name, uri=uri, rank=rank, world_size=world_size, coordinator=coordinator)
            for rank in range(world_size)
        ]

    with fault_proxy(s3) as proxy:
        uri = join_uri(proxy.uri, uuid4().hex)
        coordinator = raycheck.adapters.start_coordinator(uri, owner="me")
        pair = [actors.remote(place) for place in group("pair", 2)]
        ray.get([holder.restore.remote() for holder in pair])
        ray.get([pair[rank].set_number.remote(10 + rank) for rank in range(2)])
        ray.get([holder.train.remote(3) for holder in pair])
        ray.get([holder.close.remote() for holder in pair])

        three = [actors.remote(place, seed=place.rank) for place in group("three", 3)]
        before = len(proxy.heads)
        at = ray.get([holder.restore.remote() for holder in three])
        read = [urlsplit(head.target).path.rpartition("/")[2] for head in proxy.heads[before:] if head.method == "GET"]
        body = assert_invariants(open_store(uri))

    weights = ray.get([holder.weights.remote() for holder in three])
    assert {place.step for place in at} == {3}
    assert {place.attempt for place in at} == {2}
    assert all(torch.equal(weights[0], other) for other in weights)
    assert at[2].rng.startswith("derived")
    numbers = ray.get([holder.get.remote("number") for holder in three])
    assert numbers == [{"kept": 10}, {"kept": 11}, {"fresh": 2}]
    assert [place.report.fresh for place in at] == [(), (), ("number.rank2",)]
    assert [entry.step for entry in body.live] == [2, 3]
    assert dict(body.live[0].metrics) == {"step": 1.0}, "a diverged run is saved all the same"
    assert (read.count("index"), read.count("manifest.json")) == (1, 1), "the coordinator reads them for all ranks"


def test_a_replaced_group_is_told_that_its_attempt_is_over(uri: str) -> None:
    places = group_of(uri)
    old = Holder(places[0])
    old.restore()
    (place,) = again(places)
    claim_run(place)

    with pytest.raises(raycheck.errors.SupersededError):
        train_and_close(old, 2)
    new = Holder(place)
    new.restore()
    train_and_close(new, 2)
    assert new.threads_left() == [], "its threads have ended"

    body = assert_invariants(open_store(uri))
    assert [entry.key for entry in body.live] == ["step-000000002-a2-s1"]


def test_a_replaced_group_is_told_so_between_its_saves_too(uri: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heartbeat, "WATCH_S", 0.2)
    places = group_of(uri)
    old = Holder(places[0])
    old.restore()
    (place,) = again(places)
    claim_run(place)
    assert old.wait_until_over() == 0

    with pytest.raises(raycheck.errors.SupersededError):
        old.ckpt.end_step()
    assert old.ckpt._counter.step == 1, "the second step would have saved"


def test_steps_before_restore_are_refused(uri: str) -> None:
    holder = alone_at(uri)

    with pytest.raises(raycheck.errors.ConfigError, match="restore"):
        holder.train(1)

    assert_invariants(open_store(uri))


def test_a_rank_that_saves_alone_fails_that_save_and_mixes_nothing(uri: str) -> None:
    pair = pair_at(uri)

    # The first save is of step 1 on rank 0 and of step 2 on rank 1; the second is of step 2 on both.
    together(lambda: pair[0].train_and_save(1), lambda: pair[1].train(2))
    together(lambda: pair[0].train(1), pair[1].close)
    pair[0].close()

    assert [entry.key for entry in assert_invariants(open_store(uri)).live] == ["step-000000002-a1-s2"]


def together(*calls) -> None:
    for call in [InThread(call) for call in calls]:
        call.join()


def test_replicas_that_differ_are_refused_by_name_before_anything_is_committed(uri: str) -> None:
    pair = [Holder(place, seed=place.rank) for place in group_of(uri, world_size=2)]
    on_all(pair, "restore")

    for training in start_on_all(pair, "train", 2):
        with pytest.raises(
            raycheck.errors.ConfigError, match=r"tensor model\.(weight|bias) is not the same on ranks 0 and 1"
        ):
            training.join()

    assert assert_invariants(open_store(uri)).live == ()


def test_a_partial_restore_is_done_once_and_a_restart_goes_on_from_where_training_was(uri: str) -> None:
    def start(owner: str) -> Holder:
        return Holder(group_of(uri, owner=owner)[0], seed=1)

    first = start("pretrained")
    first.restore()
    train_and_close(first, 6)
    second = start("tuned")
    at = second.restore(only=["model"])
    moments = second.get("moments")
    train_and_close(second, 4)
    between = start("whole")
    between.restore()
    train_and_close(between, 0)
    third = start("resubmitted")
    again = third.restore(only=["model"])

    assert (at.step, at.checkpoint, moments) == (0, "step-000000006-a1-s3", 0)
    assert at.report.restored == ("model",)
    assert set(at.report.skipped) == {"optimizer", "number", "progress", "rng"}
    assert (again.step, again.checkpoint) == (4, "step-000000004-a2-s2")
    assert again.report.skipped == ()
    assert third.get("moments") == 2
    assert_invariants(open_store(uri))


def test_two_open_checkpointers_of_a_run_in_one_process_are_refused(uri: str) -> None:
    holder = alone_at(uri)

    with pytest.raises(raycheck.errors.ConfigError, match="open Checkpointer of this run"):
        holder.make_another()
    holder.restore()
    holder.train(2)
    holder.close()
    holder.make_another()

    assert len(assert_invariants(open_store(uri)).live) == 1


def test_a_rank_that_sees_another_place_than_the_driver_is_told_so() -> None:
    """This happens when each node has a separate folder at the same path."""
    (place,) = group_of(f"memory://{uuid4().hex}")
    holder = Holder(replace(place, uri=f"memory://{uuid4().hex}"))

    with pytest.raises(raycheck.errors.ConfigError, match=r"node .*: memory://\w+ is another place than the driver's"):
        holder.restore()


def test_a_node_without_permission_is_told_before_the_run_is_claimed(wire: FaultProxy, wired: str, s3: str) -> None:
    holder = alone_at(wired)
    wire.rule("deny", "PUT", "probes/", times=2)

    with pytest.raises(raycheck.errors.ConfigError, match=r"node .*: put: .*s3:PutObject"):
        holder.restore()

    assert_invariants(open_store(join_uri(s3, urlsplit(wired).path.strip("/"))))


def test_a_save_that_falls_due_during_another_one_is_left_out_on_request(wire: FaultProxy, wired: str) -> None:
    holder = alone_at(wired, when_busy="skip")
    holder.restore()
    rule = wire.rule("hold", "PUT", "distcp")

    holder.train(2)
    rule.wait()
    holder.train(3)
    rule.release()
    holder.close()

    body = assert_invariants(open_store(wired))
    assert [entry.step for entry in body.live] == [2, 5], "step 4 fell due while step 2 was held up"


@pytest.mark.slow
def test_with_two_buffers_a_save_is_staged_while_the_one_before_is_uploaded(wire: FaultProxy, wired: str) -> None:
    pair = pair_at(wired, when_busy="copy")
    on_all(pair, "train", 2)
    on_all(pair, "wait")  # the ranks agreed before it: the next one waits for it
    rule = wire.rule("hold", "PUT", "distcp")

    on_all(pair, "train", 5)  # steps 4 and 6 are staged, while 4 is held up
    rule.wait()
    then = pair[0].weights()
    late = start_on_all(pair, "train", 1)  # step 8 finds no buffer
    are_done = [training.ends_within(2.5) for training in late]
    rule.release()
    for training in late:
        training.join()
    on_all(pair, "close")

    body = assert_invariants(open_store(wired))
    model = torch.nn.Linear(600, 500)
    raycheck.open_run(wired).restore(6, into={"model": model})
    assert [entry.step for entry in body.live] == [2, 4, 6, 8]
    assert are_done == [False, False], "there was no buffer left to stage step 8 in"
    torch.manual_seed(0)
    expected = torch.nn.Linear(600, 500)
    optimizer = torch.optim.AdamW(expected.parameters())
    for _ in range(6):
        train_once(expected, optimizer)
    assert torch.allclose(model.weight, expected.weight, rtol=0, atol=1e-6)
    assert not torch.allclose(model.weight, then, rtol=0, atol=1e-6), "those are the values of step 7"


@pytest.mark.slow
def test_what_is_frozen_is_not_staged_again_while_its_upload_hangs(wire: FaultProxy, wired: str) -> None:
    holder = alone_at(wired, is_frozen=True, when_busy="copy", save_timeout_s=4.0)
    holder.restore()
    rule = wire.rule("hold", "PUT", "model.frozen/__0_0.distcp")

    holder.train(2)
    rule.wait()
    holder.train(2)  # waits for the save of step 2, which is broken off at its deadline
    rule.release()
    holder.train(2)
    holder.close()

    body = assert_invariants(open_store(wired))
    findings = [finding for item in raycheck.open_run(wired).checkpoints for finding in item.verify()]
    assert [entry.step for entry in body.live] == [4, 6]
    assert [finding.problem for finding in findings if finding.problem] == []


def test_ranks_that_lost_their_agreement_fail_one_save_and_agree_again(uri: str) -> None:
    pair = pair_at(uri)
    on_all(pair, "train", 2)

    pair[1].doubt()  # as after a coordinator that died between telling one rank and the other
    on_all(pair, "train", 4)
    on_all(pair, "close")

    body = assert_invariants(open_store(uri))
    assert [entry.step for entry in body.live] == [2, 6]


def test_a_selection_of_what_is_nowhere_is_refused_also_in_a_fresh_run(uri: str) -> None:
    holder = alone_at(uri)

    with pytest.raises(raycheck.errors.ConfigError, match="there is no 'modle'"):
        holder.restore(only=["modle"])

    assert assert_invariants(open_store(uri)).live == ()


def test_a_stream_of_batches_inside_a_dict_is_counted(uri: str) -> None:
    holder = alone_at(uri)

    assert holder.train_on(3) == (12, 12)
    assert holder.train_on(2) == (20, 20)

    assert_invariants(open_store(uri))


def test_save_saves_at_step_0_and_after_a_restore_that_differs_but_not_what_is_saved_already(uri: str) -> None:
    places = group_of(uri)

    def begin(**options: object) -> tuple[Holder, RestoreResult]:
        more = {"added": {"x": 1}} if options else None
        holder = Holder(again(places)[0], more=more, rolling_every_steps=1)
        return holder, holder.restore(**options)

    def save_and_close(holder: Holder) -> list[str]:
        holder.train_and_save(0)
        holder.close()
        return [entry.key for entry in assert_invariants(open_store(uri)).live]

    fresh, _ = begin()
    assert save_and_close(fresh) == ["step-000000000-a1-s1"]

    whole, at = begin()
    assert at.checkpoint == "step-000000000-a1-s1"
    assert save_and_close(whole) == ["step-000000000-a1-s1"], "it is what was restored"

    added, at = begin(strict=False)
    assert at.report.missing == ("added",)
    assert save_and_close(added)[-1] == "step-000000000-a3-s1"

    once_more, at = begin(only=["model"])
    assert at.report.skipped
    assert save_and_close(once_more)[-1] == "step-000000000-a4-s1"


def test_save_keeps_what_was_restored_from_a_rolling_checkpoint(uri: str) -> None:
    places = group_of(uri)
    first = Holder(places[0], rolling_every_steps=1)
    first.restore()
    first.train(1)
    first.wait()
    first.fail()

    second = Holder(again(places)[0])
    at = second.restore()
    second.train_and_save(0)
    second.wait()

    live = {entry.key: entry.rolling for entry in assert_invariants(open_store(uri)).live}
    assert live[at.checkpoint]
    assert live["step-000000001-a2-s1"] is False
