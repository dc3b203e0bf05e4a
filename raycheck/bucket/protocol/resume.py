"""Decides how a new driver starts on a run that may already exist: the values of `fit(resume=...)`.

`parse_resume` is the only place that parses what a user passed. `key_to_restore` is the only place that decides which
checkpoint it means, and whether the run allows it; the claim calls it inside its swap.
"""

from contextlib import suppress
from dataclasses import dataclass
from operator import index
from typing import SupportsIndex, cast

from raycheck.bucket.format.label import is_name
from raycheck.bucket.format.latest import Latest
from raycheck.bucket.format.object_keys import CheckpointName
from raycheck.bucket.protocol.name_and_score import MOST_SHOWN, and_others, names_near
from raycheck.bucket.store.address import shown_uri
from raycheck.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Auto:
    """Resume from the run's head, or start fresh if there is none."""


@dataclass(frozen=True, slots=True)
class Never:
    """Start fresh, and refuse a run that has checkpoints."""


@dataclass(frozen=True, slots=True)
class Must:
    """Resume from the run's head, and refuse a run that has none."""


@dataclass(frozen=True, slots=True)
class Step:
    """Return to the newest undamaged checkpoint of one step."""

    step: int


@dataclass(frozen=True, slots=True)
class AtName:
    """Return to the checkpoint with this user-given name or key, unless it is damaged. "best" is resolved first."""

    name: str


@dataclass(frozen=True, slots=True)
class Fork:
    """Start a new run from a copy of the head of the run at `uri`. The fork is made before the claim, which then uses
    Auto."""

    uri: str


Resume = Auto | Never | Must | Step | AtName
"""The values that a claim accepts."""
AUTO = Auto()
WORDS: dict[str, Resume] = {"auto": AUTO, "never": Never(), "must": Must()}
"""No checkpoint may have one of these names: label.py reserves them."""


def parse_resume(given: str | int | None, call: str = "fit(resume={!r})") -> Resume | Fork:
    """Parse the argument of `fit(resume=given)`. None means "auto".

    call: names the argument in errors. Raises ConfigError for anything other than a word, a step, a name or a URI.
    """
    if given is None:
        return AUTO
    with suppress(TypeError):  # NumPy's integers are steps too
        return Step(index(cast("SupportsIndex", given)))
    if given in WORDS:
        return WORDS[given]
    if isinstance(given, str) and ("://" in given or given.startswith("/")):
        return Fork(given)
    if isinstance(given, str) and (given == "best" or is_name(given) or CheckpointName.parse(given)):
        return AtName(given)
    raise ConfigError(
        f"{call.format(given)}: give 'auto', 'never', 'must', 'best', a step, a checkpoint's name, or another run's URI"
    )


def parse_at(given: str | int | None) -> Resume:
    """Parse the argument of `restore(at=given)`, which is like that of `fit(resume=...)` but cannot be another run's
    URI."""
    wish = parse_resume(given, "at={!r}")
    if isinstance(wish, Fork):
        raise ConfigError(f"at={given!r}: only raycheck.fit(resume=...) starts from another run")
    return wish


def key_to_restore(uri: str, body: Latest | None, resume: Resume) -> str | None:
    """Return the key of the checkpoint that a new driver's first attempt restores, None to start fresh.

    uri: the run's root, for errors. Raises ConfigError when the run does not allow what `resume` requests.
    """
    head = None if body is None else body.head
    match resume:
        case Never() if body is not None and body.num_live:
            raise ConfigError(
                f"{shown_uri(uri)}: resume='never', but the run has {body.num_live} checkpoints. Use another run name"
            )
        case Must() if head is None:
            raise ConfigError(f"{shown_uri(uri)}: resume='must', but the run has no committed checkpoint")
        case Step(step):
            keys = [] if body is None else [entry.key for entry in body.of_step(step) if not entry.damaged]
            if not keys:
                steps = "none" if body is None else steps_near(body, step)
                raise ConfigError(
                    f"{shown_uri(uri)}: resume={step}, but there is no checkpoint of that step; there are: {steps}"
                )
            return keys[-1]
        case AtName(name):
            found = None if body is None else body.named(name) or body.entry(name)
            if found is None:
                names = "none" if body is None else names_near(body, name)
                words = ", ".join(map(repr, WORDS))
                raise ConfigError(
                    f"{shown_uri(uri)}: resume={name!r}, but no checkpoint has that name; there are: {names}. Other "
                    f"accepted words are {words}"
                )
            if found.damaged:
                raise ConfigError(f"{shown_uri(uri)}: resume={name!r}, but step {found.step} ({found.key}) is damaged")
            return found.key
    return head


def steps_near(body: Latest, step: int) -> str:
    """Return in words which steps have a checkpoint: those nearest to `step`, and how many others.

    Raises PagesNeededError unless the body is whole.
    """
    marks = {entry.step: " (damaged)" if entry.damaged else "" for entry in body.live}
    nearest = sorted(sorted(marks, key=lambda there: abs(there - step))[:MOST_SHOWN])
    return and_others([f"{there}{marks[there]}" for there in nearest], len(marks))
