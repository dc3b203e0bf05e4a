"""The names from which adapters for training frameworks are built: raycheck's own adapters, and those of users.

Some of these names are in `raycheck` too. raycheck's own adapters import them from here, since `raycheck` loads the
adapters. Everything loads on first use: an adapter that trains under torchrun needs no Ray.
"""

from typing import TYPE_CHECKING

from raycheck.public_names import on_first_use

if TYPE_CHECKING:
    from raycheck.data.batches import Batches
    from raycheck.data.data_stream import DataStream
    from raycheck.data.proof_agreement import SourceProof
    from raycheck.group.group import Group
    from raycheck.group.ports import PreemptionNotice
    from raycheck.group.served_group import torchrun_group
    from raycheck.group.worker.checkpointer import Checkpointer
    from raycheck.group.worker.group_restore import RestoreResult
    from raycheck.group.worker.periodic import Periodic
    from raycheck.on_ray.actors.actor_state import ActorState
    from raycheck.on_ray.ray_group import RayGroup, start_coordinator
    from raycheck.run import Run, open_run
    from raycheck.settings import SaveSettings
    from raycheck.state.entries.megatron_training import megatron
    from raycheck.state.entries.per_rank_entries import PerRank, RankZero
    from raycheck.transfer.stage.tensor_parts import Part, describe_parts, flat_part

__all__ = [
    "ActorState",
    "Batches",
    "Checkpointer",
    "DataStream",
    "Group",
    "Part",
    "PerRank",
    "Periodic",
    "PreemptionNotice",
    "RankZero",
    "RayGroup",
    "RestoreResult",
    "Run",
    "SaveSettings",
    "SourceProof",
    "describe_parts",
    "flat_part",
    "megatron",
    "open_run",
    "start_coordinator",
    "torchrun_group",
]

__getattr__, __dir__ = on_first_use(
    __name__,
    {
        "raycheck.data.batches": ("Batches",),
        "raycheck.data.data_stream": ("DataStream",),
        "raycheck.data.proof_agreement": ("SourceProof",),
        "raycheck.group.group": ("Group",),
        "raycheck.on_ray.ray_group": ("RayGroup", "start_coordinator"),
        "raycheck.group.ports": ("PreemptionNotice",),
        "raycheck.group.served_group": ("torchrun_group",),
        "raycheck.group.worker.checkpointer": ("Checkpointer",),
        "raycheck.group.worker.group_restore": ("RestoreResult",),
        "raycheck.group.worker.periodic": ("Periodic",),
        "raycheck.on_ray.actors.actor_state": ("ActorState",),
        "raycheck.run": ("Run", "open_run"),
        "raycheck.settings": ("SaveSettings",),
        "raycheck.state.entries.megatron_training": ("megatron",),
        "raycheck.state.entries.per_rank_entries": ("PerRank", "RankZero"),
        "raycheck.transfer.stage.tensor_parts": ("Part", "describe_parts", "flat_part"),
    },
)
