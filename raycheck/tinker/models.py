"""What the server knows of a training run or a sampling session: plain values, kept in the journal as JSON."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from raycheck.tinker.engine.lora_shape import LoraShape
from raycheck.tinker.engine.orders import LoadSource


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelFacts:
    """Describes a training run.

    session, number: the session that it belongs to, and its place there. base_model: its name as the client gave it.
    source: the checkpoint that it began from; None for one that began from nothing. source_path: that one's name.
    """

    session: str
    number: int
    base_model: str
    shape: LoraShape
    metadata: Mapping[str, str] = field(default_factory=dict)
    source: LoadSource | None = None
    source_path: str | None = None
    created_at: float

    @property
    def text(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def parse(cls, text: str) -> "ModelFacts":
        facts = json.loads(text)
        source = facts.pop("source")
        return cls(**{**facts, "shape": LoraShape(**facts["shape"]), "source": source and LoadSource(**source)})


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplerFacts:
    """Names the weights of a sampling session. model_path: None for the base model, and for weights without a name."""

    base_model: str
    model_path: str | None = None
    source: LoadSource | None = None
    shape: LoraShape | None = None

    @property
    def text(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def parse(cls, text: str) -> "SamplerFacts":
        facts = json.loads(text)
        source, shape = facts.pop("source"), facts.pop("shape")
        return cls(**facts, source=source and LoadSource(**source), shape=shape and LoraShape(**shape))


def note_of(facts: ModelFacts, *, fingerprint: str, request: str, covered: int, metadata: Mapping[str, str]) -> Any:
    """Return the note of a checkpoint: all that another server must know to load it, or to list its run.

    request: the save that it answers. covered: the number of the last request whose effect is in it.
    """
    return {
        "request": request,
        "covered": covered,
        "base_model": facts.base_model,
        "base_fingerprint": fingerprint,
        "session": facts.session,
        **{f"lora_{name}": value for name, value in asdict(facts.shape).items()},
        "run_metadata": json.dumps(dict(facts.metadata)),
        "user_metadata": json.dumps(dict(metadata)),
    }


def shape_in_note(note: Mapping[str, Any]) -> LoraShape:
    """Return the adapter's shape that a note tells. Raises ValueError for a note that `note_of` has not made."""
    try:
        names = ("rank", "seed", "train_attn", "train_mlp", "train_unembed")
        return LoraShape(**{name: note[f"lora_{name}"] for name in names})
    except KeyError as error:
        raise ValueError(f"the checkpoint's note does not say {error}: this server has not written it") from None
