"""The server's data about training runs and sampling sessions: plain values, stored in the journal as JSON."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from raycheck.tinker.engine.lora_shape import LoraShape
from raycheck.tinker.engine.orders import LoadSource


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelFacts:
    """The facts of a training run.

    session, number: its session, and its number there. base_model: its name as given by the client. source: the
    checkpoint that it started from; None if it was initialized. source_path: that checkpoint's name.
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
    """The weights of a sampling session. model_path: None for the base model, and for unnamed weights."""

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
    """Return the note of a checkpoint: everything that another server needs to load it or to list its run.

    request: the save that it belongs to. covered: the number of the last request included in it.
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
    """Return the adapter's shape from a note. Raises ValueError for a note that `note_of` did not create."""
    try:
        names = ("rank", "seed", "train_attn", "train_mlp", "train_unembed")
        return LoraShape(**{name: note[f"lora_{name}"] for name in names})
    except KeyError as error:
        raise ValueError(f"the checkpoint's note lacks {error}: this server did not write it") from None
