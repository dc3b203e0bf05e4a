"""Works with whole runs, and with their files. Everything loads on first use.

- listing.py finds and opens the runs under a prefix: `raycheck runs`.
- forks.py creates a run from another run's checkpoint: `raycheck fork`.
- policy.py prunes many runs by the rules of a file: `raycheck prune-runs`.
- free_space.py frees an amount of space by dropping the oldest checkpoints of many runs: `raycheck clean`.
- deletes.py deletes checkpoints and runs: `raycheck delete`, `raycheck delete-run`.
- archive/ packs a checkpoint into one tar file, and creates a new run from such a file.
- download_checkpoint.py fetches a checkpoint into a folder, as stock DCP directories or safetensors files.
- download_safetensors.py is the part of it that needs torch.
- stored_objects.py finds a checkpoint and its objects, wherever they are stored.
- importing/ creates a run from a checkpoint that another program wrote: `raycheck import`.
- copy.py copies a run, or one checkpoint into a new run, to another place: `raycheck cp`.
- follow.py keeps a copy of a run up to date while it is trained.
- copier.py makes a mirror show what its source has, for copy.py and follow.py.
- watch_runs.py watches runs from outside and sends alerts: `raycheck watch`.
- doctor/ examines a bucket: `raycheck doctor`.
"""

from typing import TYPE_CHECKING

from raycheck.public_names import on_first_use

if TYPE_CHECKING:
    from raycheck.bucket.diagnosis.finding import BucketFinding
    from raycheck.bucket.protocol.removal.delete import DeletedRun
    from raycheck.bucket.protocol.sharing.fork import Forked
    from raycheck.catalog.archive.layout import Archived
    from raycheck.catalog.archive.pack import pack
    from raycheck.catalog.archive.tar import TarStream
    from raycheck.catalog.archive.unpack import unpack
    from raycheck.catalog.copy import CopiedRun, copy_run
    from raycheck.catalog.deletes import delete_checkpoint, delete_run
    from raycheck.catalog.doctor.examine import examine_bucket
    from raycheck.catalog.doctor.plan import SavePlan
    from raycheck.catalog.download_checkpoint import Downloaded, download
    from raycheck.catalog.follow import FollowNews, follow_run
    from raycheck.catalog.forks import fork_run
    from raycheck.catalog.free_space import Cleaned, RunDeletion, clean
    from raycheck.catalog.importing.import_checkpoint import Imported, ImportedEntryReport, import_checkpoint
    from raycheck.catalog.listing import RunFolder
    from raycheck.catalog.policy import PrunedRun, prune_runs

__all__ = [
    "Archived",
    "BucketFinding",
    "Cleaned",
    "CopiedRun",
    "DeletedRun",
    "Downloaded",
    "FollowNews",
    "Forked",
    "Imported",
    "ImportedEntryReport",
    "PrunedRun",
    "RunDeletion",
    "RunFolder",
    "SavePlan",
    "TarStream",
    "clean",
    "copy_run",
    "delete_checkpoint",
    "delete_run",
    "download",
    "examine_bucket",
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
        "raycheck.bucket.diagnosis.finding": ("BucketFinding",),
        "raycheck.bucket.protocol.removal.delete": ("DeletedRun",),
        "raycheck.bucket.protocol.sharing.fork": ("Forked",),
        "raycheck.catalog.archive.layout": ("Archived",),
        "raycheck.catalog.archive.pack": ("pack",),
        "raycheck.catalog.archive.tar": ("TarStream",),
        "raycheck.catalog.archive.unpack": ("unpack",),
        "raycheck.catalog.copy": ("CopiedRun", "copy_run"),
        "raycheck.catalog.deletes": ("delete_checkpoint", "delete_run"),
        "raycheck.catalog.doctor.examine": ("examine_bucket",),
        "raycheck.catalog.doctor.plan": ("SavePlan",),
        "raycheck.catalog.download_checkpoint": ("Downloaded", "download"),
        "raycheck.catalog.follow": ("FollowNews", "follow_run"),
        "raycheck.catalog.forks": ("fork_run",),
        "raycheck.catalog.free_space": ("Cleaned", "RunDeletion", "clean"),
        "raycheck.catalog.importing.import_checkpoint": ("Imported", "ImportedEntryReport", "import_checkpoint"),
        "raycheck.catalog.listing": ("RunFolder",),
        "raycheck.catalog.policy": ("PrunedRun", "prune_runs"),
    },
)
