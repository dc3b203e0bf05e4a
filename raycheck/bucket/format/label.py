"""Defines what a save may set on its checkpoint in addition to the state: a name, a note, and how long it is to stay.

A name identifies a checkpoint of a run, as a step does. It is stored in `latest`, and no two entries of one run share a
name. User input is checked here, before anything is saved. Names that are read from a bucket are checked by `is_name`
only: a later raycheck may reserve more words than this one.
"""

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import cast

from raycheck.bucket.format.object_keys import CheckpointName
from raycheck.errors import ConfigError

NoteValue = str | int | float | bool
MAX_NOTE_BYTES = 4096
MAX_EXPIRY_S = 1e12
MAX_SCORES = 32
MAX_SCORE_NAME = 100
MAX_SCORE = 1e300
RESERVED = frozenset({"auto", "never", "must", "latest", "head", "newest", "last", "best", "none"})
"""No checkpoint may have one of these names: they mean something as `resume`, or look as if they did."""
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,99}")
_MAX_INT = 1 << 63


@dataclass(frozen=True, kw_only=True, slots=True)
class Label:
    """Name, note and expiry that a save gives its checkpoint. Raises ConfigError for what cannot be kept.

    name: the checkpoint's name; None for none. may_move: the name may be taken from another checkpoint. note: a few
    facts, which the manifest keeps. expire_after_s: from this many seconds after the commit nothing keeps the
    checkpoint; None leaves that to the rules of retention, except that a named checkpoint then never expires.
    """

    name: str | None = None
    may_move: bool = False
    note: Mapping[str, NoteValue] = field(default_factory=dict)
    expire_after_s: float | None = None

    def __post_init__(self) -> None:
        if self.name is not None:
            check_name(self.name)
        if type(self.may_move) is not bool or (self.may_move and self.name is None):
            raise ConfigError(f"overwrite={self.may_move!r}: give True together with name=..., or False")
        check_expiry(self.expire_after_s)
        _check_note(self.note)

    def adds_to(self, other: "Label") -> bool:
        """Return whether this label sets anything that `other` does not."""
        mine, said = ((it.name, dict(it.note), it.expire_after_s) for it in (self, other))
        return mine not in (said, (None, {}, None))


def label_of(
    name: str | None, note: Mapping[str, NoteValue] | None, expire_after_s: float | None, *, overwrite: bool
) -> Label:
    """Return the label for the arguments of a `save`. Raises ConfigError."""
    return Label(name=name, may_move=overwrite, note={} if note is None else note, expire_after_s=expire_after_s)


def is_name(text: str) -> bool:
    """Return whether a checkpoint may have this name, which must differ from every step and every checkpoint's key."""
    return bool(_NAME.fullmatch(text)) and not text.isdecimal() and CheckpointName.parse(text) is None


def check_name(name: object) -> None:
    """Raise ConfigError for what cannot be the name of a checkpoint."""
    if isinstance(name, str) and is_name(name) and name not in RESERVED:
        return
    raise ConfigError(
        f"{name!r} cannot be a checkpoint's name: give up to 100 letters, digits and '_.-' that begin with neither '.' "
        f"nor '-', such as 'before-rlhf'. A number means a step, and these are taken: {', '.join(sorted(RESERVED))}"
    )


def check_expiry(expire_after_s: object) -> None:
    """Raise ConfigError for what is not a duration."""
    if expire_after_s is None:
        return
    is_number = isinstance(expire_after_s, int | float) and not isinstance(expire_after_s, bool)
    if not is_number or not 0 < cast("float", expire_after_s) < MAX_EXPIRY_S:
        raise ConfigError(f"an expiry after {expire_after_s!r} s: give a number of seconds above 0")


def check_scores(scores: object) -> None:
    """Raise ConfigError for what cannot be the scores of a checkpoint: a few finite numbers by name."""
    if not isinstance(scores, Mapping) or not scores:
        raise ConfigError(f"scores={scores!r}: give numbers by name, such as {{'mmlu': 0.63}}")
    for name, value in scores.items():
        if not isinstance(name, str) or not 0 < len(name) <= MAX_SCORE_NAME or not name.isprintable():
            raise ConfigError(f"scores: {name!r} cannot be a name; give up to {MAX_SCORE_NAME} printable characters")
        if isinstance(value, bool) or not isinstance(value, int | float) or not -MAX_SCORE < value < MAX_SCORE:
            raise ConfigError(f"scores: {name}={value!r}: give a finite number")


def is_note(note: Mapping[str, object]) -> bool:
    """Return whether these are facts as in a note: text, numbers and booleans by name, nothing nested."""
    return all(isinstance(name, str) and type(value) in (str, int, float, bool) for name, value in note.items())


def _check_note(note: object) -> None:
    if not isinstance(note, Mapping) or not is_note(note):
        raise ConfigError(f"note={note!r}: give a dict of text, int, float or bool by name, with nothing nested in it")
    for name, value in note.items():
        is_far = isinstance(value, int) and not -_MAX_INT <= value < _MAX_INT
        if is_far or (isinstance(value, float) and not math.isfinite(value)):
            raise ConfigError(f"note: {name}={value!r}: give a finite number, of at most 64 bits when it is whole")
    size = len(json.dumps(dict(note)))
    if size > MAX_NOTE_BYTES:
        raise ConfigError(f"note: it has {size} bytes as JSON; give at most {MAX_NOTE_BYTES}")


NO_LABEL = Label()
"""The label of a save that sets nothing."""
