"""Attributes that training changes and no checkpoint holds are named once; what frameworks keep for themselves is not."""

import collections
from typing import Any

import numpy as np
import pytest
import torch
import torchmetrics
from torch import nn
from torch.nn.utils import parametrizations, prune
from torch.optim import lr_scheduler
from torch.optim.swa_utils import SWALR, AveragedModel
from transformers import BertConfig, BertForMaskedLM, GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from raycheck.bucket.format.progress import Progress
from raycheck.state.changed_attributes import ChangedAttributes
from raycheck.state.train_state import TrainState


class Counting(nn.Module):
    """Averages over the steps it counts, in plain attributes of all kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.constant, self.name, self.sizes = 3, "fixed", [1, 2]
        self.steps, self._private, self.is_ready = 0, 0.0, False
        self.mean, self.history, self.by_name = torch.zeros(2), collections.deque(maxlen=4), {"a": {"b": 0}}
        self.array, self.large = np.zeros(3), torch.zeros(100, 100)
        self.register_buffer("cache", torch.zeros(2), persistent=False)
        self.register_buffer("kept", torch.zeros(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.steps += 1
        self._private += 0.5
        self.is_ready = self.steps > 1
        self.mean += 1
        self.history.append(self.steps)
        self.by_name["a"]["b"] += 1
        self.array[0] += 1
        self.large[0, 0] += 1
        self.cache += 1
        self.kept += 1
        self.output = self.layer(x)
        return self.output


def named_after(state: dict[str, Any], step: Any, steps: int = 1) -> str | None:
    """Returns what is named at the second of two saves, with steps before each."""
    looked = ChangedAttributes(state)
    for number in (1, 2):
        for _ in range(steps):
            step()
        found = looked.look(number)
        assert number == 2 or found is None
    assert looked.look(3) is None
    return found


def test_all_kinds_of_plain_attributes_are_named_with_old_and_new_value() -> None:
    model = Counting()

    text = named_after({"model": nn.Sequential(model)}, lambda: model(torch.ones(1, 2)).sum().backward())

    assert text is not None
    assert "model.0.steps (1 -> 2)" in text
    assert "model.0._private (0.5 -> 1.0)" in text
    assert "model.0.is_ready (False -> True)" in text
    assert "model.0.mean (float32[2] -> float32[2])" in text
    assert "model.0.history (deque of 1 -> deque of 2)" in text
    assert "model.0.by_name (dict of 1 -> dict of 1)" in text
    assert "model.0.cache (float32[2] -> float32[2])" in text  # a non-persistent buffer
    assert "and 1 more" in text
    assert not any(f"model.0.{name} " in text for name in ("constant", "sizes", "kept", "output", "training"))


def test_a_user_s_module_with_a_child_named_as_that_of_a_compiled_one_is_looked_at() -> None:
    class Around(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self._orig_mod = nn.Linear(2, 2)
            self.steps = 0

    model = Around()

    def step() -> None:
        model.steps += 1

    assert "model.steps (1 -> 2)" in str(named_after({"model": model}, step))


def test_attributes_of_optimizers_and_schedulers_are_named() -> None:
    class Own(torch.optim.SGD):
        count = 0

        def step(self, closure: Any = None) -> Any:
            self.count += 1
            return super().step(closure)

    class Forgets(lr_scheduler.LambdaLR):
        def state_dict(self) -> Any:
            return {key: value for key, value in super().state_dict().items() if key != "last_epoch"}

    weight = nn.Parameter(torch.ones(2))
    optimizer = Own([weight], lr=0.1)
    scheduler = Forgets(optimizer, lambda _step: 1.0)

    def step() -> None:
        optimizer.step()
        scheduler.step()

    text = named_after({"optimizer": optimizer, "scheduler": scheduler}, step)

    assert text is not None
    assert "optimizer.count (1 -> 2), scheduler.last_epoch (1 -> 2)." in text


def test_the_log_names_them_once_at_the_second_save_after_a_step(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("WARNING", "raycheck")
    model = Counting()
    state = TrainState({"model": model}, rank=0, world_size=1)
    for step in (0, 1, 1, 2, 3):
        state.stage(Progress(step=step))
        model(torch.ones(1, 2))

    (record,) = caplog.records
    assert record.getMessage().startswith("These attributes changed between steps 1 and 2 and are not saved: ")


# --- no false alarms ---

IMAGE, ROW, SEQUENCE = torch.rand(2, 4, 8, 8), torch.rand(2, 4), torch.rand(5, 2, 4)


def pruned() -> nn.Module:
    layer = nn.Linear(4, 4)
    prune.l1_unstructured(layer, "weight", 0.5)
    return layer


LAYERS: dict[str, tuple[nn.Module, torch.Tensor]] = {
    "linear": (nn.Linear(4, 4), ROW),
    "conv": (nn.Conv2d(4, 4, 3), IMAGE),
    "batch norm": (nn.BatchNorm2d(4), IMAGE),
    "instance norm": (nn.InstanceNorm2d(4, track_running_stats=True), IMAGE),
    "layer norm": (nn.LayerNorm(4), ROW),
    "dropout": (nn.Sequential(nn.Linear(4, 4), nn.Dropout(), nn.RReLU()), ROW),
    "lstm": (nn.LSTM(4, 4, num_layers=2), SEQUENCE),
    "gru": (nn.GRU(4, 4), SEQUENCE),
    "transformer": (nn.TransformerEncoderLayer(4, 2, 8), SEQUENCE),
    "adaptive": (nn.AdaptiveAvgPool2d(2), IMAGE),
    "spectral norm": (parametrizations.spectral_norm(nn.Linear(4, 4)), ROW),
    "weight norm": (parametrizations.weight_norm(nn.Linear(4, 4)), ROW),
    "older spectral norm": (nn.utils.spectral_norm(nn.Linear(4, 4)), ROW),
    "pruned": (pruned(), ROW),
    "lazy": (nn.LazyLinear(4), ROW),
    "compiled": (torch.compile(nn.Linear(4, 4), backend="eager"), ROW),
    "averaged": (AveragedModel(nn.Linear(4, 4), use_buffers=True), ROW),
    "metric": (nn.ModuleDict({"seen": torchmetrics.MeanMetric()})["seen"], ROW),
}


@pytest.mark.filterwarnings("ignore:.torch.jit.:DeprecationWarning", "ignore:.*weight_norm|spectral_norm:FutureWarning")
@pytest.mark.filterwarnings("ignore:Lazy modules:UserWarning")
@pytest.mark.parametrize("name", LAYERS)
def test_torchs_layers_give_no_false_alarm(name: str) -> None:
    layer, x = LAYERS[name]

    def step() -> None:
        found = layer(x)
        found = found[0] if isinstance(found, tuple) else found
        if found.requires_grad:
            found.sum().backward()
        if isinstance(layer, AveragedModel):
            layer.update_parameters(nn.Linear(4, 4))
        with torch.no_grad():
            for parameter in layer.parameters():
                parameter.add_(0.01)
        layer.eval()
        layer(x)
        layer.train()

    assert named_after({"model": layer, "again": nn.ModuleList([layer])}, step, steps=2) is None


SMALL = {"vocab_size": 16, "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
MODELS = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**SMALL, num_key_value_heads=2)),
    "bert": lambda: BertForMaskedLM(BertConfig(**SMALL)),
    "gpt2": lambda: GPT2LMHeadModel(GPT2Config(vocab_size=16, n_embd=8, n_layer=1, n_head=2, bos_token_id=0)),
}


@pytest.mark.parametrize("build", MODELS.values(), ids=MODELS)
def test_transformers_models_give_no_false_alarm(build: Any) -> None:
    model = build()
    optimizer = torch.optim.AdamW(model.parameters())
    lengths = iter((4, 6, 5, 8))

    def step() -> None:
        ids = torch.ones(1, next(lengths), dtype=torch.long)
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()

    assert named_after({"model": model, "optimizer": optimizer}, step, steps=2) is None


OPTIMIZERS = (
    "Adadelta",
    "Adagrad",
    "Adam",
    "AdamW",
    "Adamax",
    "ASGD",
    "NAdam",
    "RAdam",
    "RMSprop",
    "Rprop",
    "SGD",
    "LBFGS",
)
SCHEDULERS: dict[str, Any] = {
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, lambda _step: 1.0),
    "StepLR": lambda o: lr_scheduler.StepLR(o, 1),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, 0.1, total_steps=9, cycle_momentum=False),
    "CosineAnnealingWarmRestarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 2),
    "CyclicLR": lambda o: lr_scheduler.CyclicLR(o, 0.1, 0.2, cycle_momentum=False),
    "ReduceLROnPlateau": lr_scheduler.ReduceLROnPlateau,
    "SequentialLR": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.ConstantLR(o), lr_scheduler.LinearLR(o)], milestones=[2]
    ),
    "ChainedScheduler": lambda o: lr_scheduler.ChainedScheduler([lr_scheduler.ConstantLR(o)]),
    "SWALR": lambda o: SWALR(o, 0.05),
}


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_torchs_optimizers_give_no_false_alarm(kind: str) -> None:
    weight = nn.Parameter(torch.ones(2))
    optimizer = getattr(torch.optim, kind)([weight], lr=0.01)
    lr_scheduler.StepLR(optimizer, 1)

    def loss() -> torch.Tensor:
        optimizer.zero_grad()
        found = (weight**2).sum()
        found.backward()
        return found

    assert named_after({"optimizer": optimizer}, lambda: optimizer.step(loss), steps=2) is None


@pytest.mark.parametrize("kind", SCHEDULERS)
def test_torchs_schedulers_give_no_false_alarm(kind: str) -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=0.1)
    scheduler = SCHEDULERS[kind](optimizer)

    def step() -> None:
        optimizer.step()
        scheduler.step(*([1.0] if kind == "ReduceLROnPlateau" else []))

    assert named_after({"scheduler": scheduler, "optimizer": optimizer}, step, steps=2) is None
