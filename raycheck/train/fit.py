"""`raycheck.fit`: trainer.fit() with a coordinator in the driver, sensible retries, and errors as they were raised."""

import os
from contextlib import suppress
from typing import Any
from uuid import uuid4

import ray
from ray.exceptions import ActorDiedError
from ray.train import FailureConfig, Result, TrainingFailedError

from raycheck.bucket.protocol.claim import check_resume
from raycheck.bucket.protocol.fork import fork
from raycheck.bucket.reading import read_latest
from raycheck.bucket.store import Store, open_store
from raycheck.bucket.store.address import join_uri, kind_of, with_settings
from raycheck.errors import ConfigError, NotFoundError
from raycheck.storage_settings import StorageSettings
from raycheck.train.driver_signals import saves_on_signals
from raycheck.train.group import start_coordinator
from raycheck.train.log import logger, show_log
from raycheck.train.ray_api.calls import call
from raycheck.train.ray_api.controller_callbacks import RunGuard, guarded
from raycheck.train.ray_api.failure_causes import causes_of, final_error, mistake_behind
from raycheck.train.ray_api.run_location import check_ray_storage, ray_storage, storage_uri
from raycheck.train.ray_api.trainer_checks import keep_collectives_whole, refuse_unsupported, release_nodes_of

MAX_FAILURES = 3
CONTROLLER_RETRIES = 3
COLLECTIVE_TIMEOUT_S = 1800
SAVE_NOW_S = 600.0
PUT_DOWN_S = 30.0


def fit(
    trainer: Any, *, resume: str | int = "auto", storage: StorageSettings | None = None, enabled: bool = True
) -> Result:
    """Run a Ray Train trainer whose train_fn uses raycheck.Checkpointer. Returns Ray's Result.

    resume: "auto" goes on from the run's head, or starts; "never" refuses a run that has checkpoints; "must" refuses
    one that has none; a step goes back to that step's checkpoint; another run's URI begins a new run from a copy of
    that run's head, and goes on with it when it exists. It binds the first attempt of this call.

    storage: how the bucket is reached, over what the storage path's query says; also that of a run to begin from. It
    travels with the run's URI to the coordinator, the workers and Ray itself.

    enabled: False is trainer.fit() as Ray has it, in whose workers every Checkpointer is off, as by
    SaveSettings(enabled=False); nobody looks at resume and storage then.

    SIGUSR1 to this process asks for a save; SIGTERM too, and ends it after the commit, for which it waits 30 s and
    three times the last save at most. FailureConfig(max_failures=0), Ray's default, becomes 3. A dead controller is
    started again up to 3 times. Raises ConfigError before anything starts for a run that could never resume and for a
    place that Ray's own file system does not reach, where Ray would hang; FencedError when another driver has taken the
    run over, and Ray's TrainingFailedError for everything else that ends a run; but a mistake in the program
    (`failure_causes.MISTAKES`: AttributeError, TypeError, ImportError and the like) is raised as it is and at once when
    this call has not completed a step by then, since another try would end alike.
    """
    show_log()
    if not enabled:
        return _fit_without(trainer)
    refuse_unsupported(trainer)
    config = trainer.run_config
    where = storage_uri(config) if storage is None else with_settings(storage_uri(config), storage)
    uri = join_uri(where, config.name)
    store = open_store(uri)
    resume = checked_resume(resume, store, storage)
    check_ray_storage(config, where, store)
    _settle_failures(config)
    # Ray's collectives wait for ever by default; a rank that left the loop must not hold the others (I9).
    os.environ.setdefault("RAY_TRAIN_COLLECTIVE_TIMEOUT_S", str(COLLECTIVE_TIMEOUT_S))
    if not ray.is_initialized():
        ray.init()
    coordinator = start_coordinator(uri, owner=uuid4().hex[:16], resume=resume)
    callbacks = list(config.callbacks or ())
    config.callbacks = guarded(callbacks, coordinator, uri)
    try:
        with ray_storage(config, where), saves_on_signals(lambda: _save_now(coordinator)):
            return _fit_again(trainer)
    except BaseException as error:
        final = (final_error(error) or mistake_behind(error)) if isinstance(error, TrainingFailedError) else None
        _put_down(coordinator, error, final)
        if final is not None:
            raise final from error
        raise
    finally:
        config.callbacks = callbacks
        ray.kill(coordinator)


def _fit_without(trainer: Any) -> Result:
    """Only word of it goes along, so that a training function need not be told, too."""
    logger.warning("raycheck is turned off by fit(enabled=False): nothing is saved, and nothing is restored")
    config = trainer.run_config
    callbacks = list(config.callbacks or ())
    config.callbacks = [*callbacks, RunGuard(is_off=True)]
    try:
        result: Result = trainer.fit()
    finally:
        config.callbacks = callbacks
    return result


def _put_down(coordinator: Any, error: BaseException, final: BaseException | None) -> None:
    """Why this driver gives the run up goes into the attempt's record: else nobody could tell it from one that died."""
    said = final or error
    lines = causes_of(getattr(said, "worker_failures", {}))
    cause = "; ".join(lines) or f"{type(said).__name__}: {said}".partition("\n")[0]
    with suppress(Exception):
        call(coordinator.give_up, cause, final is not None, timeout_s=PUT_DOWN_S)


def _save_now(coordinator: Any) -> bool:
    return bool(call(coordinator.save_now, timeout_s=SAVE_NOW_S))


def checked_resume(resume: str | int, store: Store, storage: StorageSettings | None) -> str | int:
    """What the coordinator is told. Looks into the bucket, so that a wish that cannot be met is refused in a second
    and not after workers were started; the claim decides all the same."""
    if isinstance(resume, str) and resume not in ("auto", "never", "must"):
        if "://" not in resume and not resume.startswith("/"):
            raise ConfigError(f"fit(resume={resume!r}): give 'auto', 'never', 'must', a step, or another run's URI")
        is_alike = kind_of(resume) == kind_of(store.uri)
        fork(open_store(resume, storage if is_alike else None), store, run_id=uuid4().hex)
        return "auto"
    try:
        body = read_latest(store)
    except NotFoundError:
        body = None
    check_resume(store.uri, body, resume)
    return resume


def _fit_again(trainer: Any) -> Result:
    """The controller is never restarted by Ray, and its death is not a TrainingFailedError."""
    for left in reversed(range(CONTROLLER_RETRIES + 1)):
        try:
            result: Result = trainer.fit()
        except ActorDiedError as error:
            release_nodes_of(str(error.actor_id))
            if not left:
                raise
            logger.warning("Ray Train's controller died; starting it again (%d more times)", left)
        else:
            return result
    raise AssertionError("unreachable: the last round returns or raises")


def _settle_failures(config: Any) -> None:
    failures = config.failure_config or FailureConfig()
    if failures.max_failures == 0:
        logger.info("FailureConfig(max_failures) was 0, so that no failure would be survived; using %d", MAX_FAILURES)
        failures.max_failures = MAX_FAILURES
        config.failure_config = failures
    if keep_collectives_whole(failures):
        logger.warning(
            "FailureConfig(relax_collectives_on_preemption=True) would let ranks go on without the others, so that "
            "they no longer decide alike when to save; it is turned off"
        )
