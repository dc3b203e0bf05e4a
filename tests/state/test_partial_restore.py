"""A partial restore takes what was asked for and nothing else, and reports all the rest."""

import copy
from typing import Any

import pytest
import torch
from torch import nn

from raycheck.bucket.format.progress import Progress
from raycheck.bucket.reading import Checkpoint
from raycheck.bucket.store import Store
from raycheck.errors import ConfigError, StateMismatchError
from raycheck.state.entries.per_rank_entries import PerRank
from raycheck.state.restore_result import Restored, RestoreReport
from raycheck.state.restore_selection import Selection
from raycheck.state.train_state import TrainState
from tests.support.processes.save_without_ray import save_state

State = dict[str, Any]
OWN = ("progress", "rng")


class Net(nn.Module):
    def __init__(self, seed: int, *, classes: int = 3) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.body = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
        self.head = nn.Linear(4, classes)
        self.head_dropout = nn.Linear(1, 1)
        self.note = seed

    def get_extra_state(self) -> Any:
        return {"note": self.note}

    def set_extra_state(self, state: Any) -> None:
        self.note = state["note"]


HEAD = ("model.head.weight", "model.head.bias")
BODY = (
    "model.body.0.weight",
    "model.body.0.bias",
    "model.body.1.weight",
    "model.body.1.bias",
    "model.body.1.running_mean",
    "model.body.1.running_var",
    "model.body.1.num_batches_tracked",
)
REST = ("model._extra_state", "model.head_dropout.weight", "model.head_dropout.bias")


def build(seed: int, *, steps: int = 0, **options: Any) -> State:
    model = Net(seed, **options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1 * seed)
    for _ in range(steps):
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
    return {"model": model, "optimizer": optimizer}


@pytest.fixture
def saved() -> State:
    return build(1, steps=2)


@pytest.fixture
def checkpoint(memory: Store, saved: State) -> Checkpoint:
    return save_state(memory, saved, step=7)


def restore(checkpoint: Checkpoint, state: State, *, strict: bool = True, only: Any = None, skip: Any = ()) -> Restored:
    return TrainState(state, rank=0, world_size=1).apply(checkpoint, Selection.of(only, skip), strict=strict)


def snapshot(state: State) -> Any:
    return copy.deepcopy({name: entry.state_dict() for name, entry in state.items()})


def assert_same(found: Any, expected: Any, at: str = "it") -> None:
    if isinstance(expected, dict):
        assert found.keys() == expected.keys(), at
        for key, value in expected.items():
            assert_same(found[key], value, f"{at}.{key}")
    elif isinstance(expected, list):
        assert len(found) == len(expected), at
        for number, (one, other) in enumerate(zip(found, expected, strict=True)):
            assert_same(one, other, f"{at}.{number}")
    elif isinstance(expected, torch.Tensor):
        assert torch.equal(found, expected), at
    else:
        assert found == expected, at


# --- what is taken ---


def test_everything_is_restored_and_said_so(checkpoint: Checkpoint, saved: State):
    state = build(2)

    done = restore(checkpoint, state)

    assert done.report == RestoreReport(restored=("model", "optimizer", *OWN))
    assert str(done.report) == "restored: model, optimizer, progress, rng"
    assert done.progress == Progress(step=7)
    assert_same(snapshot(state), snapshot(saved))


def test_weights_only_leave_the_rest_as_it_was(checkpoint: Checkpoint, saved: State):
    state = build(2, steps=1)
    optimizer = snapshot(state)["optimizer"]

    done = restore(checkpoint, state, only=["model"])

    assert done.report == RestoreReport(restored=("model",), skipped=("optimizer", *OWN))
    assert done.progress == Progress()
    assert done.apply_rng() == "untouched"
    assert_same(snapshot(state), {"model": snapshot(saved)["model"], "optimizer": optimizer})


