"""Works with whole runs, and with their files: copies, forks, archives, downloads, imports and deletes them.

Everything loads on first use, so that none of these costs what another one imports.
"""

from typing import TYPE_CHECKING

from raycheck.public_names import on_first_use

if TYPE_CHECKING:
    from raycheck.bucket.protocol.object_copy import StoppedError
    from raycheck.bucket.protocol.removal.delete import DeletedRun
    from raycheck.bucket.protocol.sharing.fork import Forked
    from raycheck.catalog.archive.layout import Archived
    from raycheck.catalog.archive.pack import pack
    from raycheck.catalog.archive.tar import TarStream
    from raycheck.catalog.archive.unpack import unpack
    from raycheck.catalog.copy import CopiedRun, copy_run
    from raycheck.catalog.deletes import delete_checkpoint, delete_run
    from raycheck.catalog.download_checkpoint import Downloaded, download
    from raycheck.catalog.follow import FollowNews, follow_run
    from raycheck.catalog.forks import fork_run
    from raycheck.catalog.importing.import_checkpoint import Imported, import_checkpoint
    from raycheck.catalog.policy import PrunedRun, prune_runs

__all__ = [
    "Archived",
    "CopiedRun",
    "DeletedRun",
    "Downloaded",
    "FollowNews",
    "Forked",
    "Imported",
    "PrunedRun",
    "StoppedError",
    "TarStream",
    "copy_run",
    "delete_checkpoint",
    "delete_run",
    "download",
    "follow_run",
    "fork_run",
    "import_checkpoint",
    "pack",
    "prune_runs",
    "unpack",
]

__getattr__, __dir__ = on_first_use(
    __name__,
    {
        "raycheck.bucket.protocol.object_copy": ("StoppedError",),
        "raycheck.bucket.protocol.removal.delete": ("DeletedRun",),
        "raycheck.bucket.protocol.sharing.fork": ("Forked",),
        "raycheck.catalog.archive.layout": ("Archived",),
        "raycheck.catalog.archive.pack": ("pack",),
        "raycheck.catalog.archive.tar": ("TarStream",),
        "raycheck.catalog.archive.unpack": ("unpack",),
        "raycheck.catalog.copy": ("CopiedRun", "copy_run"),
        "raycheck.catalog.deletes": ("delete_checkpoint", "delete_run"),
        "raycheck.catalog.download_checkpoint": ("Downloaded", "download"),
        "raycheck.catalog.follow": ("FollowNews", "follow_run"),
        "raycheck.catalog.forks": ("fork_run",),
        "raycheck.catalog.importing.import_checkpoint": ("Imported", "import_checkpoint"),
        "raycheck.catalog.policy": ("PrunedRun", "prune_runs"),
    },
)
