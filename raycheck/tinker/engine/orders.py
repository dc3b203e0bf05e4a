"""The engine's inputs and outputs: plain values, without torch."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from raycheck.tinker.engine.lora_shape import LoraShape
from raycheck.tinker.wire.samples import TargetCells
from raycheck.tinker.wire.training_data import FloatArray

NoteValue = str | int | float | bool


@dataclass(frozen=True, kw_only=True, slots=True)
class BaseFacts:
    """Facts about the base model. max_tokens: 0 for no limit."""

    arch: str
    vocab_size: int
    max_tokens: int
    fingerprint: str


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadSource:
    """The checkpoint to load a model from, or the published version to sample from.

    uri: of its run. key: the checkpoint's key there, or the directory of the version. is_published: it is a version.
    """

    uri: str
    key: str
    with_optimizer: bool
    is_published: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class SaveOrder:
    """The name and retention of a save's checkpoint, see Checkpointer.save. name: None for a rolling checkpoint."""

    name: str | None
    note: Mapping[str, NoteValue] = field(default_factory=dict)
    expire_after_s: int | None = None
    overwrite: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class PassOutput:
    """The results of a pass. logprobs, losses: one value per target token of each datum."""

    logprobs: tuple[FloatArray, ...]
    losses: tuple[FloatArray, ...]
    loss_sum: float


@dataclass(frozen=True, kw_only=True, slots=True)
class SampleOrder:
    """An order to sample: what, and from which weights.

    source, shape: the checkpoint and the shape of its adapter; None for the base model. max_tokens: per sequence.
    stop_tokens: None for the base model's own. seed: of the first sequence; each later one adds 1. temperature: 0 takes
    the most likely token. top_k: -1 for all. scored_last: how many prompt tokens to score, from the end; None for all
    but the first. likeliest_prompt, likeliest_sampled: how many of the most likely tokens to return, with
    log-probabilities, at each scored prompt token and at each sampled token. targets: tokens whose log-probabilities at
    the prompt to return.
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
