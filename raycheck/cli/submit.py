"""A training script as a Ray job that is submitted again after failures, for as long as it makes progress.

The job's driver dies with its node, and nothing in Ray starts it again. The run goes on from its newest commit, so all
that is needed is to submit the same script; and to stop when it fails for a reason that another try does not cure: its
driver has said so in the bucket, the run has finished and what failed came after it, the script ended by itself at once
and without having claimed the run, or two failures have no commit between them.
"""

import asyncio
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar
from uuid import uuid4

import raycheck
from raycheck.bucket.format.latest import Entry
from raycheck.bucket.reading import read_latest
from raycheck.bucket.run_status import read_status
from raycheck.bucket.store import Store, open_store
from raycheck.errors import ConfigError, NotFoundError, RaycheckError, StoreError
from raycheck.storage_settings import StorageSettings

METADATA_KEY = "raycheck_run"
LOOK_S = 10.0
"""How often `latest` is read, to tell of commits."""
STATE_S = 2.0
"""How often the job server is asked what became of the job: the way to its log may be dead without saying so."""
LAST_LINES_S = 5.0
AWAY_S = 600.0
"""How long job server and bucket may be away: a head node that comes back takes minutes."""
AT_ONCE_S = 120.0
"""A script that ends by itself so soon, before its workers have claimed the run, never got as far as to train."""
KILLED = 128
"""Exit codes from here on are those of a shell for a command that a signal has ended."""
STARTING_S = 60.0
"""How long a cluster that has just been started may ask to try again later."""
ENDS = ("SUCCEEDED", "FAILED", "STOPPED")

Tell = Callable[[str], object]
T = TypeVar("T")


def submit(
    entrypoint: str,
    *,
    uri: str,
    address: str | None = None,
    runtime_env: Mapping[str, Any] | None = None,
    retries: int = 3,
    storage: StorageSettings | None = None,
    tell: Tell = sys.stdout.write,
) -> str:
    """Submit `entrypoint`, a shell command, until it succeeds. Returns how the last job ended: SUCCEEDED, FAILED or
    STOPPED.

    uri: the run that the script trains; it goes into the job's metadata (`raycheck_run`), without settings. address: of
    the cluster, as for `ray job submit`. runtime_env: Ray's; see with_raycheck. retries: how often it is submitted
    again after it has FAILED. tell: takes the job's output as it comes, and raycheck's own lines.

    When another try cannot help it says why and ends; see the module. Raises ConfigError for a cluster that does not
    answer or does not take the job; StoreError when job server or bucket are away for ten minutes later on.
    """
    store = open_store(uri, storage)
    newest = _newest(store)
    at_last_failure = _key(newest)
    client = _client(address)
    asked = {
        "entrypoint": entrypoint,
        "runtime_env": dict(runtime_env or {}),
        "metadata": {METADATA_KEY: uri.partition("?")[0]},
    }
    for number in range(retries + 1):
        before = _patiently(lambda: _attempt(store), "the bucket")
        name = _started(client, asked) if number else _first(client, asked)
        tell(f"raycheck: submitted {name}, {_in_words(newest)}\n")
        job = _SubmittedJob(client, name, store, tell)
        state = asyncio.run(job.follow())
        newest = _patiently(lambda: _newest(store), "the bucket")
        tell(f"raycheck: {name} {state}, {_in_words(newest)}\n")
        if state != "FAILED" or number == retries:
            return state
        if hopeless := _patiently(lambda: _hopeless(store, job, before), "the bucket"):  # noqa: B023  called at once
            tell(f"raycheck: {hopeless}; it is not submitted again\n")
            return state
        if number and _key(newest) == at_last_failure:
            tell("raycheck: nothing was committed since the failure before; another try would fail as well\n")
            return state
        at_last_failure = _key(newest)
    raise AssertionError("unreachable: the last round returns")


def _hopeless(store: Store, job: "_SubmittedJob", before: int) -> str:
    """Why another try would fail like this one; empty when it may not. before: number of the attempt before the job."""
    attempt = _attempt(store)
    if attempt == before:
        seconds = job.seconds_of_itself
        if seconds is not None and seconds <= AT_ONCE_S:
            return f"the script ended by itself after {seconds:.0f} s, before it had claimed the run"
        return ""
    status = read_status(store)
    if status.state == "finished":
        return f"the run has {status.text}; what failed came after that"
    return f"the run {status.text}; another try would fail as well" if status.is_final else ""


def with_raycheck(runtime_env: Mapping[str, Any]) -> dict[str, Any]:
    """This raycheck is sent along, over the one in the cluster. Its dependencies must be there."""
    package = str(Path(raycheck.__file__).parent)
    return {**runtime_env, "py_modules": [*runtime_env.get("py_modules", ()), package]}


