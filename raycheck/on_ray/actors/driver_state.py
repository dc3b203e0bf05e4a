"""Collects the driver's part of a group's state, in addition to the actors' own states.

Rank 0 saves it as entries of the same checkpoint, and returns it after a restore. The driver's random state is one of
these entries.
"""

from collections.abc import Mapping
from copy import deepcopy
from typing import Any

from ray.actor import ActorHandle

from raycheck.data.loader_checks import check_loaders
from raycheck.errors import ConfigError
from raycheck.group.worker.periodic import Periodic
from raycheck.on_ray.actors.actor_state import RemoteState
from raycheck.state.entries.object_entry import ObjectEntry, has_state_dict
from raycheck.state.entries.plain_value_entry import InPlace
from raycheck.state.entries.random_generators import GeneratorState, is_generator
from raycheck.state.entries.state_entry import calling
from raycheck.state.random_state import DriverRandomState

DRIVER_RNG = "driver_rng"


class DriverState:
    """The driver's objects by name. Raises ConfigError, naming the entry, for a value that has no state."""

    def __init__(self, state: Mapping[str, object]) -> None:
        self._objects = {name: _with_state(name, value) for name, value in state.items()}
        self._objects[DRIVER_RNG] = DriverRandomState()

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._objects)

    @property
    def periodics(self) -> list[Periodic]:
        return [value for value in self._objects.values() if isinstance(value, Periodic)]

    def check(self) -> None:
        """Raise ConfigError, naming the entry, for a state that could not be saved later, or not be restored."""
        for name, value in self._objects.items():
            ObjectEntry(name, value).gather()
        check_loaders(self._objects, rank=0)

    def state_dicts(self) -> dict[str, Any]:
        """Return the state of each entry, in the form that rank 0 saves."""
        return {name: ObjectEntry(name, value).tree() for name, value in self._objects.items()}

    def load(self, states: Mapping[str, Any]) -> None:
        """Load restored states. Entries that are not in the checkpoint are left unchanged."""
        for name, state in states.items():
            with calling(name, "load_state_dict"):
                self._objects[name].load_state_dict(deepcopy(state))  # arrays that come from Ray are read-only


def _with_state(name: str, value: Any) -> Any:
    """Return an object with state_dict and load_state_dict for an entry's value."""
    if isinstance(value, ActorHandle):
        return RemoteState(value, name)
    if type(value) is dict:
        return InPlace(value)
    if is_generator(value):
        return GeneratorState(value)
    if has_state_dict(value):
        return value
    raise ConfigError(
        f"state[{name!r}] is a {type(value).__name__} without state_dict and load_state_dict; the driver's state takes "
        "objects and actors that have them, and dicts of plain values"
    )
