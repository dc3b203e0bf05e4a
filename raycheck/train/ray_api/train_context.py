"""Every name of Ray that may change between its releases, feature-detected, in one place.

Tested on Ray 2.60; 2.51 is the oldest. Alpha and developer APIs: upload modes, preemption info, the train
context's innards.
"""

import inspect
import math
import sys
from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress
from typing import Any, TypeVar, cast

import ray
import ray.train
import ray.util.client
from ray.exceptions import RayActorError, RayTaskError
from ray.train import TrainingFailedError, UserCallback
from ray.util.placement_group import PlacementGroup, remove_placement_group

from raycheck.bucket.format.object_keys import pointed_by
from raycheck.errors import ConfigError, RaycheckError
from raycheck.train.log import logger
from raycheck.train.ray_api.calls import run_in

try:
    from ray.train.v2._internal.execution.callback import ControllerCallback, WorkerGroupCallback
except ImportError:
    ControllerCallback = WorkerGroupCallback = object  # type: ignore[assignment,misc]

MAX_FAREWELL_S = 600.0
ASK_S = 30.0
_DIED, _TAKEN = "its process died", "its node was taken away"
T = TypeVar("T")


MISTAKES = (
    AttributeError,
    ImportError,
    IndentationError,
    ModuleNotFoundError,
    NameError,
    NotImplementedError,
    SyntaxError,
    TabError,
    TypeError,
    UnboundLocalError,
)
"""Errors that say that a program is wrong, whatever runs it: these types themselves, and no subclass that a library has
made of them. A ValueError, KeyError, OSError or RuntimeError may as well come from data, the network or a device."""


class TuneReports(UserCallback):
    """In the controller: stands in for Ray's TuneReportCallback, and hands Tune the script's own reports alone, each
    with the path of the newest checkpoint. Every report that Tune hears is an iteration, and the last one is the
    trial's result: a pointer would count as one, without what the script reports."""

    def __init__(self, tune: Any) -> None:
        self._tune = tune
        self._newest: Any = None
        self._has_heard = False

    def after_report(self, run_context: Any, metrics: list[dict[str, Any]], checkpoint: Any) -> None:
        if checkpoint is None or pointed_by(checkpoint.path) is None:
            self._has_heard = True
            self._tune.after_report(run_context, metrics, checkpoint or self._newest)
            return
        if self._newest is None and not self._has_heard:
            logger.info(
                "Ray Tune hears what the script says with ray.train.report(metrics), from time to time; raycheck's "
                "commits are no iterations of Tune's"
            )
        self._newest = checkpoint

    def after_exception(self, run_context: Any, worker_exceptions: dict[int, Exception]) -> None:
        self._tune.after_exception(run_context, worker_exceptions)

    @classmethod
    def around(cls, callback: Any) -> Any:
        """The callback itself when it is not Tune's."""
        names = {(kind.__module__.partition(".")[0], kind.__name__) for kind in type(callback).__mro__}
        return cls(callback) if ("ray", "TuneReportCallback") in names else callback


class RunGuard(UserCallback):
    """In the controller: ends the run on errors that a restart cannot cure, which Ray would retry for ever.

    Raising from a callback is Ray's only way to stop a run whatever `max_failures` says; this is the one place where
    raycheck wants that. It also carries the coordinator's handle and the run's URI from `fit` to the workers.
    """

    def __init__(self, coordinator: Any = None, uri: str = "", *, is_off: bool = False) -> None:
        """is_off: the workers are to save nothing."""
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
    """In the controller: ends the run on a mistake in the user's program before any step was completed. A UserCallback
    is told of the error too, but without the worker's traceback."""

    def __init__(self, coordinator: Any) -> None:
        self._coordinator = coordinator

    def after_worker_group_poll_status(self, worker_group_status: Any) -> None:
        statuses = getattr(worker_group_status, "worker_statuses", {})
        errors = {rank: status.error for rank, status in statuses.items() if status.error is not None}
        mistake = mistake_in(errors)
        if mistake is not None and not self._has_trained():
            raise mistake

    def _has_trained(self) -> bool:
        """Taken for granted while the coordinator does not say."""
        with suppress(Exception):
            return bool(ray.get(self._coordinator.has_trained.remote(), timeout=ASK_S))
        return True


