"""Processes of multiprocessing that begin as forks of one process with torch and the clients of stores imported.

A process that imports these itself computes for three seconds before it does what a test wants of it. The server has
opened nothing, so nobody inherits a connection. It is started by the first that asks, and ends with this process.
"""

from multiprocessing import get_context
from multiprocessing.context import ForkServerContext

MODULES = (
    "torch.distributed.checkpoint.state_dict",
    "torch.distributed.fsdp",
    "torch.distributed.tensor",
    "torch._dynamo",  # any optimizer imports it
    "raycheck.bucket.store.s3.s3fs_store",
    "raycheck.bucket.store.gcs.store",
    "raycheck.bucket.store.ray_filesystem",
    "raycheck.group.worker.checkpointer",
    "adlfs",
    "gcsfs.core",
    "hypothesis",
    "pytest",
)


def fork_server() -> ForkServerContext:
    context = get_context("forkserver")
    context.set_forkserver_preload(list(MODULES))
    return context
