"""Ray's wrapped errors are read: what happened to each rank, and whether the user's program is wrong."""

import torch
from ray.exceptions import RayActorError
from ray.train.v2._internal.exceptions import UserExceptionWithTraceback, WorkerHealthCheckFailedError

from raycheck.on_ray.api.failure_causes import causes_of, mistake_in


def user(error: Exception) -> UserExceptionWithTraceback:
    return UserExceptionWithTraceback(error, "Traceback ...")


def test_only_what_says_that_a_program_is_wrong_is_a_mistake() -> None:
    class OfALibraryError(TypeError):
        pass

    died = WorkerHealthCheckFailedError("A worker health check failed.", failure=RayActorError())
    bad = user(AttributeError("no such attribute"))

    assert mistake_in({0: bad}) is bad
    assert mistake_in({0: user(RuntimeError("gloo: connection closed by peer")), 1: bad}) is bad, (
        "the other one follows"
    )
    assert mistake_in({0: bad, 1: died}) is None, "it may follow from the process that is gone"
    for error in (RuntimeError("NCCL"), OSError("no route"), ConnectionError("x"), ValueError("x"), KeyError("x"),
                  OfALibraryError("x"), MemoryError(), torch.cuda.OutOfMemoryError("x")):  # fmt: skip
        assert mistake_in({0: user(error)}) is None, error
    for kind in (TypeError, NameError, ImportError, ModuleNotFoundError, SyntaxError, UnboundLocalError):
        assert mistake_in({0: user(kind("x"))}) is not None, kind


def test_a_process_that_is_gone_is_named_before_the_errors_that_follow_from_it() -> None:
    died, taken = RayActorError(), RayActorError(preempted=True)
    errors = {
        0: UserExceptionWithTraceback(RuntimeError("gloo: connection closed by peer"), ""),
        2: WorkerHealthCheckFailedError("A worker health check failed.", failure=died),
        3: WorkerHealthCheckFailedError("A worker health check failed.", failure=taken),
    }

    assert causes_of(errors) == [
        "rank 2: its process died",
        "rank 3: its node was taken away",
        "rank 0: RuntimeError: gloo: connection closed by peer",
    ]
