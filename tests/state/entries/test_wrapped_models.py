"""However a model is wrapped, its tensors have the plain model's names, and the inner tensors of subclasses come back."""

import copy
from collections.abc import Callable
from typing import Any

import peft
import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    apply_activation_checkpointing,
    checkpoint_wrapper,
)
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal.two_tensor import TwoTensor
from transformers import LlamaConfig, LlamaForCausalLM

from raycheck.bucket.format.progress import Progress
from raycheck.bucket.reading import Checkpoint
from raycheck.bucket.store import Store
from raycheck.errors import ConfigError, StateMismatchError
from raycheck.state.train_state import TrainState
from tests.support.processes.save_without_ray import restore_state, save_state

# importing inductor uses torch's own deprecated names
pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit.:DeprecationWarning")
State = dict[str, Any]


class Net(nn.Module):
    """Has layers with the names that wrappers give to theirs."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.first = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
        self.base_layer = nn.Linear(4, 4)
        self.model = nn.ModuleDict({"base_layer": nn.Linear(4, 4)})
        self.my_orig_mod = nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.my_orig_mod(self.model["base_layer"](self.base_layer(self.first(x))))


def with_adam(model: nn.Module, steps: int = 0) -> State:
    optimizer = torch.optim.Adam((p for p in model.parameters() if p.requires_grad), lr=0.01)
    for _ in range(steps):
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return {"model": model, "optimizer": optimizer}


def checkpointed(model: nn.Module) -> nn.Module:
    apply_activation_checkpointing(model, check_fn=lambda layer: isinstance(layer, nn.Linear))
    return model


def compiled_inside(model: nn.Module) -> nn.Module:
    model.first = torch.compile(checkpoint_wrapper(model.first))
    model.base_layer = checkpoint_wrapper(torch.compile(model.base_layer))
    return model


WRAPS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "compile": torch.compile,
    "ddp of compile": lambda model: DistributedDataParallel(torch.compile(model)),
    "compile of ddp": lambda model: torch.compile(DistributedDataParallel(model)),
    "activation checkpointing": checkpointed,
    "ddp of compile of activation checkpointing": lambda m: DistributedDataParallel(torch.compile(checkpointed(m))),
    "layers compiled and checkpointed": compiled_inside,
}


@pytest.mark.parametrize("wrap", WRAPS.values(), ids=WRAPS)
def test_names_are_those_of_the_plain_model_both_ways(
    memory: Store, group_of_one: None, wrap: Callable[[nn.Module], nn.Module]
):
    plain, again = with_adam(Net(1), steps=2), with_adam(Net(3))
    wrapped = with_adam(wrap(Net(2)))

    from_plain = save_state(memory, plain, step=1)
    restore_state(from_plain, wrapped)
    from_wrapped = save_state(memory, wrapped, step=2, save_number=2)
    restore_state(from_wrapped, again)

    assert names_of(from_wrapped) == names_of(from_plain)
    assert "model.my_orig_mod.weight" in names_of(from_plain)
    assert_equal(again, plain)


# --- PEFT ---


def lora(model: nn.Module, *, seed: int = 5, **options: Any) -> nn.Module:
    torch.manual_seed(seed)
    targets = options.pop("target_modules", ["first.0", "base_layer"])
    return peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=targets, init_lora_weights=False, **options))


def test_a_plain_checkpoint_goes_under_lora_and_only_the_adapters_are_missing(memory: Store):
    plain, adapted = Net(1), lora(Net(2))
    adapters = {name: tensor.clone() for name, tensor in adapted.state_dict().items() if "lora_" in name}
    checkpoint = save_state(memory, {"model": plain})

    with pytest.raises(
        StateMismatchError, match=r"missing in the checkpoint: model\.first\.0\.lora_A\.default\.weight"
    ):
        restore_state(checkpoint, {"model": adapted})
    done = TrainState({"model": adapted}, rank=0, world_size=1).apply(checkpoint, strict=False)

    assert len(done.report.missing) == 6
    assert all(".lora_" in name for name in done.report.missing)
    assert done.report.unexpected == ()
    for name, tensor in adapters.items():
        assert torch.equal(adapted.state_dict()[name], tensor)
    inside = adapted.base_model.model
    layers = [inside.first[0].base_layer, inside.base_layer.base_layer, inside.model["base_layer"].base_layer]
    for layer, wanted in zip(layers, [plain.first[0], plain.base_layer, plain.model["base_layer"]], strict=True):
        assert torch.equal(layer.weight, wanted.weight)
        assert torch.equal(layer.bias, wanted.bias)
    assert torch.equal(inside.my_orig_mod.weight, plain.my_orig_mod.weight)


@pytest.mark.parametrize(
    "options",
    [{}, {"use_dora": True}, {"modules_to_save": ["my_orig_mod"]}, {"target_modules": r".*(0|base_layer|orig_mod)"}],
    ids=["lora", "dora", "saved modules", "every layer"],
)
def test_a_peft_training_resumes_and_its_base_has_the_plain_names(memory: Store, options: State):
    def build(seed: int, steps: int) -> State:
        return with_adam(lora(Net(seed), seed=seed, **options), steps)

    one, two = build(1, 2), build(2, 0)
    checkpoint = save_state(memory, one)
    restore_state(checkpoint, two)

    base = {f"model.{name}" for name in Net(0).state_dict()}
    assert base <= names_of(checkpoint)
    added = {name for name in names_of(checkpoint) - base if name.startswith("model.")}
    assert all("lora_" in name or "modules_to_save" in name for name in added)
    slots = {name.removeprefix("optimizer.state.").rpartition(".")[0] for name in names_of(checkpoint) - base - added}
    assert slots == {name.removeprefix("model.") for name in added}
    assert_equal(two, one)


def test_a_lora_that_was_injected_without_a_peft_model_has_the_plain_names_too(memory: Store):
    model, plain = Net(1), Net(2)
    peft.inject_adapter_in_model(peft.LoraConfig(r=2, target_modules=["base_layer"]), model)

    done = TrainState({"model": plain}, rank=0, world_size=1).apply(save_state(memory, {"model": model}), strict=False)

    assert len(done.report.unexpected) == 4
    assert all(".lora_" in name for name in done.report.unexpected)
    assert torch.equal(plain.base_layer.weight, model.base_layer.base_layer.weight)


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")
def test_a_hugging_face_model_under_prompt_tuning_keeps_its_names(memory: Store):
    def llama() -> LlamaForCausalLM:
        size = {"hidden_size": 8, "intermediate_size": 8, "num_attention_heads": 2, "num_key_value_heads": 2}
        return LlamaForCausalLM(LlamaConfig(vocab_size=16, num_hidden_layers=1, tie_word_embeddings=True, **size))

    plain = llama()
    settings = peft.PromptTuningConfig(num_virtual_tokens=2, task_type="CAUSAL_LM")
    tuned = peft.get_peft_model(llama(), settings)

    checkpoint = save_state(memory, {"model": tuned})
    done = TrainState({"model": plain}, rank=0, world_size=1).apply(checkpoint, strict=False)

    assert {f"model.{name}" for name in plain.state_dict()} <= names_of(checkpoint)
    assert done.report.missing == ()
    assert done.report.unexpected == ("model.prompt_encoder.default.embedding.weight",)


def test_two_tensors_that_would_get_one_plain_name_are_refused():
    adapted = lora(Net(1))
    adapted.base_model.model.base_layer._parameters["weight"] = nn.Parameter(torch.ones(1))

    with pytest.raises(ConfigError, match=r"model\.base_layer\.weight: two parts of the module have this name"):
        TrainState({"model": adapted}, rank=0, world_size=1).check()


# --- what state_dict holds beside the module's own memory ---


class Halved(nn.Module):
    """Keeps its weight in half precision, and gives it in full precision by hooks."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.weight = nn.Parameter(torch.randn(5).half())
        self.other = nn.Linear(2, 2)
        self.register_state_dict_post_hook(self._widen)

    @staticmethod
    def _widen(module: nn.Module, state: State, prefix: str, metadata: Any) -> None:
        del module, metadata
        state[f"{prefix}weight"] = state[f"{prefix}weight"].float()


