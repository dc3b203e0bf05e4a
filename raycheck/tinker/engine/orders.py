"""What the server tells the engine, and what it gets back: plain values, without torch."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from raycheck.tinker.wire.training_data import FloatArray

NoteValue = str | int | float | bool


@dataclass(frozen=True, kw_only=True, slots=True)
class BaseFacts:
    """Describes the base model to the server. max_tokens: 0 where it has no limit."""

    arch: str
    vocab_size: int
    max_tokens: int
    fingerprint: str


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadSource:
    """Says which checkpoint a model is loaded from. uri: of its run. key: the checkpoint's key there."""

    uri: str
    key: str
    with_optimizer: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class SaveOrder:
    """Says how a save's checkpoint is called and kept. See Checkpointer.save."""

    name: str
    note: Mapping[str, NoteValue] = field(default_factory=dict)
    expire_after_s: int | None = None
    overwrite: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class PassOutput:
    """Holds what a pass has computed. logprobs, losses: for each datum one value for each of its target tokens."""

    logprobs: tuple[FloatArray, ...]
    losses: tuple[FloatArray, ...]
    loss_sum: float
