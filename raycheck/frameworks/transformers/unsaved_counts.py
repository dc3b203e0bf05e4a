"""Warns of what a callback of the user's counts and no save has: after a restart such a count begins anew.

Whether an attribute is a count or a setting cannot be told from its value, so the callbacks are looked at twice: when
training begins, and at the first save. What has changed meanwhile is named.
"""

import logging
from collections import deque
from collections.abc import Iterable
from typing import Any

logger = logging.getLogger("raycheck")

_OF_LIBRARIES = {"transformers", "trl", "accelerate", "peft", "ray", "raycheck"}
_MAX_TEXT = 100_000
"""Longer values are not compared: a look must cost nothing."""


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
    """Returns the plain values in a callback's attributes, as text, by name."""
    kinds = (int, float, complex, str, bytes, list, tuple, dict, set, deque)
    texts = {name: repr(value) for name, value in getattr(callback, "__dict__", {}).items() if isinstance(value, kinds)}
    return {name: text for name, text in texts.items() if len(text) <= _MAX_TEXT}
