"""A script learns what it needs before it has anything to restore into, adds entries late, and waits for the commits."""

from typing import Any
from uuid import uuid4

import pytest
import ray
import torch

import raycheck
from raycheck.bucket.store import Store, open_store
from raycheck.bucket.store.address import join_uri
from tests.support.http_fault_proxy import fault_proxy
from tests.support.invariants import assert_invariants
from tests.support.reused_processes import reused
from tests.train.worker.test_damaged_restore import damage

pytestmark = [pytest.mark.ray, pytest.mark.filterwarnings("ignore")]  # Ray itself warns


@reused
class Late:
    """Is one rank whose optimizer and schedule are made only when the step is known."""

    def __init__(self, rank: int, world_size: int, group: str, uri: str, coordinator: Any, **settings: Any) -> None:
        torch.manual_seed(0)
        self.model = torch.nn.Linear(6, 5)
        self.early: dict[str, Any] = {"best": 9.0}
        place = raycheck.Group(id=group, uri=uri, rank=rank, world_size=world_size, coordinator=coordinator)
        settings = {"every_steps": 2, **settings}
        self.ckpt = raycheck.Checkpointer(settings=raycheck.SaveSettings(**settings), group=place)

    def peek(self, **options: Any) -> Any:
        return self.ckpt.peek(**options)

    def peek_twice(self) -> bool:
        return self.ckpt.peek() is self.ckpt.peek()

    def add(self) -> None:
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        self.ckpt.add("optimizer", self.optimizer)  # before the model that names its parameters
        self.ckpt.add("model", self.model)
        self.ckpt.add("early", self.early)

    def restore(self, **options: Any) -> Any:
        self.add()
        return self.ckpt.restore(**options)

    def add_twice(self, name: str) -> None:
        self.ckpt.add(name, {"a": 1})

    def train(self, steps: int) -> None:
        for _ in range(steps):
            self.optimizer.zero_grad()
            self.model(torch.ones(2, 6)).square().mean().backward()
            self.optimizer.step()
            self.early["best"] -= 1.0
            self.ckpt.end_step({"loss": 0.5})

    def save(self) -> None:
        self.ckpt.save()

    def wait(self, timeout_s: float | None = None) -> list[int]:
        """Returns the steps that are committed then."""
        self.ckpt.wait(timeout_s)
        return [entry.step for entry in raycheck.open_run(self.ckpt._group.uri).latest.live]

    def look(self) -> tuple[float, float, int]:
        return self.early["best"], self.model.weight.sum().item(), len(self.optimizer.state)

    def close(self) -> None:
        self.ckpt.close()


def pair_of(uri: str, group: str, owner: str, **settings: Any) -> list[Any]:
    coordinator = raycheck.start_coordinator(uri, owner=owner, suffix=f":{group}")
    return [Late.remote(rank, 2, group, uri, coordinator, **settings) for rank in range(2)]


def both(pair: list[Any], method: str, *args: Any, **options: Any) -> list[Any]:
    return ray.get([getattr(rank, method).remote(*args, **options) for rank in pair])


def trained(uri: str, steps: int = 4) -> None:
    pair = pair_of(uri, "first", "ann")
    assert [answer.is_fresh for answer in both(pair, "peek")] == [True, True]
    both(pair, "restore")
    both(pair, "train", steps)
    both(pair, "close")


