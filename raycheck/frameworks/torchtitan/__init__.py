"""Inside torchtitan: a CheckpointManager that its trainer takes by the Config alone.

manager          CheckpointManager: what the trainer calls, and how its settings are mapped
parts            the parts of a pipeline as one model, and the trainer's own counters
position         the position in torchtitan's data loader, also at another number of data-parallel ranks
resplit          what is left of an epoch, shared among another number of ranks
first_weights    where a fresh run takes its weights from
"""

from raycheck.frameworks.versions import require

require("torchtitan", "0.3", extra="torchtitan")

from raycheck.frameworks.torchtitan.manager import CheckpointManager  # noqa: E402  not before it is known to be here

__all__ = ["CheckpointManager"]
