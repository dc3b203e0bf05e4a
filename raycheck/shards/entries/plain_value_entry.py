"""Plain values as entries of the state: numbers, strings, tensors, and containers of them.

They are read from, and put back into, the dict or list that holds them. A container is filled in place at every depth,
and a tensor or array of the same form is written into, so that references which the script has taken stay good. What
cannot be changed in place (a number, a tuple) is replaced where it stands.
"""

import io
import logging
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import MutableMapping
from dataclasses import is_dataclass
from typing import Any, cast

import torch

from raycheck.bucket.format.class_values import attributes_of, set_attributes
from raycheck.bucket.format.values import encode
from raycheck.errors import ConfigError
from raycheck.shards.entries.meta_tensors import ADVICE, is_on_meta
from raycheck.shards.entries.object_entry import HELD, ObjectEntry
from raycheck.shards.entries.saved_entry import Named, SavedEntry
from raycheck.shards.entries.state_entry import GatheredEntry
from raycheck.shards.transfer.restore_proof import holds

logger = logging.getLogger("raycheck")
_DICTS = (dict, OrderedDict, Counter, defaultdict)


class InPlace:
    """A dict of plain values: the caller keeps using the very same one."""

    def __init__(self, values: dict[Any, Any]) -> None:
        self._values = values

    def state_dict(self) -> dict[Any, Any]:
        return dict(self._values)

    def load_state_dict(self, values: dict[Any, Any]) -> None:
        filled(self._values, dict(values))


class HeldValue:
    """A plain value where it stands: in the caller's own dict or list, under a key. What can be filled in place may
    also stand where nothing can be put."""

    def __init__(self, holder: Any, key: Any, name: str) -> None:
        self._holder = holder
        self._key = key
        self._name = name
        if not is_container(self.value):
            self._refuse_unless_it_can_be_put()

    @property
    def value(self) -> Any:
        try:
            return self._holder[self._key]
        except LookupError:
            raise ConfigError(f"state[{self._name!r}] is no longer where it was given") from None

    def put(self, saved: object) -> None:
        found = filled(self.value, saved)
        if found is not self.value:
            self._refuse_unless_it_can_be_put()
            self._holder[self._key] = found

    def _refuse_unless_it_can_be_put(self) -> None:
        if not isinstance(self._holder, list | MutableMapping):
            raise ConfigError(
                f"state[{self._name!r}] is a {type(self.value).__qualname__} in a {type(self._holder).__qualname__}, "
                "which a restore could not put back where anybody sees it; hold it in a dict or list of your own"
            )


def is_container(value: object) -> bool:
    """Whether it can be filled in place, so that who holds it sees what is restored."""
    return isinstance(value, torch.Tensor) or type(value) in (*_DICTS, list, deque, set, bytearray, io.BytesIO)


