"""Finds out what started this process as a rank of a training run: Ray Train, torchrun, or nothing known.

This is a port: modules below raycheck/on_ray ask here, and use no name of Ray's.
"""

import os
import sys
import threading
from importlib import import_module
from typing import Any

from raycheck.errors import ConfigError

_RAYS = "raycheck.on_ray.ray_host"
_COPIES = "raycheck.on_ray.version_copies"
"""The modules that answer in a process that has imported Ray. They are in a layer above, so they are loaded by name."""
_is_forked = False


class VersionCopies:
    """Copies of newly published versions, which are nearer than the bucket. Here there are none.

    Whoever takes one compares it with its checksum, as if it came from the bucket, and reads the bucket instead if it
    is not there. So a copy may go at any time, and no method raises.
    """

    def begin(self, directory: str) -> None:
        """Begin to add a version, without what was added before. Nobody finds it until `announce`."""

    def add(self, name: str, data: memoryview) -> None:
        """Add a file of the version that was begun, if there is room for it."""

    def announce(self) -> None:
        """Let readers find the version that was begun, and tell them of it: the list in the bucket names it now."""

    def take(self, directory: str, name: str) -> memoryview | None:
        """Return a file of a version, or None if it is not here."""
        del directory, name
        return None

    def wake_at_next(self, wake: threading.Event) -> None:
        """Set `wake` once when another version has been announced than the one of which this object knows."""


class Host:
    """A process without Ray: only torch.distributed knows its rank."""

    def rank_and_world_size(self) -> tuple[int, int]:
        """Return the rank and world size of torch.distributed, else (0, 1)."""
        import torch.distributed as dist

        if dist.is_available() and dist.is_initialized():
            return dist.get_rank(), dist.get_world_size()
        return 0, 1

    def group(self) -> Any:
        """Return this process's place in its worker group, a Group. Raises ConfigError if it is in none."""
        raise ConfigError(
            "not inside a Ray Train worker (num_workers=0 has none): start it with raycheck.fit(trainer), or, "
            "under torchrun, give group=raycheck.torchrun_group(uri)"
        )

    def is_turned_off(self) -> bool:
        """Return whether whoever started this process turned raycheck off for it."""
        return False

    def dataset_names(self) -> list[str]:
        """Return the names of the datasets that the host gave to the training run."""
        return []

    def can_fork(self) -> bool:
        """Return whether a fork of this process can run Python code safely."""
        return True


def host() -> Host:
    """Return the host that started this process."""
    if "ray" not in sys.modules:
        return Host()
    found: Host = import_module(_RAYS).RayHost()
    return found


def version_copies(uri: str) -> VersionCopies:
    """Return the copies of versions that are published at `uri`. Needs no more of Ray than its core."""
    if "ray" not in sys.modules:
        return VersionCopies()
    try:
        found: VersionCopies = import_module(_COPIES).RayVersionCopies(uri)
    except ImportError:
        return VersionCopies()
    return found


def is_forked_from_ray() -> bool:
    """Return whether this process was forked from one that is connected to Ray, whose calls would hang here."""
    return _is_forked


def _note_fork() -> None:
    global _is_forked  # noqa: PLW0603  a fork changes it, and nothing else
    ray = sys.modules.get("ray")
    _is_forked = _is_forked or (ray is not None and ray.is_initialized())


os.register_at_fork(after_in_child=_note_fork)
