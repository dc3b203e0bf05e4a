"""What a user's own method raises becomes a ConfigError that names the entry, unless a restart may cure it."""

import queue
import sqlite3
from collections.abc import Callable
from typing import Any
from uuid import uuid4

import pytest
import torch
from botocore.exceptions import ClientError, EndpointConnectionError

import raycheck
from raycheck.bucket.store import open_store
from raycheck.errors import ConfigError, StoreError
from raycheck.state.train_state import TrainState
from raycheck.transfer.read.replica_broadcast import errors_on_all_ranks, read_and_broadcast
from raycheck.transfer.read.restore_proof import WrittenBytes
from tests.support.processes.gloo_ranks import Ranks
from tests.support.processes.save_without_ray import save_state


class Own:
    """Has a state_dict and a load_state_dict; raises what it is told to, where it is told to."""

    def __init__(self) -> None:
        self.error: Exception | None = None

    def state_dict(self) -> dict[str, int]:
        return {"value": 1}

    def load_state_dict(self, state: dict[str, int]) -> None:
        del state


class OwnModule(torch.nn.Linear):
    """Has extra state of its own, so that torch's load_state_dict is called."""

    def __init__(self) -> None:
        super().__init__(1, 1)

    def get_extra_state(self) -> dict[str, int]:
        return {"value": 1}

    def set_extra_state(self, state: dict[str, int]) -> None:
        del state


class OwnMerged(Own):
    """Is given the states of all ranks."""

    merges_ranks = True

    def check_rank_states(self, states: Any) -> None:
        del states

    def load_rank_states(self, states: Any) -> None:
        del states


class OwnOptimizer(torch.optim.SGD):
    """Has methods of its own."""

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)


def breaking(owner: Any, method: str, error: Exception) -> None:
    """Makes a method of the object's class raise from now on, as one that cannot cope with a state does."""

    def fail(*_: Any, **__: Any) -> Any:
        raise error

    owner.__class__ = type(owner.__class__.__name__, (owner.__class__,), {method: fail})


def optimizer() -> OwnOptimizer:
    return OwnOptimizer(torch.nn.Linear(1, 1).parameters(), lr=0.1)


KINDS: dict[str, tuple[Callable[[], Any], Callable[[Any], Any], list[str], list[str]]] = {
    "object": (Own, lambda own: own, ["state_dict"], ["load_state_dict", "check_state_dict"]),
    "per rank": (Own, raycheck.PerRank, ["state_dict"], ["load_state_dict", "check_state_dict"]),
    "rank zero": (Own, raycheck.RankZero, ["state_dict"], ["load_state_dict"]),
    "in a list": (Own, lambda own: [own], ["state_dict"], ["load_state_dict"]),
    "module": (OwnModule, lambda own: own, ["state_dict", "get_extra_state"], ["load_state_dict", "set_extra_state"]),
    "optimizer": (optimizer, lambda own: own, ["state_dict"], ["load_state_dict"]),
    "merged": (OwnMerged, lambda own: own, ["state_dict"], ["check_rank_states", "load_rank_states"]),
}
SAVING = [(kind, method) for kind, (_, _, methods, _) in KINDS.items() for method in methods]
LOADING = [(kind, method) for kind, (_, _, _, methods) in KINDS.items() for method in methods]


def state_of(own: object) -> dict[str, object]:
    return {"model": torch.nn.Linear(1, 1), "own": own}


@pytest.mark.parametrize(("kind", "method"), SAVING)
def test_a_state_that_cannot_be_taken_is_refused_before_the_first_step(kind: str, method: str) -> None:
    make, wrap, _, _ = KINDS[kind]
    own = make()
    breaking(own, method, RuntimeError("not like this"))

    with pytest.raises(ConfigError, match=r"^state\['own(\.0)?'\]\.state_dict\(\) raised RuntimeError: not like this$"):
        TrainState(state_of(wrap(own)), rank=0, world_size=1).check(is_before_restore=True)


@pytest.mark.parametrize(("kind", "method"), LOADING)
def test_a_state_that_cannot_be_given_back_is_refused_by_name(kind: str, method: str) -> None:
    make, wrap, _, _ = KINDS[kind]
    checkpoint = save_state(open_store(f"memory://{uuid4().hex}"), state_of(wrap(make())))
    own = make()
    breaking(own, method, KeyError("value"))

    with pytest.raises(ConfigError, match=r"^state\['own(\.0)?'\]\.\w+\(\) raised KeyError: 'value'$"):
        TrainState(state_of(wrap(own)), rank=0, world_size=1).apply(checkpoint)


