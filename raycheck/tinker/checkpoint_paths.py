"""Maps the API's names to the bucket.

A training run `SESSION:train:N` is the raycheck run BASE/SESSION.train.N. Its checkpoint tinker://RUN/weights/NAME has
the name `weights.NAME` there, so the kinds never share a name. The adapter of an external checkpoint, or
of one that was downloaded, is a Hugging Face directory under `exports/` of that run.
"""

import re
from dataclasses import dataclass
from typing import Literal

from raycheck.tinker.wire.fields import NAME, RefusedRequestError

CheckpointType = Literal["training", "sampler", "external"]
TYPE_OF_SEGMENT: dict[str, CheckpointType] = {
    "weights": "training",
    "sampler_weights": "sampler",
    "external_weights": "external",
}
_RUN = re.compile(r"([A-Za-z0-9_-]{1,100}):train:(\d{1,9})")
_FOLDER = re.compile(r"([A-Za-z0-9_-]{1,100})\.train\.(\d{1,9})")
_BORROWED = re.compile(r"step-\d+-a0-s\d+")


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointPath:
    """The API's name of a checkpoint. segment: one of TYPE_OF_SEGMENT."""

    run: str
    segment: str
    name: str

    @classmethod
    def parse(cls, text: str) -> "CheckpointPath":
        """Parse "tinker://RUN/SEGMENT/NAME". Raises RefusedRequestError for anything else."""
        parts = text.removeprefix("tinker://").split("/")
        if not text.startswith("tinker://") or len(parts) != 3:
            raise RefusedRequestError(f"{text[:200]!r} is not a checkpoint path: use tinker://RUN/weights/NAME")
        return cls.of(parts[0], f"{parts[1]}/{parts[2]}")

    @classmethod
    def of(cls, run: str, checkpoint_id: str) -> "CheckpointPath":
        """Return the path of a run's checkpoint "SEGMENT/NAME". Raises RefusedRequestError."""
        segment, slash, name = checkpoint_id.partition("/")
        if not _RUN.fullmatch(run):
            raise RefusedRequestError(f"{run[:200]!r} is no training run: they are called SESSION:train:NUMBER")
        if not slash:
            raise RefusedRequestError(
                f"{checkpoint_id[:200]!r} does not say which kind of checkpoint is meant, and a run may have several "
                "of one name: use weights/NAME, sampler_weights/NAME, or external_weights/NAME, as listings do"
            )
        if segment not in TYPE_OF_SEGMENT or not NAME.fullmatch(name):
            raise RefusedRequestError(
                f"{checkpoint_id[:200]!r} is not a checkpoint of a run: use weights/NAME, sampler_weights/NAME, or "
                "external_weights/NAME, with a name of 1 to 80 letters, digits, '_' and '-'"
            )
        return cls(run=run, segment=segment, name=name)

    @property
    def raycheck_name(self) -> str:
        return f"{self.segment}.{self.name}"

    @property
    def text(self) -> str:
        return f"tinker://{self.run}/{self.segment}/{self.name}"

    @property
    def type(self) -> CheckpointType:
        return TYPE_OF_SEGMENT[self.segment]


def path_of(run: str, raycheck_name: str | None) -> CheckpointPath | None:
    """Return the path of the checkpoint with this name in raycheck, or None for other names."""
    segment, _, name = (raycheck_name or "").partition(".")
    if segment not in TYPE_OF_SEGMENT or not NAME.fullmatch(name):
        return None
    return CheckpointPath(run=run, segment=segment, name=name)


def is_borrowed(key: str) -> bool:
    """Return whether a run started from the checkpoint with this key, which no attempt of the run has written."""
    return _BORROWED.fullmatch(key) is not None


def run_id_of(session: str, number: int) -> str:
    return f"{session}:train:{number}"


def folder_of(run: str) -> str:
    """Return the name of a run's folder. Raises RefusedRequestError for anything that is not a run's id."""
    found = _RUN.fullmatch(run)
    if found is None:
        raise RefusedRequestError(f"{run[:200]!r} is no training run: they are called SESSION:train:NUMBER", 404)
    return f"{found[1]}.train.{found[2]}"


def run_in_folder(folder: str) -> str | None:
    """Return the id of the run in a folder of this name, or None if the folder is not the server's."""
    found = _FOLDER.fullmatch(folder)
    return None if found is None else run_id_of(found[1], int(found[2]))


def below(uri: str, *names: str) -> str:
    """Return the URI of a folder under another one, keeping the settings in the URI's query."""
    place, mark, query = uri.partition("?")
    return "/".join([place.rstrip("/"), *names]) + mark + query
