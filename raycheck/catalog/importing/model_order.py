"""Finds the order of a Hugging Face model's parameters: a safetensors file has its names in another one.

The model is built without memory by the installed transformers, from its configuration alone. No code of the source
runs: only classes of transformers itself are taken.
"""

from collections.abc import Collection, Mapping
from typing import Any

import torch

_COUNTED = ("layer", "block", "expert", "depth")


def parameters_in_order(config: Any, weights: Collection[str]) -> list[str]:
    """Returns the names of the model's parameters in its order; [] when they cannot be known here.

    weights: the names in the files. All of the model's parameters must be among them, tied ones by one name.
    """
    try:
        import transformers
    except ImportError:
        return []
    if not isinstance(config, Mapping) or "auto_map" in config or _is_larger(config, len(weights)):
        return []
    kind = getattr(transformers, str(next(iter(config.get("architectures") or ()), "")), None)
    if not isinstance(kind, type) or not issubclass(kind, transformers.PreTrainedModel):
        return []
    try:
        known = transformers.AutoConfig.for_model(**config)
        with torch.device("meta"):
            model = kind(known)
    except Exception:  # noqa: BLE001  a hostile or newer configuration: the caller then says what to give
        return []
    names: list[str] = []
    every: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        every.setdefault(id(parameter), []).append(name)
    for tied in every.values():
        names += [name for name in tied if name in weights][:1] or [""]
    return names if all(names) else []


def _is_larger(config: Mapping[str, Any], count: int) -> bool:
    """Returns whether the configuration names more layers than there are weights: building it could take for ever."""
    return any(
        _is_larger(value, count)
        if isinstance(value, Mapping)  # that of a part, such as text_config
        else isinstance(value, int) and value > count and any(word in str(key) for word in _COUNTED)
        for key, value in config.items()
    )
