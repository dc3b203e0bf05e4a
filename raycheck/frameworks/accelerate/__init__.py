"""The adapter for Accelerate: `attach` makes an Accelerator's save_state and load_state use a raycheck run.

attachment       attach, and what replaces the Accelerator's methods
state            what of an Accelerator is saved, and what is refused
loaders          the exact position in the loaders that Accelerate prepared
order            the order of one loader's samples, and random state around a batch that was fetched ahead
process_count    schedulers that step once for each process
"""

from raycheck.frameworks.versions import require

require("accelerate", "1.15", extra="accelerate")

from raycheck.frameworks.accelerate.attachment import Attachment, attach  # noqa: E402  not before it is known to be here

__all__ = ["Attachment", "attach"]
