"""Saves, seeds and finds the script's own random generators, as entries of the state and inside datasets.

These are torch.Generator, numpy.random.Generator and RandomState, and random.Random. As an entry, such a generator is a
value like any other: it must be equal on all ranks, which the first save checks. One that differs between ranks goes
into PerRank. state/random_state.py handles the global generators.
"""

import random
import sys
from collections.abc import Iterator
from types import FunctionType, ModuleType
from typing import Any

import torch

from raycheck.errors import StateMismatchError

MAX_ITEMS = 100
"""Larger containers in a dataset are not searched: lists of samples are longer, lists of transforms shorter."""
MAX_DEPTH = 8
_LEAVES = type | ModuleType | FunctionType | torch.Tensor | str | bytes | int | float


def is_generator(value: object) -> bool:
    """Return whether `value` is a generator whose state can be saved and restored."""
    is_known = isinstance(value, torch.Generator | random.Random) or _is_of_numpy(value)
    return is_known and not isinstance(value, random.SystemRandom)


def kind_of_generator(generator: Any) -> str:
    """Describe what, besides the state, determines the numbers: the library, and its device or algorithm."""
    if isinstance(generator, torch.Generator):
        return f"torch ({generator.device.type})"
    if isinstance(generator, random.Random):
        return "python"
    state = generator.get_state(legacy=False) if _is_legacy(generator) else generator.bit_generator.state
    return f"numpy ({type(generator).__name__} of {state['bit_generator']})"


class GeneratorState:
    """An adapter that gives a generator a state_dict and a load_state_dict."""

    def __init__(self, generator: Any) -> None:
        self._generator = generator

    def state_dict(self) -> dict[str, Any]:
        generator = self._generator
        if isinstance(generator, torch.Generator):
            state: Any = bytes(generator.get_state().numpy())
        elif isinstance(generator, random.Random):
            state = generator.getstate()
        else:
            state = generator.get_state(legacy=False) if _is_legacy(generator) else generator.bit_generator.state
        return {"kind": kind_of_generator(generator), "state": state}

    def check_state_dict(self, state: dict[str, Any]) -> None:
        """Raise StateMismatchError for the state of another kind of generator, which would produce other numbers."""
        kind = kind_of_generator(self._generator)
        saved = state.get("kind", "another object")
        if saved != kind:
            raise StateMismatchError(f"the checkpoint has a random generator of {saved}, but the one here is of {kind}")

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the generator's state. Raises as check_state_dict does."""
        self.check_state_dict(state)
        generator = self._generator
        if isinstance(generator, torch.Generator):
            generator.set_state(torch.frombuffer(bytearray(state["state"]), dtype=torch.uint8))
        elif isinstance(generator, random.Random):
            generator.setstate(state["state"])
        elif _is_legacy(generator):
            generator.set_state(state["state"])
        else:
            generator.bit_generator.state = state["state"]


def seed_generator(generator: Any, seed: int) -> None:
    """Start the generator's sequence at `seed`."""
    if isinstance(generator, torch.Generator):
        generator.manual_seed(seed)
    elif isinstance(generator, random.Random) or _is_legacy(generator):
        generator.seed(seed)
    else:
        generator.bit_generator.state = type(generator.bit_generator)(seed).state


def generators_in(value: object, path: str) -> Iterator[tuple[str, object]]:
    """Yield every generator in the attributes of an object and of the objects below it, once each, with its path.

    Global generators, to which a dataset may refer, are left out.
    """
    yield from _search(value, path, set(map(id, _global_generators())), MAX_DEPTH)


def _search(value: object, path: str, seen: set[int], depth: int) -> Iterator[tuple[str, object]]:
    if id(value) in seen or depth == 0 or isinstance(value, _LEAVES):
        return
    seen.add(id(value))
    if is_generator(value):
        yield path, value
        return
    if isinstance(value, list | tuple | dict):
        if len(value) > MAX_ITEMS:
            return
        items = value.items() if isinstance(value, dict) else enumerate(value)
        below = [(f"{path}[{key!r}]", item) for key, item in items]
    else:
        below = [(f"{path}.{name}", item) for name, item in getattr(value, "__dict__", {}).items()]
    for item_path, item in below:
        yield from _search(item, item_path, seen, depth - 1)


def _is_of_numpy(value: object) -> bool:
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, numpy.random.Generator | numpy.random.RandomState)


def _is_legacy(generator: object) -> bool:
    """Return whether `generator` is a RandomState, which caches one number outside its bit generator."""
    return isinstance(generator, sys.modules["numpy"].random.RandomState)


def _global_generators() -> list[object]:
    numpy = sys.modules.get("numpy")
    found: list[object] = [torch.default_generator, random._inst]  # noqa: SLF001
    return [*found, numpy.random.mtrand._rand] if numpy else found  # noqa: SLF001
