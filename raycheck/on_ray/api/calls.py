"""Calls Ray's actors and tasks, raises raycheck's errors in their original form, and identifies this process's node."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import ray
from ray.exceptions import ActorUnavailableError, RayTaskError

from raycheck.errors import RaycheckError


def this_node() -> str:
    """Return the id of the node that this process runs on."""
    return str(ray.get_runtime_context().get_node_id())


def run_in(actor: Any, function: Callable[..., Any], *args: Any) -> Any:
    """Call `function(instance, *args)` in the actor, queued with its own methods. Return Ray's reference."""
    return actor.__ray_call__.remote(function, *args)


def results(references: Sequence[Any]) -> list[Any]:
    """Wait for calls and tasks, and return their results in order. Raises the first error that occurs.

    An error of raycheck is raised in its original form.
    """
    left = list(references)
    while left:
        ready, left = ray.wait(left)
        with as_raised():
            ray.get(ready)
    return list(ray.get(list(references)))


def call(method: Any, *args: Any, timeout_s: float) -> Any:
    """Call an actor's method and return its answer. An error of raycheck is raised in its original form.

    Raises TimeoutError when the actor is being restarted or does not answer; the call may then be repeated. Raises
    ActorDiedError when the actor has ended for good.
    """
    try:
        with as_raised():
            return ray.get(method.remote(*args), timeout=timeout_s)
    except (ActorUnavailableError, ray.exceptions.GetTimeoutError) as error:
        raise TimeoutError(str(error).splitlines()[0] if str(error) else type(error).__name__) from error


@contextmanager
def as_raised() -> Iterator[None]:
    """Raise an error of raycheck, which Ray wraps in its own, in its original form."""
    try:
        yield
    except RayTaskError as error:
        cause = getattr(error, "cause", None)
        if isinstance(cause, RaycheckError):
            raise cause from None
        raise
