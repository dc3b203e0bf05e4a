"""Decides what a metric may be: a number, or a tensor of one number, which is read only when somebody needs it.

Everything else is refused by name at the first step that has it, on all ranks, and not only at a step that saves.
Nothing here waits for a device, except `numbers_of`.
"""

import json
import math
import sys
from collections.abc import Mapping
from numbers import Real

import torch
from torch.distributed.tensor import DTensor

from raycheck.errors import ConfigError

MAX_NAME = 1000
"""How many bytes a metric's name may have in JSON: `latest`, which has at most 256 KiB, lists 32 per checkpoint."""
_ESCAPED = 12
"""How many bytes one character may have in JSON."""


def checked(metrics: Mapping[str, object]) -> dict[str, float | torch.Tensor]:
    """Return the metrics as floats, and tensors detached, so that keeping a metric does not keep its graph alive.

    Raises ConfigError, naming the metric, for what is not one real number.
    """
    found: dict[str, float | torch.Tensor] = {}
    for name, value in metrics.items():
        if not isinstance(name, str) or not name:
            raise ConfigError(f"a metric has the name {name!r}; give it a name that is text")
        if len(name) > MAX_NAME // _ESCAPED and len(json.dumps(name)) > MAX_NAME:
            raise ConfigError(
                f"metrics[{name[:50]!r}...]: this name has {len(name)} characters, and each checkpoint in `latest` "
                f"repeats it; give a name of at most {MAX_NAME} bytes in JSON"
            )
        found[name] = _tensor(name, value) if isinstance(value, torch.Tensor) else _number(name, value)
    return found


def numbers_of(metrics: Mapping[str, object]) -> dict[str, float]:
    """Return the finite metrics as floats. It waits for the tensors' devices. Raises ConfigError as `checked` does."""
    numbers = {name: float(value) for name, value in checked(metrics).items()}
    return {name: value for name, value in numbers.items() if math.isfinite(value)}  # a run that diverges is saved too


def _number(name: str, value: object) -> float:
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(value, numpy.ndarray | numpy.bool_):
        if value.size != 1 or value.dtype.kind not in "biuf":
            raise _refused(name, f"an array of {value.dtype} and shape {list(value.shape)}")
        value = value.item()
    if not isinstance(value, Real):
        raise _refused(name, f"a {type(value).__name__}")
    try:
        return float(value)
    except OverflowError:
        raise _refused(name, "an integer that no float can hold") from None


def _tensor(name: str, value: torch.Tensor) -> torch.Tensor:
    if isinstance(value, DTensor):
        if not all(placement.is_replicate() for placement in value.placements):
            raise ConfigError(
                f"metrics[{name!r}] is a DTensor of which each rank has only a part ({value.placements}): reading it "
                "takes all ranks. Give its full_tensor(), which all of them call"
            )
        value = value.to_local()
    value = value.detach()
    if value.numel() != 1 or value.is_complex() or value.is_meta:
        kind = f"{value.dtype} and shape {list(value.shape)}{' without data' if value.is_meta else ''}"
        raise _refused(name, f"a tensor of {kind}")
    return value


def _refused(name: str, what: str) -> ConfigError:
    return ConfigError(f"metrics[{name!r}] is {what}; give a real number, or a tensor or an array of one")
