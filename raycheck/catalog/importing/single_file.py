"""Reads one torch.save file: a state dict, a dict of several, or a Lightning checkpoint."""

from collections.abc import Mapping
from typing import Any

import torch

from raycheck.catalog.importing.source_files import SourceFiles
from raycheck.catalog.importing.source_tensors import SourceTensors
from raycheck.catalog.importing.state_in_source import ReadSettings, SourceState, count_in
from raycheck.catalog.importing.torch_file import read_torch_file
from raycheck.errors import ConfigError

LIGHTNING_VERSION = "pytorch-lightning_version"
_SUFFIXES = ("_state_dict", "_state")


def read_single_file(files: SourceFiles, settings: ReadSettings) -> SourceState:
    """Read a torch.save file. Raises ConfigError if it contains anything but a dict."""
    tensors = SourceTensors()
    loaded = read_torch_file(files, files.only, tensors, verify=settings.verify)
    if not isinstance(loaded, Mapping) or not loaded:
        raise ConfigError(f"{files} contains a {type(loaded).__name__}, not a state dict or a dict of state dicts")
    if LIGHTNING_VERSION in loaded:
        return _of_lightning(loaded, tensors)
    is_state_dict = all(
        isinstance(value, torch.Tensor) or str(key).endswith("_extra_state") for key, value in loaded.items()
    )
    tree = {"model": loaded} if is_state_dict else {_plain(str(key)): value for key, value in loaded.items()}
    if not is_state_dict and len(tree) < len(loaded):
        raise ConfigError(f"{files}: several of its keys would be entries of one name: {', '.join(map(str, loaded))}")
    return SourceState(
        kind="torch",
        tree=tree,
        tensors=tensors,
        step=None if is_state_dict else count_in(loaded, "global_step", "step", "iteration"),
        epoch=None if is_state_dict else count_in(loaded, "epoch"),
    )


def _of_lightning(loaded: Mapping[Any, Any], tensors: SourceTensors) -> SourceState:
    """Return the model, the step, and the epoch of a Lightning checkpoint."""
    taken = {"state_dict", "epoch", "global_step", LIGHTNING_VERSION}
    return SourceState(
        kind="lightning",
        tree={"model": loaded.get("state_dict", {})},
        tensors=tensors,
        step=count_in(loaded, "global_step"),
        epoch=count_in(loaded, "epoch"),
        left_out=tuple(str(key) for key in loaded if key not in taken),
    )


def _plain(key: str) -> str:
    """Return the entry's name for a key such as model_state_dict."""
    return next((key.removesuffix(end) for end in _SUFFIXES if key.endswith(end) and key != end), key)