class _SubmittedJob:
    """One submitted job."""

    def __init__(self, client: Any, job: str, store: Store, tell: Tell) -> None:
        self._client = client
        self._job = job
        self._store = store
        self._tell = tell
        self._told = 0
        self._details: Any = None
        self._away_since: float | None = None

    async def follow(self) -> str:
        """Until it has ended; its state then."""
        watching, log = asyncio.create_task(self._watch()), asyncio.create_task(self._hand_on_log())
        try:
            while (state := await asyncio.to_thread(self._state)) not in ENDS:
                await asyncio.sleep(STATE_S)
                if log.done():
                    log = asyncio.create_task(self._hand_on_log())
            if log.done():  # perhaps it broke just before the last lines
                log = asyncio.create_task(self._hand_on_log())
            await asyncio.wait([log], timeout=LAST_LINES_S)
        except asyncio.CancelledError:
            self._tell(f"\nraycheck: {self._job} goes on: ray job logs --follow, or ray job stop, with its name\n")
            raise
        else:
            return state
        finally:
            watching.cancel()
            log.cancel()

    @property
    def seconds_of_itself(self) -> float | None:
        """How long its script ran, once it has ended by itself. None when something else has ended it, or may have."""
        code, began, ended = (
            getattr(self._details, name, None) for name in ("driver_exit_code", "start_time", "end_time")
        )
        if code is None or began is None or ended is None or not 0 < code < KILLED:
            return None
        return float(ended - began) / 1000

    async def _hand_on_log(self) -> None:
        """A log that is followed anew comes from its beginning."""
        position = 0
        with suppress(Exception):  # the way to it may break at any time; only the state says what became of the job
            async for text in self._client.tail_job_logs(self._job):
                position += len(text)
                if position > self._told:
                    self._tell(text[self._told - position :])
                    self._told = position

    async def _watch(self) -> None:
        seen: str | None = None
        while True:
            with suppress(RaycheckError):
                newest = await asyncio.to_thread(_newest, self._store)
                if seen is not None and _key(newest) != seen:
                    self._tell(f"raycheck: {_in_words(newest)}\n")
                seen = _key(newest) or ""
            await asyncio.sleep(LOOK_S)

    def _state(self) -> str:
        """Empty while the job server is away."""
        try:
            found = [job for job in self._client.list_jobs() if job.submission_id == self._job]
        except (OSError, RuntimeError) as error:
            self._away_since = self._away_since or time.monotonic()
            if time.monotonic() - self._away_since > AWAY_S:
                raise StoreError(f"job {self._job}: the job server is away for {AWAY_S:.0f} s: {error}") from error
            return ""
        self._away_since = None
        if not found:
            return "FAILED"  # it went with a head that was started anew
        self._details = found[0]
        return str(found[0].status.value)


def _first(client: Any, asked: Mapping[str, Any]) -> str:
    name, deadline = _new_name(), time.monotonic() + STARTING_S
    while True:
        try:
            return _submitted(client, asked, name)
        except (OSError, RuntimeError, ValueError) as error:
            if "try again later" not in str(error) or time.monotonic() > deadline:
                raise ConfigError(f"the cluster does not take the job: {error}") from error
        time.sleep(STATE_S)


def _started(client: Any, asked: Mapping[str, Any]) -> str:
    """Later, when the cluster may just be coming back."""
    name = _new_name()
    return _patiently(lambda: _submitted(client, asked, name), "the job server")


def _submitted(client: Any, asked: Mapping[str, Any], name: str) -> str:
    """By a name of ours: when the answer was lost, the job is found by it and not started twice."""
    with suppress(OSError, RuntimeError):
        if any(job.submission_id == name for job in client.list_jobs()):
            return name
    return str(client.submit_job(submission_id=name, **asked))


def _new_name() -> str:
    return f"raycheck-{uuid4().hex[:12]}"


def _patiently(call: Callable[[], T], what: str) -> T:
    deadline = time.monotonic() + AWAY_S
    while True:
        try:
            return call()
        except (OSError, RuntimeError, StoreError) as error:
            if time.monotonic() > deadline:
                raise StoreError(f"{what} is away for {AWAY_S:.0f} s: {error}") from error
            time.sleep(STATE_S)


def _client(address: str | None) -> Any:
    at = address or "the address from the environment"
    try:
        from ray.exceptions import RayError
        from ray.job_submission import JobSubmissionClient
    except ImportError as error:
        raise ConfigError(f"jobs need ray[default]: {error}") from error
    try:
        return JobSubmissionClient(address)
    except RayError as error:  # of authentication; the cluster asks for a token, and none or another was sent
        why = str(error).partition("\n")[0]
        raise ConfigError(f"the job server at {at} wants a token, set RAY_AUTH_MODE=token: {why}") from error
    except (OSError, RuntimeError, ValueError) as error:
        raise ConfigError(f"no job server at {at}: {error}") from error


def _newest(store: Store) -> Entry | None:
    """The newest commit; None while there is none."""
    try:
        live = read_latest(store).live
    except NotFoundError:
        return None
    return live[-1] if live else None  # in the order of commits, whose times are whole seconds


def _attempt(store: Store) -> int:
    """The number of the live attempt; 0 while there is none."""
    try:
        return read_latest(store).attempt.number
    except NotFoundError:
        return 0


def _key(newest: Entry | None) -> str | None:
    return None if newest is None else newest.key


def _in_words(newest: Entry | None) -> str:
    return "nothing committed" if newest is None else f"newest commit: step {newest.step} ({newest.key})"
