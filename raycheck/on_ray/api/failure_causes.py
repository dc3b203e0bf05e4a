"""Interprets Ray's errors: what happened to each rank, which error ends the run, and which is a bug in the program.

Ray wraps the error of a worker several times, differently in each release; only this module knows the names of its
attributes (`_base_exc`, `health_check_failure`, `worker_failures`).
"""

from collections.abc import Mapping
from typing import cast

from ray.exceptions import RayActorError, RayTaskError
from ray.train import TrainingFailedError

from raycheck.errors import RaycheckError

_DIED, _TAKEN = "its process died", "its node was taken away"

MISTAKES = (
    AttributeError,
    ImportError,
    IndentationError,
    ModuleNotFoundError,
    NameError,
    NotImplementedError,
    SyntaxError,
    TabError,
    TypeError,
    UnboundLocalError,
)
"""Errors that indicate a bug in the program, on any machine: exactly these types, and no subclass that a library
defines. A ValueError, KeyError, OSError or RuntimeError may also come from data, the network or a device."""


def causes_of(errors: Mapping[int, BaseException]) -> list[str]:
    """Return one line for each rank that says what happened to it.

    Ranks whose process died come first, since the errors of the others are consequences of that.
    """
    lines = [_cause_of(rank, error) for rank, error in sorted(errors.items())]
    return sorted(lines, key=lambda line: not line.endswith((_DIED, _TAKEN)))


def _cause_of(rank: int, error: BaseException) -> str:
    found = (getattr(error, name, None) for name in ("health_check_failure", "_base_exc", "cause"))
    inner = next(filter(None, found), error)
    if isinstance(inner, RayActorError):
        return f"rank {rank}: {_TAKEN if getattr(inner, 'preempted', False) else _DIED}"
    text = str(inner).strip().partition("\n")[0][:200]
    return f"rank {rank}: {type(inner).__name__}: {text}"


def mistake_in(errors: Mapping[int, BaseException]) -> Exception | None:
    """Return the error of a rank that indicates a bug in the user's program, in Ray's wrapper with its traceback.

    Return None if there is none, or if a rank's process died: the errors of the others may be consequences of that.
    """
    if not all(hasattr(error, "_base_exc") for error in errors.values()):
        return None
    found = (error for error in errors.values() if type(getattr(error, "_base_exc", None)) in MISTAKES)
    return cast("Exception | None", next(found, None))


def mistake_behind(error: TrainingFailedError) -> BaseException | None:
    """Return the user's own error, if `MistakeGuard` ended the run because of it."""
    failure = getattr(error, "controller_failure", None)
    mistake: BaseException | None = getattr(failure, "_base_exc", None)
    return mistake if type(mistake) in MISTAKES else None


def final_error(error: BaseException | None) -> RaycheckError | None:
    """Return the raycheck error inside a Ray error that ends the run; None if a restart may help."""
    seen: set[int] = set()
    queue = [error]
    while queue:
        item = queue.pop(0)
        if item is None or id(item) in seen:
            continue
        seen.add(id(item))
        if isinstance(item, RaycheckError) and not isinstance(item, RayTaskError):
            if item.ends_run:
                return item
            continue
        failures = getattr(item, "worker_failures", None)
        queue += [
            getattr(item, "cause", None),
            getattr(item, "_base_exc", None),
            getattr(item, "controller_failure", None),
            *(failures.values() if isinstance(failures, dict) else ()),
            item.__cause__,
        ]
    return None
