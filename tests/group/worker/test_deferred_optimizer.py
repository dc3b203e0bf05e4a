"""Tests restores that return before the optimizers' tensors are read: whoever needs them waits, and all ranks agree."""

import copy
import logging
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any
from uuid import uuid4

import pytest
import torch
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

import raycheck
from raycheck.bucket.format import object_keys
from raycheck.bucket.store import open_store
from raycheck.bucket.store.address import join_uri
from raycheck.errors import ConfigError, DamagedError, RaycheckError, StoppedError, StoreError, SupersededError
from raycheck.group.worker import group_restore
from raycheck.state.deferred_tensors import DeferredTensors
from tests.group.worker.test_damaged_restore import damage
from tests.support.histories.invariants import assert_invariants
from tests.support.processes.background_call import InThread, on_all
from tests.support.processes.coordinator_in_thread import InProcess, again, group_of
from tests.support.servers.http_fault_proxy import FaultProxy, Kind, Rule

SAVED = 2
MORE = 3
WITHIN_S = 100.0
MOMENT = "optimizer.state.weight.exp_avg"
Params = Any
OPTIMIZERS: dict[str, Callable[[Params], torch.optim.Optimizer]] = {
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.01),
    "fused AdamW": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
    "AdamW one by one": lambda p: torch.optim.AdamW(p, lr=0.01, foreach=False),
    "SGD with momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "Adafactor": lambda p: torch.optim.Adafactor(p, lr=0.01),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=0.01),  # it has its tensors from the beginning
    "NAdam": lambda p: torch.optim.NAdam(p, lr=0.01),
}


OPEN: list[raycheck.Checkpointer] = []


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def ended(request: pytest.FixtureRequest) -> Iterator[None]:
    """End what a test has left open, while it still reaches its store."""
    if "wire" in request.fixturenames:
        request.getfixturevalue("wire")
    yield
    while OPEN:
        if not (ckpt := OPEN.pop()).is_closed:
            ckpt.__exit__(RuntimeError, RuntimeError("the test is over"), None)


class Own(torch.optim.SGD):
    """An optimizer of the script's own: it may do anything with its tensors when it loads them."""


class Rank:
    """One rank of a training whose weights and moments are more than a request apart."""

    def __init__(
        self,
        place: InProcess,
        make: Callable[[Params], torch.optim.Optimizer] = OPTIMIZERS["AdamW"],
        *,
        seed: int = 0,
        dtype: torch.dtype = torch.float32,
        **settings: Any,
    ) -> None:
        torch.manual_seed(seed)
        self.model = torch.nn.Linear(64, 500).to(dtype)
        self.optimizer = make(self.model.parameters())
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 2)
        self.step: Callable[[], Any] = self.optimizer.step
        self.dtype = dtype
        settings = {"every_steps": SAVED, **settings}
        self.open(place, **settings)

    def open(self, place: InProcess, **settings: Any) -> None:
        state = {"model": self.model, "optimizer": self.optimizer, "scheduler": self.scheduler}
        self.ckpt = raycheck.Checkpointer(state, raycheck.SaveSettings(**settings), group=place)
        OPEN.append(self.ckpt)

    def restore(self, **options: Any) -> Any:
        return self.ckpt.restore(**options)

    def backward(self) -> None:
        self.optimizer.zero_grad()
        self.model(torch.ones(2, 64, dtype=self.dtype)).square().mean().backward()

    def step_once(self) -> None:
        self.step()
        self.scheduler.step()

    def train(self, steps: int) -> None:
        for _ in range(steps):
            self.backward()
            self.step_once()
            self.ckpt.end_step()

    def tensors(self) -> list[torch.Tensor]:
        slots = [self.optimizer.state[parameter] for parameter in self.model.parameters()]
        moments = [value for each in slots for value in each.values() if isinstance(value, torch.Tensor)]
        return [tensor.detach().clone() for tensor in (*self.model.parameters(), *moments)]

    def fail(self) -> None:
        self.ckpt.__exit__(RuntimeError, RuntimeError("it broke"), None)

    def close(self) -> None:
        self.ckpt.close()


