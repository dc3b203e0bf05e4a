"""What is saved and loaded: four states of the same size, full of random data before any clock starts.

Few large tensors, 3,000 small ones, one rank's part of a Llama with AdamW as FSDP2 shards it, and a LoRA fine-tune
whose base, 95 % of the bytes, is frozen.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

NUM_LARGE = 16
NUM_SMALL = 3000
LLAMA_LAYERS = 6
LLAMA_WORLD_SIZE = 8
FROZEN_SHARE = 0.95
LINEARS = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj")
MLP = ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
Shapes = dict[str, tuple[int, ...]]


@dataclass(frozen=True, kw_only=True, slots=True)
class State:
    """A model of float32 parameters and, maybe, its AdamW. Frozen parameters have no optimizer state."""

    name: str
    model: nn.Module
    optimizer: torch.optim.Optimizer | None = None

    @property
    def live(self) -> dict[str, object]:
        """As the user hands it to raycheck."""
        return {"model": self.model} | ({} if self.optimizer is None else {"optimizer": self.optimizer})

    @property
    def nested(self) -> dict[str, Any]:
        """As stock torch saves it: the same tensors in plain dicts."""
        found: dict[str, Any] = {"model": {name: value.detach() for name, value in self.model.named_parameters()}}
        if self.optimizer is not None:
            names = {parameter: name for name, parameter in self.model.named_parameters()}
            found["optimizer"] = {names[parameter]: dict(slots) for parameter, slots in self.optimizer.state.items()}
        return found

    @property
    def changing(self) -> list[torch.Tensor]:
        """What an optimizer's step changes."""
        trained = [parameter.detach() for parameter in self.model.parameters() if parameter.requires_grad]
        return trained + self._slots

    @property
    def tensors(self) -> list[torch.Tensor]:
        """What this rank holds of each tensor."""
        parameters = [parameter.detach() for parameter in self.model.parameters()]
        return [tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in parameters + self._slots]

    @property
    def size_bytes(self) -> int:
        return size_of(self.tensors)

    @property
    def _slots(self) -> list[torch.Tensor]:
        if self.optimizer is None:
            return []
        return [value for slots in self.optimizer.state.values() for value in slots.values()]


def size_of(tensors: list[torch.Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def make_state(name: str, size_bytes: int) -> State:
    """One of STATES, of about this size."""
    torch.manual_seed(0)
    return STATES[name](name, size_bytes)


def _few_large(name: str, size_bytes: int) -> State:
    rows = max(8, size_bytes // (NUM_LARGE * 1024 * 4))
    return State(name=name, model=_module({f"weight{i}": (rows, 1024) for i in range(NUM_LARGE)}))


def _many_small(name: str, size_bytes: int) -> State:
    count = max(1, size_bytes // (NUM_SMALL * 4))
    return State(name=name, model=_module({f"block{i // 10}.weight{i % 10}": (count,) for i in range(NUM_SMALL)}))


def _llama(name: str, size_bytes: int) -> State:
    model = _module(_llama_shapes(size_bytes // 12))
    return State(name=name, model=model, optimizer=_stepped(model))


def _lora(name: str, size_bytes: int) -> State:
    base = _llama_shapes(int(size_bytes * FROZEN_SHARE / 4))
    hidden = base["model.norm.weight"][0] * LLAMA_WORLD_SIZE
    layers = [path.removesuffix(".weight") for path in base if path.endswith("_proj.weight")]
    rank = max(1, round(size_bytes * (1 - FROZEN_SHARE) / 12 / (2 * len(layers) * hidden)))
    adapters = {f"{layer}.lora_{kind}": (rank, hidden) for layer in layers for kind in "AB"}
    model = _module(base | adapters)
    for path, parameter in model.named_parameters():
        parameter.requires_grad_(path in adapters)
    return State(name=name, model=model, optimizer=_stepped(model))


STATES = {"few large": _few_large, "3,000 small": _many_small, "Llama, AdamW": _llama, "LoRA": _lora}


def _llama_shapes(num_parameters: int) -> Shapes:
    """What rank 0 of 8 holds: all weights cut on their first dimension, as `fully_shard` does it."""
    per_square = (LLAMA_LAYERS * 13 + 16) / LLAMA_WORLD_SIZE
    step = 4 * LLAMA_WORLD_SIZE  # a fourth of it, for keys and values, must be divisible too
    hidden = max(step, int(math.sqrt(num_parameters / per_square)) // step * step)
    cut, wide, kv = hidden // LLAMA_WORLD_SIZE, hidden * 7 // 2, hidden // 4
    found: Shapes = {"model.embed_tokens.weight": (8 * cut, hidden)}
    for layer in range(LLAMA_LAYERS):
        at = f"model.layers.{layer}"
        rows = (hidden, kv, kv, hidden)
        found |= {f"{at}.{path}.weight": (n // LLAMA_WORLD_SIZE, hidden) for path, n in zip(LINEARS, rows, strict=True)}
        found |= {f"{at}.{path}.weight": (wide // LLAMA_WORLD_SIZE, hidden) for path in MLP[:2]}
        found |= {f"{at}.{MLP[2]}.weight": (cut, wide)}
        found |= {f"{at}.{norm}.weight": (cut,) for norm in ("input_layernorm", "post_attention_layernorm")}
    return found | {"model.norm.weight": (cut,), "lm_head.weight": (8 * cut, hidden)}


def _module(shapes: Mapping[str, tuple[int, ...]]) -> nn.Module:
    """Modules nested as the dotted names say."""
    root = nn.Module()
    for name, shape in shapes.items():
        *path, last = name.split(".")
        at = root
        for part in path:
            if part not in dict(at.named_children()):
                at.register_module(part, nn.Module())
            at = at.get_submodule(part)
        at.register_parameter(last, nn.Parameter(torch.empty(shape).uniform_()))
    return root


def _stepped(model: nn.Module) -> torch.optim.Optimizer:
    """AdamW with the state it has after a step."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained)
    for parameter in trained:
        optimizer.state[parameter] = {
            "step": torch.tensor(1.0),
            "exp_avg": torch.empty_like(parameter).uniform_().detach(),
            "exp_avg_sq": torch.empty_like(parameter).uniform_().detach(),
        }
    return optimizer
