"""`raycheck submit`: runs a training script as a Ray job and resubmits it after failures as long as it makes progress.

The job's driver dies with its node, and nothing in Ray restarts it. The run resumes from its newest commit, so it is
enough to submit the same script again. Resubmission stops as soon as another try cannot help:

- the driver recorded in the bucket that it gave up for good;
- the run had finished, and the failure came after that;
- the script exited on its own, early, before its workers had claimed the run;
- nothing was committed between two failures.
"""

import asyncio
import os
import shlex
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any, TypeVar
from uuid import uuid4

import typer

import raycheck
from raycheck.bucket.format.latest import Entry
from raycheck.bucket.reading import read_newest
from raycheck.bucket.run_status import read_status
from raycheck.bucket.store import Store, open_store
from raycheck.bucket.store.address import shown_uri
from raycheck.cli.closed_pipe import continue_without_reader
from raycheck.cli.options import Storage, settings_of, yaml_of
from raycheck.errors import ConfigError, NotFoundError, RaycheckError, StoreError
from raycheck.storage_settings import StorageSettings

METADATA_KEY = "raycheck_run"
LOOK_S = 10.0
"""Seconds between two reads of `latest`, to notice new commits."""
STATE_S = 2.0
"""Seconds between two polls of the job's state. The connection that streams the job's log can die without an error, so
the log alone does not show the end."""
LAST_LINES_S = 5.0
AWAY_S = 600.0
"""How long the job server and the bucket may be unreachable: a restarting head node takes minutes."""
AT_ONCE_S = 120.0
"""A script that exits on its own within this time, before its workers have claimed the run, never started to train."""
KILLED = 128
"""From this exit code on, a shell reports that a signal ended the command."""
STARTING_S = 60.0
"""How long a newly started cluster may answer "try again later"."""
ENDS = ("SUCCEEDED", "FAILED", "STOPPED")

Tell = Callable[[str], object]
T = TypeVar("T")


def submit(  # noqa: PLR0917  typer makes options of them
    entrypoint: Annotated[list[str], typer.Argument(metavar="-- COMMAND", help="E.g. -- python train.py --lr 1e-4")],
    run: Annotated[str, typer.Option(help="URI of the run that the script trains: storage path and run name.")],
    address: Annotated[str | None, typer.Option(help="The cluster, e.g. http://127.0.0.1:8265.")] = None,
    working_dir: Annotated[str | None, typer.Option(help="A folder to send along, in which the command runs.")] = None,
    runtime_env: Annotated[Path | None, typer.Option(help="A YAML file with the rest of Ray's runtime env.")] = None,
    send_raycheck: Annotated[bool, typer.Option(help="Send this raycheck along; else the cluster's is used.")] = True,
    retries: Annotated[int, typer.Option(min=0, help="How often to submit again after a failure.")] = 3,
    storage: Storage = None,
) -> None:
    """Run a training script as a Ray job, with retries.

    The job's output is followed, and a failed job is submitted again. Resubmission ends after --retries, when nothing
    was committed between two failures, and when another try cannot help: the run had finished, the driver gave up for
    good, or the script exited at once. Exit codes: 0 it succeeded, 1 it failed or was stopped. Ctrl-C leaves the job
    running.
    """
    continue_without_reader()
    env = yaml_of(runtime_env, option="--runtime-env") if runtime_env else {}
    if working_dir is not None:
        env["working_dir"] = working_dir
    state = submit_until_done(
        shlex.join(entrypoint),
        uri=run,
        address=address,
        runtime_env=with_raycheck(env) if send_raycheck else env,
        retries=retries,
        storage=settings_of(storage),
        tell=_print,
    )
    if state != "SUCCEEDED":
        raise typer.Exit(1)