def saved(uri: str, steps: int = SAVED, world_size: int = 1, **options: Any) -> list[torch.Tensor]:
    """Save at each second step. Return the tensors that training comes to MORE steps later without a restart."""
    ranks = [Rank(place, **options) for place in group_of(uri, world_size=world_size, owner="ann")]
    on_all(ranks, "restore")
    on_all(ranks, "train", steps)
    on_all(ranks, "close")
    for _ in range(MORE):
        ranks[0].backward()
        ranks[0].step_once()
    return ranks[0].tensors()


def kinds(names: Iterable[str], *often: str) -> list[Any]:
    """Return parameters of which only some are not left to --all."""
    return [pytest.param(name, marks=() if name in often else pytest.mark.slow) for name in names]


def equal(found: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> bool:
    assert len(found) == len(expected)
    return all(map(torch.equal, found, expected))


def assert_waits(call: InThread) -> None:
    """Assert that the call comes to wait for what is read later, and is not over."""
    deadline = time.monotonic() + WITHIN_S
    while not _is_in_wait(call):
        assert not call.ends_within(0.01), "it did not wait"
        assert time.monotonic() < deadline, "it neither waits nor ends"


def _is_in_wait(call: InThread) -> bool:
    frame = sys._current_frames().get(call._thread.ident or 0)
    while frame is not None and frame.f_code not in (DeferredTensors.wait.__code__, DeferredTensors.give_up.__code__):
        frame = frame.f_back
    return frame is not None


def rules_for_moments(wire: FaultProxy, uri: str, kind: Kind, **more: Any) -> list[Rule]:
    """Have something happen to the requests that reach what is read later, of the newest checkpoint."""
    checkpoint = raycheck.open_run(uri).head
    manifest, index = checkpoint._read()
    rules = []
    for rank in range(manifest.world_size):
        chunks = [chunk for chunk in index.chunks if chunk.rank == rank and chunk.payload_size]
        starts = {
            entry: [chunk.payload_offset for chunk in chunks if index.tensors[chunk.tensor].name.startswith(entry)]
            for entry in ("model.", "optimizer.")
        }
        if not starts["optimizer."]:
            continue
        from_byte = min(starts["optimizer."])
        assert max(starts["model."], default=0) < from_byte
        key = f"{checkpoint.key}/train/{object_keys.shard_file(rank)}"
        rules.append(wire.rule(kind, "GET", key, from_byte=from_byte, **{"times": 1000, **more}))
    return rules


def behind(wire: FaultProxy, s3: str, name: str, owner: str) -> InProcess:
    """Return the place of a rank that reaches its store through the proxy. Its coordinator does not, and may live longer."""
    return replace(group_of(join_uri(s3, name), owner=owner)[0], uri=join_uri(wire.uri, name))


@pytest.fixture
def name() -> str:
    return uuid4().hex


class Held:
    """A rank that restores through a proxy, which holds what is read later."""

    def __init__(self, wire: FaultProxy, s3: str, name: str, **options: Any) -> None:
        self.expected = saved(join_uri(s3, name), **options)
        (self._rule,) = rules_for_moments(wire, join_uri(s3, name), "hold")
        self.rank = Rank(behind(wire, s3, name, "bob"), seed=1, **options)

    def restore(self) -> None:
        at = self.rank.restore(defer_optimizer=True)
        assert (at.step, at.tensors) == (SAVED, 2)
        self._rule.wait()

    def release(self) -> None:
        self._rule.release()

    def waits(self, call: Callable[[], Any]) -> Any:
        """Assert that the call ends only when the moments are there. Return what it returns."""
        calling = InThread(call)
        assert_waits(calling)
        self.release()
        return calling.join()

    def comes_to_the_same(self, after: int = 0) -> None:
        """Assert that training goes on as if there had been no restart. after: the steps that were made already."""
        for _ in range(MORE - after):
            self.rank.backward()
            self.rank.step_once()
        assert equal(self.rank.tensors(), self.expected)


@pytest.mark.server
@pytest.mark.parametrize("kind", kinds(OPTIMIZERS, "fused AdamW", "Adagrad"))
def test_the_first_step_waits_and_changes_nothing_before(wire: FaultProxy, s3: str, name: str, kind: str) -> None:
    held = Held(wire, s3, name, make=OPTIMIZERS[kind])
    held.restore()
    rank = held.rank
    assert rank.optimizer.param_groups[0]["lr"] < rank.optimizer.param_groups[0]["initial_lr"]
    rank.backward()
    before = [parameter.clone() for parameter in rank.model.parameters()]

    stepping = InThread(rank.step_once)
    assert_waits(stepping)
    assert equal(list(rank.model.parameters()), before)
    held.release()
    stepping.join()

    held.comes_to_the_same(after=1)
    rank.close()
    assert_invariants(open_store(join_uri(s3, name)))


@pytest.mark.server
@pytest.mark.filterwarnings("ignore")  # torch's compiler warns of torch
@pytest.mark.parametrize("when", kinds(["before", "after"], "before"))
def test_a_compiled_step_waits_although_it_calls_no_hooks(wire: FaultProxy, s3: str, name: str, when: str) -> None:
    """Compiled steps round otherwise, so what is expected was trained by one too. The state exists in one case only."""

    def compiled(rank: Rank) -> None:
        rank.step = torch.compile(rank.optimizer.step, backend="eager")
        if when == "before":
            for _ in range(2):
                rank.backward()
                rank.step()

    held = Held(wire, s3, name)
    whole = Rank(group_of(join_uri(s3, name), owner="eve")[0], seed=1, every_steps=100)
    torch._dynamo.reset()
    compiled(whole)
    whole.restore()
    whole.train(MORE)
    whole.fail()
    torch._dynamo.reset()
    compiled(held.rank)
    held.restore()
    held.rank.backward()

    held.waits(held.rank.step_once)

    held.expected = whole.tensors()
    held.comes_to_the_same(after=1)


@pytest.mark.server
def test_a_scaled_step_waits(wire: FaultProxy, s3: str, name: str) -> None:
    held, scaler = Held(wire, s3, name), torch.amp.GradScaler("cpu", init_scale=1.0)
    held.restore()
    held.rank.backward()
    scaler.scale(torch.ones(1))

    held.waits(lambda: scaler.step(held.rank.optimizer))

    held.rank.scheduler.step()
    held.comes_to_the_same(after=1)


LOOKS: dict[str, Callable[[Rank], Any]] = {
    "state_dict": lambda rank: rank.optimizer.state_dict(),
    "torch's get_optimizer_state_dict": lambda rank: get_optimizer_state_dict(rank.model, rank.optimizer),
    "a slot": lambda rank: rank.optimizer.state[rank.model.weight]["exp_avg"].clone(),
    "get": lambda rank: rank.optimizer.state.get(rank.model.weight),
    "how many": lambda rank: len(rank.optimizer.state),
    "in": lambda rank: rank.model.weight in rank.optimizer.state,
    "is there any": lambda rank: bool(rank.optimizer.state),
    "a loop": lambda rank: list(rank.optimizer.state),
    "a copy": lambda rank: copy.deepcopy(rank.optimizer),
    "a dict": lambda rank: dict(rank.optimizer.state),
    "text": lambda rank: repr(rank.optimizer.state),
    "equal": lambda rank: rank.optimizer.state == {},
}
CALLS: dict[str, Callable[[Rank], Any]] = {
    "end_step": lambda rank: rank.ckpt.end_step(),
    "end_epoch": lambda rank: rank.ckpt.end_epoch(),
    "save": lambda rank: rank.ckpt.save(name="now"),
    "wait": lambda rank: rank.ckpt.wait(),
    "close": lambda rank: rank.ckpt.close(),
}


@pytest.mark.server
def test_whoever_looks_at_the_moments_waits(wire: FaultProxy, s3: str, name: str) -> None:
    held = Held(wire, s3, name)
    held.restore()

    looking = [InThread(lambda look=look: look(held.rank)) for look in LOOKS.values()]
    for call in looking:
        assert_waits(call)
    held.release()
    for call in looking:
        call.join()

    held.comes_to_the_same()


@pytest.mark.server
@pytest.mark.parametrize("kind", kinds(CALLS, "save", "end_step"))
def test_whatever_may_save_waits(wire: FaultProxy, s3: str, name: str, kind: str) -> None:
    held = Held(wire, s3, name)
    held.restore()

    held.waits(lambda: CALLS[kind](held.rank))

    held.comes_to_the_same()


@pytest.mark.server
def test_a_save_has_the_moments(wire: FaultProxy, s3: str, name: str) -> None:
    held = Held(wire, s3, name)
    held.restore()
    held.waits(lambda: held.rank.ckpt.save(name="same").result(60))
    held.rank.fail()

    after = Rank(group_of(join_uri(s3, name), owner="eve")[0], seed=2)
    assert after.restore(at="same").step == SAVED
    held.rank = after

    held.comes_to_the_same()


def test_weights_of_another_type_than_their_moments(uri: str) -> None:
    def make(parameters: Params) -> torch.optim.Optimizer:
        optimizer = torch.optim.AdamW(parameters, lr=0.01, foreach=False)
        for parameter in optimizer.param_groups[0]["params"]:
            moments = {slot: torch.full(parameter.shape, 0.1) for slot in ("exp_avg", "exp_avg_sq")}
            optimizer.state[parameter] = {"step": torch.tensor(1.0), **moments}
        return optimizer

    first = Rank(group_of(uri, owner="ann")[0], make, dtype=torch.bfloat16)
    first.restore()
    first.ckpt.save().result(60)
    first.fail()
    rank = Rank(group_of(uri, owner="bob")[0], dtype=torch.bfloat16, seed=1)

    rank.restore(defer_optimizer=True)

    assert equal(rank.tensors(), first.tensors())
    assert rank.optimizer.state[rank.model.weight]["exp_avg"].dtype == torch.float32


@pytest.mark.server
def test_weights_on_meta_do_not_wait(wire: FaultProxy, s3: str, name: str) -> None:
    held = Held(wire, s3, name)
    held.rank.fail()
    held.rank.model = torch.nn.Linear(64, 500, device="meta")
    held.rank.optimizer = torch.optim.AdamW(held.rank.model.parameters(), lr=0.01)
    held.rank.scheduler = torch.optim.lr_scheduler.StepLR(held.rank.optimizer, 2)
    held.rank.step = held.rank.optimizer.step
    held.rank.open(behind(wire, s3, name, "eve"))
    held.restore()
    held.rank.backward()

    held.waits(held.rank.step_once)

    held.comes_to_the_same(after=1)


def test_an_optimizer_that_is_not_of_torch_is_restored_at_once(uri: str) -> None:
    make: Callable[[Params], torch.optim.Optimizer] = lambda p: Own(p, lr=0.1, momentum=0.9)  # noqa: E731
    expected = saved(uri, make=make)
    rank = Rank(group_of(uri, owner="bob")[0], make, seed=1)

    rank.restore(defer_optimizer=True)

    assert type(vars(rank.optimizer)["state"]).__name__ == "defaultdict"
    rank.train(MORE)
    assert equal(rank.tensors(), expected)


def test_tensors_in_lists_are_read_at_once_and_those_beside_them_later(uri: str) -> None:
    class Closed(Rank):
        def __init__(self, place: InProcess, seed: int = 0) -> None:
            super().__init__(place, torch.optim.LBFGS, seed=seed)
            self.step = lambda: self.optimizer.step(self.closure)

        def closure(self) -> torch.Tensor:
            self.optimizer.zero_grad()
            loss = self.model(torch.ones(2, 64)).square().mean()
            loss.backward()
            return loss

    first = Closed(group_of(uri, owner="ann")[0])
    first.restore()
    first.train(SAVED)
    first.close()
    rank = Closed(group_of(uri, owner="bob")[0], seed=1)
    rank.restore(defer_optimizer=True)

    for each in (first, rank):
        for _ in range(MORE):
            each.backward()
            each.step_once()

    assert equal(rank.tensors(), first.tensors())


def pair_of(uri: str, owner: str, **options: Any) -> list[Rank]:
    return [Rank(place, **options) for place in group_of(uri, world_size=2, owner=owner)]


def assert_both_raise(ranks: Sequence[Rank], error: type[Exception], match: str) -> None:
    """Assert that every way forward raises it, on both ranks, and that nothing has changed."""
    before = [[parameter.clone() for parameter in rank.model.parameters()] for rank in ranks]
    on_all(ranks, "backward")
    for method in ("step", "step_once", "train"):
        for rank in ranks:
            with pytest.raises(error, match=match):
                getattr(rank, method)(*((1,) if method == "train" else ()))
    for rank in ranks:
        for call in (
            rank.ckpt.end_step,
            rank.ckpt.save,
            rank.ckpt.wait,
            rank.ckpt.end_epoch,
            rank.optimizer.state_dict,
        ):
            with pytest.raises(error, match=match):
                call()
    for rank, weights in zip(ranks, before, strict=True):
        assert equal(list(rank.model.parameters()), weights)


def test_damage_that_is_found_late_ends_the_attempt_and_the_next_one_restores_the_one_before(uri: str) -> None:
    saved(uri, steps=4, world_size=2)
    store = open_store(uri)
    bad = damage(store, 4, MOMENT)
    places = group_of(uri, world_size=2, owner="bob")
    pair = [Rank(place, seed=1) for place in places]

    assert [at.step for at in on_all(pair, "restore", defer_optimizer=True)] == [4, 4]
    assert_both_raise(
        pair, SupersededError, rf"rank \d: {bad} is damaged .*{MOMENT}.*; restart the workers, .* step-000000002"
    )
    for rank in pair:
        with pytest.raises(SupersededError):
            rank.close()
    body = assert_invariants(store)
    assert [(entry.step, bool(entry.damaged)) for entry in body.live] == [(2, False), (4, True)]

    pair = [Rank(place, seed=1) for place in again(places)]
    at = on_all(pair, "restore", defer_optimizer=True)
    on_all(pair, "train", 2)
    on_all(pair, "close")

    assert [place.step for place in at] == [2, 2]
    body = assert_invariants(store)
    assert [(entry.step, bool(entry.damaged)) for entry in body.live] == [(2, False), (4, True), (4, False)]


def test_damage_that_is_found_at_once_is_left_behind_as_without(uri: str) -> None:
    saved(uri, steps=4, world_size=2)
    damage(open_store(uri), 4, "model.weight")

    pair = pair_of(uri, "bob", seed=1)
    at = on_all(pair, "restore", defer_optimizer=True)
    on_all(pair, "train", 2)
    on_all(pair, "close")

    assert [place.step for place in at] == [2, 2]
    body = assert_invariants(open_store(uri))
    assert [(entry.step, bool(entry.damaged)) for entry in body.live] == [(2, False), (4, True), (4, False)]


@pytest.mark.parametrize(("steps", "on_corrupt"), [(2, "previous"), (4, "raise")])
def test_with_nothing_to_go_back_to_late_damage_is_an_error_on_all_ranks(uri: str, steps: int, on_corrupt: str) -> None:
    saved(uri, steps=steps, world_size=2)
    damage(open_store(uri), steps, MOMENT)
    pair = pair_of(uri, "bob", seed=1)
    on_all(pair, "restore", defer_optimizer=True, on_corrupt=on_corrupt)

    assert_both_raise(pair, DamagedError, MOMENT)

    on_all(pair, "fail")
    assert not any(item.damaged for item in raycheck.open_run(uri).checkpoints)


@pytest.mark.server
def test_a_store_that_fails_late_on_one_rank_fails_all_and_is_no_damage(wire: FaultProxy, s3: str, name: str) -> None:
    uri = join_uri(s3, name)
    saved(uri, world_size=2)
    denied = rules_for_moments(wire, uri, "deny")
    well, ill = group_of(uri, world_size=2, owner="bob")
    pair = [Rank(well, seed=1), Rank(replace(ill, uri=join_uri(wire.uri, name)), seed=1)]
    on_all(pair, "restore", defer_optimizer=True)

    assert_both_raise(pair, StoreError, r"distcp")
    with pytest.raises(StoreError, match="rank 1: restore of step-000000002"):
        pair[0].step()

    assert any(rule.seen for rule in denied)
    on_all(pair, "fail")
    pair = [Rank(place, seed=1) for place in again([well, well])]
    assert [at.step for at in on_all(pair, "restore", defer_optimizer=True)] == [SAVED, SAVED]
    on_all(pair, "train", 2)
    on_all(pair, "close")
    body = assert_invariants(open_store(uri))
    assert [(entry.step, bool(entry.damaged)) for entry in body.live] == [(2, False), (4, False)]


@pytest.mark.server
@pytest.mark.slow
def test_what_comes_late_has_a_deadline(wire: FaultProxy, s3: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(group_restore, "LEAST_S", 0.0)
    held = Held(wire, s3, name)
    held.rank.fail()
    held.rank.open(behind(wire, s3, name, "eve"), save_timeout_s=10.0)
    held.restore()
    held.rank.backward()

    with pytest.raises(StoreError, match=r"restore of step-000000002-a1-s1: not done within 10 s"):
        held.rank.step()


@pytest.mark.server
def test_a_rank_that_leaves_meanwhile_is_named_to_those_that_wait(wire: FaultProxy, s3: str, name: str) -> None:
    saved(join_uri(s3, name), world_size=2)
    rules = rules_for_moments(wire, join_uri(s3, name), "hold")
    places = group_of(join_uri(s3, name), world_size=2, owner="bob")
    pair = [Rank(replace(place, uri=join_uri(wire.uri, name)), seed=1) for place in places]
    on_all(pair, "restore", defer_optimizer=True)
    pair[0].backward()
    stepping = InThread(pair[0].step)
    for rule in rules:
        rule.wait()

    pair[1].fail()
    for rule in rules:
        rule.release()

    with pytest.raises(RaycheckError, match="rank 1: "):
        stepping.join()


@pytest.mark.server
def test_a_restore_in_the_same_process_waits_until_nothing_of_the_last_one_writes(
    wire: FaultProxy, s3: str, name: str
) -> None:
    held = Held(wire, s3, name)
    held.restore()
    held.rank.fail()
    opening = InThread(lambda: held.rank.open(again([held.rank.ckpt._group])[0]) or held.rank.restore())
    assert_waits(opening)

    held.release()

    assert opening.join().step == SAVED
    held.comes_to_the_same()


@pytest.mark.server
def test_a_block_that_is_left_with_an_error_gives_no_moments_away(wire: FaultProxy, s3: str, name: str) -> None:
    held = Held(wire, s3, name)
    held.restore()
    held.rank.backward()
    held.rank.fail()

    for _ in range(2):
        with pytest.raises(StoppedError, match="the optimizer's state is not there"):
            held.rank.step_once()
        with pytest.raises(StoppedError, match="restore again"):
            held.rank.optimizer.state_dict()
    held.release()
    held.rank.open(again([held.rank.ckpt._group])[0])
    assert held.rank.restore().step == SAVED
    held.comes_to_the_same()


def test_all_ranks_must_ask_for_it(uri: str) -> None:
    saved(uri, world_size=2)
    pair = pair_of(uri, "bob")

    restores = [InThread(lambda: pair[0].restore(defer_optimizer=True)), InThread(pair[1].restore)]

    for restore in restores:
        with pytest.raises(ConfigError, match="some ranks restore with defer_optimizer=True"):
            restore.join()
    on_all(pair, "fail")
    with pytest.raises(StoppedError, match="the optimizer's state is not there"):  # and nothing waits for it
        len(pair[0].optimizer.state)
    assert len(pair[1].optimizer.state) == 2


def test_a_fresh_run_and_a_part_without_optimizers(uri: str) -> None:
    rank = Rank(group_of(uri, owner="ann")[0])
    assert rank.restore(defer_optimizer=True).checkpoint is None
    rank.train(SAVED)
    rank.close()

    weights = Rank(group_of(uri, owner="bob")[0], seed=1)
    weights.restore(defer_optimizer=True, only=["model"])
    weights.train(SAVED)
    weights.close()

    assert torch.equal(weights.tensors()[0], weights.model.weight)
    assert_invariants(open_store(uri))


def test_rank_0_logs_when_the_moments_came(uri: str, caplog: pytest.LogCaptureFixture) -> None:
    saved(uri)
    rank = Rank(group_of(uri, owner="bob")[0], seed=1)
    with caplog.at_level(logging.INFO, logger="raycheck"):
        at = rank.restore(defer_optimizer=True)
        rank.train(1)
    rank.fail()

    moments = 2 * sum(parameter.nbytes for parameter in rank.model.parameters())
    assert "the optimizers' tensors have come checkpoint=step-000000002-a1-s1 bytes=" in caplog.text
    assert "waited_s=" in caplog.text
    assert at.bytes_fetched < moments
    assert "raycheck-deferred" not in {thread.name for thread in threading.enumerate()}
