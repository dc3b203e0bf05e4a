"""The alerts of the run that a coordinator leads: collects what happens, and sends it in a thread of its own.

What happens before rank 0 has brought the settings waits for them: a claim says why the attempt before has died.
"""

from concurrent.futures import ThreadPoolExecutor, wait
from threading import Lock

from raycheck.alerts import AlertSender, Happening, died, finished, given_up, is_death
from raycheck.bucket.format.latest import Attempt, Latest
from raycheck.bucket.store import Store
from raycheck.group.coordinator.messages import SaveFailure
from raycheck.settings import Alerts

LAST_S = 20.0
"""How long the end of a run waits for its alerts to be sent."""
MAX_WAITING = 20


class RunAlerts:
    """The alerts of one run, as one coordinator sends them."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._alerts: Alerts | None = None
        self._sender: AlertSender | None = None
        self._lock = Lock()
        self._waiting: list[tuple[Happening, ...]] = []
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="raycheck-alerts")

    def send_by(self, alerts: Alerts | None) -> None:
        """Take the settings. Raises ConfigError if they cannot work on this machine."""
        if alerts is None or alerts == self._alerts:
            return
        sender = AlertSender(self._store, alerts)
        with self._lock:
            self._sender, self._alerts = sender, alerts
            waiting, self._waiting = self._waiting, []
        for which in waiting:
            self._tell(*which)

    def claimed(self, before: Attempt | None, cause: str) -> None:
        """Tell why the attempt before the claimed one has ended, if it has died."""
        if before is not None and before.number and before.world_size and is_death(cause):
            self._tell(died(before.number, cause))

    def group_failed(self, attempt: int | None, causes: list[str]) -> None:
        """Tell that the live attempt has died."""
        if attempt is not None and causes:
            self._tell(died(attempt, "; ".join(causes)))

    def given_up(self, attempt: int, cause: str) -> None:
        """Tell that the driver gives up the run. Wait a while until that is sent: this process is about to end."""
        self._tell(given_up(attempt, cause))
        self._wait()

    def finished(self, body: Latest) -> None:
        """Tell that the run has finished. Wait a while until that is sent: this process is about to end."""
        self._tell(finished(body.attempt.number, body.head))
        self._wait()

    def save_failed(self, failure: SaveFailure) -> None:
        """Tell of a failed save."""
        self._tell(*_happenings(failure))

    def _tell(self, *which: Happening) -> None:
        """Send the first of these happenings of which the settings want to know."""
        with self._lock:
            sender, alerts = self._sender, self._alerts
            if sender is None or alerts is None:
                self._waiting = [*self._waiting, which][-MAX_WAITING:]
                return
        wanted = next((happening for happening in which if happening.kind in alerts.on), None)
        if wanted is not None:
            self._thread.submit(sender.tell, wanted)

    def _wait(self) -> None:
        if self._sender is not None:
            wait([self._thread.submit(int)], LAST_S)


def _happenings(failure: SaveFailure) -> tuple[Happening, ...]:
    """Return what a failed save is, the graver happening first."""
    name = f"{failure.attempt:06d}-{failure.save}"
    count = f"{failure.in_a_row} of at most {failure.limit} saves in a row have failed"
    failed = f"the save of step {failure.step} has failed ({count}): {failure.message}"
    nearly = f"the next failed save ends the training: {failed}"
    is_near = failure.in_a_row == failure.limit - 1
    last = [Happening(kind="saves_failing", what=name, text=nearly, is_marked=False)] if is_near else []
    return (*last, Happening(kind="save_failed", what=name, text=failed, is_marked=False))