def submit_until_done(
    entrypoint: str,
    *,
    uri: str,
    address: str | None = None,
    runtime_env: Mapping[str, Any] | None = None,
    retries: int = 3,
    storage: StorageSettings | None = None,
    tell: Tell = sys.stdout.write,
) -> str:
    """Submit `entrypoint`, a shell command, until it succeeds or another try cannot help (see the module).

    uri: the run that the script trains. It goes, without settings, into the job's metadata as `raycheck_run`.
    address: the cluster, as for `ray job submit`. runtime_env: Ray's; see with_raycheck. retries: how often the script
    is submitted again after it has FAILED. tell: called with the job's output as it arrives, and with raycheck's own
    lines.

    Returns how the last job ended: SUCCEEDED, FAILED or STOPPED. Raises ConfigError for a cluster that does not answer
    or does not take the job. Raises StoreError when the job server or the bucket is later unreachable for ten minutes.
    """
    store = open_store(uri, storage)
    newest = _newest(store)
    at_last_failure = _key(newest)
    client = _client(address)
    request = {
        "entrypoint": entrypoint,
        "runtime_env": dict(runtime_env or {}),
        "metadata": {METADATA_KEY: shown_uri(uri)},
    }
    for number in range(retries + 1):
        before = _patiently(lambda: _attempt(store), "the bucket")
        name = _submit_again(client, request) if number else _submit_first(client, request)
        tell(f"raycheck: submitted {name}, {_in_words(newest)}\n")
        job = _SubmittedJob(client, name, store, tell)
        state = asyncio.run(job.follow())
        newest = _patiently(lambda: _newest(store), "the bucket")
        tell(f"raycheck: {name} {state}, {_in_words(newest)}\n")
        if state != "FAILED" or number == retries:
            return state
        if why := _patiently(lambda: _reason_to_stop(store, job, before), "the bucket"):  # noqa: B023  called at once
            tell(f"raycheck: {why}; it is not submitted again\n")
            return state
        if number and _key(newest) == at_last_failure:
            tell("raycheck: nothing was committed since the previous failure; another try would fail as well\n")
            return state
        at_last_failure = _key(newest)
    raise AssertionError("unreachable: the last round returns")


def _reason_to_stop(store: Store, job: "_SubmittedJob", before: int) -> str:
    """Return why another try would fail like this one, or "" if it may succeed.

    before: the number of the run's live attempt before the job was submitted.
    """
    attempt = _attempt(store)
    if attempt == before:
        seconds = job.seconds_until_own_end
        if seconds is not None and seconds <= AT_ONCE_S:
            return f"the script exited on its own after {seconds:.0f} s, before it had claimed the run"
        return ""
    status = read_status(store)
    if status.state == "finished":
        return f"the run has {status.text}; the failure came after that"
    return f"the run {status.text}; another try would fail as well" if status.is_final else ""


def with_raycheck(runtime_env: Mapping[str, Any]) -> dict[str, Any]:
    """Return the runtime environment with this raycheck included, which replaces the cluster's own.

    raycheck's dependencies must be installed in the cluster.
    """
    package = str(Path(raycheck.__file__).parent)
    return {**runtime_env, "py_modules": [*runtime_env.get("py_modules", ()), package]}


