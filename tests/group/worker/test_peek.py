"""Tests scripts that peek before they have anything to restore into, add entries late, and wait for their commits."""

from typing import Any
from uuid import uuid4

import pytest
import torch

import raycheck
from raycheck.bucket.store import Store, open_store
from raycheck.bucket.store.address import join_uri
from tests.group.worker.test_damaged_restore import damage
from tests.support.histories.invariants import assert_invariants
from tests.support.processes.background_call import InThread, on_all, start_on_all
from tests.support.processes.coordinator_in_thread import again, group_of
from tests.support.servers.http_fault_proxy import FaultProxy


class Late:
    """One rank whose optimizer and schedule are made only when the step is known."""

    def __init__(self, place: raycheck.adapters.Group, **settings: Any) -> None:
        torch.manual_seed(0)
        self.model = torch.nn.Linear(6, 5)
        self.early: dict[str, Any] = {"best": 9.0}
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
        """Return the steps that are committed then."""
        self.ckpt.wait(timeout_s)
        return [item.step for item in raycheck.open_run(self.ckpt._group.uri).checkpoints]

    def look(self) -> tuple[float, float, int]:
        return self.early["best"], self.model.weight.sum().item(), len(self.optimizer.state)

    def close(self) -> None:
        self.ckpt.close()

    def fail(self) -> None:
        """Leave training like a script that has raised an error."""
        self.ckpt.__exit__(RuntimeError, RuntimeError("it broke"), None)


def pair_of(uri: str, owner: str, **settings: Any) -> list[Late]:
    return [Late(place, **settings) for place in group_of(uri, world_size=2, owner=owner)]


def trained(uri: str, steps: int = 4) -> None:
    pair = pair_of(uri, "ann")
    assert [answer.is_fresh for answer in on_all(pair, "peek")] == [True, True]
    on_all(pair, "restore")
    on_all(pair, "train", steps)
    on_all(pair, "close")