class ControllerGuard(ControllerCallback):
    """In the controller: a store that is away does not end the run, and a healthy group saves before Ray replaces it by
    one of another size. Never raises."""

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
                    self._coordinator.group_failed.remote(["a node of the group was about to go"])
                case "ResizingState":
                    ray.get(self._coordinator.save_now.remote(), timeout=MAX_FAREWELL_S)


def guarded(callbacks: Iterable[Any], coordinator: Any, uri: str) -> list[Any]:
    """A RunConfig's callbacks with raycheck's."""
    has_hook = ControllerCallback is not object
    hooks = [ControllerGuard(coordinator), MistakeGuard(coordinator)] if has_hook else []
    return [*map(TuneReports.around, callbacks), RunGuard(coordinator, uri), *hooks]


def causes_of(errors: Mapping[int, BaseException]) -> list[str]:
    """What happened to the ranks, a line each; first those whose process is gone, since others' errors follow."""
    lines = [_cause_of(rank, error) for rank, error in sorted(errors.items())]
    return sorted(lines, key=lambda line: not line.endswith((_DIED, _TAKEN)))


def _cause_of(rank: int, error: BaseException) -> str:
    found = (getattr(error, name, None) for name in ("health_check_failure", "_base_exc", "cause"))
    inner = next(filter(None, found), error)
    if isinstance(inner, RayActorError):
        return f"rank {rank}: {_TAKEN if getattr(inner, 'preempted', False) else _DIED}"
    text = str(inner).strip().partition("\n")[0][:200]
    return f"rank {rank}: {type(inner).__name__}: {text}"


def mistake_in(errors: Mapping[int, BaseException]) -> Exception | None:
    """The error of a rank that says that the user's program is wrong, in Ray's wrapper, which has its traceback. None
    when there is none, and when a rank's process is gone: the others' errors may follow from that."""
    if not all(hasattr(error, "_base_exc") for error in errors.values()):
        return None
    found = (error for error in errors.values() if type(getattr(error, "_base_exc", None)) in MISTAKES)
    return cast("Exception | None", next(found, None))


def mistake_behind(error: TrainingFailedError) -> BaseException | None:
    """The user's own error, when it is for that mistake that the guard has ended the run."""
    failure = getattr(error, "controller_failure", None)
    mistake: BaseException | None = getattr(failure, "_base_exc", None)
    return mistake if type(mistake) in MISTAKES else None


def release_nodes_of(controller_id: str) -> None:
    """Remove the placement groups of a controller that died. Ray's own cleaner of them asks the dashboard: where none
    runs they would hold the nodes until the job ends, and the next controller would wait for ever."""
    try:
        from ray._private.state import state
        from ray.core.generated.gcs_pb2 import PlacementGroupTableData  # type: ignore[attr-defined]

        accessor = state._connect_and_get_accessor()  # noqa: SLF001
        table = [PlacementGroupTableData.FromString(row) for row in accessor.get_placement_group_table()]
    except (ImportError, AttributeError, ray.exceptions.RayError) as error:
        logger.warning("the nodes of Ray Train's dead controller may stay taken: %s", error)
        return
    for group in table:
        if group.creator_actor_id.hex() == controller_id and group.state != PlacementGroupTableData.REMOVED:
            remove_placement_group(PlacementGroup(ray.PlacementGroupID(group.placement_group_id)))


def keep_collectives_whole(failures: Any) -> bool:
    """Whether a FailureConfig had to be changed so that no rank passes a collective without the others."""
    is_relaxed = bool(getattr(failures, "relax_collectives_on_preemption", False))
    if is_relaxed:
        failures.relax_collectives_on_preemption = False
    return is_relaxed