def test_a_fresh_optimizer_goes_on_with_all_else(checkpoint: Checkpoint, saved: State):
    state = build(2)
    optimizer = snapshot(state)["optimizer"]

    done = restore(checkpoint, state, skip=["optimizer"])

    assert done.report == RestoreReport(restored=("model", *OWN), skipped=("optimizer",))
    assert done.progress == Progress(step=7)
    assert done.apply_rng() == "restored"
    assert_same(snapshot(state), {"model": snapshot(saved)["model"], "optimizer": optimizer})


def test_random_state_and_progress_are_skipped_by_name(checkpoint: Checkpoint):
    done = restore(checkpoint, build(2), skip=["rng", "progress"])

    assert done.report == RestoreReport(restored=("model", "optimizer"), skipped=OWN)
    assert done.progress == Progress()
    assert done.apply_rng() == "untouched"


def test_a_layer_is_taken_out_of_a_model(checkpoint: Checkpoint, saved: State):
    state = build(2)
    before = snapshot(state)["model"]

    done = restore(checkpoint, state, only=["model.body.0"])

    taken = BODY[:2]
    left = tuple(name for name in (*BODY, *HEAD, *REST) if name not in taken)
    assert done.report.restored == taken
    assert set(done.report.skipped) == {*left, "optimizer", *OWN}
    after, wanted = snapshot(state)["model"], snapshot(saved)["model"]
    assert_same(after, before | {name.removeprefix("model."): wanted[name.removeprefix("model.")] for name in taken})


def test_a_new_head_is_left_as_it_is(checkpoint: Checkpoint, saved: State):
    state = build(2, classes=10)
    before = snapshot(state)["model"]

    done = restore(checkpoint, state, skip=["model.head", "optimizer"])

    assert set(done.report.restored) == {*BODY, *REST, *OWN}
    assert done.report.skipped == (*HEAD, "optimizer")
    assert (done.report.missing, done.report.unexpected) == ((), ())
    wanted = snapshot(saved)["model"]
    assert_same(snapshot(state)["model"], wanted | {key: before[key] for key in ("head.weight", "head.bias")})


def test_a_head_that_the_checkpoint_never_had_can_be_skipped_by_name(memory: Store, saved: State):
    del saved["model"].head
    checkpoint = save_state(memory, {"model": saved["model"]})
    state = {"model": build(2)["model"]}

    done = restore(checkpoint, state, skip=["model.head"])

    assert done.report.skipped == HEAD
    assert done.report.missing == ()
    assert torch.equal(state["model"].body[0].weight, saved["model"].body[0].weight)


def test_skip_wins_over_only(checkpoint: Checkpoint):
    done = restore(checkpoint, build(2), only=["model"], skip=["model.head", "model.body"])

    assert done.report.restored == REST
    assert done.report.skipped == (*BODY, *HEAD, "optimizer", *OWN)


def test_extra_state_is_a_place_too(checkpoint: Checkpoint, saved: State):
    left, taken = build(2), build(3)

    restore(checkpoint, left, skip=["model._extra_state"])
    done = restore(checkpoint, taken, only=["model._extra_state"])

    assert (left["model"].note, taken["model"].note) == (2, 1)
    assert done.report.restored == ("model._extra_state",)
    assert torch.equal(left["model"].head.weight, saved["model"].head.weight)


def test_taking_nothing_changes_nothing(checkpoint: Checkpoint):
    state = build(2, steps=1)
    before = snapshot(state)

    done = restore(checkpoint, state, only=[])

    assert done.report == RestoreReport(skipped=("model", "optimizer", *OWN))
    assert done.bytes_fetched == 0
    assert_same(snapshot(state), before)


# --- what is on one side only ---


