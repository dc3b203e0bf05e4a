"""The numbers that a training gives at each step, to be kept with a checkpoint."""

import math
from collections.abc import Mapping

import torch

from raycheck.errors import ConfigError


def detached(metrics: Mapping[str, object]) -> dict[str, object]:
    """To be read later, perhaps, without holding what they were computed from."""
    return {name: value.detach() if isinstance(value, torch.Tensor) else value for name, value in metrics.items()}


def numbers_of(metrics: Mapping[str, object]) -> dict[str, float]:
    """Those that are finite. Raises ConfigError, naming it, for what is no number."""
    numbers = {}
    for name, value in metrics.items():
        if isinstance(value, torch.Tensor) and value.numel() == 1:
            value = value.item()  # noqa: PLW2901  read only on a step that saves
        if not isinstance(value, int | float):
            raise ConfigError(f"metrics[{name!r}] is a {type(value).__name__}; give a number or a 0-dim tensor")
        if math.isfinite(value):  # JSON has no nan, and a run that diverges must still be saved
            numbers[name] = float(value)
    return numbers
