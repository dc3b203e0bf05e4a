"""The handle that `Checkpointer.save` returns: whether its save is committed, and the checkpoint that it became.

It only waits for what the save thread is told. Counting failures, and ending the training after too many of them,
remains with the queue, in the training thread. So any rank may use its handle, in any thread, or no rank at all.
"""

from concurrent.futures import Future, wait
from dataclasses import dataclass, replace
from time import monotonic
from typing import Self

from raycheck.bucket.format.progress import Progress
from raycheck.errors import ConfigError, SaveFailedError
from raycheck.group.coordinator.messages import Outcome


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointInfo:
    """The checkpoint that a save became.

    uri: the run's, as `raycheck.open_run` takes it. key: the checkpoint's name in the run. Both are "" when raycheck is
    turned off. unnamed: why the checkpoint does not have the name that the save asked for; "" when it has, or when the
    save asked for none.
    """

    uri: str
    key: str
    step: int
    epoch: int
    unnamed: str = ""


class SaveHandle:
    """A handle on one save. It may be used on any rank and in any thread, also after the Checkpointer is closed.

    When `save` returns, the state may change, and the upload needs nothing more from the training thread. A shard that
    is uploaded in slices keeps `save` itself waiting until the last slice is copied. So `result` never waits for the
    thread that calls it.
    """

    def __init__(self, info: CheckpointInfo, *, rank: int = 0, longest_s: float = 0.0) -> None:
        """longest_s: how long any save may take."""
        self._info = info
        self._rank = rank
        self._longest_s = longest_s
        self._outcome: Future[tuple[Outcome, float]] = Future()

    @classmethod
    def committed(cls, *, uri: str, key: str, progress: Progress) -> Self:
        """Return the handle of a checkpoint that exists already; without a key, of a save that is turned off."""
        handle = cls(CheckpointInfo(uri=uri, key=key, step=progress.step, epoch=progress.epoch))
        handle._outcome.set_result((Outcome(kind="committed", key=key), monotonic()))
        return handle

    def follow(self, outcome: Future[tuple[Outcome, float]]) -> None:
        """Take the outcome of an upload that has begun."""
        self._outcome = outcome

    def fail(self, error: Exception) -> None:
        """Note that the save ended before its upload began."""
        self._outcome.set_exception(error)

    @property
    def is_done(self) -> bool:
        """Return whether the save has ended on this rank, committed or not."""
        return self._outcome.done()

    @property
    def is_committed(self) -> bool:
        """Return whether the save is committed, as far as this rank knows. It never waits and never raises."""
        if not self.is_done or self._outcome.exception() is not None or self._info.key == "":
            return False
        return self._outcome.result()[0].kind == "committed"

    def result(self, timeout_s: float | None = None) -> CheckpointInfo:
        """Wait until the save is committed. One rank may call it alone, since the others need not.

        timeout_s: seconds to wait at most; None: as long as a save may take.

        Raises what made the save fail: SaveFailedError or StoreError, and FencedError or SupersededError when the
        attempt is over. Raises SaveFailedError too when the save has not ended in time; it continues then, and
        `is_done` is False. To save the step of a failed save again, call `Checkpointer.wait` on all ranks first.
        """
        check_timeout("result", timeout_s)
        seconds = self._longest_s if timeout_s is None else timeout_s
        who = f"rank {self._rank}: the save of step {self._info.step}"
        wait([self._outcome], seconds)
        if not self.is_done:
            raise SaveFailedError(f"{who} has not ended within {seconds:g} s; it continues")
        outcome, _ = self._outcome.result()
        if outcome.kind == "failed":
            raise SaveFailedError(f"{who} was not committed: {outcome.message}")
        if outcome.kind == "superseded":
            raise SaveFailedError(f"{who} is not in the run: a later save was committed before, or took its place")
        return replace(self._info, unnamed=outcome.unnamed)


def check_timeout(call: str, timeout_s: float | None) -> None:
    """Raise ConfigError when this is not a time to wait."""
    if timeout_s is not None and not (isinstance(timeout_s, int | float) and timeout_s >= 0):
        raise ConfigError(f"{call}(timeout_s={timeout_s!r}): give a number of seconds")