@pytest.mark.parametrize(
    "error",
    [
        ConnectionResetError("gone"),
        TimeoutError("late"),
        MemoryError(),
        torch.OutOfMemoryError("full"),
        torch.distributed.DistNetworkError("gone"),
        RuntimeError("[pair.cc:537] Read error [127.0.0.1]:58033: Connection reset by peer"),
        RuntimeError("CUDA error: unspecified launch failure"),
        RuntimeError("HIP error: an illegal memory access was encountered"),
        RuntimeError("DataLoader worker (pid 4242) is killed by signal: Killed. "),
        RuntimeError("DataLoader worker (pid(s) 4242, 4243) exited unexpectedly"),
        RuntimeError("Timed out waiting 1800000ms for recv operation to complete"),
        EOFError(),
        queue.Empty(),
        sqlite3.OperationalError("database is locked"),
        EndpointConnectionError(endpoint_url="http://store"),
        ClientError({"Error": {"Code": "SlowDown", "Message": "slower"}}, "PutObject"),
    ],
    ids=repr,
)
def test_what_a_restart_may_cure_is_raised_as_it_is(error: Exception) -> None:
    own = Own()
    breaking(own, "state_dict", error)

    with pytest.raises(type(error)) as raised:
        TrainState(state_of(own), rank=0, world_size=1).check()

    assert raised.value is error


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("disconnected_head size mismatch"),
        RuntimeError("Error(s) in loading state_dict: size mismatch for peer.connection.weight"),
        RuntimeError("Caught RuntimeError in DataLoader worker process 0."),
        NotImplementedError("no state"),
        AssertionError(),
    ],
    ids=repr,
)
def test_a_mistake_is_not_retried_whatever_its_text_reminds_of(error: Exception) -> None:
    own = Own()
    breaking(own, "state_dict", error)

    with pytest.raises(ConfigError, match=rf"state_dict\(\) raised {type(error).__name__}: "):
        TrainState(state_of(own), rank=0, world_size=1).check()


def test_rank_zero_takes_a_dict_of_plain_values_and_fills_it_in_place() -> None:
    values = {"v": 1, "list": [1]}
    checkpoint = save_state(open_store(f"memory://{uuid4().hex}"), state_of(raycheck.RankZero(values)))
    held = values["list"]
    values["v"] = 2
    values["list"].append(2)  # type: ignore[attr-defined]

    TrainState(state_of(raycheck.RankZero(values)), rank=0, world_size=1).apply(checkpoint)

    assert values == {"v": 1, "list": [1]}
    assert values["list"] is held


@pytest.mark.parametrize("rank", [0, 1])
def test_rank_zero_refuses_anything_else_on_every_rank(rank: int) -> None:
    with pytest.raises(ConfigError, match=r"state\['own'\] is RankZero of a int without state_dict"):
        TrainState(state_of(raycheck.RankZero(5)), rank=rank, world_size=2)


def refusal_of_zero(rank: int, world_size: int) -> str:
    from torch.distributed.optim import ZeroRedundancyOptimizer  # with a warning of its own, an error to pytest

    model = torch.nn.Linear(1, 1)
    sharded = ZeroRedundancyOptimizer(model.parameters(), optimizer_class=torch.optim.SGD, lr=0.1)
    try:
        TrainState({"model": model, "optimizer": sharded}, rank=rank, world_size=world_size)
    except ConfigError as error:
        return str(error)
    return "taken"


def test_a_zero_redundancy_optimizer_is_refused_with_what_to_use(ranks: Ranks) -> None:
    for text in ranks.run(refusal_of_zero, 2):
        assert text.startswith("state['optimizer'] is a ZeroRedundancyOptimizer")
        assert "torch.distributed.fsdp.fully_shard" in text


def find_nothing() -> None:
    raise KeyError("value")


def told_of_another_rank(rank: int, world_size: int) -> str:
    try:
        if rank == 1:
            with errors_on_all_ranks(world_size):
                find_nothing()
        read_and_broadcast(lambda _: 0, [], rank, world_size, written=WrittenBytes())
    except (KeyError, StoreError) as error:
        return str(error)
    return "nothing"


def test_a_rank_that_fails_before_the_ranks_read_together_is_named_to_the_others(ranks: Ranks) -> None:
    assert ranks.run(told_of_another_rank, 2) == ["rank 1: could not restore: KeyError: 'value'", "'value'"]
