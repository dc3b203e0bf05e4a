"""Finds out what started a process that uses Ray: Ray Train, or a user's driver or actor."""

import ray

from raycheck.host import Host
from raycheck.on_ray.api import train_context
from raycheck.on_ray.api.controller_callbacks import is_turned_off
from raycheck.on_ray.ray_group import RayGroup, group_of_ray_train


class RayHost(Host):
    """A process that has imported Ray: perhaps a worker of Ray Train."""

    def rank_and_world_size(self) -> tuple[int, int]:
        return train_context.rank_and_world_size() if train_context.in_ray_train() else super().rank_and_world_size()

    def group(self) -> RayGroup:
        if not train_context.in_ray_train():
            super().group()  # raises
        return group_of_ray_train()

    def is_turned_off(self) -> bool:
        return is_turned_off()

    def dataset_names(self) -> list[str]:
        return train_context.dataset_names()

    def can_fork(self) -> bool:
        """Return whether this process is an actor of Ray, or not connected to Ray: a driver may hang after a fork."""
        return not ray.is_initialized() or ray.get_runtime_context().get_actor_id() is not None
