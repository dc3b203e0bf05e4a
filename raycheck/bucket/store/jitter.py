"""Draws random pauses from raycheck's own generator, and makes the clients of its stores do so too.

The random state of a training process belongs to the user. It is saved and restored, and ranks with one seed have the
same state. A single draw for a pause between two requests would make the ranks differ permanently. So all of raycheck
uses this generator instead of the module `random`.
"""

import os
import random
from importlib import import_module
from types import ModuleType
from typing import Any

CHANCE = random.Random()
os.register_at_fork(after_in_child=CHANCE.seed)  # as `random` does: forks with one state would meet again and again
_MODULES = {
    "aiohttp": ("aiohttp.connector",),
    "azure": ("azure.core.pipeline.policies._authentication", "azure.core.pipeline.policies._authentication_async"),
    "botocore": ("botocore.retryhandler", "botocore.retries.standard", "botocore.utils"),
    "gcsfs": ("gcsfs.retry", "google.auth._exponential_backoff"),
}
"""The modules that draw, by client. tests/bucket/store/test_jitter.py searches everything that a store imports."""


def draw_apart(client: str) -> None:
    """Make an installed client draw from CHANCE. Call this before the client's first request."""
    for name in _MODULES[client]:
        module = import_module(name)
        if getattr(module, "random", None) is random:
            vars(module)["random"] = CHANCE
            _replace_defaults(module)


def _replace_defaults(module: ModuleType) -> None:
    """Replace default arguments that are functions of `random`: they were bound when the module was loaded."""
    for made in vars(module).values():
        if isinstance(made, type) and made.__module__ == module.__name__:
            start: Any = vars(made).get("__init__")
            if defaults := getattr(start, "__defaults__", None):
                start.__defaults__ = tuple(CHANCE.random if value == random.random else value for value in defaults)