def final_error(error: BaseException | None) -> RaycheckError | None:
    """The raycheck error inside one of Ray's that ends the run; None when a restart may help."""
    seen: set[int] = set()
    queue = [error]
    while queue:
        item = queue.pop(0)
        if item is None or id(item) in seen:
            continue
        seen.add(id(item))
        if isinstance(item, RaycheckError) and not isinstance(item, RayTaskError):
            if item.ends_run:
                return item
            continue
        failures = getattr(item, "worker_failures", None)
        queue += [
            getattr(item, "cause", None),
            getattr(item, "_base_exc", None),
            getattr(item, "controller_failure", None),
            *(failures.values() if isinstance(failures, dict) else ()),
            item.__cause__,
        ]
    return None


def in_ray_train() -> bool:
    """Whether this is a Ray Train worker's train_fn."""
    return _context() is not None


def rank_and_world_size() -> tuple[int, int]:
    """Of Ray Train, else of torch.distributed, else (0, 1)."""
    import torch.distributed as dist

    context = _context()
    if context is not None:
        return context.get_world_rank(), context.get_world_size()
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return 0, 1


def is_first_on_node() -> bool:
    """Whether no lower rank of this run is on this node."""
    context = _context()
    return context is None or context.get_local_rank() == 0


def broadcast(value: T) -> T:
    """Rank 0's value, on every rank. A barrier by actor call: every rank must call it equally often."""
    from ray.train.collective import broadcast_from_rank_zero

    result: T = broadcast_from_rank_zero(value)
    return result


def run_config() -> Any:
    """The RunConfig of the run this worker belongs to."""
    context = _context()
    assert context is not None, "only asked for inside Ray Train"
    return context.train_run_context.run_config


def train_run_id() -> str:
    """One per trainer.fit() call."""
    context = _context()
    assert context is not None, "only asked for inside Ray Train"
    return str(context.train_run_context.run_id)


def guard_from_fit() -> RunGuard | None:
    """What `raycheck.fit` put on the RunConfig; None under a plain trainer.fit()."""
    for callback in run_config().callbacks or ():
        if isinstance(callback, RunGuard):
            return callback
    return None


def is_turned_off() -> bool:
    """Whether this worker was started by `raycheck.fit(enabled=False)`."""
    guard = guard_from_fit() if in_ray_train() else None
    return guard is not None and guard.is_off


def guard_this_run() -> None:
    """Under a plain trainer.fit(): put a RunGuard into the running controller, so that final errors are final."""
    context = _context()
    assert context is not None, "only asked for inside Ray Train"
    ray.get(run_in(context.controller_actor, _install_guard), timeout=60)


def _install_guard(controller: Any) -> None:
    from ray.train.v2._internal.callbacks.user_callback import UserCallbackHandler

    for callback in controller._callbacks:  # noqa: SLF001
        if isinstance(callback, UserCallbackHandler):
            guards = callback._user_callbacks  # noqa: SLF001
            if not any(isinstance(item, RunGuard) for item in guards):
                guards[:] = [*map(TuneReports.around, guards), RunGuard()]
                _survive_lost_records()


def _survive_lost_records() -> None:
    """In the controller's process: Ray's own record of the checkpoints it was told of may fail to be written, which
    would end the run. raycheck reads nothing of it, and the next report writes it whole."""
    with suppress(ImportError, AttributeError):
        from ray.train.v2._internal.execution.checkpoint.checkpoint_manager import CheckpointManager as Manager

        record: Any = Manager._save_state_and_delete_old_checkpoints  # noqa: SLF001

        def record_if_possible(manager: Any) -> None:
            try:
                record(manager)  # what it cannot write down it does not delete either
            except OSError as error:
                logger.warning("Ray Train's own record of checkpoints was not written; the run goes on: %s", error)

        Manager._save_state_and_delete_old_checkpoints = record_if_possible  # type: ignore[method-assign]  # noqa: SLF001


