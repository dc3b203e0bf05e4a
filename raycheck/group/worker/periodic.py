"""Decides when a script's own periodic work is due, such as evaluation or logging.

All ranks get the same answer: each of them counts steps and epochs, and time is rank 0's clock, which is broadcast with
its other decisions. The last turn is part of the state. So a restart neither forgets work that is due nor repeats work
that the checkpoint records as done. Work done after that checkpoint was lost with the steps, and is due again.
"""

import time
from collections.abc import Callable, Iterable, Mapping

from raycheck.bucket.format.progress import Progress
from raycheck.errors import ConfigError
from raycheck.group.group import Group
from raycheck.log import logger
from raycheck.settings import check_triggers


class Periodic:
    """A schedule for the script's own periodic work.

    Put it into the state, and call `take_turn` after `end_step` and `end_epoch`.

    every_steps: due at each multiple of this number of steps, or at the first call after it. every_epochs: the same for
    completed epochs. every_s: due once this many seconds of training have passed since the last turn or the
    start; downtime does not count. The work is due as soon as any of them is. Raises ConfigError when none is given, or
    when a value cannot work.
    """

    def __init__(
        self, *, every_steps: int | None = None, every_s: float | None = None, every_epochs: int | None = None
    ) -> None:
        if (every_steps, every_s, every_epochs) == (None, None, None):
            raise ConfigError("Periodic(): give every_steps, every_s or every_epochs")
        self.every_steps = every_steps
        self.every_s = every_s
        self.every_epochs = every_epochs
        check_triggers(self)
        self._now: Callable[[], tuple[Progress, float]] | None = None
        self._saved: tuple[int, int, float] | None = None  # step, epoch and seconds of a restored state, until `start`
        self._step = self._epoch = 0  # at the last turn
        self._clock_s = 0.0

    def take_turn(self) -> bool:
        """Return whether the work is due, and if so, count it as done: a second call at the same step returns False.

        Every rank calls it at the same places. Raises ConfigError before `restore`, and when this is not in a
        Checkpointer's state.
        """
        if self._now is None:
            raise ConfigError("take_turn(): put the Periodic into the Checkpointer's state, and call restore() first")
        progress, clock_s = self._now()
        is_due = (
            _is_passed(self._step, progress.step, self.every_steps)
            or _is_passed(self._epoch, progress.epoch, self.every_epochs)
            or (self.every_s is not None and clock_s - self._clock_s >= self.every_s)
        )
        if is_due:
            self._step, self._epoch, self._clock_s = progress.step, progress.epoch, clock_s
        return is_due

    def start(self, now: Callable[[], tuple[Progress, float]]) -> None:
        """Start when training starts, or resumes after a restore.

        now: returns the progress, and rank 0's clock in seconds as all ranks know it.
        """
        progress, clock_s = now()
        step, epoch, passed_s = self._saved or (progress.step, progress.epoch, 0.0)
        # After a restore without "progress" the steps count from 0 again, and so do the turns.
        self._step, self._epoch = min(step, progress.step), min(epoch, progress.epoch)
        self._clock_s = clock_s - passed_s
        self._now, self._saved = now, None

    def state_dict(self) -> dict[str, int | float]:
        """Return the last turn: its step, its epoch, and the seconds of training since."""
        passed_s = 0.0 if self._now is None else max(0.0, self._now()[1] - self._clock_s)
        return {"step": self._step, "epoch": self._epoch, "seconds": passed_s}

    def load_state_dict(self, state: Mapping[str, int | float]) -> None:
        """Keep the last turn of a saved state until `start`."""
        self._saved = int(state["step"]), int(state["epoch"]), float(state["seconds"])


def _is_passed(last: int, now: int, every: int | None) -> bool:
    """Return whether a multiple of `every` is between the last turn and now."""
    return every is not None and now // every > last // every


def periodics_of(entries: Mapping[str, object], group: Group, *, is_led: bool) -> list[Periodic]:
    """Return the Periodics in a rank's state.

    is_led: a driver leads this rank, and only the driver has a clock. Raises ConfigError, naming the entry, for a
    Periodic with every_s when the ranks have no common clock.
    """
    found = {name: value for name, value in entries.items() if isinstance(value, Periodic)}
    for name, periodic in found.items():
        if periodic.every_s is not None and is_led:
            raise ConfigError(f"state[{name!r}]: Periodic(every_s=...) belongs in the driver's state")
        if periodic.every_s is not None and group.broadcast is None and group.world_size > 1:
            raise ConfigError(
                f"state[{name!r}]: Periodic(every_s=...) needs Group(broadcast=...): ranks must make the same decision"
            )
    return list(found.values())


def start_alone(periodics: Iterable[Periodic], progress: Callable[[], Progress], *, world_size: int) -> None:
    """Start Periodics when raycheck is turned off.

    Several ranks then have no common clock: nothing becomes due by time, and a warning says so.
    """
    began = time.monotonic()
    is_alone = world_size == 1
    for periodic in periodics:
        periodic.start(lambda: (progress(), time.monotonic() - began if is_alone else 0.0))
        if periodic.every_s is not None and not is_alone:
            logger.warning("raycheck is turned off: Periodic(every_s=...) is not due by time on several ranks")
