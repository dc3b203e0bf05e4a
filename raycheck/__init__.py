"""raycheck: checkpointing for Ray Train straight to cloud object storage.

A script calls these names to train and to inspect a run. The rest are in four modules: `raycheck.errors` has every
error, `raycheck.catalog` works with whole runs and their files, `raycheck.adapters` has the parts of a framework's
adapter, and `raycheck.values` has the types that calls return. Adapters for frameworks are `raycheck.lightning` and so
on; `raycheck.loggers` lists checkpoints in experiment trackers.

Everything loads on first use, so that browsing a bucket imports neither torch nor ray.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from raycheck.public_names import on_first_use

if TYPE_CHECKING:
    __version__: str
    from raycheck import adapters as adapters
    from raycheck import catalog as catalog
    from raycheck import errors as errors
    from raycheck import loggers as loggers
    from raycheck import values as values
    from raycheck.catalog.listing import list_runs
    from raycheck.data.batches import Batches
    from raycheck.errors import RaycheckError
    from raycheck.frameworks import accelerate as accelerate
    from raycheck.frameworks import lightning as lightning
    from raycheck.frameworks import torchtitan as torchtitan
    from raycheck.frameworks import transformers as transformers
    from raycheck.group.served_group import torchrun_group
    from raycheck.group.worker.checkpointer import Checkpointer
    from raycheck.on_ray.actors.actor_checkpointer import ActorCheckpointer
    from raycheck.on_ray.data.ray_data import RayData
    from raycheck.on_ray.fit import fit
    from raycheck.published.follower import follow
    from raycheck.run import Run, export_hf, open_checkpoint, open_run
    from raycheck.settings import AfterCommit, Alerts, SaveSettings
    from raycheck.state.entries.per_rank_entries import PerRank, RankZero
    from raycheck.storage_settings import StorageSettings

_HOMES = {
    "raycheck.catalog.listing": ("list_runs",),
    "raycheck.data.batches": ("Batches",),
    "raycheck.errors": ("RaycheckError",),
    "raycheck.group.served_group": ("torchrun_group",),
    "raycheck.group.worker.checkpointer": ("Checkpointer",),
    "raycheck.on_ray.actors.actor_checkpointer": ("ActorCheckpointer",),
    "raycheck.on_ray.data.ray_data": ("RayData",),
    "raycheck.on_ray.fit": ("fit",),
    "raycheck.published.follower": ("follow",),
    "raycheck.run": ("Run", "export_hf", "open_checkpoint", "open_run"),
    "raycheck.settings": ("AfterCommit", "Alerts", "SaveSettings"),
    "raycheck.state.entries.per_rank_entries": ("PerRank", "RankZero"),
    "raycheck.storage_settings": ("StorageSettings",),
}
_MODULES: dict[str, str] = {
    "accelerate": "raycheck.frameworks.accelerate",
    "adapters": "raycheck.adapters",
    "catalog": "raycheck.catalog",
    "errors": "raycheck.errors",
    "lightning": "raycheck.frameworks.lightning",
    "loggers": "raycheck.loggers",
    "torchtitan": "raycheck.frameworks.torchtitan",
    "transformers": "raycheck.frameworks.transformers",
    "values": "raycheck.values",
}
"""The home of each public module, by the name under which users reach it: raycheck.NAME."""

__all__ = [
    "ActorCheckpointer",
    "AfterCommit",
    "Alerts",
    "Batches",
    "Checkpointer",
    "PerRank",
    "RankZero",
    "RayData",
    "RaycheckError",
    "Run",
    "SaveSettings",
    "StorageSettings",
    "export_hf",
    "fit",
    "follow",
    "list_runs",
    "open_checkpoint",
    "open_run",
    "torchrun_group",
]

_load, _names = on_first_use(__name__, _HOMES)


def __dir__() -> list[str]:
    return sorted({*_names(), *_MODULES, "__version__"})


def __getattr__(name: str) -> object:
    if name == "__version__":
        return _version()
    return import_module(_MODULES[name]) if name in _MODULES else _load(name)


def _version() -> str:
    """Return the installed version. It is unknown if `raycheck submit` shipped raycheck with the job."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("raycheck")
    except PackageNotFoundError:
        return "0+unknown"
