"""Loads a fresh run's weights from the source in torchtitan's settings: Hugging Face files, DCP directory, or run."""

from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict_loader import load
from torchtitan.tools import filesystem

from raycheck.adapters import Run, open_run
from raycheck.errors import ConfigError, NotFoundError
from raycheck.frameworks.shaped_module import ShapedModule


def load_first_weights(config: Any, model: nn.Module, parts: list[nn.Module], adapter: Any) -> bool:
    """Load a fresh run's model as `initial_load_path` and `initial_load_in_hf` say. Returns False if neither is set.

    Raises ConfigError when there is nothing to load from.
    """
    path = config.initial_load_path
    if config.initial_load_in_hf:
        _load_hugging_face(path or getattr(adapter, "hf_assets_path", None), parts, adapter, config)
        return True
    if not path:
        return False
    try:
        open_run(path).restore(into={"model": model})
    except NotFoundError:
        _load_dcp(path, parts)
    return True


def _load_hugging_face(path: str | None, parts: list[nn.Module], adapter: Any, config: Any) -> None:
    """Load the model from a folder of Hugging Face files, or from a run whose model uses Hugging Face's names."""
    if adapter is None:
        raise ConfigError("initial_load_in_hf: this model has no state_dict_adapter, which maps Hugging Face's names")
    run = _run_at(path) if path else None
    if path and run is None and filesystem.is_remote(path):
        raise ConfigError(
            f"initial_load_in_hf: there is no checkpoint of a raycheck run at {path}. For Hugging Face files in a "
            "bucket, convert them to a run once, by raycheck import FILES RUN, and give RUN as initial_load_path"
        )
    if run is None and (not path or not filesystem.isdir(path)):
        raise ConfigError(
            f"initial_load_in_hf: {path!r} is not a folder; give initial_load_path, or an hf_assets_path with weights"
        )
    found = adapter.to_hf(_weights(parts))
    if run is not None:
        _fill(found, run)
    else:
        load(found, storage_reader=adapter.get_hf_storage_reader(path, config.initial_load_in_hf_quantized))
    weights = adapter.from_hf(found)
    for part in parts:
        part.load_state_dict(weights, strict=False)


def _run_at(path: str) -> Run | None:
    """Return the run at `path`, or None if there is none or it has no commit yet."""
    try:
        run = open_run(path)
    except NotFoundError:
        return None
    return None if run.head is None else run


def _fill(tensors: dict[str, torch.Tensor], run: Run) -> None:
    """Read tensors by name from the entry `model` of the run's newest checkpoint.

    Each rank reads its own part of them. Raises ConfigError when a tensor is missing there.
    """
    assert run.head is not None, "see _run_at"
    there = {tensor.name for tensor in run.head.tensors()}
    if missing := sorted(name for name in tensors if f"model.{name}" not in there):
        raise ConfigError(
            f"initial_load_in_hf: {run.head.key} in initial_load_path has no model.{missing[0]}. Give a run that "
            "'raycheck import' created from Hugging Face files, or leave initial_load_in_hf out for a run saved by "
            "torchtitan"
        )
    run.head.restore(into={"model": ShapedModule(tensors)}, strict=False, cast=True)


def _load_dcp(path: str, parts: list[nn.Module]) -> None:
    if not filesystem.isdir(path):
        raise ConfigError(f"initial_load_path={path!r}: neither a raycheck run nor a folder")
    weights = _weights(parts)
    with torch.no_grad():
        load(weights, checkpoint_id=path)
    for part in parts:
        part.load_state_dict(weights, strict=False)


def _weights(parts: list[nn.Module]) -> dict[str, Any]:
    return {name: value for part in parts for name, value in part.state_dict().items()}
