"""One tenant's model: an adapter over the shared weights, its optimizer, and their form in a checkpoint.

A checkpoint stores an `AdapterModule`: a module with only the adapter's parameters, under their names in a PEFT model.
So it contains no base weights, yet raycheck can export it as a PEFT directory because the module carries the adapter's
configuration. Every rank has the complete adapter, and a checkpoint stores it once.
"""

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from raycheck.tinker.engine.base_model import Adapter, BaseModel
from raycheck.tinker.engine.lora_shape import ALPHA, AdamParams, LoraShape

ADAPTER = "default"


class AdapterModule(nn.Module):
    """The parameters of an adapter, with the attributes of a PEFT model that raycheck's exports read."""

    def __init__(self, base: Any, config: Any, parameters: Mapping[str, nn.Parameter]) -> None:
        super().__init__()
        self.peft_config = {ADAPTER: config}
        self.active_adapters = [ADAPTER]
        self._base = (base,)  # in a tuple, so that it does not become a submodule
        for name, parameter in parameters.items():
            _attach(self, name.split("."), parameter)

    def get_base_model(self) -> Any:
        return self._base[0]


def _attach(module: nn.Module, path: list[str], parameter: nn.Parameter) -> None:
    for step in path[:-1]:
        if step not in module._modules:  # noqa: SLF001  hasattr would find methods of nn.Module, too
            module.add_module(step, nn.Module())
        inner = module._modules[step]  # noqa: SLF001
        assert inner is not None, "only modules were added"
        module = inner
    module.register_parameter(path[-1], parameter)


class LoraModel:
    """One tenant's model. Two new models of equal shape over equal bases are bitwise identical."""

    def __init__(self, base: BaseModel, shape: LoraShape) -> None:
        from peft import LoraConfig

        self.base = base
        self.shape = shape
        layers = base.linear_layers(attn=shape.train_attn, mlp=shape.train_mlp, unembed=shape.train_unembed)
        self.config = LoraConfig(
            r=shape.rank,
            lora_alpha=ALPHA,
            lora_dropout=0.0,
            bias="none",
            target_modules=layers,
            task_type="CAUSAL_LM",
            base_model_name_or_path=base.source,
        )
        generator = torch.Generator().manual_seed(shape.seed)
        found = {path: _pair(base, path, shape.rank, generator) for path in layers}
        self.lora = Adapter(pairs=found, scaling=ALPHA / shape.rank)
        named = {
            f"{path}.lora_{which}.{ADAPTER}.weight": parameter
            for path, pair in found.items()
            for which, parameter in zip("AB", pair, strict=True)
        }
        self.adapter = AdapterModule(base.model, self.config, named)
        self.parameters = list(named.values())
        self.optimizer = torch.optim.AdamW(self.parameters, lr=0.0)

    def add_gradients(self, gradients: list[torch.Tensor]) -> None:
        """Add to the gradients accumulated for the next step. gradients: one for each of `parameters`."""
        for parameter, gradient in zip(self.parameters, gradients, strict=True):
            parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient

    def step(self, params: AdamParams) -> dict[str, float]:
        """Make one AdamW step with the accumulated gradients, and clear them. Returns the step's metrics.

        Raises ValueError, without any change, if the norm of the gradients is not finite.
        """
        found = [parameter for parameter in self.parameters if parameter.grad is not None]
        norm = nn.utils.get_total_norm([parameter.grad for parameter in found if parameter.grad is not None])
        if not math.isfinite(norm):
            raise ValueError(f"the norm of the gradients is {float(norm)}: no step was made, and nothing was changed")
        for group in self.optimizer.param_groups:
            group.update(
                lr=params.learning_rate,
                betas=(params.beta1, params.beta2),
                eps=params.eps,
                weight_decay=params.weight_decay,
            )
        if params.grad_clip_norm:
            nn.utils.clip_grads_with_norm_(found, params.grad_clip_norm, norm)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return {"grad_norm": float(norm)}

    @property
    def state(self) -> Mapping[str, object]:
        """Return this model's state for a checkpoint."""
        return {"model": self.adapter, "optimizer": self.optimizer}


def peft_tensors(adapter: Adapter) -> dict[str, torch.Tensor]:
    """Return an adapter's tensors by their names in a PEFT directory."""
    return {
        f"base_model.model.{path}.lora_{which}.weight": values
        for path, pair in adapter.pairs.items()
        for which, values in zip("AB", pair, strict=True)
    }


def _pair(base: BaseModel, path: str, rank: int, generator: torch.Generator) -> tuple[nn.Parameter, nn.Parameter]:
    """Return A and B of one layer, initialized as PEFT does: A is drawn on the CPU, for any device, and B is 0.

    They are always float32, because small steps would be lost in a shorter type.
    """
    width_in, width_out = base.layer_size(path)
    down = torch.empty(rank, width_in)
    nn.init.kaiming_uniform_(down, a=math.sqrt(5), generator=generator)
    return nn.Parameter(down.to(base.device)), nn.Parameter(torch.zeros(width_out, rank, device=base.device))
