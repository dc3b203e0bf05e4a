"""Tests what a tensor costs in Python: by counting executed lines, and that nothing else grows faster than the tensors.

tests/bench/many_tensors.py measures the same parts in microseconds.
"""

import gc
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest
import torch

from raycheck.bucket.store import Store
from raycheck.state.train_state import TrainState
from raycheck.transfer.collector_pause import collector_paused
from tests.bench.many_tensors import many_layers, measure_here
from tests.support.processes.counted_lines import Lines
from tests.support.processes.save_without_ray import Own, restore_state, save_state

FEW, MANY = 80, 240
MOST = {
    "check": 204,
    "first stage": 197,
    "first upload": 194,
    "first commit": 372,
    "stage": 75,
    "upload": 194,
    "commit": 1,
    "restore": 640,
}
"""Lines of raycheck's code per tensor: a tenth more than were counted with Python 3.11."""


def test_lines_per_tensor_of_every_part_of_a_save_and_a_restore() -> None:
    found = []
    for num_tensors in (FEW, MANY):
        lines = Lines()
        with lines.counted():
            found.append(measure_here(num_tensors, clock=lines))

    few, many = (
        {phase: per_million * count / 1e6 for phase, per_million in own.items()}
        for own, count in zip(found, (FEW, MANY), strict=True)
    )
    more = {phase: (many[phase] - few[phase]) / (MANY - FEW) for phase in MOST}
    assert {phase: round(lines) for phase, lines in more.items() if lines > MOST[phase]} == {}
    assert more["restore"] > 0


def test_torch_finds_each_parameter_of_a_restored_optimizer_without_a_search(
    memory: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, two = many_layers(40).live, many_layers(40).live
    checkpoint = save_state(memory, one)
    searched: list[type] = []
    process = torch.optim.Optimizer._process_value_according_to_param_policy

    def spied(*args: Any) -> torch.Tensor:
        searched.extend(type(group["params"]) for group in args[3])
        return process(*args)

    monkeypatch.setattr(torch.optim.Optimizer, "_process_value_according_to_param_policy", staticmethod(spied))
    restore_state(checkpoint, two)

    assert set(searched) == {range}
    assert two["optimizer"].param_groups[0]["params"] == list(two["model"].parameters())  # type: ignore[attr-defined]


@pytest.fixture
def collector() -> Iterator[None]:
    was_on = gc.isenabled()
    yield
    (gc.enable if was_on else gc.disable)()


@pytest.mark.usefixtures("collector")
@pytest.mark.parametrize("is_on", [True, False])
def test_a_pause_of_the_collector_ends_with_the_setting_that_was_there(is_on: bool) -> None:
    (gc.enable if is_on else gc.disable)()
    inside, may_end = threading.Event(), threading.Event()

    def overlap() -> None:
        with collector_paused():
            inside.set()
            assert may_end.wait(60)

    other = threading.Thread(target=overlap)
    with suppress(ValueError), collector_paused():
        other.start()
        assert inside.wait(60)
        assert not gc.isenabled()
        raise ValueError
    assert not gc.isenabled()
    may_end.set()
    other.join()

    assert gc.isenabled() is is_on


def test_a_process_that_is_forked_during_a_pause_collects() -> None:
    script = """
import gc, os
from raycheck.transfer.collector_pause import collector_paused
with collector_paused():
    child = os.fork()
    if not child:
        os._exit(0 if gc.isenabled() else 1)
    _, status = os.waitpid(child, 0)
    assert not gc.isenabled()
assert gc.isenabled()
assert os.waitstatus_to_exitcode(status) == 0
"""
    subprocess.run([sys.executable, "-c", script], check=True, timeout=120)


@pytest.mark.usefixtures("collector")
def test_the_collector_waits_while_a_state_is_gathered_and_loaded_and_runs_afterwards(memory: Store) -> None:
    gc.enable()
    seen: list[bool] = []

    class Watching(Own):
        def state_dict(self) -> Any:
            seen.append(gc.isenabled())
            return super().state_dict()

        def load_state_dict(self, state: Any) -> None:
            seen.append(gc.isenabled())

    state = {"own": Watching({"x": 1})}
    TrainState(state, rank=0, world_size=1).check()
    restore_state(save_state(memory, {**state}), {**state})

    assert len(seen) >= 4
    assert not any(seen)
    assert gc.isenabled()
