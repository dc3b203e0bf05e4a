"""Buffers that differ between ranks are named, and PerRank gives each rank its own back."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import raycheck
from raycheck.bucket.assembly.replica_agreement import agree
from raycheck.bucket.format.progress import Progress
from raycheck.bucket.store import Store
from raycheck.errors import ConfigError
from raycheck.state.train_state import TrainState
from tests.support.processes.background_call import InThread
from tests.support.processes.coordinator_in_thread import InProcess, group_of
from tests.support.processes.save_without_ray import agreed, save


class WithQueue(nn.Module):
    """Has a queue of its own on each rank, as MoCo without a gather does, and extra state."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)
        nn.init.ones_(self.layer.weight)
        nn.init.ones_(self.layer.bias)
        self.register_buffer("queue", torch.full((3,), float(rank)))
        self.register_buffer("equal", torch.ones(2))


class WithExtra(nn.Linear):
    def __init__(self, extra: Any) -> None:
        super().__init__(1, 1, bias=False)
        nn.init.ones_(self.weight)
        self.extra = extra

    def get_extra_state(self) -> Any:
        return self.extra

    def set_extra_state(self, state: Any) -> None:
        self.extra = state


def differing(states: list[dict[str, Any]]) -> tuple[str, ...]:
    size = len(states)
    ranks = [TrainState(state, rank=rank, world_size=size) for rank, state in enumerate(states)]
    return agree([rank.replica_checksums() for rank in ranks])[0].differing


def test_what_differs_is_named() -> None:
    models = [nn.Sequential(WithQueue(rank), WithExtra({"seen": rank})) for rank in range(3)]

    assert differing([{"model": model} for model in models]) == ("model.0.queue", "model.1._extra_state")


def test_equal_buffers_are_not_named() -> None:
    assert differing([{"model": WithQueue(rank=1)}, {"model": WithQueue(rank=1)}]) == ()


def test_what_ddp_sends_to_all_ranks_is_not_named(group_of_one: None) -> None:
    synced = [{"model": DistributedDataParallel(WithQueue(rank))} for rank in range(2)]
    own = [{"model": DistributedDataParallel(WithQueue(rank))} for rank in range(2)]
    for state in own:
        state["model"].broadcast_buffers = False

    assert differing(synced) == ()
    assert differing(own) == ("model.queue",)


def with_own_queue(rank: int, *, is_first: bool) -> dict[str, Any]:
    model = WithQueue(rank)
    own = {"own": raycheck.PerRank({"queue": model.queue})}
    return own | {"model": model} if is_first else {"model": model} | own


@pytest.mark.parametrize("is_first", [True, False], ids=["before the module", "after the module"])
def test_each_rank_gets_its_own_queue_back_by_per_rank(memory: Store, is_first: bool) -> None:
    states = [with_own_queue(rank, is_first=is_first) for rank in range(2)]
    assert differing(states) == ()
    ranks = agreed([TrainState(state, rank=rank, world_size=2) for rank, state in enumerate(states)])
    checkpoint = save(memory, [rank.stage(Progress(step=1)) for rank in ranks])

    again = [with_own_queue(7, is_first=is_first) for _ in range(3)]
    for rank, state in enumerate(again):
        TrainState(state, rank=rank, world_size=3).apply(checkpoint)

    queues = [state["model"].queue.tolist() for state in again]
    assert queues == [[0.0] * 3, [1.0] * 3, [0.0] * 3]  # a new rank has what the module's entry gave it


def test_a_per_rank_entry_whose_buffer_the_module_replaced_is_refused() -> None:
    state = with_own_queue(0, is_first=False)
    train_state = TrainState(state, rank=0, world_size=1)
    state["model"].queue.add_(1)
    train_state.check()

    state["model"].queue = state["model"].queue + 1

    with pytest.raises(ConfigError, match=r"state\['own'\] holds the tensor that was model\.queue.*in place"):
        train_state.check()


def test_the_log_names_it_once(tmp_path: Any, caplog: pytest.LogCaptureFixture) -> None:
    def train(group: InProcess) -> None:
        model = WithQueue(group.rank)
        settings = raycheck.SaveSettings(every_steps=1)
        with raycheck.Checkpointer({"model": model}, settings, group=group) as ckpt:
            ckpt.restore()
            for _ in range(3):
                ckpt.end_step()

    caplog.set_level("WARNING", "raycheck")
    groups = group_of(f"file://{tmp_path}/run", world_size=2)
    for thread in [InThread(lambda group=group: train(group)) for group in groups]:
        thread.join()

    named = [record.getMessage() for record in caplog.records if "differ between ranks" in record.getMessage()]
    assert len(named) == 1
    assert named[0].startswith("model.queue differ")
    assert 'raycheck.PerRank({"queue": model.queue})' in named[0]