def test_a_tensor_that_a_hook_of_state_dict_made_is_given_back(memory: Store):
    one, two = nn.ModuleDict({"inner": Halved(1)}), nn.ModuleDict({"inner": Halved(2)})

    restore_state(save_state(memory, {"model": one}), {"model": two})

    assert two["inner"].weight.dtype == torch.float16
    assert torch.equal(two["inner"].weight, one["inner"].weight)
    assert torch.equal(two["inner"].other.weight, one["inner"].other.weight)


def test_non_persistent_buffers_are_neither_saved_nor_touched(memory: Store):
    def build(value: float) -> nn.Module:
        module = nn.Linear(2, 2)
        module.register_buffer("kept", torch.full((2,), value))
        module.register_buffer("scratch", torch.full((2,), value), persistent=False)
        return module

    one, two = build(1.0), build(2.0)
    checkpoint = save_state(memory, {"model": one})
    report = TrainState({"model": two}, rank=0, world_size=1).apply(checkpoint).report

    assert names_of(checkpoint) == {"model.weight", "model.bias", "model.kept"}
    assert two.scratch.tolist() == [2.0, 2.0]
    assert two.kept.tolist() == [1.0, 1.0]
    assert report.missing == report.skipped == ()


# --- tensor subclasses ---


class Labelled(TwoTensor):
    """Has a context: a label that says what kind of pair it is."""

    label: Any = None

    def __tensor_flatten__(self) -> Any:
        return ["a", "b"], self.label

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        out = super().__torch_dispatch__(func, types, args, kwargs)
        source = args[0] if args else None
        if isinstance(out, cls) and isinstance(source, cls):
            out.label = source.label
        return out


def pair(seed: int, kind: type = TwoTensor, label: Any = None) -> nn.Module:
    torch.manual_seed(seed)
    module = nn.Module()
    weight, buffer = kind(torch.randn(3, 2), torch.randn(3, 2)), kind(torch.randn(4), torch.randn(4))
    weight.label = buffer.label = label
    module.register_parameter("weight", nn.Parameter(weight, requires_grad=False))
    module.weight.label = label
    module.register_buffer("buffer", buffer)
    return module


