"""The errors that raycheck raises, one class for each thing a caller may do about it.

    RaycheckError
        NotFoundError           correct the address
        ConflictError           call again: somebody else has just changed the run
            FencedError         stop: another driver owns the run
            SupersededError     let this attempt end: a newer one is running
        CorruptError            repair the run, or install a newer raycheck
            DamagedError        restore another checkpoint
        StoreError              try again later
            DeniedError         grant the permission
        ConfigError             correct what the message names
            StateMismatchError  make the state match the checkpoint, or restore part of it
        SaveFailedError         find out why saves fail
        StoppedError            call again to continue

Three modules define a subclass of one of these that only raycheck itself handles differently: NewerFormatError in
bucket/format/document.py, ReferenceLostError in bucket/protocol/referred_objects.py, and OverloadedError in
bucket/store/retry.py. No other error leaves a public call.

Each class takes one message, which names the object and says what to do, so pickling between Ray's processes leaves it
unchanged. `ends_run` marks the errors that a restart cannot fix: on these, `raycheck.fit` stops the run, however many
retries Ray has left. A message may quote the contents of a bucket, so it is made safe for a terminal.
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
    """A conditional write was refused: the object already exists, or has another version."""


class FencedError(ConflictError):
    """Another driver owns the run now. This is final: this driver will never commit again."""

    ends_run = True


class SupersededError(ConflictError):
    """A newer attempt of the same driver is running. Only this attempt is over."""


class CorruptError(RaycheckError):
    """The bytes in the bucket do not match a manifest or `latest`, or have a newer format version."""

    ends_run = True


class DamagedError(CorruptError):
    """A committed checkpoint is proven to be damaged: an object is missing, or has the wrong size or checksum.

    An unreachable store proves nothing.
    """


class StoreError(RaycheckError):
    """The store, or the connection to it, failed. The call may succeed later, unless this is a DeniedError."""


class DeniedError(StoreError):
    """The store refused the request because the credentials lack a permission, which the message names."""


class ConfigError(RaycheckError, ValueError):
    """Something the caller wrote cannot work; nothing was changed."""

    ends_run = True


class StateMismatchError(ConfigError):
    """The live state and the checkpoint do not have the same contents; all differences are listed."""


class SaveFailedError(RaycheckError):
    """A save did not become a checkpoint. Earlier checkpoints are untouched."""


class StoppedError(RaycheckError):
    """The copy was asked to stop. What is complete in the target stays there."""

    def __init__(self, message: str = "the copy was stopped; repeat it to continue") -> None:
        super().__init__(message)
