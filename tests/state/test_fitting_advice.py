"""Where the live state and the checkpoint differ, the error gives advice that fits, and each advice works as it says."""

import ast
import re
from typing import Any
from uuid import uuid4

import pytest
import torch
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from raycheck.bucket.format.progress import Progress
from raycheck.bucket.reading import Checkpoint
from raycheck.bucket.store import open_store
from raycheck.errors import ConfigError, StateMismatchError
from raycheck.state.preview import Preview
from raycheck.state.restore_result import RestoreReport
from raycheck.state.restore_selection import EVERYTHING, Selection
from raycheck.state.train_state import TrainState
from tests.support.processes.save_without_ray import save_state


class CentersAtFirstForward(torch.nn.Module):
    """Registers its running mean at its first forward, as many modules do that learn their width from their input."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not hasattr(self, "mean"):
            self.register_buffer("mean", torch.zeros(x.shape[1]))
        self.mean += x.mean(0)
        return x - self.mean


class CentersFromNone(torch.nn.Module):
    """Has a buffer that is None until the first forward."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.mean = x.mean(0) if self.mean is None else self.mean + x.mean(0)
        return x - self.mean


class Sized(torch.nn.Module):
    """Has a parameter and a buffer of a given size."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(size))
        self.bias = torch.nn.Parameter(torch.ones(1))
        self.register_buffer("queue", torch.ones(size))


def saved(state: dict[str, object]) -> Checkpoint:
    return save_state(open_store(f"memory://{uuid4().hex}"), state)


def restored(
    checkpoint: Checkpoint, state: dict[str, object], *, skip: list[str] | None = None, **how: Any
) -> RestoreReport:
    selection = EVERYTHING if skip is None else Selection.of(None, skip)
    return TrainState(state, rank=0, world_size=1).apply(checkpoint, selection, **how).report


def refusal(checkpoint: Checkpoint, state: dict[str, object], **how: Any) -> str:
    with pytest.raises(StateMismatchError) as error:
        restored(checkpoint, state, **how)
    return str(error.value)


def advised_skip(text: str) -> list[str]:
    """Returns the list that the error says to give as skip."""
    found = re.findall(r"restore\(skip=(\[[^.\]]*(?:\.[^.\]]+)*\])\)", text)
    return list(ast.literal_eval(found[0]))


KINDS = [CentersAtFirstForward, CentersFromNone]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "wrap", [lambda m: m, torch.nn.Sequential, checkpoint_wrapper], ids=["plain", "nested", "wrapped"]
)
def test_a_buffer_that_is_not_registered_yet_is_kept_and_training_goes_on_with_its_value(kind: Any, wrap: Any) -> None:
    x = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    model = wrap(kind())
    model(x)
    checkpoint = saved({"model": model})
    uninterrupted = model(x)

    fresh = wrap(kind())
    report = restored(checkpoint, {"model": fresh}, strict=False)

    assert torch.equal(fresh(x), uninterrupted)
    (name,) = report.registered
    assert name.endswith("mean")
    assert report.unexpected == ()
    assert f"registered: {name}" in str(report)
    TrainState({"model": fresh}, rank=0, world_size=1).stage(Progress(step=2))


@pytest.mark.parametrize("kind", KINDS)
def test_strictly_it_is_refused_and_every_way_that_the_error_names_works(kind: Any) -> None:
    x = torch.tensor([[1.0, 2.0]])
    model = kind()
    model(x)
    checkpoint = saved({"model": model})

    text = refusal(checkpoint, {"model": kind()})

    assert (
        "model.mean is a buffer that its module has not registered, perhaps because it does so at its first forward"
        in text
    )
    assert "run that once before restore(), or restore(strict=False)" in text
    run_before = kind()
    run_before(x * 100)
    restored(checkpoint, {"model": run_before})
    assert torch.equal(run_before.mean, model.mean)
    assert advised_skip(text) == ["model.mean"]
    left_out = kind()
    restored(checkpoint, {"model": left_out}, skip=["model.mean"])
    assert getattr(left_out, "mean", None) is None


class Rotary(torch.nn.Module):
    """Has a weight, and a table that is computed from its arguments and may be saved."""

    def __init__(self, base: float, *, persistent: bool) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(1))
        self.register_buffer("table", torch.full((3,), base), persistent=persistent)


@pytest.mark.parametrize("is_none", [False, True])
def test_a_buffer_that_is_not_saved_any_more_keeps_its_value_here(is_none: bool) -> None:
    checkpoint = saved({"model": Rotary(1.0, persistent=True)})
    live = Rotary(2.0, persistent=False)
    if is_none:
        live.table = None

    report = restored(checkpoint, {"model": live}, strict=False)

    assert report.unexpected == ("model.table",)
    assert report.registered == ()
    assert list(live.state_dict()) == ["weight"]
    assert live.table is None if is_none else torch.equal(live.table, torch.full((3,), 2.0))
    text = refusal(checkpoint, {"model": live})
    assert "model.table" in text
    assert "has not registered" not in text


def test_a_parameter_that_was_removed_is_not_brought_back() -> None:
    model = torch.nn.Module()
    model.register_parameter("gate", torch.nn.Parameter(torch.ones(1)))
    model.register_buffer("mean", torch.ones(1))

    report = restored(saved({"model": model}), {"model": torch.nn.Module()}, strict=False)

    assert (report.registered, report.unexpected) == (("model.mean",), ("model.gate",))


@pytest.mark.parametrize("has_slots", [False, True])
def test_for_another_shape_the_error_names_all_that_has_to_be_left_out(has_slots: bool) -> None:
    def state(size: int, *, is_trained: bool) -> dict[str, object]:
        model = Sized(size)
        optimizer = torch.optim.Adam(model.parameters())
        if is_trained:
            (model.weight.sum() + model.bias).backward()
            optimizer.step()
        return {"model": model, "optimizer": optimizer}

    checkpoint = saved(state(3, is_trained=True))
    live = state(5, is_trained=has_slots)

    text = refusal(checkpoint, live)

    assert "model.weight: float32[5] here, float32[3] saved" in text
    assert "give the live tensor the saved shape before restore() (peek().shapes has it)" in text
    assert "cast" not in text
    assert sorted(advised_skip(text)) == ["model.queue", "model.weight", "optimizer"]
    before = live["model"].weight.clone()  # type: ignore[attr-defined]
    restored(checkpoint, live, skip=advised_skip(text))
    assert torch.equal(live["model"].weight, before)  # type: ignore[attr-defined]
    assert live["model"].bias.item() != 1  # type: ignore[attr-defined]
    fitting = state(
        Preview.of(checkpoint, EVERYTHING, attempt=1, rank=0, refused=()).shapes["model.weight"][0], is_trained=False
    )
    restored(checkpoint, fitting)


def test_only_where_a_type_differs_a_cast_is_advised() -> None:
    checkpoint = saved({"model": torch.nn.Linear(1, 1)})

    assert "restore(cast=True) converts it" in refusal(checkpoint, {"model": torch.nn.Linear(1, 1).double()})


def module() -> object:
    return torch.nn.Linear(1, 1)


def optimizer() -> object:
    return torch.optim.SGD(torch.nn.Linear(1, 1).parameters(), lr=0.1)


def scheduler() -> object:
    return torch.optim.lr_scheduler.StepLR(optimizer(), 1)  # type: ignore[arg-type]


@pytest.mark.parametrize("make", [module, optimizer, scheduler])
def test_an_entry_that_was_none_and_is_an_object_now(make: Any) -> None:
    checkpoint = saved({"model": torch.nn.Linear(1, 1), "own": None})
    state = {"model": torch.nn.Linear(1, 1), "own": make()}

    text = refusal(checkpoint, state)

    assert "own was None when it was saved" in text
    assert advised_skip(text) == ["own"]
    assert "own" in restored(checkpoint, state, skip=["own"]).skipped
    report = restored(checkpoint, state, strict=False)
    assert "own" not in report.restored
    assert report.missing


@pytest.mark.parametrize("make", [module, optimizer, scheduler])
def test_an_entry_that_was_an_object_and_is_none_now(make: Any) -> None:
    checkpoint = saved({"model": torch.nn.Linear(1, 1), "own": make()})
    state = {"model": torch.nn.Linear(1, 1), "own": None}

    for strict in (True, False):
        text = refusal(checkpoint, state, strict=strict)
        assert "state['own'] is None here: create the object before restore(), if peek().entries has 'own'" in text
    assert advised_skip(text) == ["own"]
    restored(checkpoint, state, skip=["own"])
    assert "own" in Preview.of(checkpoint, EVERYTHING, attempt=1, rank=0, refused=()).entries
    restored(checkpoint, {**state, "own": make()})


@pytest.mark.parametrize("make", [module, optimizer, scheduler])
def test_an_entry_that_becomes_an_object_in_mid_training_is_refused_with_the_way_that_works(make: Any) -> None:
    given = {"model": torch.nn.Linear(1, 1), "own": None}
    state = TrainState(given, rank=0, world_size=1)
    given["own"] = make()

    with pytest.raises(
        ConfigError, match=r"now, and was a plain value when the state was given.*Checkpointer\.add\(\)"
    ):
        state.stage(Progress(step=1))


def test_peek_gives_the_shape_of_every_tensor() -> None:
    checkpoint = saved({"model": Sized(3), "own": {"table": torch.ones(2, 4)}})

    shapes = Preview.of(checkpoint, EVERYTHING, attempt=1, rank=0, refused=()).shapes

    assert shapes == {"model.weight": (3,), "model.bias": (1,), "model.queue": (3,), "own.table": (2, 4)}
