"""The state of a Ray actor as an entry of the state: rank 0 asks for it at each save and hands it back at a restore."""

from typing import Any

import ray

from raycheck.errors import ConfigError, StoreError
from raycheck.shards.entries.per_rank_entries import RankZero

TIMEOUT_S = 120.0


class RemoteState:
    """An actor's state_dict and load_state_dict, called from here. name: what messages call it. Raises Ray's errors."""

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
    """A save that cannot have it fails, and training goes on."""

    def _ask(self, method: Any, *args: Any) -> Any:
        try:
            return super()._ask(method, *args)
        except ray.exceptions.RayError as error:
            raise StoreError(f"{self._name} did not give or take its state: {error}") from error


class ActorState(RankZero):
    """Puts a Ray actor's state into the checkpoint: `{"prep": raycheck.ActorState(actor)}`.

    The actor needs methods state_dict and load_state_dict. Rank 0 calls them: the first at the start, to see whether it
    can be saved, and while a save copies the state. It must answer within timeout_s seconds, else this save fails and
    training goes on. Arrays of NumPy reach the second one read-only, as in any call of Ray's. Raises ConfigError for an
    actor without these methods.
    """

    def __init__(self, actor: Any, *, timeout_s: float = TIMEOUT_S) -> None:
        super().__init__(_OfARank(actor, str(actor), timeout_s=timeout_s))
