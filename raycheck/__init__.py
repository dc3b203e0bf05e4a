"""raycheck: checkpointing for Ray Train straight to cloud object storage.

The names below are the whole public surface. They load on first use, so that browsing a bucket imports neither
torch nor ray.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    __version__: str
    from raycheck.bucket.protocol.removal.delete import DeletedRun
    from raycheck.bucket.protocol.sharing.fork import Forked
    from raycheck.catalog.archive.pack import pack
    from raycheck.catalog.archive.tar import TarStream
    from raycheck.catalog.archive.unpack import unpack
    from raycheck.catalog.copy import CopiedRun, copy_run
    from raycheck.catalog.deletes import delete_checkpoint, delete_run
    from raycheck.catalog.download import download
    from raycheck.catalog.follow import follow_run
    from raycheck.catalog.forks import fork_run
    from raycheck.catalog.importing.import_checkpoint import import_checkpoint
    from raycheck.catalog.listing import RunSummary, list_runs
    from raycheck.catalog.policy import prune_runs
    from raycheck.data.batches import Batches
    from raycheck.data.data_stream import DataStream
    from raycheck.errors import (
        ConfigError,
        ConflictError,
        CorruptError,
        DamagedError,
        DeniedError,
        FencedError,
        NotFoundError,
        RaycheckError,
        SaveFailedError,
        StateMismatchError,
        StoreError,
        SupersededError,
    )
    from raycheck.frameworks import accelerate as accelerate  # reached as raycheck.accelerate
    from raycheck.frameworks import lightning as lightning  # reached as raycheck.lightning
    from raycheck.frameworks import torchtitan as torchtitan
    from raycheck.frameworks import transformers as transformers  # reached as raycheck.transformers
    from raycheck.group.group import Group
    from raycheck.group.served_group import torchrun_group
    from raycheck.group.worker.checkpointer import Checkpointer
    from raycheck.group.worker.periodic import Periodic
    from raycheck.on_ray.actors.actor_checkpointer import ActorCheckpointer
    from raycheck.on_ray.actors.actor_state import ActorState
    from raycheck.on_ray.data.ray_data import RayData
    from raycheck.on_ray.fit import fit
    from raycheck.on_ray.ray_group import RayGroup, start_coordinator
    from raycheck.run import Run, export_hf, open_checkpoint, open_run
    from raycheck.settings import AfterCommit, SaveSettings
    from raycheck.state.entries.per_rank_entries import PerRank, RankZero
    from raycheck.storage_settings import StorageSettings

_HOMES = {
    "raycheck.bucket.protocol.removal.delete": ("DeletedRun",),
    "raycheck.bucket.protocol.sharing.fork": ("Forked",),
    "raycheck.catalog.deletes": ("delete_checkpoint", "delete_run"),
    "raycheck.catalog.forks": ("fork_run",),
    "raycheck.catalog.importing.import_checkpoint": ("import_checkpoint",),
    "raycheck.catalog.policy": ("prune_runs",),
    "raycheck.catalog.listing": ("RunSummary", "list_runs"),
    "raycheck.catalog.archive.pack": ("pack",),
    "raycheck.catalog.archive.tar": ("TarStream",),
    "raycheck.catalog.archive.unpack": ("unpack",),
    "raycheck.catalog.download": ("download",),
    "raycheck.catalog.copy": ("CopiedRun", "copy_run"),
    "raycheck.catalog.follow": ("follow_run",),
    "raycheck.errors": (
        "ConfigError",
        "ConflictError",
        "CorruptError",
        "DamagedError",
        "DeniedError",
        "FencedError",
        "NotFoundError",
        "RaycheckError",
        "SaveFailedError",
        "StateMismatchError",
        "StoreError",
        "SupersededError",
    ),
    "raycheck.run": ("Run", "export_hf", "open_checkpoint", "open_run"),
    "raycheck.settings": ("AfterCommit", "SaveSettings"),
    "raycheck.state.entries.per_rank_entries": ("PerRank", "RankZero"),
    "raycheck.storage_settings": ("StorageSettings",),
    "raycheck.on_ray.actors.actor_state": ("ActorState",),
    "raycheck.on_ray.actors.actor_checkpointer": ("ActorCheckpointer",),
    "raycheck.data.batches": ("Batches",),
    "raycheck.data.data_stream": ("DataStream",),
    "raycheck.on_ray.data.ray_data": ("RayData",),
    "raycheck.on_ray.fit": ("fit",),
    "raycheck.group.group": ("Group",),
    "raycheck.on_ray.ray_group": ("RayGroup", "start_coordinator"),
    "raycheck.group.served_group": ("torchrun_group",),
    "raycheck.group.worker.periodic": ("Periodic",),
    "raycheck.group.worker.checkpointer": ("Checkpointer",),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}
_FRAMEWORKS: dict[str, str] = {
    "transformers": "raycheck.frameworks.transformers",
    "lightning": "raycheck.frameworks.lightning",
    "accelerate": "raycheck.frameworks.accelerate",
    "torchtitan": "raycheck.frameworks.torchtitan",
}
"""The modules of adapters by the name under which they are reached: raycheck.NAME."""

__all__ = [
    "ActorCheckpointer",
    "ActorState",
    "AfterCommit",
    "Batches",
    "Checkpointer",
    "ConfigError",
    "ConflictError",
    "CopiedRun",
    "CorruptError",
    "DamagedError",
    "DataStream",
    "DeletedRun",
    "DeniedError",
    "FencedError",
    "Forked",
    "Group",
    "NotFoundError",
    "PerRank",
    "Periodic",
    "RankZero",
    "RayData",
    "RayGroup",
    "RaycheckError",
    "Run",
    "RunSummary",
    "SaveFailedError",
    "SaveSettings",
    "StateMismatchError",
    "StorageSettings",
    "StoreError",
    "SupersededError",
    "TarStream",
    "copy_run",
    "delete_checkpoint",
    "delete_run",
    "download",
    "export_hf",
    "fit",
    "follow_run",
    "fork_run",
    "import_checkpoint",
    "list_runs",
    "open_checkpoint",
    "open_run",
    "pack",
    "prune_runs",
    "start_coordinator",
    "torchrun_group",
    "unpack",
]


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_FRAMEWORKS, "__version__"})


def __getattr__(name: str) -> object:
    if name == "__version__":
        return _version()
    if name in _FRAMEWORKS:
        return import_module(_FRAMEWORKS[name])
    if name not in _HOME_OF:
        raise AttributeError(f"module 'raycheck' has no attribute {name!r}")
    return getattr(import_module(_HOME_OF[name]), name)


def _version() -> str:
    """Returns the installed version. It is unknown for a raycheck that `raycheck submit` sent along."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("raycheck")
    except PackageNotFoundError:
        return "0+unknown"
