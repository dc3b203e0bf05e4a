"""Defines every error that raycheck raises, one class for each thing a caller may do about it.

Each takes one message, which names the object and says what to do. So it survives pickling between Ray's processes
unchanged. `ends_run` marks the errors that a restart cannot cure: on these `raycheck.fit` stops the run, however many
failures Ray may still retry. A message may quote what lies in a bucket, so it is made fit for a terminal.
"""

from raycheck.terminal import printable_lines


class RaycheckError(Exception):
    """The root of all errors that raycheck raises."""

    ends_run = False

    def __str__(self) -> str:
        return printable_lines(super().__str__())


class NotFoundError(RaycheckError, FileNotFoundError):
    """An object, checkpoint or run that was named does not exist."""

    def __str__(self) -> str:
        return printable_lines(str(self.args[0]))


class ConflictError(RaycheckError):
    """A conditional write was refused: the object is there already, or is another version."""


class FencedError(ConflictError):
    """Another driver owns the run now. This is final for this driver: it will commit nothing more."""

    ends_run = True


class SupersededError(ConflictError):
    """A newer attempt of the same driver runs. Only this attempt is over."""


class CorruptError(RaycheckError):
    """The bytes in the bucket are not what a manifest or `latest` says, or have a newer format version."""

    ends_run = True


class DamagedError(CorruptError):
    """A committed checkpoint is proven to be damaged: one of its objects is missing, or has another size or checksum. A
    store that cannot be reached proves nothing."""


class StoreError(RaycheckError):
    """The store, or the way to it, failed. The call may succeed later, unless this is a DeniedError."""

    is_denied = False
    """True for a DeniedError, False for any other StoreError."""


class DeniedError(StoreError):
    """The store refused the request because the credentials lack a permission, which the message names."""

    is_denied = True


class ConfigError(RaycheckError, ValueError):
    """Something the caller wrote cannot work; nothing was changed."""

    ends_run = True


class StateMismatchError(ConfigError):
    """The live state and the checkpoint do not hold the same things; all differences are listed."""


class SaveFailedError(RaycheckError):
    """A save did not become a checkpoint. Earlier checkpoints are untouched."""
