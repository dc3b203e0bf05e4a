"""`fit` runs trainer.fit() with a coordinator in the driver, sensible retries, and errors as they were raised."""

import os
import socket
from contextlib import suppress
from typing import Any
from uuid import uuid4

import ray
from ray.exceptions import ActorDiedError
from ray.train import FailureConfig, Result, TrainingFailedError

from raycheck.bucket.choice import resolved
from raycheck.bucket.diagnosis.checks import refuse_unfit_place
from raycheck.bucket.protocol.resume import AUTO, Fork, Resume, key_to_restore, parse_resume
from raycheck.bucket.protocol.sharing.fork import fork
from raycheck.bucket.reading import ask_latest
from raycheck.bucket.store import Store, open_store
from raycheck.bucket.store.address import join_uri, kind_of, with_settings
from raycheck.errors import NotFoundError
from raycheck.log import event, logger, show_log
from raycheck.on_ray.api.calls import call
from raycheck.on_ray.api.controller_callbacks import RunGuard, guarded
from raycheck.on_ray.api.failure_causes import causes_of, final_error, mistake_behind
from raycheck.on_ray.api.run_location import check_ray_storage, ray_storage, storage_uri
from raycheck.on_ray.api.trainer_checks import keep_collectives_whole, refuse_unsupported, release_nodes_of
from raycheck.on_ray.api.tune_session import given_pointer, in_tune, report_commits_of, trial_id
from raycheck.on_ray.driver_signals import saves_on_signals
from raycheck.on_ray.ray_group import start_coordinator
from raycheck.storage_settings import StorageSettings

MAX_FAILURES = 3
CONTROLLER_RETRIES = 3
COLLECTIVE_TIMEOUT_S = 1800
SAVE_NOW_S = 600.0
GIVE_UP_S = 30.0
"""How long a driver that ends with an error waits for the error to be in the attempt's record."""


def fit(
    trainer: Any, *, resume: str | int = "auto", storage: StorageSettings | None = None, enabled: bool = True
) -> Result:
    """Run a Ray Train trainer whose train_fn uses raycheck.Checkpointer. Return Ray's Result.

    resume: how the first attempt of this call starts. "auto" resumes from the run's head, or starts at step 0 if there
    is none; "never" refuses a run that has checkpoints; "must" refuses one that has none; a step, a checkpoint's
    name or "best" (by the keep_best of the newest save) rewinds the run to that checkpoint. Another run's URI starts a
    new run from that run's head, without copying tensors within one bucket, or resumes the new run if it exists.

    storage: how to access the bucket; it overrides the query of the storage path. It also applies to a run to start
    from. It is passed with the run's URI to the coordinator, the workers and Ray itself.

    enabled: False runs Ray's own trainer.fit(); every Checkpointer in its workers is turned off, as with
    SaveSettings(enabled=False). resume and storage are then ignored.

    SIGUSR1 to this process triggers a save. So does SIGTERM, which then ends the process after the commit; it waits for
    that at most 30 s plus three times the last save. FailureConfig(max_failures=0), Ray's default, becomes 3. A dead
    controller is restarted up to 3 times.

    Raises ConfigError before anything starts, for a run that could never resume, for a place that Ray's own file system
    does not reach, where Ray would hang, and for one that `raycheck doctor` calls wrong, in its words. Raises
    FencedError when another driver has taken over the run. A bug in the program (`failure_causes.MISTAKES`:
    AttributeError, TypeError, ImportError and the like) fails the run immediately with the original exception, if this
    call has not completed a step by then: another attempt would fail in the same way. Everything else that ends a run
    is Ray's TrainingFailedError.
    """
    show_log()
    if not enabled:
        return _fit_without(trainer)
    refuse_unsupported(trainer)
    config = trainer.run_config
    where = storage_uri(config) if storage is None else with_settings(storage_uri(config), storage)
    if in_tune() and resume == "auto":
        return _fit_trial(trainer, where)
    return _fit_run(trainer, where, resume, storage)


def _fit_run(trainer: Any, where: str, resume: str | int, storage: StorageSettings | None) -> Result:
    """Run the trainer with its run in the storage at `where`. See fit."""
    config = trainer.run_config
    uri = join_uri(where, config.name)
    store = open_store(uri)
    store.both(
        lambda: refuse_unfit_place(store, node=socket.gethostname()), lambda: check_ray_storage(config, where, store)
    )
    wish = settle_resume(resume, store, storage)
    _settle_failures(config)
    # Ray's collectives wait forever by default; a rank that left the loop must not block the others (I9).
    os.environ.setdefault("RAY_TRAIN_COLLECTIVE_TIMEOUT_S", str(COLLECTIVE_TIMEOUT_S))
    os.environ.setdefault("RAY_TRAIN_PREEMPTION_POLL_INTERVAL_S", "1")  # 5 by default, and a notice may be shorter
    if not ray.is_initialized():
        ray.init()
    coordinator = start_coordinator(uri, owner=uuid4().hex[:16], resume=wish)
    coordinator.prepare.remote()  # while Ray starts the workers
    callbacks = list(config.callbacks or ())
    config.callbacks = guarded(callbacks, coordinator, uri)
    try:
        with ray_storage(config, where), saves_on_signals(lambda: _save_now(coordinator)):
            return _fit_again(trainer)
    except BaseException as error:
        final = (final_error(error) or mistake_behind(error)) if isinstance(error, TrainingFailedError) else None
        _record_failure(coordinator, error, final)
        if final is not None:
            raise final from error
        raise
    finally:
        config.callbacks = callbacks
        ray.kill(coordinator)


