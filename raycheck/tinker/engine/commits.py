"""The saves that clients ask for: each becomes a commit of the model's run, by the model's Checkpointer.

`begin_save` returns when the model's state is copied, so that the model's next requests run during the upload.
`is_committed` then says whether the commit is there. Nothing else in the server commits a model's state.
"""

from raycheck import Checkpointer, SaveSettings
from raycheck.errors import ConfigError
from raycheck.tinker.engine.orders import SaveOrder
from raycheck.tinker.engine.ranks import Ranks

SETTINGS = SaveSettings(every_steps=None, keep_last=1, rolling_keep_last=2, max_failed_saves=1_000_000)
"""Saves happen only by request. An unnamed checkpoint is deleted when a newer one is committed."""


def begin_save(checkpointer: Checkpointer, order: SaveOrder) -> None:
    """Start a save and return when the model's state is copied. Call `is_committed` until the save is over; start no
    other save before then."""
    checkpointer.save(
        is_rolling=order.name is None,
        name=order.name,
        note=order.note,
        expire_after_s=order.expire_after_s,
        overwrite=order.overwrite,
    )


def is_committed(checkpointer: Checkpointer, ranks: Ranks) -> bool:
    """Return whether the started save is committed, without waiting. Call it on all ranks.

    Raises SaveFailedError if the save has failed, and ConfigError if another checkpoint has the name.
    """
    if any(ranks.gather(checkpointer.save_status.busy_s is not None)):
        return False
    checkpointer.wait()
    if checkpointer.save_status.unnamed:
        raise ConfigError(f"the checkpoint did not get its name: {checkpointer.save_status.unnamed}")
    return True