def test_an_added_scheduler_starts_fresh_when_told_so(checkpoint: Checkpoint, saved: State):
    def with_scheduler() -> State:
        state = build(2)
        return state | {"scheduler": torch.optim.lr_scheduler.StepLR(state["optimizer"], 5)}

    strict, skipping, loose = with_scheduler(), with_scheduler(), with_scheduler()
    with pytest.raises(StateMismatchError, match=r"missing in the checkpoint: scheduler\n"):
        restore(checkpoint, strict)
    skipped = restore(checkpoint, skipping, skip=["scheduler"])
    missing = restore(checkpoint, loose, strict=False)

    assert skipped.report == RestoreReport(restored=("model", "optimizer", *OWN), skipped=("scheduler",))
    assert missing.report == RestoreReport(restored=("model", "optimizer", *OWN), missing=("scheduler",))
    for state in (skipping, loose):
        assert state["scheduler"].last_epoch == 0
        assert_same(state["optimizer"].state_dict()["state"], saved["optimizer"].state_dict()["state"])


def test_a_removed_entry_is_refused_reported_or_skipped(memory: Store, saved: State):
    checkpoint = save_state(memory, saved | {"mine": PerRank(3), "ema": nn.Linear(1, 1)})

    with pytest.raises(StateMismatchError, match=r"(?s)only in the checkpoint: ema\n.*only in the checkpoint: mine\n"):
        restore(checkpoint, build(2))
    loose = restore(checkpoint, build(2), strict=False)
    skipping = restore(checkpoint, build(2), skip=["ema", "mine"])

    assert loose.report == RestoreReport(restored=("model", "optimizer", *OWN), unexpected=("ema", "mine"))
    assert skipping.report == RestoreReport(restored=("model", "optimizer", *OWN), skipped=("ema", "mine"))


def test_an_added_and_a_removed_parameter_leave_the_optimizer_of_the_others_intact(memory: Store, saved: State):
    checkpoint = save_state(memory, saved)
    state = build(2)
    model = state["model"]
    del model.head
    model.new = nn.Linear(2, 2)
    state["optimizer"] = torch.optim.AdamW(model.parameters(), lr=5.0)

    done = restore(checkpoint, state, strict=False)

    slots = ("model.new.bias", "model.new.weight", "optimizer.state.new.bias", "optimizer.state.new.weight")
    assert tuple(sorted(done.report.missing)) == slots
    gone = ("model.head.bias", "model.head.weight", "optimizer.state.head.bias", "optimizer.state.head.weight")
    assert tuple(sorted(done.report.unexpected)) == gone
    assert model.new.weight not in state["optimizer"].state
    for name in ("body.0.weight", "body.1.bias", "head_dropout.weight"):
        ours, theirs = model.get_parameter(name), saved["model"].get_parameter(name)
        assert torch.equal(ours, theirs)
        assert_same(dict(state["optimizer"].state[ours]), dict(saved["optimizer"].state[theirs]))
    assert state["optimizer"].param_groups[0]["lr"] == 0.1
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    state["optimizer"].step()
    assert state["optimizer"].state[model.new.weight]["step"] == 1
    assert state["optimizer"].state[model.body[0].weight]["step"] == 3


def test_a_slot_that_only_the_live_optimizer_has_is_left_as_it_is(checkpoint: Checkpoint, saved: State):
    state = {"model": Net(2)}
    state["optimizer"] = torch.optim.AdamW(state["model"].parameters(), amsgrad=True)
    for parameter in state["model"].parameters():
        parameter.grad = torch.full_like(parameter, 3)
    state["optimizer"].step()
    weight = state["model"].head.weight
    kept = state["optimizer"].state[weight]["max_exp_avg_sq"].clone()

    done = restore(checkpoint, state, strict=False)

    assert "optimizer.state.head.weight.max_exp_avg_sq" in done.report.missing
    slots = state["optimizer"].state[weight]
    assert torch.equal(slots["max_exp_avg_sq"], kept)
    assert torch.equal(slots["exp_avg"], saved["optimizer"].state[saved["model"].head.weight]["exp_avg"])
    state["optimizer"].step()


