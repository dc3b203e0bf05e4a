"""Tells people what happens to a run, by a webhook and a command, each at most once.

Before an alert is sent, a mark is created in the run, at `alerts/<happening>.json`. Whoever creates it sends the alert:
the coordinator, that of the next driver, or a `raycheck watch` outside of the run. So an alert is lost if its sender
dies between the two, and it never comes twice. Failed saves have no mark, since the storage may be why they failed:
only the coordinator of their attempt knows of them, and it remembers what it has sent.

The webhook's URL is a secret: it is in no log line, no document and no error.
"""

import json
import os
import shutil
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from uuid import uuid4

from raycheck.bucket.format.object_keys import alert_key
from raycheck.bucket.protocol.write_once import put_once
from raycheck.bucket.store import Store
from raycheck.bucket.store.address import shown_uri
from raycheck.errors import ConfigError, DeniedError, RaycheckError, SaveFailedError
from raycheck.log import event, logger
from raycheck.settings import AlertKind, Alerts

WEBHOOK_TIMEOUT_S = 10.0
COMMAND_TIMEOUT_S = 30.0
WEBHOOK_PAUSES_S = (1.0, 3.0)
NOT_TAKEN = (429, 503)
"""The answers by which a server says that it has not accepted the request, so that it may be sent again."""
MAX_TEXT = 1000


@dataclass(frozen=True, kw_only=True, slots=True)
class Happening:
    """Something that happened to a run.

    what: distinguishes it from others of its kind: the attempt, or the checkpoint. text: says it to people. is_marked:
    it is marked in the run's storage.
    """

    kind: AlertKind
    what: str
    text: str
    is_marked: bool = True

    @property
    def name(self) -> str:
        return f"{self.kind}-{self.what}"


NOT_DEATHS = ("it had finished", "the run was rewound", "Ray changed the group", "its driver gave up")
"""How the cause of an attempt's end begins if nobody has to be told: it was wanted, or is told as `given_up`."""


def is_death(cause: str) -> bool:
    """Return whether an attempt that ended by this cause, as its record has it, has died."""
    return bool(cause) and not cause.startswith(NOT_DEATHS)


def died(attempt: int, cause: str) -> Happening:
    text = f"attempt {attempt} has died: {cause}"
    return Happening(kind="attempt_died", what=f"{attempt:06d}", text=text)


def given_up(attempt: int, cause: str) -> Happening:
    text = f"the driver has given up the run in attempt {attempt}: {cause}"
    return Happening(kind="attempt_died", what=f"{attempt:06d}-given-up", text=text)


def finished(attempt: int, head: str | None) -> Happening:
    text = f"the run has finished with {head or 'nothing committed'}"
    return Happening(kind="run_finished", what=head or f"{attempt:06d}", text=text)


def silent(attempt: int, head: str | None, text: str) -> Happening:
    return Happening(
        kind="run_silent", what=f"{attempt:06d}-{head or 'uncommitted'}", text=f"the run is silent: {text}"
    )


class AlertSender:
    """Sends the alerts of one run that its settings ask for."""

    def __init__(self, store: Store, alerts: Alerts) -> None:
        """Raises ConfigError if the command is not on this machine."""
        check_command(alerts)
        self._store = store
        self._alerts = alerts
        self._sent: set[str] = set()

    def tell(self, happening: Happening) -> bool:
        """Send an alert, unless it was sent before or is not asked for. Return whether it was sent. Never raises."""
        if happening.kind not in self._alerts.on or happening.name in self._sent:
            return False
        self._sent.add(happening.name)
        if happening.is_marked and not self._mark(happening):
            return False
        facts = {
            "alert": happening.kind,
            "run": shown_uri(self._store.uri),
            "text": " ".join(happening.text.split())[:MAX_TEXT],
        }
        logger.info(event(f"alert: {facts['text']}", run=self._store.uri))
        if self._alerts.webhook is not None:
            self._try("webhook", partial(_post, self._alerts.webhook, facts))
        if self._alerts.command is not None:
            self._try("command", partial(_run, self._alerts.command, facts))
        return True

    def _mark(self, happening: Happening) -> bool:
        """Create the mark of a happening. Return whether this call did."""
        mark = {"alert": happening.kind, "text": happening.text[:MAX_TEXT], "told_by": uuid4().hex}
        try:
            put_once(self._store, alert_key(happening.name), json.dumps(mark).encode())
        except SaveFailedError:
            return False
        except DeniedError:  # a watcher that may only read
            return True
        except RaycheckError as error:
            self._sent.discard(happening.name)
            logger.warning(event("an alert is not sent: it cannot be marked", cause=error, run=self._store.uri))
            return False
        return True

    def _try(self, way: str, send: Callable[[], None]) -> None:
        try:
            send()
        except Exception as error:  # noqa: BLE001  whatever it was, the run continues
            why = f"status {error.code}" if isinstance(error, urllib.error.HTTPError) else type(error).__name__
            if isinstance(error, _CommandError):
                why = str(error)
            logger.warning(event(f"the {way} of an alert failed: {why}", run=self._store.uri))


class _CommandError(Exception):
    """A command that ended with another status than 0."""


def check_command(alerts: Alerts) -> None:
    """Raise ConfigError if the program of `Alerts(command=...)` is not on this machine."""
    if alerts.command is not None and shutil.which(alerts.command[0]) is None:
        raise ConfigError(
            f"Alerts(command=...): there is no program {alerts.command[0]!r} where the coordinator runs: on the "
            "driver's node, or under torchrun on rank 0's; install it there, or give its absolute path"
        )


def _post(url: str, facts: Mapping[str, str]) -> None:
    """Post the alert as Slack takes it. Send it again only if the server has certainly not taken it."""
    text = f"raycheck: {facts['run']}: {facts['text']}"
    for mark, entity in (("&", "&amp;"), ("<", "&lt;"), (">", "&gt;")):
        text = text.replace(mark, entity)
    request = urllib.request.Request(  # noqa: S310  Alerts takes http and https only
        url, json.dumps({"text": text}).encode(), {"Content-Type": "application/json"}
    )
    for pause_s in (*WEBHOOK_PAUSES_S, None):
        try:
            with urllib.request.urlopen(request, timeout=WEBHOOK_TIMEOUT_S):  # noqa: S310
                return
        except urllib.error.HTTPError as error:
            if error.code not in NOT_TAKEN or pause_s is None:
                raise
        except urllib.error.URLError as error:
            if not isinstance(error.reason, ConnectionRefusedError) or pause_s is None:
                raise
        time.sleep(pause_s)


def _run(command: Sequence[str], facts: Mapping[str, str]) -> None:
    """Run the command with the alert as JSON in its input, and in its environment."""
    told = {f"RAYCHECK_{name.upper()}": value for name, value in facts.items()}
    done = subprocess.run(  # noqa: S603  the user's own command
        command,
        input=json.dumps(dict(facts)).encode(),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env=os.environ | told,
        timeout=COMMAND_TIMEOUT_S,
        check=False,
    )
    if done.returncode:
        raise _CommandError(f"{command[0]} ended with status {done.returncode}")
