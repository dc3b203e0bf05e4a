"""Every error raycheck raises, by what the caller should do.

All take one message that names the object and says what to do, so that they survive pickling between Ray's
processes unchanged. `ends_run` marks those which a restart cannot cure: `raycheck.fit` stops the run on them
however many failures Ray may still retry. Their text may quote what lies in a bucket, so it is made fit for a terminal.
"""

from raycheck.terminal import printable_lines


class RaycheckError(Exception):
    """Root of all errors of raycheck."""

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
    """Another driver owns the run now. Final for this driver: nothing more of it will be committed."""

    ends_run = True


class SupersededError(ConflictError):
    """A newer attempt of the same driver runs. Only this attempt is over."""


class CorruptError(RaycheckError):
    """Bytes in the bucket are not what a manifest or `latest` says, or their format version is newer."""

    ends_run = True


class DamagedError(CorruptError):
    """It is proven that a committed checkpoint is not what was committed: an object of it is missing, or has another
    size or checksum. A store that cannot be reached proves nothing."""


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
