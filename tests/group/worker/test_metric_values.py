"""Tests what a metric may be: numbers of every library are kept to the last bit, and all else is refused by name."""

import math
from decimal import Decimal
from fractions import Fraction
from uuid import uuid4

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

import raycheck
from raycheck.errors import ConfigError
from raycheck.group.worker.metric_values import checked, numbers_of
from raycheck.group.worker.step_metrics import StepMetrics
from tests.support.processes.coordinator_in_thread import group_of
from tests.support.processes.played_ranks import playing

NUMBERS = {
    "an int": (3, 3.0),
    "a bool": (True, 1.0),
    "a float": (0.1, 0.1),
    "a fraction": (Fraction(1, 4), 0.25),
    "a NumPy float64": (np.float64(0.1), 0.1),
    "a NumPy float32": (np.float32(0.1), float(np.float32(0.1))),
    "a NumPy float16": (np.float16(0.1), float(np.float16(0.1))),
    "a NumPy integer": (np.int64(-7), -7.0),
    "a NumPy bool": (np.bool_(True), 1.0),
    "a 0-dim array": (np.array(0.3, dtype=np.float32), float(np.float32(0.3))),
    "a 0-dim array of integers": (np.array(9, dtype=np.uint8), 9.0),
    "an array of one": (np.array([2.5]), 2.5),
    "a 0-dim tensor": (torch.tensor(0.1), float(np.float32(0.1))),
    "a double": (torch.tensor(0.1, dtype=torch.float64), 0.1),
    "a bfloat16": (torch.tensor(0.5, dtype=torch.bfloat16), 0.5),
    "a tensor of integers": (torch.tensor(4), 4.0),
    "a tensor of a bool": (torch.tensor(True), 1.0),
    "a tensor of one": (torch.tensor([1.5]), 1.5),
    "a tensor with a graph": (torch.tensor(2.0, requires_grad=True) * 2, 4.0),
    "a parameter": (torch.nn.Parameter(torch.tensor(0.25)), 0.25),
    "NaN": (math.nan, math.nan),
    "a NumPy infinity": (np.float32("-inf"), -math.inf),
    "a tensor of NaN": (torch.tensor(math.nan), math.nan),
}
REFUSED = {
    "text": ("0.5", "a str"),
    "nothing": (None, "a NoneType"),
    "a list": ([1.0], "a list"),
    "a decimal": (Decimal("0.5"), "a Decimal"),
    "a complex number": (1j, "a complex"),
    "a NumPy complex": (np.complex64(1), "a complex64"),
    "an array of two": (np.zeros(2), r"an array of float64 and shape \[2\]"),
    "an array of text": (np.array("a"), r"an array of <U1 and shape \[\]"),
    "a tensor of two": (torch.zeros(2), r"a tensor of torch.float32 and shape \[2\]"),
    "a complex tensor": (torch.tensor(1j), r"a tensor of torch.complex64 and shape \[\]"),
    "a meta tensor": (torch.zeros((), device="meta"), "without data"),
    "a number beyond all floats": (10**400, "an integer that no float can hold"),
}


def rows_of(metrics: dict[str, object]) -> dict[str, float]:
    """Return what the history is given of one step."""
    kept = StepMetrics()
    kept.add(5, checked(metrics))
    taken = kept.take()
    assert {name: list(steps) for name, (steps, _) in taken.items()} == {name: [5] for name in (*metrics, "")}
    return {name: values[0] for name, (_, values) in taken.items() if name}


@pytest.mark.parametrize("kind", NUMBERS)
def test_a_number_is_kept_whatever_library_has_made_it(kind: str) -> None:
    value, expected = NUMBERS[kind]

    assert rows_of({"x": value})["x"].hex() == expected.hex()
    assert numbers_of({"x": value}) == ({"x": expected} if math.isfinite(expected) else {})


@pytest.mark.parametrize("kind", REFUSED)
def test_what_is_not_one_number_is_refused_by_name(kind: str) -> None:
    value, what = REFUSED[kind]

    for call in (checked, numbers_of):
        with pytest.raises(ConfigError, match=rf"metrics\['lr'\] is .*{what}"):
            call({"loss": 0.5, "lr": value})


@pytest.mark.parametrize("name", ["", 3])
def test_a_metric_needs_a_name_that_is_text(name: object) -> None:
    with pytest.raises(ConfigError, match="a metric has the name"):
        checked({name: 0.5})


def test_a_replicated_dtensor_is_a_number_and_a_part_of_one_is_refused() -> None:
    with playing(1, world_size=2):
        mesh = dist.init_device_mesh("cpu", (2,), mesh_dim_names=(uuid4().hex,))
        whole = DTensor.from_local(torch.tensor(0.75), mesh, [Replicate()], run_check=False)
        sum_of_parts = DTensor.from_local(torch.tensor(0.75), mesh, [Partial()], run_check=False)
        shard = DTensor.from_local(torch.tensor([0.75]), mesh, [Shard(0)], run_check=False)

        assert rows_of({"loss": whole}) == numbers_of({"loss": whole}) == {"loss": 0.75}
        for part in (sum_of_parts, shard):
            with pytest.raises(ConfigError, match=r"metrics\['norm'\] is a DTensor .*full_tensor\(\)"):
                checked({"norm": part})


def test_a_tensor_on_a_device_is_not_read_before_it_is_taken() -> None:
    """The meta device, which has no data, stands for one that is far away: reading it would raise."""
    kept, far = StepMetrics(), torch.zeros((), device="meta")

    kept.add(1, {"loss": far})

    with pytest.raises(NotImplementedError):
        kept.take()


@pytest.mark.parametrize("every", [1, 50])
def test_a_metric_that_is_no_number_ends_the_training_at_its_first_step(every: int) -> None:
    (group,) = group_of(f"memory://{uuid4().hex}")

    def train() -> None:
        settings = raycheck.SaveSettings(every_steps=every)
        with raycheck.Checkpointer({"model": torch.nn.Linear(2, 2)}, settings, group=group) as ckpt:
            ckpt.restore()
            ckpt.end_step({"loss": 0.5, "what": "text"})

    with pytest.raises(ConfigError, match=r"metrics\['what'\] is a str"):
        train()


def test_more_metrics_than_memory_should_hold_go_to_the_history_before_the_next_save(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("raycheck.group.worker.step_metrics.MANY_VALUES", 10)
    uri = f"memory://{uuid4().hex}"
    (group,) = group_of(uri)

    with raycheck.Checkpointer(
        {"model": torch.nn.Linear(2, 2)}, raycheck.SaveSettings(every_steps=1000), group=group
    ) as ckpt:
        ckpt.restore()
        for step in range(1, 101):
            ckpt.end_step({"loss": np.float32(1 / step)})

    (line,) = raycheck.open_run(uri).history().curve("loss")
    assert line.steps == tuple(range(1, 101))
    assert line.values == tuple(float(np.float32(1 / step)) for step in range(1, 101))


@pytest.mark.parametrize("name", ["a" * 999, "\u00e9" * 167, "a" * 9000], ids=["long", "escaped", "very long"])
def test_a_name_that_would_fill_latest_is_refused_at_its_first_step_by_its_beginning(name: str) -> None:
    assert checked({"a" * 998: 1.0, "\u00e9" * 166: 1.0})

    with pytest.raises(ConfigError, match=rf"metrics\['{name[:50]}'\.\.\.\].* {len(name)} characters.* at most 1000"):
        checked({"loss": 1.0, name: 1.0})
