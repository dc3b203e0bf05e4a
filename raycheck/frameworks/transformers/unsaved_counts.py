"""Warns of what a callback of the user's counts and no save has: after a restart such a count begins anew.

Whether an attribute is a count or a setting cannot be told from its value, so the callbacks are looked at twice: when
training begins, and at the first save. What has changed meanwhile is named. A look is short whatever a callback holds,
asks nothing of objects that are no plain values, and never fails: it is only for a warning.
"""

import logging
import reprlib
from collections import deque
from collections.abc import Iterable, Sized
from typing import Any

logger = logging.getLogger("raycheck")

_OF_LIBRARIES = {"transformers", "trl", "accelerate", "peft", "ray", "raycheck"}
_MAX_ITEMS = 10_000
"""Of longer values only the length is compared."""


class UnsavedCounts:
    """Remembers the plain values in the callbacks that no save has."""

    def __init__(self, callbacks: Iterable[Any]) -> None:
        self._began = [(callback, _plain(callback)) for callback in callbacks if _is_left_out(callback)]

    def warn(self) -> None:
        """Logs a warning for each callback that has counted since the beginning, once."""
        began, self._began = self._began, []
        for callback, before in began:
            now = _plain(callback)
            counted = sorted(name for name, text in now.items() if before.get(name) != text)
            if counted:
                logger.warning(
                    "the callback %s counts in %s, which is not saved: after a restart it begins anew. Give it "
                    "state_dict() and load_state_dict(), or make it an ExportableState",
                    type(callback).__qualname__,
                    ", ".join(counted),
                )


def _is_left_out(callback: Any) -> bool:
    from transformers.trainer_callback import ExportableState

    is_library = type(callback).__module__.partition(".")[0] in _OF_LIBRARIES
    return not (is_library or isinstance(callback, ExportableState) or hasattr(callback, "load_state_dict"))


def _plain(callback: Any) -> dict[str, str]:
    """Returns the plain values in a callback's attributes, as short text, by name."""
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
    """Writes the first items of plain values as text, two levels deep; of any other object it writes the class."""

    def __init__(self) -> None:
        super().__init__()
        self.maxlevel = 2
        self.maxlist = self.maxtuple = self.maxset = self.maxdict = self.maxdeque = 100
        self.maxstring = self.maxlong = _MAX_ITEMS

    def repr_instance(self, x: Any, level: int) -> str:
        for kind in (dict, list, tuple, set, deque):
            if isinstance(x, kind):  # one of its own class, such as a Counter
                return str(getattr(self, f"repr_{kind.__name__}")(x, level))
        if x is None or isinstance(x, (int, float, complex)):
            return repr(x)
        return repr(x[:_MAX_ITEMS]) if isinstance(x, (str, bytes)) else type(x).__qualname__


_SHORT = _Short()
