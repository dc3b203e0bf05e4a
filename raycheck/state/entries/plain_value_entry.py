"""Creates entries for plain values: numbers, strings, tensors, and containers of them.

They are read from the dict or list that contains them, and restored into it. fill_in_place.py fills containers and
tensors in place.
"""

import logging
from collections.abc import MutableMapping
from typing import Any

import torch

from raycheck.errors import ConfigError
from raycheck.state.entries.fill_in_place import filled, is_container
from raycheck.state.entries.meta_tensors import ADVICE, is_on_meta
from raycheck.state.entries.object_entry import ObjectEntry, has_state_dict
from raycheck.state.entries.saved_entry import HELD, Named, SavedEntry
from raycheck.state.entries.state_entry import GatheredEntry

logger = logging.getLogger("raycheck")


class InPlace:
    """An adapter that gives a dict of plain values a state_dict and a load_state_dict.

    The caller still uses the dict itself.
    """

    def __init__(self, values: dict[Any, Any]) -> None:
        self._values = values

    def state_dict(self) -> dict[Any, Any]:
        return dict(self._values)

    def load_state_dict(self, values: dict[Any, Any]) -> None:
        filled(self._values, dict(values))


class HeldValue:
    """A reference to a plain value: the caller's own dict or list that contains it, and its key there.

    A container that cannot be changed, such as a tuple, may only contain what can be filled in place.
    """

    def __init__(self, holder: Any, key: Any, name: str) -> None:
        self._holder = holder
        self._key = key
        self._name = name
        if not is_container(self.value):
            self._refuse_fixed_holder()

    @property
    def value(self) -> Any:
        try:
            return self._holder[self._key]
        except LookupError:
            raise ConfigError(f"state[{self._name!r}] is no longer in the container that was given") from None

    def put(self, saved: object) -> None:
        """Fill the value in place, or replace it in its container."""
        found = filled(self.value, saved)
        if found is not self.value:
            self._refuse_fixed_holder()
            self._holder[self._key] = found

    def _refuse_fixed_holder(self) -> None:
        if not isinstance(self._holder, list | MutableMapping):
            raise ConfigError(
                f"state[{self._name!r}] is a {type(self.value).__qualname__} in a {type(self._holder).__qualname__}, "
                "which a restore could not replace there; keep it in your own dict or list"
            )


class PlainValueEntry(ObjectEntry):
    """The entry of a HeldValue.

    A bare tensor is read in place, as a buffer is, so its shape and dtype must be the saved ones.
    """

    def __init__(self, name: str, held: HeldValue, *, rank: int) -> None:
        super().__init__(name, held)
        self._held = held
        self._has_warned = rank != 0 or is_container(held.value)

    def tree(self) -> Any:
        value = self._held.value
        if has_state_dict(value):
            raise ConfigError(
                f"state[{self.name!r}] is a {type(value).__qualname__} now, and was a plain value when the state was "
                "given, so it would not be saved. Add it once it exists, with Checkpointer.add() before restore()"
            )
        return value

    def gather(self) -> GatheredEntry:
        if not self._has_warned:  # a script that updates a variable instead would always save the first value
            self._has_warned = True
            logger.warning(
                "state[%r] is a bare %s: it is read from the dict that was given as the state, and restored into that "
                "dict; a variable that holds a copy of it is neither saved nor restored",
                self.name,
                type(self._held.value).__qualname__,
            )
        return super().gather()

    def values(self, tree: Any, tensors: Named) -> Any:
        return {HELD: super().values(tree, tensors)}

    def match(self, saved: SavedEntry) -> Named:
        if saved.values is None:
            saved.missing.append(self.name)
            return {}
        live = self._held.value
        if list(saved.values) != [HELD]:
            if live is None:
                saved.advice.append(
                    f"state[{self.name!r}] is None here: create the object before restore(), if peek().entries has "
                    f"{self.name!r}. restore(skip=[{self.name!r}]) continues without it"
                )
            saved.mismatched.append(f"{self.name}: a bare {_kind(live)} here, an object or dict saved")
            return {}
        there = self.compared(saved, saved.values[HELD], lambda _name: None)
        is_saved_tensor = isinstance(live, torch.Tensor) and self.name in saved.tensors  # of any tensor class
        if is_container(live) and type(there) is not type(live) and not is_saved_tensor:
            saved.mismatched.append(f"{self.name}: {_kind(live)} here, {_kind(there)} saved")
            return {}
        if isinstance(live, torch.Tensor):
            return {self.name: live} if saved.compare(self.name, live) else {}
        return self.targets(saved)

    def left_on_meta(self, wanted: Named) -> list[str]:
        del wanted
        live = self._held.value
        is_bare = isinstance(live, torch.Tensor) and is_on_meta(live)
        return [f"{self.name} is on the meta device and would stay there; {ADVICE}"] if is_bare else []

    def load(self, saved: SavedEntry, tensors: Named) -> None:
        if saved.values is not None and not isinstance(self._held.value, torch.Tensor):
            self._held.put(self.decoded(saved.values[HELD], tensors.__getitem__))


def _kind(value: object) -> str:
    return "None" if value is None else type(value).__qualname__
