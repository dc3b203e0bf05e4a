"""What the server tells the engine, and what it gets back: plain values, without torch."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from raycheck.tinker.engine.lora_shape import LoraShape
from raycheck.tinker.wire.samples import TargetCells
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
    """Says how a save's checkpoint is called and kept. See Checkpointer.save. name: None for a rolling one without."""

    name: str | None
    note: Mapping[str, NoteValue] = field(default_factory=dict)
    expire_after_s: int | None = None
    overwrite: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class PassOutput:
    """Holds what a pass has computed. logprobs, losses: for each datum one value for each of its target tokens."""

    logprobs: tuple[FloatArray, ...]
    losses: tuple[FloatArray, ...]
    loss_sum: float


@dataclass(frozen=True, kw_only=True, slots=True)
class SampleOrder:
    """Says what to sample, and from which weights.

    source, shape: the checkpoint, and the shape of its adapter; None for the base model. max_tokens: per sequence.
    stop_tokens: None for the base model's own. seed: of the first sequence; each next one has the next number.
    temperature: 0 takes the likeliest token. top_k: -1 for all. scored_last: how many tokens of the prompt are scored,
    from its end; None for all but the first. likeliest_prompt, likeliest_sampled: of how many tokens the
    log-probabilities are returned at each scored token of the prompt, and at each sampled one. targets: tokens whose
    log-probabilities at the prompt are returned.
    """

    source: LoadSource | None
    shape: LoraShape | None
    prompt: tuple[int, ...]
    num_samples: int
    max_tokens: int
    seed: int
    temperature: float
    top_k: int
    top_p: float
    stop_tokens: tuple[int, ...] | None
    stop_strings: tuple[str, ...]
    prompt_logprobs: bool
    scored_last: int | None = None
    likeliest_prompt: int = 0
    likeliest_sampled: int = 0
    targets: TargetCells | None = None