class PlainValueEntry(ObjectEntry):
    """A bare tensor is read in place, as a buffer is; its shape and dtype must be those of the checkpoint."""

    def __init__(self, name: str, held: HeldValue, *, rank: int) -> None:
        super().__init__(name, held)
        self._held = held
        self._is_said = rank != 0 or is_container(held.value)

    def tree(self) -> Any:
        return self._held.value

    def gather(self) -> GatheredEntry:
        if not self._is_said:  # a variable of the same name would be saved as it was at the start, and nobody sees it
            self._is_said = True
            logger.warning(
                "state[%r] is a bare %s: it is read from the dict that was given as the state, and a restore puts it "
                "back there; a variable that was assigned from it or to it is another one",
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
            saved.mismatched.append(f"{self.name}: a bare {type(live).__qualname__} here, an object or dict saved")
            return {}
        there = self.compared(saved, saved.values[HELD], lambda _name: None)
        is_tensor = isinstance(live, torch.Tensor) and self.name in saved.tensors  # or a parameter
        if is_container(live) and type(there) is not type(live) and not is_tensor:
            here = type(live).__qualname__
            saved.mismatched.append(f"{self.name}: a {here} here, a {type(there).__qualname__} saved")
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


def filled(live: object, saved: object) -> Any:
    """`live` with the saved value in it, as far as it can be changed in place; else the saved value."""
    return _Filling().into(live, saved)


class _Filling:
    """One object that stands at two places takes one value: where the second differs, it gets an object of its own."""

    def __init__(self) -> None:
        self._taken: dict[int, tuple[object, object]] = {}

    def into(self, live: Any, saved: Any) -> Any:
        is_tensor = isinstance(live, torch.Tensor) and isinstance(saved, torch.Tensor)  # or a parameter
        if live is saved or (type(live) is not type(saved) and not is_tensor):
            return saved
        if id(live) in self._taken:
            return live if _is_same(self._taken[id(live)][1], saved) else saved
        filled = self._changed(live, saved)
        if filled is live:
            self._taken[id(live)] = live, saved
        return filled

    def _changed(self, live: Any, saved: Any) -> Any:
        kind = type(live)
        if isinstance(live, torch.Tensor):
            return live if _copied(live, saved) else saved
        if kind in _DICTS:
            found = {key: self.into(live[key], item) if key in live else item for key, item in saved.items()}
            live.clear()
            if kind is defaultdict:
                live.default_factory = saved.default_factory
            for key, item in found.items():  # Counter.update would add
                live[key] = item
            return live
        if kind is list or (kind is deque and live.maxlen == saved.maxlen):
            items = self._each(live, saved)
            live.clear()
            live.extend(items)
            return live
        if kind is tuple:
            return tuple(self._each(live, saved)) if len(live) == len(saved) else saved
        if kind is set:
            live.clear()
            live.update(saved)
            return live
        if kind is bytearray:
            live[:] = saved
            return live
        if kind is io.BytesIO and not live.closed:
            return _refilled(live, saved)
        if kind.__name__ == "ndarray":
            return _array(live, saved)
        if is_dataclass(kind):
            return self._instance(live, saved)
        return saved

    def _each(self, live: Any, saved: Any) -> list[Any]:
        held = list(live)
        return [self.into(held[i], item) if i < len(held) else item for i, item in enumerate(saved)]

    def _instance(self, live: Any, saved: Any) -> Any:
        """A dataclass instance: filled unless it is frozen, when others may rely on what it holds."""
        if cast("Any", type(live)).__dataclass_params__.frozen:
            return saved
        before, after = attributes_of(live), attributes_of(saved)
        if before.keys() != after.keys():
            return saved
        set_attributes(live, {name: self.into(before[name], item) for name, item in after.items()})
        return live


def _copied(live: torch.Tensor, saved: torch.Tensor) -> bool:
    """Write a tensor of the same form over another one. False, and nothing is written, where that is not possible."""
    if (live.dtype, live.shape, live.layout) != (saved.dtype, saved.shape, saved.layout) or is_on_meta(live):
        return False
    try:
        with torch.no_grad():
            live.copy_(saved)
    except RuntimeError:  # an expanded tensor, an inference tensor
        return False
    return True


def _array(live: Any, saved: Any) -> Any:
    if (live.dtype, live.shape) != (saved.dtype, saved.shape) or not live.flags.writeable or 0 in live.strides:
        return saved
    live[...] = saved
    return live


def _refilled(live: io.BytesIO, saved: io.BytesIO) -> io.BytesIO:
    try:
        live.truncate(0)
    except BufferError:  # somebody reads its memory
        return saved
    live.seek(0)
    live.write(saved.getvalue())
    live.seek(saved.tell())
    return live


def _is_same(one: object, other: object) -> bool:
    """Whether two values are equal to the last bit. Containers of tensors count as different."""
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return holds(one, other)
    try:
        return repr(encode(one, "")) == repr(encode(other, ""))
    except ConfigError:
        return False
