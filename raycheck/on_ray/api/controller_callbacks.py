"""Callbacks that run in Ray Train's controller process, which starts, watches and restarts the workers.

They end a run that no restart can help, request a save before Ray resizes a healthy group, and keep raycheck's reports
out of Ray Tune's. `raycheck.fit` adds them to the RunConfig; under a plain trainer.fit(), rank 0 adds the most
important one to the running controller.
"""

from collections.abc import Iterable
from contextlib import suppress
from typing import Any

import ray
from ray.train import UserCallback

from raycheck.bucket.format.object_keys import pointed_by
from raycheck.log import event, logger
from raycheck.on_ray.api.calls import run_in
from raycheck.on_ray.api.failure_causes import causes_of, final_error, mistake_in
from raycheck.on_ray.api.train_context import controller_actor, in_ray_train, run_config

try:
    from ray.train.v2._internal.execution.callback import ControllerCallback, WorkerGroupCallback
except ImportError:
    ControllerCallback = WorkerGroupCallback = object  # type: ignore[assignment,misc]

MAX_SAVE_S = 600.0
"""How long the controller waits for a save before it resizes a group; the coordinator gives up much earlier."""
ASK_S = 30.0


def guarded(callbacks: Iterable[Any], coordinator: Any, uri: str) -> list[Any]:
    """Return a RunConfig's callbacks with raycheck's added, and Ray Tune's replaced by `TuneReports`."""
    has_hook = ControllerCallback is not object
    hooks = [ControllerGuard(coordinator), MistakeGuard(coordinator)] if has_hook else []
    return [*map(TuneReports.around, callbacks), RunGuard(coordinator, uri), *hooks]


class RunGuard(UserCallback):
    """A callback that ends the run on errors that a restart cannot cure, which Ray would retry forever.

    Raising from a callback is Ray's only way to stop a run whatever `max_failures` is; this is the only place where
    raycheck does that. The guard also carries the coordinator's handle and the run's URI from `fit` to the workers.
    """

    def __init__(self, coordinator: Any = None, uri: str = "", *, is_off: bool = False) -> None:
        """is_off: the workers save nothing and restore nothing."""
        self.coordinator = coordinator
        self.uri = uri
        self.is_off = is_off

    def after_exception(self, run_context: Any, worker_exceptions: dict[int, Exception]) -> None:
        del run_context
        if self.coordinator is not None:
            with suppress(Exception):
                self.coordinator.group_failed.remote(causes_of(worker_exceptions))
        for error in worker_exceptions.values():
            final = final_error(error)
            if final is not None:
                raise final


class MistakeGuard(WorkerGroupCallback):
    """A callback that ends the run on a bug in the user's program, as long as no step was completed.

    A UserCallback gets the error too, but without the worker's traceback.
    """

    def __init__(self, coordinator: Any) -> None:
        self._coordinator = coordinator

    def after_worker_group_poll_status(self, worker_group_status: Any) -> None:
        statuses = getattr(worker_group_status, "worker_statuses", {})
        errors = {rank: status.error for rank, status in statuses.items() if status.error is not None}
        mistake = mistake_in(errors)
        if mistake is not None and not self._ask_has_trained():
            raise mistake

    def _ask_has_trained(self) -> bool:
        """Ask the coordinator whether a step was completed. If it does not answer, assume that one was."""
        with suppress(Exception):
            return bool(ray.get(self._coordinator.has_trained.remote(), timeout=ASK_S))
        return True


class ControllerGuard(ControllerCallback):
    """A callback that requests a save before Ray replaces a healthy group by one of another size, and keeps a run alive
    when its storage fails.

    Never raises.
    """

    def __init__(self, coordinator: Any) -> None:
        self._coordinator = coordinator

    def after_controller_start(self, *context: Any) -> None:
        del context
        _survive_lost_records()

    def after_controller_state_update(self, previous_state: Any, current_state: Any) -> None:
        del previous_state
        with suppress(Exception):
            match type(current_state).__name__:
                case "PreemptingState":
                    self._coordinator.group_failed.remote(["a node of the group was about to be preempted"])
                case "ResizingState":
                    ray.get(self._coordinator.save_now.remote(), timeout=MAX_SAVE_S)


class TuneReports(UserCallback):
    """A replacement for Ray's TuneReportCallback that passes to Tune only what the script itself reports.

    Each report gets the path of the newest checkpoint. Tune counts every report that it gets as an iteration, and the
    last one is the trial's result. A pointer to a commit would count as an iteration too, without the script's metrics.
    """

    def __init__(self, tune: Any) -> None:
        self._tune = tune
        self._newest: Any = None
        self._has_reported = False

    @classmethod
    def around(cls, callback: Any) -> Any:
        """Wrap Ray Tune's callback; return any other callback unchanged."""
        names = {(kind.__module__.partition(".")[0], kind.__name__) for kind in type(callback).__mro__}
        return cls(callback) if ("ray", "TuneReportCallback") in names else callback

    def after_report(self, run_context: Any, metrics: list[dict[str, Any]], checkpoint: Any) -> None:
        if checkpoint is None or pointed_by(checkpoint.path) is None:
            self._has_reported = True
            self._tune.after_report(run_context, metrics, checkpoint or self._newest)
            return
        if self._newest is None and not self._has_reported:
            logger.info(
                "Ray Tune gets only what the script reports with ray.train.report(metrics); raycheck's commits are not "
                "Tune iterations, so report from time to time"
            )
        self._newest = checkpoint

    def after_exception(self, run_context: Any, worker_exceptions: dict[int, Exception]) -> None:
        self._tune.after_exception(run_context, worker_exceptions)


def guard_from_fit() -> RunGuard | None:
    """Return the guard that `raycheck.fit` put on this worker's RunConfig; None under a plain trainer.fit()."""
    for callback in run_config().callbacks or ():
        if isinstance(callback, RunGuard):
            return callback
    return None


def is_turned_off() -> bool:
    """Return whether this worker was started by `raycheck.fit(enabled=False)`."""
    guard = guard_from_fit() if in_ray_train() else None
    return guard is not None and guard.is_off


def guard_this_run() -> None:
    """Add a RunGuard to the running controller, so that final errors are final under a plain trainer.fit() too."""
    ray.get(run_in(controller_actor(), _install_guard), timeout=60)


def _install_guard(controller: Any) -> None:
    from ray.train.v2._internal.callbacks.user_callback import UserCallbackHandler

    for callback in controller._callbacks:  # noqa: SLF001
        if isinstance(callback, UserCallbackHandler):
            guards = callback._user_callbacks  # noqa: SLF001
            if not any(isinstance(item, RunGuard) for item in guards):
                guards[:] = [*map(TuneReports.around, guards), RunGuard()]
                _survive_lost_records()


def _survive_lost_records() -> None:
    """Let the run continue when Ray cannot write its own record of the checkpoints that were reported to it.

    Without this, the error would end the run. raycheck reads nothing from that record, and the next report rewrites it
    completely. This runs in the controller's process.
    """
    with suppress(ImportError, AttributeError):
        from ray.train.v2._internal.execution.checkpoint.checkpoint_manager import CheckpointManager as Manager

        record: Any = Manager._save_state_and_delete_old_checkpoints  # noqa: SLF001

        def record_if_possible(manager: Any) -> None:
            try:
                record(manager)  # what it cannot record, it does not delete either
            except OSError as error:
                text = f"Ray Train's own record of checkpoints was not written; the run continues: {error}"
                logger.warning(event(text))

        manager_class: Any = Manager
        manager_class._save_state_and_delete_old_checkpoints = record_if_possible  # noqa: SLF001