def _fit_trial(trainer: Any, where: str) -> Result:
    """Run the trainer in a Ray Tune trial, from the commit that Tune gives it.

    The trial's own commit belongs to its run, which resumes. Another trial's commit is forked into a new run; the
    trial's earlier run is left unchanged.
    """
    config = trainer.run_config
    name, pointer = config.name, given_pointer()
    try:
        if pointer is not None and pointer.trial == trial_id():
            config.name = pointer.run
        elif pointer is not None:
            config.name = f"{name}-from-{pointer.trial}-{uuid4().hex[:6]}"
            source, target = (open_store(join_uri(where, run)) for run in (pointer.run, config.name))
            fork(source, target, run_id=uuid4().hex, key=pointer.key)
            logger.info(
                event("continues from another trial's commit", source=pointer.key, of=source.uri, run=target.uri)
            )
        report_commits_of(config.name)
        return _fit_run(trainer, where, "auto", None)
    finally:
        config.name = name


def settle_resume(resume: str | int, store: Store, storage: StorageSettings | None) -> Resume:
    """Do what `resume` asks for before the claim: fork the run at another URI, or refuse what is not possible.

    Refusing it here takes a second; the claim would refuse it only after the workers were started. The claim still
    decides. storage: see `fit`. Return the `resume` for the claim. Raises ConfigError, and what `fork` raises.
    """
    wish = parse_resume(resume)
    if isinstance(wish, Fork):
        is_alike = kind_of(wish.uri) == kind_of(store.uri)
        fork(open_store(wish.uri, storage if is_alike else None), store, run_id=uuid4().hex)
        return AUTO
    try:
        ask_latest(store, lambda body: key_to_restore(store.uri, body, resolved(store, wish)))
    except NotFoundError:
        key_to_restore(store.uri, None, wish)
    return wish


def _fit_without(trainer: Any) -> Result:
    """Run the trainer with raycheck turned off. A RunGuard tells this to the workers."""
    logger.warning("raycheck is turned off by fit(enabled=False): nothing is saved, and nothing is restored")
    config = trainer.run_config
    callbacks = list(config.callbacks or ())
    config.callbacks = [*callbacks, RunGuard(is_off=True)]
    try:
        result: Result = trainer.fit()
    finally:
        config.callbacks = callbacks
    return result


def _fit_again(trainer: Any) -> Result:
    """Run the trainer, and restart it when its controller has died.

    Ray neither restarts a controller, nor counts its death as a failure.
    """
    for left in reversed(range(CONTROLLER_RETRIES + 1)):
        try:
            result: Result = trainer.fit()
        except ActorDiedError as error:
            release_nodes_of(str(error.actor_id))
            if not left:
                raise
            logger.warning(event("Ray Train's controller died: restarting it", retries_left=left))
        else:
            return result
    raise AssertionError("unreachable: the last iteration returns or raises")


def _save_now(coordinator: Any) -> bool:
    return bool(call(coordinator.save_now, timeout_s=SAVE_NOW_S))


def _record_failure(coordinator: Any, error: BaseException, final: BaseException | None) -> None:
    """Have the coordinator record why this driver ends the run, to distinguish it from a driver that died."""
    shown = final or error
    lines = causes_of(getattr(shown, "worker_failures", {}))
    cause = "; ".join(lines) or f"{type(shown).__name__}: {shown}".partition("\n")[0]
    with suppress(Exception):
        call(coordinator.give_up, cause, final is not None, timeout_s=GIVE_UP_S)


def _settle_failures(config: Any) -> None:
    """Change a FailureConfig under which the run would not survive, and log the change."""
    failures = config.failure_config or FailureConfig()
    if failures.max_failures == 0:
        logger.info(
            "max_failures is 0, Ray's default: the first failure would end the run. Using %d; set "
            "FailureConfig(max_failures=...) to choose",
            MAX_FAILURES,
        )
        failures.max_failures = MAX_FAILURES
        config.failure_config = failures
    if keep_collectives_whole(failures):
        logger.warning(
            "FailureConfig(relax_collectives_on_preemption=True) is turned off: it would let ranks continue without "
            "the others, so that they would no longer agree on when to save"
        )
