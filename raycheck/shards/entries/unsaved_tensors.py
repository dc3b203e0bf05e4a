"""What an object holds although its state_dict() gives nothing: a save of it would look whole, and be empty."""

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from raycheck.errors import ConfigError


def refuse_unsaved(name: str, owner: object) -> None:
    """Raise ConfigError for an object without any state that holds tensors."""
    held = next(_tensors(owner, depth=2), None)
    if held is not None:
        raise ConfigError(
            f"state[{name!r}].state_dict() gives nothing, but the {type(owner).__qualname__} holds a tensor "
            f"({held.removeprefix('.')}): nothing of it would be saved. Register it as a persistent buffer or give it "
            f"in state_dict(); or leave {name!r} out of the state, if it is made anew at every start"
        )


def _tensors(value: object, *, depth: int) -> Iterator[str]:
    """Places of tensors in its attributes, its children included."""
    if isinstance(value, torch.Tensor):
        yield ""
    elif isinstance(value, torch.nn.Module):
        for path, module in value.named_modules():
            for key, buffer in {**module._parameters, **module._buffers}.items():  # noqa: SLF001
                if buffer is not None:
                    yield f".{path}.{key}".replace("..", ".")
            yield from (f".{path}{place}".replace("..", ".") for place in _inside(_own(module), depth))
    elif depth:
        items: Mapping[Any, Any] = dict(enumerate(value)) if isinstance(value, list | tuple) else _own(value)
        yield from _inside(value if isinstance(value, dict) else items, depth)


def _inside(items: Mapping[Any, Any], depth: int) -> Iterator[str]:
    for key, item in items.items():
        if not isinstance(item, torch.nn.Module):
            yield from (f".{key}{place}" for place in _tensors(item, depth=depth - 1))


def _own(value: object) -> Mapping[str, object]:
    hidden = ("_parameters", "_buffers", "_modules") if isinstance(value, torch.nn.Module) else ()
    return {key: item for key, item in getattr(value, "__dict__", {}).items() if key not in hidden}
