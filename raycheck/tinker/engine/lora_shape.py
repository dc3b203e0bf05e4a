"""A client's choices for its model and for one optimizer step, validated on creation."""

import sys
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

MAX_RANK = 1024
ALPHA = 32
"""The alpha of every adapter. The API has no field for it; a weight changes by ALPHA / rank * B @ A."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LoraShape:
    """The shape of a model's adapter.

    rank: of each pair A and B. seed: for drawing A. train_attn, train_mlp, train_unembed: which linear layers have a
    pair: those of attention, those of the MLPs, and the output layer. Raises ValueError for invalid values.
    """

    rank: int
    seed: int
    train_attn: bool = True
    train_mlp: bool = True
    train_unembed: bool = True

    def __post_init__(self) -> None:
        if type(self.rank) is not int or not 1 <= self.rank <= MAX_RANK:
            raise ValueError(f"lora_config.rank={self.rank!r}: give a whole number from 1 to {MAX_RANK}")
        if type(self.seed) is not int or not 0 <= self.seed < 1 << 63:
            raise ValueError(f"lora_config.seed={self.seed!r}: give a whole number from 0 to 2**63 - 1")
        parts = (self.train_attn, self.train_mlp, self.train_unembed)
        if any(type(part) is not bool for part in parts) or not any(parts):
            raise ValueError(
                "lora_config: train_attn, train_mlp, and train_unembed must be true or false, and at least one true"
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class AdamParams:
    """The settings of one AdamW step. grad_clip_norm: 0 disables clipping. Raises ValueError for invalid values."""

    learning_rate: float = 1e-4
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-12
    weight_decay: float = 0.0
    grad_clip_norm: float = 0.0

    def __post_init__(self) -> None:
        for spec in fields(self):
            value = getattr(self, spec.name)
            if type(value) not in (int, float) or not 0 <= value <= sys.float_info.max:
                raise ValueError(f"adam_params.{spec.name}={value!r}: give a finite number of at least 0")
        if self.beta1 >= 1 or self.beta2 >= 1:
            raise ValueError(f"adam_params: beta1={self.beta1} and beta2={self.beta2} must be below 1")

    @classmethod
    def parse(cls, given: Mapping[str, Any]) -> "AdamParams":
        """Read the fields of a request, ignoring unknown ones. Raises ValueError for another optimizer."""
        if given.get("type", "adamw") not in ("adamw", "adam"):
            raise ValueError(f"optim_params.type={given['type']!r}: this server supports AdamW only")
        names = {spec.name for spec in fields(cls)}
        return cls(**{name: value for name, value in given.items() if name in names and value is not None})
