"""A restore is bit-exact: the next training step computes, draws and leaves behind what it would have without a restart.

The objects that are restored were made anew, from other initial values and under another seed. Nothing is compared with
a tolerance. All trainings use dropout, and most draw from python and numpy, so the random state must come back too.
test_train_state.py tests single kinds of entries.
"""

import copy
import math
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.optim import lr_scheduler as schedulers
from torch.optim.swa_utils import SWALR, AveragedModel
from torch.utils._pytree import keystr, tree_flatten_with_path

from raycheck.bucket.format.progress import Progress
from raycheck.bucket.reading import Checkpoint
from raycheck.bucket.store import Store
from raycheck.state.restore_selection import Selection
from raycheck.state.train_state import TrainState
from tests.state.test_train_state import SCHEDULERS, draws
from tests.support.processes.save_without_ray import save, save_state
from tests.support.samples import hf_models

State = dict[str, Any]
Build = Callable[[int], State]
"""Makes a training's live objects from a seed: weights, learning rates and other settings follow from it."""
Step = Callable[[State, int], list[Any]]
"""Takes the optimizer step of a number, and returns what it computed."""


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Run torch on one thread: on a busy machine its threads wait for each other ten times longer than they compute."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


OPTIMIZERS: dict[str, Callable[[Any, int], torch.optim.Optimizer]] = {
    "SGD": lambda p, seed: torch.optim.SGD(p, lr=0.1 * seed),
    "SGD with momentum": lambda p, seed: torch.optim.SGD(p, lr=0.1 * seed, momentum=0.9 / seed, nesterov=True),
    "AdamW with decay": lambda p, seed: torch.optim.AdamW(p, lr=0.01 * seed, weight_decay=0.1 * seed),
    "AdamW without decay": lambda p, seed: torch.optim.AdamW(p, lr=0.01 * seed, weight_decay=0.1 * (seed - 1)),
    "Adam with amsgrad": lambda p, seed: torch.optim.Adam(p, lr=0.01 * seed, betas=(0.9 / seed, 0.99), amsgrad=True),
}


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_the_next_step_of_an_optimizer_is_the_same(memory: Store, kind: str):
    def build(seed: int) -> State:
        model = net(seed)
        return {"model": model, "optimizer": OPTIMIZERS[kind](model.parameters(), seed)}

    found, wanted = next_step_of_both(memory, build, steps=5)

    assert_bit_equal(found, wanted)


@pytest.mark.filterwarnings("ignore::UserWarning:peft", "ignore::FutureWarning:transformers")
@pytest.mark.parametrize("base", [hf_models.gpt2, hf_models.llama], ids=lambda base: base.__name__)
def test_the_next_step_of_adapters_is_the_same_over_a_base_that_came_back(memory: Store, base: Callable[[int], Any]):
    targets = ["c_attn", "c_fc"] if base is hf_models.gpt2 else ["q_proj", "v_proj"]

    def build(seed: int) -> State:
        config = LoraConfig(task_type="CAUSAL_LM", r=4, target_modules=targets, lora_dropout=0.2)
        model = get_peft_model(base(seed), config).train()
        adapters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        return {"model": model, "optimizer": torch.optim.AdamW(adapters, lr=0.01 * seed)}

    def step(state: State, number: int) -> list[Any]:
        ids = torch.randint(64, (2, 8), generator=torch.Generator().manual_seed(number))
        done = state["model"](input_ids=ids, labels=ids)
        done.loss.backward()
        return [done.loss, done.logits, *update(state)]

    found, wanted = next_step_of_both(memory, build, steps=3, step=step)

    assert_bit_equal(found, wanted)
    assert len(wanted["optimizer"]["state"]) == sum("lora_" in name for name in wanted["model"]) > 0


def scheduled(seed: int) -> State:
    model = net(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01 * seed)
    return {"model": model, "optimizer": optimizer, "scheduler": schedulers.StepLR(optimizer, step_size=2, gamma=0.5)}


def batches(state: State, numbers: range) -> list[Any]:
    return [output for number in numbers for output in backward(state, number)]


def four_batches(state: State, number: int) -> list[Any]:
    return [*batches(state, range(4 * number, 4 * number + 4)), *update(state)]


