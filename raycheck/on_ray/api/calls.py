"""Calls Ray's actors and tasks, with raycheck's errors as they were raised; and names the node of this process."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import ray
from ray.exceptions import RayActorError, RayTaskError

from raycheck.errors import RaycheckError


def this_node() -> str:
    """Returns the id of the node that this process runs on."""
    return str(ray.get_runtime_context().get_node_id())


def run_in(actor: Any, function: Callable[..., Any], *args: Any) -> Any:
    """Calls `function(instance, *args)` in the actor, in turn with its own methods. Returns Ray's reference."""
    return actor.__ray_call__.remote(function, *args)


def results(references: Sequence[Any]) -> list[Any]:
    """Waits for calls and tasks, and returns their results in order. Raises the first error that comes.

    An error of raycheck comes out as it was raised.
    """
    left = list(references)
    while left:
        ready, left = ray.wait(left)
        with as_raised():
            ray.get(ready)
    return list(ray.get(list(references)))


def call(method: Any, *args: Any, timeout_s: float) -> Any:
    """Calls an actor's method and returns its answer. An error of raycheck comes out as it was raised.

    Raises TimeoutError when the actor is being restarted or does not answer; the call may then be repeated.
    """
    try:
        with as_raised():
            return ray.get(method.remote(*args), timeout=timeout_s)
    except (RayActorError, ray.exceptions.GetTimeoutError) as error:
        raise TimeoutError(str(error).splitlines()[0] if str(error) else type(error).__name__) from error


@contextmanager
def as_raised() -> Iterator[None]:
    """Raises an error of raycheck's, which comes out of Ray wrapped in its own, as it was raised."""
    try:
        yield
    except RayTaskError as error:
        cause = getattr(error, "cause", None)
        if isinstance(cause, RaycheckError):
            raise cause from None
        raise
