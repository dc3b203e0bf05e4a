"""Restores a saved value into a live one in place, so that references which the script holds stay valid.

A container is filled in place at every depth, and a tensor or array of the same form is written into. What cannot be
changed in place (a number, a tuple) is replaced in its container.
"""

import io
from collections import Counter, OrderedDict, defaultdict, deque
from dataclasses import is_dataclass
from typing import Any, cast

import torch

from raycheck.bucket.format.class_values import attributes_of, set_attributes
from raycheck.bucket.format.values import encode
from raycheck.errors import ConfigError
from raycheck.state.entries.meta_tensors import is_on_meta
from raycheck.transfer.read.restore_proof import holds

_DICTS = (dict, OrderedDict, Counter, defaultdict)


def is_container(value: object) -> bool:
    """Return whether `value` can be filled in place, so that everyone who holds it sees what is restored."""
    return isinstance(value, torch.Tensor) or type(value) in (*_DICTS, list, deque, set, bytearray, io.BytesIO)


def filled(live: object, saved: object) -> Any:
    """Restore the saved value into the live one.

    Return `live` if it could be changed in place, otherwise the saved value.
    """
    return _Filler().into(live, saved)


class _Filler:
    """A filler of live objects that fills each object once.

    An object that is held in two places takes the value of the first. If the second place has another value, it gets a
    separate object.
    """

    def __init__(self) -> None:
        self._taken: dict[int, tuple[object, object]] = {}

    def into(self, live: Any, saved: Any) -> Any:
        is_tensor = isinstance(live, torch.Tensor) and isinstance(saved, torch.Tensor)  # or a parameter
        if live is saved or (type(live) is not type(saved) and not is_tensor):
            return saved
        if id(live) in self._taken:
            return live if _is_same(self._taken[id(live)][1], saved) else saved
        filled = self._fill(live, saved)
        if filled is live:
            self._taken[id(live)] = live, saved
        return filled

    def _fill(self, live: Any, saved: Any) -> Any:
        kind = type(live)
        if isinstance(live, torch.Tensor):
            return live if _try_copy(live, saved) else saved
        if kind in _DICTS:
            found = {key: self.into(live[key], item) if key in live else item for key, item in saved.items()}
            live.clear()
            if kind is defaultdict:
                live.default_factory = saved.default_factory
            for key, item in found.items():  # not update(), which would add to the counts of a Counter
                live[key] = item
            return live
        if kind is list or (kind is deque and live.maxlen == saved.maxlen):
            items = self._fill_items(live, saved)
            live.clear()
            live.extend(items)
            return live
        if kind is tuple:
            return tuple(self._fill_items(live, saved)) if len(live) == len(saved) else saved
        if kind is set:
            live.clear()
            live.update(saved)
            return live
        if kind is bytearray:
            live[:] = saved
            return live
        if kind is io.BytesIO and not live.closed:
            return _fill_bytes_io(live, saved)
        if kind.__name__ == "ndarray":
            return _fill_array(live, saved)
        if is_dataclass(kind):
            return self._fill_instance(live, saved)
        return saved

    def _fill_items(self, live: Any, saved: Any) -> list[Any]:
        held = list(live)
        return [self.into(held[i], item) if i < len(held) else item for i, item in enumerate(saved)]

    def _fill_instance(self, live: Any, saved: Any) -> Any:
        """Fill a dataclass instance, unless it is frozen: then others may rely on its contents."""
        if cast("Any", type(live)).__dataclass_params__.frozen:
            return saved
        before, after = attributes_of(live), attributes_of(saved)
        if before.keys() != after.keys():
            return saved
        set_attributes(live, {name: self.into(before[name], item) for name, item in after.items()})
        return live


def _try_copy(live: torch.Tensor, saved: torch.Tensor) -> bool:
    """Copy a tensor over a live one of the same form. Return False without copying if that is not possible."""
    if (live.dtype, live.shape, live.layout) != (saved.dtype, saved.shape, saved.layout) or is_on_meta(live):
        return False
    try:
        with torch.no_grad():
            live.copy_(saved)
    except RuntimeError:  # torch refuses expanded tensors and inference tensors
        return False
    return True


def _fill_array(live: Any, saved: Any) -> Any:
    if (live.dtype, live.shape) != (saved.dtype, saved.shape) or not live.flags.writeable or 0 in live.strides:
        return saved
    live[...] = saved
    return live


def _fill_bytes_io(live: io.BytesIO, saved: io.BytesIO) -> io.BytesIO:
    try:
        live.truncate(0)
    except BufferError:  # its memory is exported to a reader
        return saved
    live.seek(0)
    live.write(saved.getvalue())
    live.seek(saved.tell())
    return live


def _is_same(one: object, other: object) -> bool:
    """Return whether two values are equal bit by bit. Containers of tensors count as different."""
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return holds(one, other)
    try:
        return repr(encode(one, "")) == repr(encode(other, ""))
    except ConfigError:
        return False