def flip(store: Store, key: str) -> None:
    data = bytearray(store.get(key).data)
    data[len(data) // 2] ^= 1
    store.put(key, bytes(data))


def test_a_script_learns_the_step_before_there_is_anything_to_fill(cluster: None, s3: str) -> None:
    uri = join_uri(s3, uuid4().hex)
    trained(uri)

    pair = pair_of(uri, "second", "bob")
    answers = both(pair, "peek")
    untouched = raycheck.open_run(uri).latest.attempt.last_save
    assert both(pair, "peek_twice") == [True, True]
    at = both(pair, "restore")

    for answer in answers:
        assert (answer.step, answer.attempt, answer.is_fresh) == (4, 2, False)
        assert answer.entries == ("early", "model", "optimizer")
        assert (answer.metrics, dict(answer.values)) == ({"loss": 0.5}, {"early": {"best": 5.0}})
    assert untouched == 0
    assert [(place.step, place.attempt, place.checkpoint) for place in at] == [(4, 2, answers[0].checkpoint)] * 2
    best, _, moments = both(pair, "look")[0]
    assert (best, moments) == (5.0, 2)
    assert both(pair, "peek") == answers, "it says the same later on"
    for rank in pair:
        with pytest.raises(raycheck.ConfigError, match=r"add\('x'\) comes after restore"):
            ray.get(rank.add_twice.remote("x"))
    both(pair, "close")
    assert_invariants(open_store(uri))


@pytest.mark.slow
def test_an_entry_comes_once_and_a_state_must_not_stay_empty(cluster: None, s3: str) -> None:
    uri = join_uri(s3, uuid4().hex)
    coordinator = raycheck.start_coordinator(uri, owner="me")
    rank = Late.remote(0, 1, "group", uri, coordinator)

    ray.get(rank.add.remote())
    with pytest.raises(raycheck.ConfigError, match=r"add\('model'\): the state has an entry of this name"):
        ray.get(rank.add_twice.remote("model"))
    with pytest.raises(raycheck.ConfigError, match="raycheck's own"):
        ray.get(rank.add_twice.remote("rng"))

    place = raycheck.Group(id="g", uri=f"memory://{uuid4().hex}", rank=0, world_size=1, coordinator=None)
    with pytest.raises(raycheck.ConfigError, match="the state is empty"):
        raycheck.Checkpointer(group=place).restore()


def test_damage_that_one_rank_peeks_takes_all_ranks_to_the_one_before(cluster: None, s3: str) -> None:
    uri = join_uri(s3, uuid4().hex)
    trained(uri)
    bad = raycheck.open_run(uri).head.entry.key
    flip(open_store(uri), f"checkpoints/{bad}/index")

    pair = pair_of(uri, "second", "bob")
    answers = both(pair, "peek")
    at = both(pair, "restore")

    assert [answer.step for answer in answers] == [place.step for place in at] == [2, 2]
    assert [place.report.refused for place in at] == [answer.refused for answer in answers]
    said = [answer.refused for answer in answers if answer.refused]  # a rank that came late was told of the good one
    assert said
    assert all("index has another checksum" in line for (line,) in said)
    both(pair, "close")
    body = assert_invariants(open_store(uri))
    assert [(entry.step, bool(entry.damaged)) for entry in body.live] == [(2, False), (4, True)]


def test_a_restore_that_finds_damage_after_a_peek_starts_again_and_peeks_anew(cluster: None, s3: str) -> None:
    """No script that was told of step 4 may go on from step 2."""
    uri = join_uri(s3, uuid4().hex)
    trained(uri)
    bad = damage(open_store(uri), 4, "model.weight")
    coordinator = raycheck.start_coordinator(uri, owner="bob")
    pair = [Late.remote(rank, 2, "second", uri, coordinator) for rank in range(2)]
    assert [answer.step for answer in both(pair, "peek")] == [4, 4]

    for restore in [rank.restore.remote() for rank in pair]:
        with pytest.raises(
            raycheck.SupersededError, match=rf"peek\(\) answered for {bad}.* will answer for step-000000002"
        ):
            ray.get(restore)
    again = [Late.remote(rank, 2, "third", uri, coordinator) for rank in range(2)]
    answers, at = both(again, "peek"), both(again, "restore")

    assert [answer.step for answer in answers] == [place.step for place in at] == [2, 2]
    both(again, "train", 2)
    both(again, "close")
    body = assert_invariants(open_store(uri))
    assert [(entry.step, bool(entry.damaged)) for entry in body.live] == [(2, False), (4, True), (4, False)]


@pytest.mark.slow
def test_a_user_who_asked_for_it_gets_the_error_of_a_peek_and_an_untouched_run(cluster: None, s3: str) -> None:
    uri = join_uri(s3, uuid4().hex)
    trained(uri)
    flip(open_store(uri), f"checkpoints/{raycheck.open_run(uri).head.entry.key}/index")

    for answer in [rank.peek.remote(on_corrupt="raise") for rank in pair_of(uri, "second", "bob")]:
        with pytest.raises(raycheck.DamagedError, match=r"rank \d: peek at .*index"):
            ray.get(answer)

    assert [entry.damaged for entry in raycheck.open_run(uri).latest.live] == [None, None]


def test_a_rank_that_does_not_peek_while_another_does_is_named_and_nobody_waits(cluster: None, s3: str) -> None:
    uri = join_uri(s3, uuid4().hex)
    trained(uri, steps=2)
    for number, first in enumerate(("peek", "restore")):
        pair = pair_of(uri, f"mixed-{number}", f"owner-{number}")
        methods = [first, {"peek": "restore", "restore": "peek"}[first]]

        answers = [getattr(rank, method).remote() for rank, method in zip(pair, methods, strict=True)]

        for answer in answers:
            with pytest.raises(raycheck.ConfigError, match=r"call peek\(\), and ranks .* restore\(\)"):
                ray.get(answer, timeout=120)


@pytest.mark.slow
def test_a_peek_of_another_part_than_the_restore_takes_is_refused(cluster: None, s3: str) -> None:
    uri = join_uri(s3, uuid4().hex)
    trained(uri, steps=2)

    pair = pair_of(uri, "second", "bob")
    assert [answer.step for answer in both(pair, "peek")] == [2, 2]
    for restore in [rank.restore.remote(only=["model"]) for rank in pair]:
        with pytest.raises(raycheck.ConfigError, match=r"peek\(\) answered step 2"):
            ray.get(restore)
    alike = pair_of(uri, "third", "eve")
    answers, at = both(alike, "peek", only=["model"]), both(alike, "restore", only=["model"])

    assert [answer.step for answer in answers] == [place.step for place in at] == [0, 0]


def test_a_save_at_the_start_is_one_of_step_0_and_is_restored(cluster: None, s3: str) -> None:
    uri = join_uri(s3, uuid4().hex)
    first = pair_of(uri, "first", "ann", at_start=True, every_steps=None)
    both(first, "restore")
    assert both(first, "wait") == [[0], [0]]
    before = both(first, "look")[0]
    both(first, "train", 1)  # and the workers are lost

    second = pair_of(uri, "second", "bob", at_start=True, every_steps=None)
    answers, at = both(second, "peek"), both(second, "restore")

    assert [(answer.step, answer.is_fresh) for answer in answers] == [(0, False)] * 2
    assert [(place.step, place.checkpoint) for place in at] == [(0, "step-000000000-a1-s1")] * 2
    assert both(second, "look")[0] == before
    both(second, "train", 1)
    both(second, "close")
    body = assert_invariants(open_store(uri))
    assert [entry.step for entry in body.live] == [0, 1], "step 0 was saved once"


def test_a_wait_lasts_until_the_commit_and_says_what_was_not_committed(cluster: None, s3: str) -> None:
    with fault_proxy(s3) as proxy:
        uri = join_uri(proxy.uri, uuid4().hex)
        pair = pair_of(uri, "pair", "ann", every_steps=None)
        both(pair, "restore")
        assert both(pair, "wait") == [[], []], "there is nothing to wait for"

        held = proxy.rule("hold", "PUT", "__0_0.distcp")
        both(pair, "train", 1)
        both(pair, "save")
        held.wait()
        for waiting in [rank.wait.remote(0.2) for rank in pair]:
            with pytest.raises(raycheck.SaveFailedError, match="have not ended in time"):
                ray.get(waiting)
        held.release()
        assert both(pair, "wait") == [[1], [1]]

        proxy.rule("deny", "PUT", "__0_0.distcp", times=99)
        both(pair, "train", 1)
        both(pair, "save")
        for _ in range(2):  # it is still not committed when it is asked again
            for waiting in [rank.wait.remote() for rank in pair]:
                with pytest.raises(raycheck.SaveFailedError, match=r"wait\(\): not every save was committed"):
                    ray.get(waiting)

    assert [
        entry.step
        for entry in assert_invariants(
            open_store(uri.replace(str(proxy.port), s3.partition("127.0.0.1:")[2].partition("&")[0]))
        ).live
    ] == [1]
