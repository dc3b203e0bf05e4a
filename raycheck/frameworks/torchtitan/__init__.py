"""The adapter for torchtitan: a CheckpointManager that its trainer uses when the Config selects it.

manager          CheckpointManager: the methods that the trainer calls, and the mapping of its settings
parts            the parts of a pipeline as one model, and the trainer's own counters
position         the position in torchtitan's data loader, for any number of data-parallel ranks
resplit          the rest of an epoch, divided among another number of ranks
first_weights    the source of a fresh run's weights
"""

from raycheck.frameworks.versions import require

require("torchtitan", "0.3", extra="torchtitan")

from raycheck.frameworks.torchtitan.manager import CheckpointManager  # noqa: E402  not before it is known to be here

__all__ = ["CheckpointManager"]
