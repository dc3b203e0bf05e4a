"""Accesses the datasets that Ray Train splits among its workers, and splits one again without some of its rows.

Ray Train gives each worker an iterator over its share. The datasets themselves are in an actor of Ray Train, the
dataset manager, which splits them according to the trainer's DataConfig. A dataset is split again there, with rows
removed, by the same DataConfig: its options and resources apply to both.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import ray
import ray.train

from raycheck.errors import ConfigError
from raycheck.on_ray.api.calls import run_in
from raycheck.on_ray.api.train_context import dataset_manager

SPLIT_S = 600.0
"""The time limit for the dataset manager to split a dataset; it starts one actor for that."""
_NEEDED = "_datasets", "_data_config", "_world_size", "_worker_node_ids", "_coordinator_actors"


def shard_of(name: str) -> Any:
    """Return this worker's share of a dataset. This is a barrier. Raises ConfigError if it is not split."""
    manager = dataset_manager()
    absent = _NEEDED if manager is None else ray.get(run_in(manager, _names_absent), timeout=SPLIT_S)
    if absent:
        raise ConfigError(
            f"RayData({name!r}): Ray {ray.__version__} has no dataset manager that raycheck knows; Ray 2.60 has one"
        )
    try:
        shard = ray.train.get_dataset_shard(name)
    except KeyError as error:
        raise ConfigError(f"RayData({name!r}): the trainer was given no such dataset") from error
    if not _is_share(shard):
        raise ConfigError(
            f"RayData({name!r}): every rank reads all of this dataset, because of the trainer's "
            "DataConfig(datasets_to_split), so no row belongs to one rank. Have it split, or use "
            "ray.train.get_dataset_shard"
        )
    return shard


def shares_without(name: str, keep: Callable[[Any], Any]) -> list[Any]:
    """Return one share of a dataset per rank, after applying `keep` to its blocks.

    keep: is called with a pyarrow table, and returns it with fewer rows. It runs in Ray Data's tasks. One rank calls
    this.
    """
    shares: list[Any] = ray.get(run_in(dataset_manager(), partial(_split, name=name, keep=keep)), timeout=SPLIT_S)
    return shares


def _names_absent(manager: Any) -> list[str]:
    return [name for name in _NEEDED if not hasattr(manager, name)]


def _split(manager: Any, *, name: str, keep: Callable[[Any], Any]) -> list[Any]:
    """Split a dataset as the manager does. Runs in its process."""
    dataset = manager._datasets[name].map_batches(  # noqa: SLF001
        keep, batch_size=None, batch_format="pyarrow", zero_copy_batch=True
    )
    by_rank = manager._data_config.configure(  # noqa: SLF001
        datasets={name: dataset},
        world_size=manager._world_size,  # noqa: SLF001
        worker_handles=None,
        worker_node_ids=manager._worker_node_ids,  # noqa: SLF001
    )
    shares = [shares[name] for shares in by_rank]
    manager._coordinator_actors.append(shares[0]._coord_actor)  # noqa: SLF001  so that its execution ends with the group
    return shares


def _is_share(shard: Any) -> bool:
    return hasattr(shard, "_coord_actor")
