"""The types of the values that public calls take and return, for annotations. Everything loads on first use.

`raycheck.Run` is in front. `raycheck.catalog` has the types of its own results; RunSummary is here, since
`raycheck.list_runs` returns it, too.
"""

from typing import TYPE_CHECKING

from raycheck.public_names import on_first_use

if TYPE_CHECKING:
    from raycheck.bucket.attempt_records import ResumeRecord, SlowRecord
    from raycheck.bucket.protocol.removal.prune_and_sweep import Deletion
    from raycheck.bucket.run_status import Status
    from raycheck.bucket.stored_export import StoredExport
    from raycheck.bucket.verify import Finding
    from raycheck.catalog.listing import RunSummary
    from raycheck.data.batch_loader import BatchLoader
    from raycheck.data.step_samples import StepSamples
    from raycheck.group.worker.group_restore import RestoreResult
    from raycheck.group.worker.save_handle import CheckpointInfo, SaveHandle
    from raycheck.group.worker.save_queue import SaveStatus
    from raycheck.huggingface.export import Exported
    from raycheck.on_ray.actors.actor_checkpointer import ActorSaveHandle
    from raycheck.published.follower import PulledVersion, VersionFollower
    from raycheck.published.publish import Published
    from raycheck.published.records import PublishedVersion
    from raycheck.published.series import PublishedVersions
    from raycheck.run import CommittedCheckpoint
    from raycheck.settings import HFExport, KeepBest, Publish, Retention
    from raycheck.show_progress import ShowProgress
    from raycheck.state.preview import Preview
    from raycheck.state.restore_result import RestoreReport
    from raycheck.state.restore_selection import Selection
    from raycheck.views.attempts import AttemptHistory, Commit, MetricLine
    from raycheck.views.details import CheckpointDetails
    from raycheck.views.difference import CheckpointDifference, TensorDifference
    from raycheck.views.history import RunHistory
    from raycheck.views.kept import KeptCheckpoint, KeptCheckpoints
    from raycheck.views.notebook import Picture
    from raycheck.views.tensor_change import TensorChange
    from raycheck.views.tensor_sample import TensorSample
    from raycheck.views.tensors import TensorSummary

__all__ = [
    "ActorSaveHandle",
    "AttemptHistory",
    "BatchLoader",
    "CheckpointDetails",
    "CheckpointDifference",
    "CheckpointInfo",
    "Commit",
    "CommittedCheckpoint",
    "Deletion",
    "Exported",
    "Finding",
    "HFExport",
    "KeepBest",
    "KeptCheckpoint",
    "KeptCheckpoints",
    "MetricLine",
    "Picture",
    "Preview",
    "Publish",
    "Published",
    "PublishedVersion",
    "PublishedVersions",
    "PulledVersion",
    "RestoreReport",
    "RestoreResult",
    "ResumeRecord",
    "Retention",
    "RunHistory",
    "RunSummary",
    "SaveHandle",
    "SaveStatus",
    "Selection",
    "ShowProgress",
    "SlowRecord",
    "Status",
    "StepSamples",
    "StoredExport",
    "TensorChange",
    "TensorDifference",
    "TensorSample",
    "TensorSummary",
    "VersionFollower",
]

__getattr__, __dir__ = on_first_use(
    __name__,
    {
        "raycheck.bucket.attempt_records": ("ResumeRecord", "SlowRecord"),
        "raycheck.bucket.protocol.removal.prune_and_sweep": ("Deletion",),
        "raycheck.bucket.run_status": ("Status",),
        "raycheck.bucket.stored_export": ("StoredExport",),
        "raycheck.bucket.verify": ("Finding",),
        "raycheck.catalog.listing": ("RunSummary",),
        "raycheck.data.batch_loader": ("BatchLoader",),
        "raycheck.data.step_samples": ("StepSamples",),
        "raycheck.group.worker.group_restore": ("RestoreResult",),
        "raycheck.group.worker.save_handle": ("CheckpointInfo", "SaveHandle"),
        "raycheck.group.worker.save_queue": ("SaveStatus",),
        "raycheck.huggingface.export": ("Exported",),
        "raycheck.on_ray.actors.actor_checkpointer": ("ActorSaveHandle",),
        "raycheck.published.follower": ("VersionFollower", "PulledVersion"),
        "raycheck.published.publish": ("Published",),
        "raycheck.published.records": ("PublishedVersion",),
        "raycheck.published.series": ("PublishedVersions",),
        "raycheck.run": ("CommittedCheckpoint",),
        "raycheck.settings": ("HFExport", "KeepBest", "Publish", "Retention"),
        "raycheck.show_progress": ("ShowProgress",),
        "raycheck.state.preview": ("Preview",),
        "raycheck.state.restore_result": ("RestoreReport",),
        "raycheck.state.restore_selection": ("Selection",),
        "raycheck.views.attempts": ("AttemptHistory", "Commit", "MetricLine"),
        "raycheck.views.details": ("CheckpointDetails",),
        "raycheck.views.difference": ("CheckpointDifference", "TensorDifference"),
        "raycheck.views.history": ("RunHistory",),
        "raycheck.views.kept": ("KeptCheckpoint", "KeptCheckpoints"),
        "raycheck.views.notebook": ("Picture",),
        "raycheck.views.tensor_change": ("TensorChange",),
        "raycheck.views.tensor_sample": ("TensorSample",),
        "raycheck.views.tensors": ("TensorSummary",),
    },
)