class Copying(TwoTensor):
    """Makes new inner tensors on detach(), so that what state_dict() gives is no longer the live value."""

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        out = super().__torch_dispatch__(func, types, args, kwargs)
        return cls(out.a.clone(), out.b.clone()) if func is torch.ops.aten.detach.default else out


@pytest.mark.parametrize("kind", [TwoTensor, Copying])
def test_a_tensor_of_two_tensors_comes_back_in_place(memory: Store, kind: type):
    one, two = pair(1, kind), pair(2, kind)
    held = two.weight.a

    checkpoint = save_state(memory, {"model": one})
    restore_state(checkpoint, {"model": two})

    assert names_of(checkpoint) == {f"model.{name}.{half}" for name in ("weight", "buffer") for half in "ab"}
    for name in ("weight", "buffer"):
        found, expected = getattr(two, name), getattr(one, name)
        assert type(found) is kind
        assert torch.equal(found.a, expected.a)
        assert torch.equal(found.b, expected.b)
    assert torch.equal(held, one.weight.a)


def test_the_inner_tensors_of_a_parameter_are_compared_and_spread_as_parameters_are():
    states = [TrainState({"model": pair(seed)}, rank=0, world_size=2) for seed in (1, 1, 2)]

    first, same, other = ({box.name: box for box in state.replica_checksums().held} for state in states)

    assert first == same
    for half in "ab":
        assert first[f"model.weight.{half}"].may_spread
        assert first[f"model.weight.{half}"].crc32 != other[f"model.weight.{half}"].crc32
        assert first[f"model.buffer.{half}"].crc32 is None


class Opaque:
    """Has its address as its repr."""


def test_the_context_of_a_subclass_is_compared_but_never_an_address_in_it(memory: Store):
    saved = save_state(memory, {"model": pair(1, Labelled, label=("rows", Opaque()))})

    two = pair(2, Labelled, label=("rows", Opaque()))
    restore_state(saved, {"model": two})
    other = pair(3, Labelled, label=("columns", Opaque()))
    before = other.weight.a.clone()
    with pytest.raises(StateMismatchError, match=r"model\.weight: Labelled\(\('columns'.*here, Labelled\(\('rows'"):
        restore_state(saved, {"model": other})

    assert torch.equal(two.weight.b, pair(1).weight.b)
    assert torch.equal(other.weight.a, before)


def test_a_subclass_and_a_plain_tensor_do_not_pass_for_each_other(memory: Store):
    plain = nn.Module()
    plain.register_parameter("weight", nn.Parameter(torch.ones(3, 2)))
    plain.register_buffer("buffer", torch.ones(4))

    with pytest.raises(StateMismatchError, match=r"missing in the checkpoint: model\.weight\n"):
        restore_state(save_state(memory, {"model": pair(1)}), {"model": plain})


class Closed(torch.Tensor):
    """Is a tensor subclass that does not say what it is made of."""


def opened(kind: str) -> State:
    if kind == "closed":
        module = nn.Linear(1, 1)
        module.register_buffer("odd", torch.ones(2).as_subclass(Closed))
        return {"model": module}
    if kind == "nested":
        module = nn.Module()
        inner = TwoTensor(torch.ones(2), torch.ones(2))
        module.register_buffer("odd", TwoTensor(inner, copy.deepcopy(inner)))
        return {"model": module}
    model = pair(1)
    optimizer = torch.optim.SGD([model.weight], momentum=0.9)
    optimizer.state[model.weight] = {"momentum_buffer": model.weight.detach().clone()}
    return {"model": model, "optimizer": optimizer}


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("closed", r"state at model\.odd is a .*Closed, a tensor subclass"),
        ("nested", r"state at model\.odd\.a is a .*TwoTensor, a tensor subclass"),
        ("slot", r"state at optimizer\.state\.weight\.momentum_buffer is a .*TwoTensor, a tensor subclass"),
    ],
)
def test_a_subclass_that_cannot_be_taken_apart_is_refused_by_its_path(kind: str, message: str):
    state = TrainState(opened(kind), rank=0, world_size=1)

    for act in (state.check, state.replica_checksums, lambda: state.stage(Progress())):
        with pytest.raises(ConfigError, match=message):
            act()


def names_of(checkpoint: Checkpoint) -> set[str]:
    return {tensor.name for tensor in checkpoint.read_index(checkpoint.read_manifest()).tensors}


def assert_equal(found: State, expected: State) -> None:
    """Compares weights and optimizer state, tensor by tensor, in the order of the parameters."""
    for ours, theirs in zip(found["model"].parameters(), expected["model"].parameters(), strict=True):
        assert torch.equal(ours, theirs)
        slots, wanted = found["optimizer"].state.get(ours, {}), expected["optimizer"].state.get(theirs, {})
        assert slots.keys() == wanted.keys()
        assert all(torch.equal(slots[slot], wanted[slot]) for slot in wanted)
