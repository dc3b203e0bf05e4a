"""Calls of actors and tasks, whose errors come out as they were raised; and where this process runs."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import ray
from ray.exceptions import RayActorError, RayTaskError

from raycheck.errors import RaycheckError


def this_node() -> str:
    """The id of the node that this process is on."""
    return str(ray.get_runtime_context().get_node_id())


def run_in(actor: Any, function: Callable[..., Any], *args: Any) -> Any:
    """Ray's reference to what `function(its instance, *args)` returns in the actor, in turn with its own methods."""
    return actor.__ray_call__.remote(function, *args)


def results(references: Sequence[Any]) -> list[Any]:
    """Of calls and tasks. Raises the first error that comes, those of raycheck as they were raised."""
    left = list(references)
    while left:
        ready, left = ray.wait(left)
        with _as_raised():
            ray.get(ready)
    return list(ray.get(list(references)))


def call(method: Any, *args: Any, timeout_s: float) -> Any:
    """One actor call. Typed errors of raycheck come out as they were raised.

    Raises TimeoutError when the actor is being restarted or does not answer; the call may be repeated.
    """
    try:
        with _as_raised():
            return ray.get(method.remote(*args), timeout=timeout_s)
    except (RayActorError, ray.exceptions.GetTimeoutError) as error:
        raise TimeoutError(str(error).splitlines()[0] if str(error) else type(error).__name__) from error


@contextmanager
def _as_raised() -> Iterator[None]:
    try:
        yield
    except RayTaskError as error:
        cause = getattr(error, "cause", None)
        if isinstance(cause, RaycheckError):
            raise cause from None
        raise
