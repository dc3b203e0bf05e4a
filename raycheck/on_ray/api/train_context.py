"""Reads from Ray Train what a worker knows (its rank, run and datasets), and reports checkpoints to it.

Each function works on the oldest and the newest supported Ray, and detects what the installed Ray offers.
"""

import sys
from collections.abc import Mapping
from typing import Any, TypeVar

import ray
import ray.train

from raycheck.settings import Retention

T = TypeVar("T")


def in_ray_train() -> bool:
    """Return whether this code runs in the train_fn of a Ray Train worker."""
    return _context() is not None


def rank_and_world_size() -> tuple[int, int]:
    """Return Ray Train's rank and world size."""
    context = _worker_context()
    return context.get_world_rank(), context.get_world_size()


def is_first_on_node() -> bool:
    """Return whether this rank is the lowest one of the run on its node."""
    context = _context()
    return context is None or context.get_local_rank() == 0


def broadcast(value: T) -> T:
    """Return rank 0's value on every rank. This is a barrier of actor calls: every rank must call it equally often."""
    from ray.train.collective import broadcast_from_rank_zero

    result: T = broadcast_from_rank_zero(value)
    return result


def run_config() -> Any:
    """Return the RunConfig of this worker's run."""
    return _worker_context().train_run_context.run_config


def retention_asked_for() -> Retention | None:
    """Return the retention that the RunConfig's CheckpointConfig asks for; None if it sets no limit."""
    config = run_config().checkpoint_config
    count, metric = getattr(config, "num_to_keep", None), getattr(config, "checkpoint_score_attribute", None)
    if count is None:
        return None
    if metric is None:
        return Retention(keep_last=count)
    return Retention(keep_best={"metric": metric, "mode": config.checkpoint_score_order, "count": count})


def train_run_id() -> str:
    """Return the id of this trainer.fit() call. It stays the same when Ray restarts the workers."""
    return str(_worker_context().train_run_context.run_id)


def controller_actor() -> Any:
    """Return the handle of the controller that started this worker."""
    return _worker_context().controller_actor


def dataset_names() -> list[str]:
    """Return the names of the trainer's datasets, as get_dataset_shard takes them."""
    provider = getattr(_context(), "dataset_shard_provider", None)
    for holder in ("_dataset_names", "_dataset_iterators"):  # the second one up to Ray 2.51
        if names := getattr(provider, holder, None):
            return sorted(names)
    return []


def dataset_manager() -> Any:
    """Return the actor that manages the datasets of this worker's run, or None if this Ray has no such actor."""
    return getattr(getattr(_context(), "dataset_shard_provider", None), "_dataset_manager", None)


def report_pointer(prefix: str, metrics: Mapping[str, float]) -> None:
    """Report the pointer directory `prefix`, which is relative to the run, to Ray as a checkpoint.

    Every rank calls this at the same step and with the same directory, so that ray.train.get_checkpoint() returns the
    same on all of them. Ray keeps rank 0's metrics.
    """
    storage = _worker_context().storage_context
    path = storage.build_checkpoint_path_from_name(prefix)
    ray.train.report(
        _ranked(metrics, run_config().checkpoint_config),
        checkpoint=ray.train.Checkpoint(path, filesystem=storage.storage_filesystem),
        checkpoint_upload_mode=ray.train.CheckpointUploadMode.NO_UPLOAD,
    )


def _ranked(metrics: Mapping[str, float], config: Any) -> dict[str, float]:
    """Return the metrics. If the score by which Ray ranks checkpoints is missing, add the worst possible one.

    It is missing if there was no such metric at this step, or if it was not finite. Without a score, Ray would consider
    the checkpoint the best of all if lower is better. Infinity would not survive Ray's JSON.
    """
    name = getattr(config, "checkpoint_score_attribute", None)
    if name is None or name in metrics:
        return dict(metrics)
    is_max = getattr(config, "checkpoint_score_order", "max") == "max"
    return {**metrics, name: -sys.float_info.max if is_max else sys.float_info.max}


def checkpoint_path() -> str | None:
    """Return the path of the checkpoint that Ray wants this worker to restore; None if Ray has none."""
    checkpoint = ray.train.get_checkpoint()
    return None if checkpoint is None else str(checkpoint.path)


def _worker_context() -> Any:
    context = _context()
    assert context is not None, "only called inside Ray Train"
    return context


def _context() -> Any:
    try:
        from ray.train.v2._internal.execution.context import get_train_context
    except ImportError:
        return None
    try:
        return get_train_context()
    except RuntimeError:
        return None