def last_two_batches(state: State, number: int) -> list[Any]:
    return [*batches(state, range(4 * number + 2, 4 * number + 4)), *update(state)]


def test_the_next_step_over_four_batches_is_the_same(memory: Store):
    found, wanted = next_step_of_both(memory, scheduled, steps=3, step=four_batches)

    assert_bit_equal(found, wanted)


def test_a_save_between_two_batches_of_a_step_loses_their_gradients_and_nothing_else(memory: Store):
    one = built(scheduled, 1)
    four_batches(one, 0)
    batches(one, range(4, 6))
    checkpoint = save_state(memory, one)
    wanted = outcome(one, last_two_batches, 1)

    restored(checkpoint, two := built(scheduled, 2))

    assert all(parameter.grad is None for parameter in two["model"].parameters())
    found = outcome(two, last_two_batches, 1)
    for part in ("computed", "scheduler", "rng"):
        assert_bit_equal(found[part], wanted[part])
    with pytest.raises(AssertionError):
        assert_bit_equal(found["model"], wanted["model"])


@pytest.mark.parametrize(("overflows", "scale"), [({3}, 1024.0), ({3, 6}, 128.0)], ids=["grows", "backs off"])
def test_the_next_step_under_a_grad_scaler_is_the_same_whether_it_overflows_or_not(
    memory: Store, overflows: set[int], scale: float
):
    def build(seed: int) -> State:
        settings = {"init_scale": 1024.0 * seed, "growth_interval": 3 * seed, "backoff_factor": 0.25 / seed}
        return scheduled(seed) | {"scaler": torch.amp.GradScaler("cpu", **settings)}

    def step(state: State, number: int) -> list[Any]:
        return one_batch(state, number, times=math.inf if number in overflows else 1.0)

    # 1024 grows to 2048 after three steps, is cut to 512 by the inf of the fourth; two good steps follow.
    found, wanted = next_step_of_both(memory, build, steps=6, step=step)

    assert_bit_equal(found, wanted)
    assert (wanted["scaler"]["scale"], wanted["scaler"]["_growth_tracker"]) == (scale, 0)


TURNS = {
    "LambdaLR": 5,
    "MultiplicativeLR": 8,
    "StepLR": 5,
    "MultiStepLR": 4,
    "ConstantLR": 8,
    "LinearLR": 11,
    "ExponentialLR": 6,
    "CosineAnnealingLR": 9,
    "CosineAnnealingWarmRestarts": 11,
    "PolynomialLR": 14,
    "CyclicLR": 11,
    "OneCycleLR": 11,
    "ReduceLROnPlateau": 3,
    "SequentialLR": 10,
    "ChainedScheduler": 7,
    "SWALR": 8,
}
"""Number of steps before the save, chosen so that a phase, a cycle or the patience ends there or with the next step.
A test beside SCHEDULERS checks that every class of the installed torch is there; one that is missing here is a KeyError
below."""


@pytest.mark.parametrize("kind", SCHEDULERS)
def test_the_next_step_under_a_scheduler_is_the_same_at_a_turn_of_its_rates(memory: Store, kind: str):
    def build(seed: int) -> State:
        model = net(seed)
        halves = [(model[:2], 0.1 * seed), (model[2:], 0.05 * seed)]
        groups = [{"params": half.parameters(), "lr": rate} for half, rate in halves]
        optimizer = torch.optim.SGD(groups, momentum=0.9 / seed)
        return {"model": model, "optimizer": optimizer, "scheduler": SCHEDULERS[kind](optimizer)}

    found, wanted = next_step_of_both(memory, build, steps=TURNS[kind.partition("-")[0]])

    assert_bit_equal(found, wanted)


def with_all(seed: int) -> State:
    model = net(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05 * seed)
    return {
        "model": model,
        "optimizer": optimizer,
        "scheduler": SWALR(optimizer, swa_lr=0.01, anneal_epochs=9),
        "scaler": torch.amp.GradScaler("cpu", init_scale=1000.0 / seed, growth_interval=3),
        "average": AveragedModel(model, use_buffers=True),
    }