class _SubmittedJob:
    """One submitted job: its output, its end, and the commits that the run receives during the job."""

    def __init__(self, client: Any, job: str, store: Store, tell: Tell) -> None:
        self._client = client
        self._job = job
        self._store = store
        self._tell = tell
        self._told = 0
        self._details: Any = None
        self._away_since: float | None = None

    async def follow(self) -> str:
        """Forward the job's output until the job has ended. Returns its state: one of ENDS."""
        watching, log = asyncio.create_task(self._watch()), asyncio.create_task(self._pass_log_on())
        try:
            while (state := await asyncio.to_thread(self._state)) not in ENDS:
                await asyncio.sleep(STATE_S)
                if log.done():
                    log = asyncio.create_task(self._pass_log_on())
            if log.done():  # it may have broken just before the last lines
                log = asyncio.create_task(self._pass_log_on())
            await asyncio.wait([log], timeout=LAST_LINES_S)
        except asyncio.CancelledError:
            self._tell(
                f"\nraycheck: {self._job} is still running: use ray job logs --follow, or ray job stop, with its name\n"
            )
            raise
        else:
            return state
        finally:
            watching.cancel()
            log.cancel()

    @property
    def seconds_until_own_end(self) -> float | None:
        """Return the seconds until the script failed on its own, or None if something else ended it, or may have."""
        code, began, ended = (
            getattr(self._details, name, None) for name in ("driver_exit_code", "start_time", "end_time")
        )
        if code is None or began is None or ended is None or not 0 < code < KILLED:
            return None
        return float(ended - began) / 1000

    async def _pass_log_on(self) -> None:
        """Forward new text in the job's log. Each new connection starts at the log's beginning."""
        position = 0
        with suppress(Exception):  # the connection may break at any time; only the state shows how the job ended
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
        """Query the job's state. Returns "" while the job server is unreachable.

        Raises StoreError after it has been unreachable for AWAY_S.
        """
        try:
            found = [job for job in self._client.list_jobs() if job.submission_id == self._job]
        except (OSError, RuntimeError) as error:
            self._away_since = self._away_since or time.monotonic()
            if time.monotonic() - self._away_since > AWAY_S:
                raise StoreError(
                    f"job {self._job}: the job server was unreachable for {AWAY_S:.0f} s: {error}"
                ) from error
            return ""
        self._away_since = None
        if not found:
            return "FAILED"  # its record was lost when the head node was restarted
        self._details = found[0]
        return str(found[0].status.value)


def _submit_first(client: Any, request: Mapping[str, Any]) -> str:
    name, deadline = _new_name(), time.monotonic() + STARTING_S
    while True:
        try:
            return _submit_once(client, request, name)
        except (OSError, RuntimeError, ValueError) as error:
            if "try again later" not in str(error) or time.monotonic() > deadline:
                raise ConfigError(f"the cluster refuses the job: {error}") from error
        time.sleep(STATE_S)


def _submit_again(client: Any, request: Mapping[str, Any]) -> str:
    """Submit again, with patience, since the cluster may be restarting."""
    name = _new_name()
    return _patiently(lambda: _submit_once(client, request, name), "the job server")


def _submit_once(client: Any, request: Mapping[str, Any], name: str) -> str:
    """Submit the job under a name that we chose, unless a job of that name exists.

    If the response to an earlier call was lost, the job is found by its name and not started twice.
    """
    with suppress(OSError, RuntimeError):
        if any(job.submission_id == name for job in client.list_jobs()):
            return name
    return str(client.submit_job(submission_id=name, **request))


def _new_name() -> str:
    return f"raycheck-{uuid4().hex[:12]}"


def _patiently(call: Callable[[], T], what: str) -> T:
    """Return the result of `call`, retrying for up to AWAY_S while `what` is unreachable."""
    deadline = time.monotonic() + AWAY_S
    while True:
        try:
            return call()
        except (OSError, RuntimeError, StoreError) as error:
            if time.monotonic() > deadline:
                raise StoreError(f"{what} was unreachable for {AWAY_S:.0f} s: {error}") from error
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
    except RayError as error:  # authentication failed: the cluster requires a token, and none or a wrong one was sent
        why = str(error).partition("\n")[0]
        if os.environ.get("RAY_AUTH_MODE") == "token":
            raise ConfigError(f"wrong token for the job server at {at}: {why}") from error
        raise ConfigError(f"the job server at {at} requires a token, set RAY_AUTH_MODE=token: {why}") from error
    except (OSError, RuntimeError, ValueError) as error:
        raise ConfigError(f"no job server at {at}: {error}") from error


def _newest(store: Store) -> Entry | None:
    """Return the entry of the newest commit, or None if there is none."""
    try:
        live = read_newest(store).newest
    except NotFoundError:
        return None
    return live[-1] if live else None  # in commit order; commit times are whole seconds


def _attempt(store: Store) -> int:
    """Return the number of the live attempt, or 0 if there is none."""
    try:
        return read_newest(store).attempt.number
    except NotFoundError:
        return 0


def _key(newest: Entry | None) -> str | None:
    return None if newest is None else newest.key


def _in_words(newest: Entry | None) -> str:
    return "nothing committed" if newest is None else f"newest commit: step {newest.step} ({newest.key})"


def _print(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()
