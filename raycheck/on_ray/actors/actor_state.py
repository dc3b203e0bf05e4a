"""Makes a Ray actor's state an entry of a state: rank 0 fetches it at each save, and returns it at a restore."""

from typing import Any

import ray

from raycheck.errors import ConfigError, StoreError
from raycheck.state.entries.per_rank_entries import RankZero

TIMEOUT_S = 120.0


class RemoteState:
    """A local object whose state_dict and load_state_dict call an actor's.

    name: what errors call the actor. timeout_s: seconds to wait for an answer; None to wait forever. Raises ConfigError
    for an actor without these methods, and Ray's own errors when a call fails.
    """

    def __init__(self, actor: Any, name: str, *, timeout_s: float | None = None) -> None:
        for method in ("state_dict", "load_state_dict"):
            if not hasattr(actor, method):
                raise ConfigError(f"{name}: the actor has no method {method}; give it state_dict and load_state_dict")
        self._actor = actor
        self._name = name
        self._timeout_s = timeout_s

    def state_dict(self) -> Any:
        return self._ask(self._actor.state_dict)

    def load_state_dict(self, state: Any) -> None:
        self._ask(self._actor.load_state_dict, state)

    def _ask(self, method: Any, *args: Any) -> Any:
        return ray.get(method.remote(*args), timeout=self._timeout_s)


class _OfARank(RemoteState):
    """A RemoteState that raises StoreError if the actor does not answer.

    Then the save fails, and training continues.
    """

    def _ask(self, method: Any, *args: Any) -> Any:
        try:
            return super()._ask(method, *args)
        except ray.exceptions.RayError as error:
            raise StoreError(f"{self._name} did not return or load its state: {error}") from error


class ActorState(RankZero):
    """An entry that saves a Ray actor's state: `{"prep": raycheck.adapters.ActorState(actor)}`.

    The actor needs the methods state_dict and load_state_dict. Rank 0 calls state_dict at the start, to check whether
    the state can be saved, and while a save copies the state; it calls load_state_dict at a restore. If the actor does
    not answer within timeout_s seconds, this save fails and training continues. NumPy arrays reach load_state_dict
    read-only, as in any Ray call. Raises ConfigError for an actor without these methods.
    """

    def __init__(self, actor: Any, *, timeout_s: float = TIMEOUT_S) -> None:
        super().__init__(_OfARank(actor, str(actor), timeout_s=timeout_s))