def test_the_next_step_of_averaged_weights_is_the_same(memory: Store):
    found, wanted = next_step_of_both(memory, with_all, steps=5)

    assert_bit_equal(found, wanted)
    assert wanted["average"]["n_averaged"] == 6


@pytest.mark.parametrize("entry", ["model", "optimizer", "scheduler", "scaler", "average", "rng"])
def test_the_next_step_shows_whatever_entry_did_not_come_back(memory: Store, entry: str):
    found, wanted = next_step_of_both(memory, with_all, steps=5, skip=[entry])

    del found[entry], wanted[entry]
    with pytest.raises(AssertionError):
        assert_bit_equal(found, wanted)


# --- the protocol ---


def net(seed: int) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Dropout(0.5), nn.Linear(8, 3))


def backward(state: State, number: int, *, times: float = 1.0) -> list[Any]:
    batch = torch.randn(5, 6, generator=torch.Generator().manual_seed(number))
    noise = random.uniform(0.5, 1.5) + np.random.normal()  # noqa: NPY002  what user code draws from
    outputs = [state[name](batch * noise) for name in ("model", "average") if name in state]
    loss = (outputs[0] - 1).pow(2).mean() * times
    loss = state["scaler"].scale(loss) if "scaler" in state else loss
    loss.backward()
    return [*outputs, loss]


def update(state: State) -> list[Any]:
    """Take the optimizer's step and all that follows it. Returns the learning rates of the next step."""
    optimizer, scheduler = state["optimizer"], state.get("scheduler")
    if "scaler" in state:
        state["scaler"].step(optimizer)
        state["scaler"].update()
    else:
        optimizer.step()
    optimizer.zero_grad()
    if isinstance(scheduler, schedulers.ReduceLROnPlateau):
        scheduler.step(min(scheduler.last_epoch, 1))
    elif scheduler is not None:
        scheduler.step()
    if "average" in state:
        state["average"].update_parameters(state["model"])
    return [group["lr"] for group in optimizer.param_groups]


def one_batch(state: State, number: int, **options: float) -> list[Any]:
    return [*backward(state, number, **options), *update(state)]


def next_step_of_both(
    store: Store, build: Build, *, steps: int, step: Step = one_batch, skip: Sequence[str] = ()
) -> tuple[State, State]:
    """Returns the outcome of the step after a save: in objects made anew and restored, and in those that were saved."""
    one = built(build, 1)
    live = TrainState(one, rank=0, world_size=1)
    for number in range(steps):
        step(one, number)
        staged = live.stage(
            Progress(step=number + 1)
        )  # saved each time, so that the last save uses the plan of earlier ones
    checkpoint = save(store, [staged])
    wanted = outcome(one, step, steps)
    restored(checkpoint, two := built(build, 2), skip)
    return outcome(two, step, steps), wanted


def built(build: Build, seed: int) -> State:
    state = build(seed)
    random.seed(seed)
    np.random.seed(seed)  # noqa: NPY002
    torch.manual_seed(seed)
    return state


def restored(checkpoint: Checkpoint, state: State, skip: Sequence[str] = ()) -> None:
    TrainState(state, rank=0, world_size=1).apply(checkpoint, Selection.of(None, skip)).apply_rng()


def outcome(state: State, step: Step, number: int) -> State:
    """Returns what the step computes, all state after it, and what the random generators draw then."""
    computed = step(state, number)
    after = {name: copy.deepcopy(entry.state_dict()) for name, entry in state.items()}
    return {"computed": computed, **after, "rng": draws()}


def assert_bit_equal(found: Any, wanted: Any) -> None:
    """Compares tensors to the bit, and all else in type and value."""
    ours, theirs = ({keystr(path): leaf for path, leaf in tree_flatten_with_path(it)[0]} for it in (found, wanted))
    assert ours.keys() == theirs.keys()
    for path, value in theirs.items():
        if isinstance(value, torch.Tensor):
            torch.testing.assert_close(ours[path], value, rtol=0, atol=0, msg=lambda text, at=path: f"{at}: {text}")
            assert torch.equal(ours[path].signbit(), value.signbit()), f"{path}: 0.0 and -0.0"
        else:
            assert (type(ours[path]), repr(ours[path])) == (type(value), repr(value)), path
