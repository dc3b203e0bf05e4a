"""Checks and repairs a Ray trainer's configuration before it starts, and cleans up after its controller has died."""

from typing import Any

import ray
import ray.util.client
from ray.util.placement_group import PlacementGroup, remove_placement_group

from raycheck.errors import ConfigError
from raycheck.log import event, logger


def refuse_unsupported(trainer: Any) -> None:
    """Raise ConfigError for uses of Ray in which nothing could be trained or restored."""
    if ray.util.client.ray.is_connected():
        raise ConfigError(
            "this driver is connected through Ray Client (ray://), whose death nobody in the cluster would notice. "
            "Submit it as a job: ray job submit -- python script.py"
        )
    if trainer.scaling_config.num_workers == 0:
        raise ConfigError("ScalingConfig(num_workers=0) runs without workers; use num_workers=1 to save and restore")
    if getattr(trainer, "validation_config", None) is not None:
        raise ConfigError(
            "validation_config=...: raycheck does not call a trainer's validation function. Pass it as "
            "SaveSettings(after_commit=raycheck.AfterCommit(function)); it is called with the run's URI and the "
            "checkpoint's key, and keeps what it measures by raycheck.open_run(uri).score(key, {...})"
        )
    name = trainer.run_config.name or ""
    if not name.isascii():
        raise ConfigError(
            f"RunConfig(name={name!r}): Ray Train's own metrics take names of ASCII alone, so its controller would "
            "fail. Other letters may be in storage_path"
        )


def keep_collectives_whole(failures: Any) -> bool:
    """Turn off an option that would let a rank skip one of Ray's collectives that the others take part in.

    failures: a FailureConfig. Return whether it had to be changed.
    """
    is_relaxed = bool(getattr(failures, "relax_collectives_on_preemption", False))
    if is_relaxed:
        failures.relax_collectives_on_preemption = False
    return is_relaxed


def release_nodes_of(controller_id: str) -> None:
    """Remove the placement groups of a controller that died.

    Ray's own cleanup queries the dashboard. If no dashboard is running, the groups would hold the nodes until the job
    ends, and the next controller would wait forever.
    """
    try:
        from ray._private.state import state
        from ray.core.generated.gcs_pb2 import PlacementGroupTableData

        accessor = state._connect_and_get_accessor()  # noqa: SLF001
        table = [PlacementGroupTableData.FromString(row) for row in accessor.get_placement_group_table()]
    except (ImportError, AttributeError, ray.exceptions.RayError) as error:
        logger.warning(event(f"the nodes of Ray Train's dead controller may stay reserved: {error}"))
        return
    for group in table:
        if group.creator_actor_id.hex() == controller_id and group.state != PlacementGroupTableData.REMOVED:
            remove_placement_group(PlacementGroup(ray.PlacementGroupID(group.placement_group_id)))
