"""Finds what has started this process as a rank of a training: Ray Train, torchrun, or nothing known.

It is a port: what lies below raycheck/on_ray asks here, and names nothing of Ray's.
"""

import sys
from importlib import import_module
from typing import Any

from raycheck.errors import ConfigError

_RAYS = "raycheck.on_ray.ray_host"
"""The module that answers in a process that has imported Ray. It is named and not imported: it lies above this one."""


class Host:
    """A process of which only torch.distributed knows what it is."""

    def rank_and_world_size(self) -> tuple[int, int]:
        """Return the rank and world size of torch.distributed, else (0, 1)."""
        import torch.distributed as dist

        if dist.is_available() and dist.is_initialized():
            return dist.get_rank(), dist.get_world_size()
        return 0, 1

    def group(self) -> Any:
        """Return this process's place in its worker group, a Group. Raise ConfigError where nobody has made one."""
        raise ConfigError(
            "not inside a Ray Train worker (num_workers=0 has none): start it with raycheck.fit(trainer), or, "
            "under torchrun, give group=raycheck.torchrun_group(uri)"
        )

    def is_turned_off(self) -> bool:
        """Return whether whoever started this process has turned raycheck off for it."""
        return False

    def dataset_names(self) -> list[str]:
        """Return the names of the datasets that the training was given by its host."""
        return []

    def can_fork(self) -> bool:
        """Return whether a fork of this process may run Python code safely."""
        return True


def host() -> Host:
    """Return what has started this process."""
    if "ray" not in sys.modules:
        return Host()
    found: Host = import_module(_RAYS).RayHost()
    return found
