"""Warns about counts in the user's callbacks that no save contains: after a restart they start again from zero.

An attribute's value does not show whether it is a count or a setting, so the callbacks are inspected twice: when
training starts and at the first save. Attributes that have changed in between are named. An inspection is short
whatever a callback contains, runs no code of objects that are not plain values, and never fails, because it only serves
a warning.
"""

import logging
import reprlib
from collections import deque
from collections.abc import Iterable, Sized
from typing import Any

logger = logging.getLogger("raycheck")

_OF_LIBRARIES = {"transformers", "trl", "accelerate", "peft", "ray", "raycheck"}
_MAX_ITEMS = 10_000
"""Longer values are compared by length only."""


class UnsavedCounts:
    """The plain values in callbacks that no save contains, as they were when training started."""

    def __init__(self, callbacks: Iterable[Any]) -> None:
        self._began = [(callback, _plain(callback)) for callback in callbacks if _is_left_out(callback)]

    def warn(self) -> None:
        """Log a warning, once, for each callback that has counted since training started."""
        began, self._began = self._began, []
        for callback, before in began:
            now = _plain(callback)
            counted = sorted(name for name, text in now.items() if before.get(name) != text)
            if counted:
                logger.warning(
                    "the callback %s counts in %s, which is not saved: after a restart it starts again. Give it "
                    "state_dict() and load_state_dict(), or make it an ExportableState",
                    type(callback).__qualname__,
                    ", ".join(counted),
                )


def _is_left_out(callback: Any) -> bool:
    from transformers.trainer_callback import ExportableState

    is_library = type(callback).__module__.partition(".")[0] in _OF_LIBRARIES
    return not (is_library or isinstance(callback, ExportableState) or hasattr(callback, "load_state_dict"))


def _plain(callback: Any) -> dict[str, str]:
    """Return the plain values among a callback's attributes as short text, by name."""
    kinds = (int, float, complex, str, bytes, list, tuple, dict, set, deque)
    texts = {}
    for name, value in dict(getattr(callback, "__dict__", {})).items():
        if isinstance(value, kinds):
            try:
                texts[name] = _text(value)
            except Exception:  # noqa: BLE001, S112  another thread changes it, or its class has no sound text
                continue
    return texts


def _text(value: object) -> str:
    length = len(value) if isinstance(value, Sized) else 0
    return f"{length} items" if length > _MAX_ITEMS else f"{length} items: {_SHORT.repr(value)}"


class _Short(reprlib.Repr):
    """A repr of the first items of plain values, two levels deep; other objects are shown by class."""

    def __init__(self) -> None:
        super().__init__()
        self.maxlevel = 2
        self.maxlist = self.maxtuple = self.maxset = self.maxdict = self.maxdeque = 100
        self.maxstring = self.maxlong = _MAX_ITEMS

    def repr_instance(self, x: Any, level: int) -> str:
        for kind in (dict, list, tuple, set, deque):
            if isinstance(x, kind):  # an instance of a subclass, such as a Counter
                return str(getattr(self, f"repr_{kind.__name__}")(x, level))
        if x is None or isinstance(x, (int, float, complex)):
            return repr(x)
        return repr(x[:_MAX_ITEMS]) if isinstance(x, (str, bytes)) else type(x).__qualname__


_SHORT = _Short()