def test_an_entry_that_became_per_rank_is_missing_and_not_half_read(memory: Store):
    class Own:
        def __init__(self, value: int) -> None:
            self.value = value

        def state_dict(self) -> State:
            return {"value": self.value}

        def load_state_dict(self, state: State) -> None:
            self.value = state["value"]

    model = nn.Linear(1, 1)
    plain = save_state(memory, {"model": model, "own": Own(1)}, save_number=1)
    per_rank = save_state(memory, {"model": model, "own": PerRank(Own(2))}, save_number=2, step=2)
    live, wrapped = Own(5), PerRank(Own(6))

    for checkpoint, state, message in ((plain, wrapped, r"own\.rank0"), (per_rank, live, "own")):
        with pytest.raises(StateMismatchError, match=rf"missing in the checkpoint: {message}\n"):
            restore(checkpoint, {"model": model, "own": state})

    assert (live.value, wrapped.value.value) == (5, 6)


def test_a_module_without_tensors_that_the_checkpoint_lacks_is_named(memory: Store):
    checkpoint = save_state(memory, {"model": nn.Linear(1, 1)})

    done = restore(checkpoint, {"model": nn.Linear(1, 1), "pool": nn.Identity()}, strict=False)

    assert done.report == RestoreReport(restored=("model", *OWN), missing=("pool",))


def test_an_empty_tensor_that_only_the_checkpoint_has_is_named(memory: Store):
    one, two = nn.Linear(1, 1), nn.Linear(1, 1)
    for number in range(2):
        one.register_buffer(f"empty{number}", torch.empty(0, number))
    two.register_buffer("empty0", torch.empty(0, 0))

    with pytest.raises(StateMismatchError, match=r"only in the checkpoint: model\.empty1\n"):
        restore(save_state(memory, {"model": one}), {"model": two})


# --- what is refused ---


def test_another_shape_is_refused_also_when_not_strict(checkpoint: Checkpoint):
    state = build(2, steps=1, classes=4)
    before = snapshot(state)

    with pytest.raises(StateMismatchError, match=r"not alike: model\.head\.weight: float32\[4, 4\] here, .*\[3, 4\]"):
        restore(checkpoint, state, strict=False)

    assert_same(snapshot(state), before)


REFUSED: dict[str, tuple[State, str]] = {
    "name that is nowhere": (
        {"only": ["modle"]},
        r"there is no 'modle' .* \['model', 'optimizer', 'progress', 'rng'\]",
    ),
    "place that is nowhere": ({"skip": ["model.haed"]}, r"there is no 'model\.haed'"),
    "beginning of a name": ({"only": ["model.head_drop"]}, r"there is no 'model\.head_drop'"),
    "string": ({"only": "model"}, r"pass a list of names, not the string 'model'"),
    "string to skip": ({"skip": "optimizer"}, r"pass a list of names, not the string 'optimizer'"),
    "object": ({"only": [nn.Linear(1, 1)]}, r"pass names of entries, not a Linear"),
    "slot of an optimizer": ({"skip": ["optimizer.state.head.weight.exp_avg"]}, r"select 'optimizer' as a whole"),
    "state of an optimizer": ({"only": ["optimizer.state"]}, r"select 'optimizer' as a whole"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_selection_that_cannot_be_meant_is_refused_and_changes_nothing(checkpoint: Checkpoint, case: str):
    options, message = REFUSED[case]
    state = build(2, steps=1)
    before = snapshot(state)

    with pytest.raises(ConfigError, match=message):
        restore(checkpoint, state, **options)

    assert_same(snapshot(state), before)


def test_equal_selections_read_equal_and_everything_reads_as_nothing():
    assert str(Selection.of(["b", "a"], ())) == str(Selection.of(("a", "b"), []))
    assert str(Selection.of(None, ())) == ""
    assert str(Selection.of([], ())) != ""
