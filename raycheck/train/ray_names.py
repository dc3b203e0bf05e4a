"""Every name of Ray that may change between its releases, feature-detected, in one place.

Tested on Ray 2.60; 2.51 is the oldest. Alpha and developer APIs: upload modes, preemption info, the train
context's innards.
"""

import math
from collections.abc import Collection, Mapping
from contextlib import suppress
from typing import Any, TypeVar

import ray
import ray.train
import ray.util.client
from ray.exceptions import RayActorError, RayTaskError
from ray.train import UserCallback

from raycheck.errors import ConfigError, RaycheckError
from raycheck.train.log import logger
from raycheck.train.ray_calls import run_in

try:
    from ray.train.v2._internal.execution.callback import ControllerCallback
except ImportError:
    ControllerCallback = object  # type: ignore[assignment,misc]

MAX_FAREWELL_S = 600.0
_DIED, _TAKEN = "its process died", "its node was taken away"
T = TypeVar("T")


class RunGuard(UserCallback):
    """In the controller: ends the run on errors that a restart cannot cure, which Ray would retry for ever.

    Raising from a callback is Ray's only way to stop a run whatever `max_failures` says; this is the one place where
    raycheck wants that. It also carries the coordinator's handle and the run's URI from `fit` to the workers.
    """

    def __init__(self, coordinator: Any = None, uri: str = "") -> None:
        self.coordinator = coordinator
        self.uri = uri

    def after_exception(self, run_context: Any, worker_exceptions: dict[int, Exception]) -> None:
        del run_context
        if self.coordinator is not None:
            with suppress(Exception):
                self.coordinator.hurt.remote(causes_of(worker_exceptions))
        for error in worker_exceptions.values():
            final = final_error(error)
            if final is not None:
                raise final


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
                    self._coordinator.hurt.remote(["a node of the group was about to go"])
                case "ResizingState":
                    ray.get(self._coordinator.save_now.remote(), timeout=MAX_FAREWELL_S)


def guards(coordinator: Any, uri: str) -> list[Any]:
    """raycheck's callbacks for a RunConfig."""
    has_hook = ControllerCallback is not object
    return [RunGuard(coordinator, uri), *([ControllerGuard(coordinator)] if has_hook else [])]


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
                guards.append(RunGuard())
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


def report_pointer(prefix: str, metrics: dict[str, float]) -> None:
    """Tell Ray of the pointer directory `prefix` (relative to the run). Every rank calls this at the same step."""
    context = _context()
    assert context is not None, "only asked for inside Ray Train"
    storage = context.storage_context
    checkpoint = None
    if context.get_world_rank() == 0:
        path = storage.build_checkpoint_path_from_name(prefix)
        checkpoint = ray.train.Checkpoint(path, filesystem=storage.storage_filesystem)
    ray.train.report(metrics, checkpoint=checkpoint, checkpoint_upload_mode=ray.train.CheckpointUploadMode.NO_UPLOAD)


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
