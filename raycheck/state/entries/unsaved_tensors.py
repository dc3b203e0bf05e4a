"""Refuses objects that contain tensors although their state_dict() is empty: a save of one would look complete."""

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from raycheck.errors import ConfigError


def refuse_unsaved(name: str, obj: object) -> None:
    """Raise ConfigError for an object with an empty state that contains tensors."""
    held = next(_tensors(obj, depth=2), None)
    if held is not None:
        raise ConfigError(
            f"state[{name!r}].state_dict() is empty, but the {type(obj).__qualname__} holds a tensor "
            f"({held.removeprefix('.')}), which would not be saved. Register it as a persistent buffer or return it "
            f"from state_dict(); or leave {name!r} out of the state, if the script recreates it at every start"
        )


def _tensors(value: object, *, depth: int) -> Iterator[str]:
    """Return the paths of the tensors in the attributes of `value` and of its children."""
    if isinstance(value, torch.Tensor):
        yield ""
    elif isinstance(value, torch.nn.Module):
        for path, module in value.named_modules():
            for key, buffer in {**module._parameters, **module._buffers}.items():  # noqa: SLF001
                if buffer is not None:
                    yield f".{path}.{key}".replace("..", ".")
            yield from (
                f".{path}{path_in_it}".replace("..", ".") for path_in_it in _tensors_in(_attributes(module), depth)
            )
    elif depth:
        items: Mapping[Any, Any] = dict(enumerate(value)) if isinstance(value, list | tuple) else _attributes(value)
        yield from _tensors_in(value if isinstance(value, dict) else items, depth)


def _tensors_in(items: Mapping[Any, Any], depth: int) -> Iterator[str]:
    for key, item in items.items():
        if not isinstance(item, torch.nn.Module):
            yield from (f".{key}{path_in_it}" for path_in_it in _tensors(item, depth=depth - 1))


def _attributes(value: object) -> Mapping[str, object]:
    hidden = ("_parameters", "_buffers", "_modules") if isinstance(value, torch.nn.Module) else ()
    return {key: item for key, item in getattr(value, "__dict__", {}).items() if key not in hidden}