def refuse_unsupported(trainer: Any) -> None:
    """Raise ConfigError for ways to use Ray in which nothing could be restored."""
    if ray.util.client.ray.is_connected():  # type: ignore[no-untyped-call]
        raise ConfigError(
            "this driver is connected through Ray Client (ray://), whose death nobody in the cluster would notice. "
            "Submit it as a job: ray job submit -- python script.py"
        )
    if trainer.scaling_config.num_workers == 0:
        raise ConfigError("ScalingConfig(num_workers=0) runs without workers; use num_workers=1 to save and restore")


def dataset_names() -> list[str]:
    """The datasets that the trainer of this worker was given, as get_dataset_shard hands them out."""
    provider = getattr(_context(), "dataset_shard_provider", None)
    for holder in ("_dataset_names", "_dataset_iterators"):  # the second one up to Ray 2.51
        if names := getattr(provider, holder, None):
            return sorted(names)
    return []


def report_pointer(prefix: str, metrics: Mapping[str, float], *, validate: bool = False) -> None:
    """Tell Ray of the pointer directory `prefix` (relative to the run). Every rank calls this at the same step, with
    one directory, so that ray.train.get_checkpoint() says the same on all of them; Ray keeps rank 0's metrics."""
    context = _context()
    assert context is not None, "only asked for inside Ray Train"
    storage = context.storage_context
    path = storage.build_checkpoint_path_from_name(prefix)
    ray.train.report(
        _ranked(metrics, run_config().checkpoint_config),
        checkpoint=ray.train.Checkpoint(path, filesystem=storage.storage_filesystem),
        checkpoint_upload_mode=ray.train.CheckpointUploadMode.NO_UPLOAD,
        **({"validation": True} if validate else {}),
    )


def _ranked(metrics: Mapping[str, float], config: Any) -> dict[str, float]:
    """With the worst value there is for a score that this checkpoint does not have (no such metric at its step, or not
    a finite one): Ray would take it for the best of all where lower is better. Infinity would not survive its JSON."""
    name = getattr(config, "checkpoint_score_attribute", None)
    if name is None or name in metrics:
        return dict(metrics)
    is_max = getattr(config, "checkpoint_score_order", "max") == "max"
    return {**metrics, name: -sys.float_info.max if is_max else sys.float_info.max}


def check_validation(*, is_ray_train: bool) -> None:
    """Raise ConfigError where Ray has no validation function to run."""
    if not is_ray_train:
        raise ConfigError("save(..., validate=True): only Ray Train validates checkpoints; here nobody would")
    if "validation" not in inspect.signature(ray.train.report).parameters:
        raise ConfigError(f"save(..., validate=True): Ray {ray.__version__} cannot do this; 2.60 can")
    if not getattr(_context(), "has_validation_fn", False):
        raise ConfigError(
            "save(..., validate=True): give the trainer a function: "
            "TorchTrainer(validation_config=ValidationConfig(fn=...))"
        )


def checkpoint_path() -> str | None:
    """Where the checkpoint lies that Ray would have this worker restore; None when Ray knows of none."""
    checkpoint = ray.train.get_checkpoint()
    return None if checkpoint is None else str(checkpoint.path)


def preemption_deadline() -> float | None:
    """Unix seconds at which a node of this group is to go, inf for a notice without a time, None without a notice.

    Every rank calls it equally often.
    """
    if not hasattr(ray.train, "get_preemption_info"):
        return None
    info = ray.train.get_preemption_info()
    if info is None:
        return None
    return math.inf if info.deadline_ms is None else info.deadline_ms / 1000.0


def drain_deadline(nodes: Collection[str]) -> float | None:
    """Unix seconds at which the first of these nodes is to go, inf for a notice without a time, None without one."""
    try:
        from ray._private.state import state

        draining = state.get_draining_nodes()
    except (ImportError, AttributeError, ray.exceptions.RayError):
        return None
    return min((ms / 1000.0 if ms else math.inf for node, ms in draining.items() if node in nodes), default=None)


def _context() -> Any:
    try:
        from ray.train.v2._internal.execution.context import get_train_context
    except ImportError:
        return None
    try:
        return get_train_context()
    except RuntimeError:
        return None
