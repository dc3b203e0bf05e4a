"""Creates entries for anything with state_dict and load_state_dict: schedulers, scalers, data, the
user's own objects.
"""

from typing import Any

from raycheck.errors import ConfigError
from raycheck.state.entries.saved_entry import HELD, Named, SavedEntry, empty_like
from raycheck.state.entries.state_entry import StateEntry, calling
from raycheck.state.entries.unsaved_tensors import refuse_unsaved


def has_state_dict(value: object) -> bool:
    """Return whether `value` has the two methods by which objects return and load their state."""
    return all(callable(getattr(value, method, None)) for method in ("state_dict", "load_state_dict"))


class ObjectEntry(StateEntry):
    """An entry that saves what an object's state_dict() returns, and restores it with load_state_dict()."""

    def __init__(self, name: str, obj: Any) -> None:
        super().__init__(name)
        self._obj = obj

    def tree(self) -> dict[str, Any]:
        with calling(self.name, "state_dict"):
            state = self._obj.state_dict()
        if not isinstance(state, dict):
            raise ConfigError(f"state[{self.name!r}].state_dict() is a {type(state).__name__}, not a dict")
        if not state:
            refuse_unsaved(self.name, self._obj)
        return state

    def values(self, tree: dict[str, Any], tensors: Named) -> Any:
        tensors.clear()  # the tree may have tensors inside tuples, which DCP's flattening does not name
        return self.encode(tree, self.name, tensors)

    def match(self, saved: SavedEntry) -> Named:
        if saved.values is None or saved.was_none(self.name):
            saved.missing.append(self.name)
            return {}
        if isinstance(saved.values, dict) and HELD in saved.values:
            saved.mismatched.append(f"{self.name}: an object or dict here, a bare value saved")
            return {}
        names: list[str] = []
        value = self.compared(saved, saved.values, names.append)
        if saved.tensors.keys() - names:  # only modules and optimizers save tensors to which their values do not refer
            saved.mismatched.append(f"{self.name}: an object or dict here, a module or an optimizer saved")
            return {}
        self.check_by_object(self._obj, saved, value)
        return self.targets(saved)

    def targets(self, saved: SavedEntry) -> Named:
        """Return tensors to read into, laid out like the live ones of the same shape and dtype.

        A live tensor that is trained must fit, since an optimizer would keep using it.
        """
        live: Named = {}
        self.encode(self.tree(), self.name, live)
        for name in live.keys() & saved.tensors.keys():
            if live[name].requires_grad:
                saved.compare(name, live[name])
        return {name: empty_like(live.get(name), tensor) for name, tensor in saved.tensors.items()}

    def load(self, saved: SavedEntry, tensors: Named) -> None:
        if saved.values is not None:
            value = self.decoded(saved.values, tensors.__getitem__)
            with calling(self.name, "load_state_dict"):
                self._obj.load_state_dict(value)