def flip(store: Store, key: str) -> None:
    data = bytearray(store.get(key).data)
    data[len(data) // 2] ^= 1
    store.put(key, bytes(data))


def test_a_script_learns_the_step_before_there_is_anything_to_fill(uri: str) -> None:
    trained(uri)

    pair = pair_of(uri, "bob")
    answers = on_all(pair, "peek")
    untouched = raycheck.open_run(uri)._latest.attempt.last_save
    assert on_all(pair, "peek_twice") == [True, True]
    at = on_all(pair, "restore")

    for answer in answers:
        assert (answer.step, answer.attempt, answer.is_fresh) == (4, 2, False)
        assert answer.entries == ("early", "model", "optimizer")
        assert (answer.metrics, dict(answer.values)) == ({"loss": 0.5}, {"early": {"best": 5.0}})
    assert untouched == 0
    assert [(place.step, place.attempt, place.checkpoint) for place in at] == [(4, 2, answers[0].checkpoint)] * 2
    best, _, moments = on_all(pair, "look")[0]
    assert (best, moments) == (5.0, 2)
    assert on_all(pair, "peek") == answers, "it says the same later on"
    for rank in pair:
        with pytest.raises(raycheck.errors.ConfigError, match=r"add\('x'\) comes after restore"):
            rank.add_twice("x")
    on_all(pair, "close")
    assert_invariants(open_store(uri))


def test_what_a_peek_has_read_is_not_read_again(uri: str) -> None:
    trained(uri)
    pair = pair_of(uri, "bob")
    on_all(pair, "peek")
    index = f"checkpoints/{raycheck.open_run(uri).head.key}/index"

    flip(open_store(uri), index)
    assert [at.step for at in on_all(pair, "restore")] == [4, 4]
    flip(open_store(uri), index)

    on_all(pair, "close")
    assert_invariants(open_store(uri))


def test_an_entry_comes_once_and_a_state_must_not_stay_empty(uri: str) -> None:
    rank = Late(group_of(uri)[0])

    rank.add()
    with pytest.raises(raycheck.errors.ConfigError, match=r"add\('model'\): the state has an entry of this name"):
        rank.add_twice("model")
    with pytest.raises(raycheck.errors.ConfigError, match="raycheck's own"):
        rank.add_twice("rng")

    place = raycheck.adapters.RayGroup(id="g", uri=f"memory://{uuid4().hex}", rank=0, world_size=1, coordinator=None)
    with pytest.raises(raycheck.errors.ConfigError, match="the state is empty"):
        raycheck.Checkpointer(group=place).restore()


def test_damage_that_one_rank_peeks_takes_all_ranks_to_the_one_before(uri: str) -> None:
    trained(uri)
    bad = raycheck.open_run(uri).head.key
    flip(open_store(uri), f"checkpoints/{bad}/index")

    pair = pair_of(uri, "bob")
    answers = on_all(pair, "peek")
    at = on_all(pair, "restore")

    assert [answer.step for answer in answers] == [place.step for place in at] == [2, 2]
    assert [place.report.refused for place in at] == [answer.refused for answer in answers]
    said = [answer.refused for answer in answers if answer.refused]  # a rank that came late was told of the good one
    assert said
    assert all("index has another checksum" in line for (line,) in said)
    on_all(pair, "close")
    body = assert_invariants(open_store(uri))
    assert [(entry.step, bool(entry.damaged)) for entry in body.live] == [(2, False), (4, True)]


def test_a_restore_that_finds_damage_after_a_peek_starts_again_and_peeks_anew(uri: str) -> None:
    """A script that was told step 4 must not continue from step 2."""
    trained(uri)
    bad = damage(open_store(uri), 4, "model.weight")
    places = group_of(uri, world_size=2, owner="bob")
    pair = [Late(place) for place in places]
    assert [answer.step for answer in on_all(pair, "peek")] == [4, 4]

    for restore in start_on_all(pair, "restore"):
        with pytest.raises(
            raycheck.errors.SupersededError, match=rf"peek\(\) described {bad}.* will then describe step-000000002"
        ):
            restore.join()
    on_all(pair, "fail")
    pair = [Late(place) for place in again(places)]
    answers, at = on_all(pair, "peek"), on_all(pair, "restore")

    assert [answer.step for answer in answers] == [place.step for place in at] == [2, 2]
    on_all(pair, "train", 2)
    on_all(pair, "close")
    body = assert_invariants(open_store(uri))
    assert [(entry.step, bool(entry.damaged)) for entry in body.live] == [(2, False), (4, True), (4, False)]


def test_a_user_who_asked_for_it_gets_the_error_of_a_peek_and_an_untouched_run(uri: str) -> None:
    trained(uri)
    flip(open_store(uri), f"checkpoints/{raycheck.open_run(uri).head.key}/index")

    for answer in start_on_all(pair_of(uri, "bob"), "peek", on_corrupt="raise"):
        with pytest.raises(raycheck.errors.DamagedError, match=r"rank \d: peek at .*index"):
            answer.join()

    assert [item.damaged for item in raycheck.open_run(uri).checkpoints] == [None, None]


def test_a_rank_that_does_not_peek_while_another_does_is_named_and_nobody_waits(uri: str) -> None:
    trained(uri, steps=2)
    for number, first in enumerate(("peek", "restore")):
        pair = pair_of(uri, f"owner-{number}")
        methods = [first, {"peek": "restore", "restore": "peek"}[first]]

        answers = [InThread(getattr(rank, method)) for rank, method in zip(pair, methods, strict=True)]

        for answer in answers:
            with pytest.raises(raycheck.errors.ConfigError, match=r"call peek\(\), and ranks .* restore\(\)"):
                answer.join(120)
        on_all(pair, "fail")


def test_a_peek_of_another_part_than_the_restore_takes_is_refused(uri: str) -> None:
    trained(uri, steps=2)

    pair = pair_of(uri, "bob")
    assert [answer.step for answer in on_all(pair, "peek")] == [2, 2]
    for restore in start_on_all(pair, "restore", only=["model"]):
        with pytest.raises(raycheck.errors.ConfigError, match=r"peek\(\) returned step 2"):
            restore.join()
    on_all(pair, "fail")
    alike = pair_of(uri, "eve")
    answers, at = on_all(alike, "peek", only=["model"]), on_all(alike, "restore", only=["model"])

    assert [answer.step for answer in answers] == [place.step for place in at] == [0, 0]
    for rank in alike:
        with pytest.raises(raycheck.errors.ConfigError, match=r"peek\(\) returned step 0"):
            rank.peek(skip=["optimizer"])


def test_a_save_at_the_start_is_one_of_step_0_and_is_restored(uri: str) -> None:
    first = pair_of(uri, "ann", at_start=True, every_steps=None)
    on_all(first, "restore")
    assert on_all(first, "wait") == [[0], [0]]
    before = on_all(first, "look")[0]
    on_all(first, "train", 1)
    on_all(first, "fail")

    second = pair_of(uri, "bob", at_start=True, every_steps=None)
    answers, at = on_all(second, "peek"), on_all(second, "restore")

    assert [(answer.step, answer.is_fresh) for answer in answers] == [(0, False)] * 2
    assert [(place.step, place.checkpoint) for place in at] == [(0, "step-000000000-a1-s1")] * 2
    assert on_all(second, "look")[0] == before
    on_all(second, "train", 1)
    on_all(second, "close")
    body = assert_invariants(open_store(uri))
    assert [entry.step for entry in body.live] == [0, 1], "step 0 was saved once"


def test_a_wait_lasts_until_the_commit_and_says_what_was_not_committed(wire: FaultProxy, s3: str) -> None:
    name = uuid4().hex
    pair = pair_of(join_uri(wire.uri, name), "ann", every_steps=None)
    on_all(pair, "restore")
    assert on_all(pair, "wait") == [[], []], "there is nothing to wait for"

    held = wire.rule("hold", "PUT", "__0_0.distcp")
    on_all(pair, "train", 1)
    on_all(pair, "save")
    held.wait()
    for waiting in start_on_all(pair, "wait", 0.2):
        with pytest.raises(raycheck.errors.SaveFailedError, match="have not ended in time"):
            waiting.join()
    held.release()
    assert on_all(pair, "wait") == [[1], [1]]

    wire.rule("deny", "PUT", "__0_0.distcp", times=99)
    on_all(pair, "train", 1)
    on_all(pair, "save")
    for _ in range(2):  # it is still not committed when it is asked again
        for waiting in start_on_all(pair, "wait"):
            with pytest.raises(raycheck.errors.SaveFailedError, match=r"wait\(\): not every save was committed"):
                waiting.join()

    assert [entry.step for entry in assert_invariants(open_store(join_uri(s3, name))).live] == [1]
