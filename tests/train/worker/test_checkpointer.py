"""The Checkpointer without Ray Train: in any group of Ray actors, with a place given by hand."""

import dataclasses
import threading
import time
from urllib.parse import urlsplit
from uuid import uuid4

import pytest
import ray
import torch

import raycheck
from raycheck.bucket.store import open_store
from raycheck.bucket.store.address import join_uri
from tests.support.http_fault_proxy import fault_proxy
from tests.support.invariants import assert_invariants
from tests.support.reused_processes import reused

pytestmark = [pytest.mark.ray, pytest.mark.filterwarnings("ignore")]  # Ray itself warns


def train_once(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    model(torch.ones(2, 600)).square().mean().backward()
    optimizer.step()


@reused
class Holder:
    """Is one rank that holds a replicated model, and a number of its own."""

    def __init__(
        self,
        rank: int,
        world_size: int,
        group: str,
        uri: str,
        coordinator,
        *,
        seed: int = 0,
        is_frozen: bool = False,
        more: dict | None = None,
        **settings,
    ) -> None:
        torch.manual_seed(seed)
        self.model = torch.nn.Linear(600, 500)
        self.model.bias.requires_grad_(not is_frozen)
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        self.number = raycheck.PerRank({"fresh": rank})
        self.place = raycheck.Group(id=group, uri=uri, rank=rank, world_size=world_size, coordinator=coordinator)
        self.state = {"model": self.model, "optimizer": self.optimizer, "number": self.number, **(more or {})}
        self.ckpt = raycheck.Checkpointer(
            self.state, raycheck.SaveSettings(every_steps=2, **settings), group=self.place
        )

    def restore(self, **options):
        return self.ckpt.restore(**options)

    def make_another(self) -> None:
        raycheck.Checkpointer(self.state, group=self.place)

    def get(self, name: str):
        return {"number": self.number.value, "moments": len(self.optimizer.state)}[name]

    def set_number(self, value: int) -> None:
        self.number.value = {"kept": value}

    def train(self, steps: int) -> None:
        for _ in range(steps):
            train_once(self.model, self.optimizer)
            self.ckpt.end_step({"loss": float("nan"), "step": 1})

    def train_and_save(self, steps: int) -> None:
        self.train(steps)
        self.ckpt.save()

    def train_on(self, steps: int) -> tuple[int, int]:
        """Train on a stream of batches inside a dict. Returns its position, and that of the progress."""
        data = raycheck.Batches(range(40), global_batch=4, rank=0, world_size=1)
        state = {"model": self.model, "data": {"train": data}}
        self.ckpt.close()
        with raycheck.Checkpointer(state, group=dataclasses.replace(self.place, id=uuid4().hex)) as ckpt:
            at = ckpt.restore()
            for _, _ in zip(range(steps), data.loader(at.epoch), strict=False):
                ckpt.end_step()
            return data.state_dict()["consumed"], ckpt._counter.progress.samples

    def wait(self) -> None:
        self.ckpt._live()._queue.wait()

    def doubt(self) -> None:
        """Forget that the ranks have agreed, on this rank alone."""
        queue = self.ckpt._live()._queue
        queue.wait()
        queue._has_agreed = False

    def weights(self):
        return self.model.weight.detach()

    def restore_and_watch(self, every_s: float) -> None:
        raycheck.train.worker.heartbeat.WATCH_S = every_s
        self.ckpt.restore()

    def step_until_told(self) -> int:
        """End a step once the thread has found out; returns the number of that step."""
        deadline = time.monotonic() + 90.0
        while time.monotonic() < deadline and self.ckpt._watch.over is None:
            time.sleep(0.05)
        with pytest.raises(raycheck.SupersededError):
            self.ckpt.end_step()
        return self.ckpt._counter.step

    def close(self) -> list[str]:
        """Returns raycheck's threads that are left a moment later."""
        self.ckpt.close()
        deadline = time.monotonic() + 60.0
        while (left := [one.name for one in threading.enumerate() if one.name.startswith("raycheck")]) and (
            time.monotonic() < deadline
        ):
            time.sleep(0.05)
        return left


def test_a_group_of_plain_actors_saves_and_another_world_size_restores(cluster: None, s3: str) -> None:
    with fault_proxy(s3) as proxy:
        uri = join_uri(proxy.uri, uuid4().hex)
        coordinator = raycheck.start_coordinator(uri, owner="me")
        pair = [Holder.remote(rank, 2, "pair", uri, coordinator) for rank in range(2)]
        ray.get([holder.restore.remote() for holder in pair])
        ray.get([pair[rank].set_number.remote(10 + rank) for rank in range(2)])
        ray.get([holder.train.remote(3) for holder in pair])
        ray.get([holder.close.remote() for holder in pair])

        three = [Holder.remote(rank, 3, "three", uri, coordinator, seed=rank) for rank in range(3)]
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


def test_a_replaced_group_is_told_that_its_attempt_is_over(cluster: None, s3: str) -> None:
    uri = join_uri(s3, uuid4().hex)
    coordinator = raycheck.start_coordinator(uri, owner="me")
    old = Holder.remote(0, 1, "old", uri, coordinator)
    ray.get(old.restore.remote())
    new = Holder.remote(0, 1, "new", uri, coordinator)
    ray.get(new.restore.remote())

    with pytest.raises(raycheck.SupersededError):
        ray.get([old.train.remote(2), old.close.remote()])
    assert ray.get([new.train.remote(2), new.close.remote()])[1] == [], "its threads have ended"

    body = assert_invariants(open_store(uri))
    assert [entry.key for entry in body.live] == ["step-000000002-a2-s1"]


@pytest.mark.slow
def test_a_replaced_group_is_told_so_between_its_saves_too(cluster: None, s3: str) -> None:
    uri = join_uri(s3, uuid4().hex)
    coordinator = raycheck.start_coordinator(uri, owner="me")
    old = Holder.remote(0, 1, "old", uri, coordinator)
    ray.get(old.restore_and_watch.remote(0.2))
    ray.get(Holder.remote(0, 1, "new", uri, coordinator).restore.remote())

    assert ray.get(old.step_until_told.remote()) == 1, "the second step would have saved"


@pytest.mark.slow
def test_steps_before_restore_are_refused(cluster: None, s3: str) -> None:
    uri = join_uri(s3, uuid4().hex)
    holder = Holder.remote(0, 1, "group", uri, raycheck.start_coordinator(uri, owner="me"))

    with pytest.raises(raycheck.ConfigError, match="restore"):
        ray.get(holder.train.remote(1))

    assert_invariants(open_store(uri))


@pytest.mark.slow
def test_a_rank_that_saves_alone_fails_that_save_and_mixes_nothing(cluster: None, s3: str) -> None:
    uri = join_uri(s3, uuid4().hex)
    coordinator = raycheck.start_coordinator(uri, owner="me")
    pair = [Holder.remote(rank, 2, "pair", uri, coordinator) for rank in range(2)]
    ray.get([holder.restore.remote() for holder in pair])

    # The first save is of step 1 on rank 0 and of step 2 on rank 1; the second is of step 2 on both.
    ray.get([pair[0].train_and_save.remote(1), pair[1].train.remote(2)])
    ray.get([pair[0].train.remote(1), pair[1].close.remote()])
    ray.get(pair[0].close.remote())

    assert [entry.key for entry in assert_invariants(open_store(uri)).live] == ["step-000000002-a1-s2"]


def test_replicas_that_differ_are_refused_by_name_before_anything_is_committed(cluster: None, s3: str) -> None:
    uri = join_uri(s3, uuid4().hex)
    coordinator = raycheck.start_coordinator(uri, owner="me")
    pair = [Holder.remote(rank, 2, "pair", uri, coordinator, seed=rank) for rank in range(2)]
    ray.get([holder.restore.remote() for holder in pair])

    for training in [holder.train.remote(2) for holder in pair]:
        with pytest.raises(raycheck.ConfigError, match=r"tensor model\.(weight|bias) is not the same on ranks 0 and 1"):
            ray.get(training)

    assert assert_invariants(open_store(uri)).live == ()


@pytest.mark.slow
def test_a_partial_restore_is_done_once_and_a_restart_goes_on_from_where_training_was(cluster: None, s3: str) -> None:
    uri = join_uri(s3, uuid4().hex)
    weights_only = {"only": ["model"]}

    def start(group: str):
        return Holder.remote(0, 1, group, uri, raycheck.start_coordinator(uri, owner=group), seed=1)

    first = start("pretrained")
    ray.get([first.restore.remote(), first.train.remote(6), first.close.remote()])
    second = start("tuned")
    at = ray.get(second.restore.remote(**weights_only))
    moments = ray.get(second.get.remote("moments"))
    ray.get([second.train.remote(4), second.close.remote()])
    between = start("whole")
    ray.get([between.restore.remote(), between.train.remote(0), between.close.remote()])
    third = start("resubmitted")
    again = ray.get(third.restore.remote(**weights_only))

    assert (at.step, at.checkpoint, moments) == (0, "step-000000006-a1-s3", 0)
    assert at.report.restored == ("model",)
    assert set(at.report.skipped) == {"optimizer", "number", "progress", "rng"}
    assert (again.step, again.checkpoint) == (4, "step-000000004-a2-s2")
    assert again.report.skipped == ()
    assert ray.get(third.get.remote("moments")) == 2
    assert_invariants(open_store(uri))


@pytest.mark.slow
def test_two_open_checkpointers_of_a_run_in_one_process_are_refused(cluster: None, s3: str) -> None:
    uri = join_uri(s3, uuid4().hex)
    holder = Holder.remote(0, 1, "group", uri, raycheck.start_coordinator(uri, owner="me"))

    with pytest.raises(raycheck.ConfigError, match="open Checkpointer of this run"):
        ray.get(holder.make_another.remote())
    ray.get([holder.restore.remote(), holder.train.remote(2), holder.close.remote(), holder.make_another.remote()])

    assert len(assert_invariants(open_store(uri)).live) == 1


@pytest.mark.slow
def test_a_rank_that_sees_another_place_than_the_driver_is_told_so(cluster: None) -> None:
    uri = f"memory://{uuid4().hex}"  # of each process its own, as a folder on each node would be
    holder = Holder.remote(0, 1, "group", uri, raycheck.start_coordinator(uri, owner="me"))

    with pytest.raises(raycheck.ConfigError, match=r"node .*: memory://\w+ is another place than the driver's"):
        ray.get(holder.restore.remote())


def test_a_node_without_permission_is_told_before_the_run_is_claimed(cluster: None, s3: str) -> None:
    with fault_proxy(s3) as proxy:
        uri = join_uri(proxy.uri, uuid4().hex)
        holder = Holder.remote(0, 1, "group", uri, raycheck.start_coordinator(uri, owner="me"))
        proxy.rule("deny", "PUT", "probes/", times=2)

        with pytest.raises(raycheck.ConfigError, match=r"node .*: put: .*s3:PutObject"):
            ray.get(holder.restore.remote())

    assert_invariants(open_store(uri.replace(str(proxy.port), s3.partition("127.0.0.1:")[2].partition("&")[0])))


@pytest.mark.slow
def test_a_save_that_falls_due_during_another_one_is_left_out_on_request(cluster: None, s3: str) -> None:
    with fault_proxy(s3) as proxy:
        uri = join_uri(proxy.uri, uuid4().hex)
        coordinator = raycheck.start_coordinator(uri, owner="me")
        holder = Holder.remote(0, 1, "group", uri, coordinator, when_busy="skip")
        ray.get(holder.restore.remote())
        rule = proxy.rule("hold", "PUT", "distcp")

        ray.get(holder.train.remote(2))
        rule.wait()
        ray.get(holder.train.remote(3))
        rule.release()
        ray.get(holder.close.remote())

        body = assert_invariants(open_store(uri))
    assert [entry.step for entry in body.live] == [2, 5], "step 4 fell due while step 2 was held up"


@pytest.mark.slow
def test_with_two_buffers_a_save_is_staged_while_the_one_before_is_uploaded(cluster: None, s3: str) -> None:
    with fault_proxy(s3) as proxy:
        uri = join_uri(proxy.uri, uuid4().hex)
        coordinator = raycheck.start_coordinator(uri, owner="me")
        pair = [Holder.remote(rank, 2, "pair", uri, coordinator, buffers=2) for rank in range(2)]
        ray.get([holder.restore.remote() for holder in pair])
        ray.get([holder.train.remote(2) for holder in pair])
        ray.get([holder.wait.remote() for holder in pair])  # the ranks agreed before it: the next one waits for it
        rule = proxy.rule("hold", "PUT", "distcp")

        ray.get([holder.train.remote(5) for holder in pair])  # steps 4 and 6 are staged, while 4 is held up
        rule.wait()
        then = ray.get(pair[0].weights.remote())
        late = [holder.train.remote(1) for holder in pair]  # step 8 finds no buffer
        done, _ = ray.wait(late, num_returns=2, timeout=5.0)
        rule.release()
        ray.get(late)
        ray.get([holder.close.remote() for holder in pair])

        body = assert_invariants(open_store(uri))
        model = torch.nn.Linear(600, 500)
        raycheck.open_run(uri).restore(6, into={"model": model})
    assert [entry.step for entry in body.live] == [2, 4, 6, 8]
    assert not done, "there was no buffer left to stage step 8 in"
    torch.manual_seed(0)
    expected = torch.nn.Linear(600, 500)
    optimizer = torch.optim.AdamW(expected.parameters())
    for _ in range(6):
        train_once(expected, optimizer)
    assert torch.allclose(model.weight, expected.weight, rtol=0, atol=1e-6)
    assert not torch.allclose(model.weight, then, rtol=0, atol=1e-6), "those are the values of step 7"


@pytest.mark.slow
def test_what_is_frozen_is_not_staged_again_while_its_upload_hangs(cluster: None, s3: str) -> None:
    with fault_proxy(s3) as proxy:
        uri = join_uri(proxy.uri, uuid4().hex)
        coordinator = raycheck.start_coordinator(uri, owner="me")
        settings = {"buffers": 2, "save_timeout_s": 4.0}
        holder = Holder.remote(0, 1, "group", uri, coordinator, is_frozen=True, **settings)
        ray.get(holder.restore.remote())
        rule = proxy.rule("hold", "PUT", "model.frozen/__0_0.distcp")

        ray.get(holder.train.remote(2))
        rule.wait()
        ray.get(holder.train.remote(2))  # waits for the save of step 2, which is broken off at its deadline
        rule.release()
        ray.get(holder.train.remote(2))
        ray.get(holder.close.remote())

        store = open_store(uri)
        body = assert_invariants(store)
        findings = [finding for item in raycheck.open_run(uri).checkpoints for finding in item.verify()]
    assert [entry.step for entry in body.live] == [4, 6]
    assert [finding.problem for finding in findings if finding.problem] == []


@pytest.mark.slow
def test_ranks_that_lost_their_agreement_fail_one_save_and_agree_again(cluster: None, s3: str) -> None:
    uri = join_uri(s3, uuid4().hex)
    coordinator = raycheck.start_coordinator(uri, owner="me")
    pair = [Holder.remote(rank, 2, "pair", uri, coordinator) for rank in range(2)]
    ray.get([holder.restore.remote() for holder in pair])
    ray.get([holder.train.remote(2) for holder in pair])

    ray.get(pair[1].doubt.remote())  # as after a coordinator that died between telling one rank and the other
    ray.get([holder.train.remote(4) for holder in pair])
    ray.get([holder.close.remote() for holder in pair])

    body = assert_invariants(open_store(uri))
    assert [entry.step for entry in body.live] == [2, 6]


@pytest.mark.slow
def test_a_selection_of_what_is_nowhere_is_refused_also_in_a_fresh_run(cluster: None, s3: str) -> None:
    uri = join_uri(s3, uuid4().hex)
    holder = Holder.remote(0, 1, "group", uri, raycheck.start_coordinator(uri, owner="me"))

    with pytest.raises(raycheck.ConfigError, match="there is no 'modle'"):
        ray.get(holder.restore.remote(only=["modle"]))

    assert assert_invariants(open_store(uri)).live == ()


@pytest.mark.slow
def test_a_stream_of_batches_inside_a_dict_is_counted(cluster: None, s3: str) -> None:
    uri = join_uri(s3, uuid4().hex)
    holder = Holder.remote(0, 1, "group", uri, raycheck.start_coordinator(uri, owner="me"))

    assert ray.get(holder.train_on.remote(3)) == (12, 12)
    assert ray.get(holder.train_on.remote(2)) == (20, 20)

    assert_invariants(open_store(uri))


def test_save_saves_at_step_0_and_after_a_restore_that_differs_but_not_what_is_saved_already(
    cluster: None, s3: str
) -> None:
    uri = join_uri(s3, uuid4().hex)
    coordinator = raycheck.start_coordinator(uri, owner="me")

    def begin(group: str, **options):
        more = {"added": {"x": 1}} if options else None
        holder = Holder.remote(0, 1, group, uri, coordinator, more=more, rolling_every_steps=1)
        return holder, ray.get(holder.restore.remote(**options))

    def save_and_close(holder) -> list[str]:
        ray.get(holder.train_and_save.remote(0))
        ray.get(holder.close.remote())
        return [entry.key for entry in assert_invariants(open_store(uri)).live]

    fresh, _ = begin("fresh")
    assert save_and_close(fresh) == ["step-000000000-a1-s1"]

    whole, at = begin("whole")
    assert at.checkpoint == "step-000000000-a1-s1"
    assert save_and_close(whole) == ["step-000000000-a1-s1"], "it is what was restored"

    added, at = begin("added", strict=False)
    assert at.report.missing == ("added",)
    assert save_and_close(added)[-1] == "step-000000000-a3-s1"

    again, at = begin("again", only=["model"])
    assert at.report.skipped
    assert save_and_close(again)[-1] == "step-000000000-a4-s1"


def test_save_keeps_what_was_restored_from_a_rolling_checkpoint(cluster: None, s3: str) -> None:
    uri = join_uri(s3, uuid4().hex)
    coordinator = raycheck.start_coordinator(uri, owner="me")
    first = Holder.remote(0, 1, "first", uri, coordinator, rolling_every_steps=1)
    ray.get(first.restore.remote())
    ray.get(first.train.remote(1))
    ray.get(first.wait.remote())
    ray.kill(first.actor)

    second = Holder.remote(0, 1, "second", uri, coordinator)
    at = ray.get(second.restore.remote())
    ray.get(second.train_and_save.remote(0))
    ray.get(second.wait.remote())

    live = {entry.key: entry.rolling for entry in assert_invariants(open_store(uri)).live}
    assert live[at.checkpoint]
    assert live["step-000000001-a2-s1"] is False
