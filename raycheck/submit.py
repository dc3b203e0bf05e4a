"""A training script as a Ray job that is submitted again after failures, for as long as it makes progress.

The job's driver dies with its node, and nothing in Ray starts it again. The run goes on from its newest commit, so all
that is needed is to submit the same script; and to stop when two failures have no commit between them, since then it
fails for a reason that another try does not cure.
"""

import asyncio
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import raycheck
from raycheck.bucket.catalog import read_latest
from raycheck.bucket.latest import Entry
from raycheck.bucket.store import Store, open_store
from raycheck.errors import ConfigError, NotFoundError, RaycheckError, StoreError
from raycheck.storage_settings import StorageSettings

METADATA_KEY = "raycheck_run"
LOOK_S = 10.0
"""How often `latest` is read, to tell of commits."""
AWAY_S = 600.0
"""How long the job server may be away: a head node that comes back takes minutes."""
ENDS = ("SUCCEEDED", "FAILED", "STOPPED")


def submit(
    entrypoint: str,
    *,
    uri: str,
    address: str | None = None,
    runtime_env: Mapping[str, Any] | None = None,
    retries: int = 3,
    storage: StorageSettings | None = None,
    tell: Callable[[str], None] = print,
) -> str:
    """Submit `entrypoint`, a shell command, until it succeeds. Returns how the last job ended: SUCCEEDED, FAILED or
    STOPPED.

    uri: the run that the script trains; it goes into the job's metadata (`raycheck_run`), without settings. address: of
    the cluster, as for `ray job submit`. runtime_env: Ray's; see with_raycheck. retries: how often it is submitted
    again after it has FAILED. tell: takes the job's output as it comes, and raycheck's own lines.

    Raises ConfigError when the cluster does not answer, StoreError when it is away for ten minutes, and what reading
    the bucket raises.
    """
    store = open_store(uri, storage)
    newest = _newest(store)
    at_last_failure = _key(newest)
    client = _client(address)
    for number in range(retries + 1):
        job = client.submit_job(
            entrypoint=entrypoint, runtime_env=dict(runtime_env or {}), metadata={METADATA_KEY: uri.partition("?")[0]}
        )
        tell(f"raycheck: submitted {job}, {_in_words(newest)}\n")
        try:
            state = asyncio.run(_Job(client, job, store, tell).follow())
        except KeyboardInterrupt:
            tell(f"\nraycheck: {job} goes on; ray job logs --follow {job}, ray job stop {job}\n")
            raise
        newest = _newest(store)
        tell(f"raycheck: {job} {state}, {_in_words(newest)}\n")
        if state != "FAILED" or number == retries:
            return state
        if number and _key(newest) == at_last_failure:
            tell("raycheck: nothing was committed since the failure before; another try would fail as well\n")
            return state
        at_last_failure = _key(newest)
    raise AssertionError("unreachable: the last round returns")


def with_raycheck(runtime_env: Mapping[str, Any]) -> dict[str, Any]:
    """This raycheck is sent along, over the one in the cluster. Its dependencies must be there."""
    package = str(Path(raycheck.__file__).parent)
    return {**runtime_env, "py_modules": [*runtime_env.get("py_modules", ()), package]}


class _Job:
    """One submitted job."""

    def __init__(self, client: Any, job: str, store: Store, tell: Callable[[str], None]) -> None:
        self._client = client
        self._job = job
        self._store = store
        self._tell = tell
        self._told = 0

    async def follow(self) -> str:
        """Until it has ended; its state then."""
        watching = asyncio.create_task(self._watch())
        try:
            while True:
                with suppress(Exception):  # the way to the log may break at any time; only the state says what became
                    await self._hand_on_log()
                state = await asyncio.to_thread(self._state)
                if state in ENDS:
                    return state
                await asyncio.sleep(1.0)
        finally:
            watching.cancel()

    async def _hand_on_log(self) -> None:
        """A log that is followed anew comes from its beginning."""
        position = 0
        async for text in self._client.tail_job_logs(self._job):
            position += len(text)
            if position > self._told:
                self._tell(text[self._told - position :])
                self._told = position

    async def _watch(self) -> None:
        seen = _key(_newest(self._store))
        while True:
            await asyncio.sleep(LOOK_S)
            with suppress(RaycheckError):
                newest = await asyncio.to_thread(_newest, self._store)
                if _key(newest) != seen:
                    self._tell(f"raycheck: {_in_words(newest)}\n")
                    seen = _key(newest)

    def _state(self) -> str:
        deadline = time.monotonic() + AWAY_S
        while True:
            try:
                found = [job.status for job in self._client.list_jobs() if job.submission_id == self._job]
            except (OSError, RuntimeError) as error:
                if time.monotonic() > deadline:
                    raise StoreError(f"job {self._job}: the job server is away for {AWAY_S:.0f} s: {error}") from error
                time.sleep(1.0)
            else:
                return str(found[0].value) if found else "FAILED"  # it went with a head that was started anew


def _client(address: str | None) -> Any:
    from ray.job_submission import JobSubmissionClient

    try:
        return JobSubmissionClient(address)
    except (OSError, RuntimeError, ValueError) as error:
        raise ConfigError(f"no job server at {address or 'the address from the environment'}: {error}") from error


def _newest(store: Store) -> Entry | None:
    """The newest commit; None while there is none."""
    try:
        live = read_latest(store).live
    except NotFoundError:
        return None
    return max(live, key=lambda entry: entry.committed_at, default=None)


def _key(newest: Entry | None) -> str | None:
    return None if newest is None else newest.key


def _in_words(newest: Entry | None) -> str:
    return "nothing committed" if newest is None else f"newest commit: step {newest.step} ({newest.key})"
