"""Processes of multiprocessing that begin as forks of one process with torch and the clients of stores imported.

A process that imports these itself computes for three seconds before it does what a test wants of it. The server has
opened nothing, so nobody inherits a connection. It is started by the first that asks, and ends with this process.
"""

import os
import subprocess
import sys
import tempfile
from multiprocessing import get_context
from multiprocessing.context import ForkServerContext
from pathlib import Path
from types import ModuleType

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
_OUTPUTS = "stdout", "stderr"


def fork_server() -> ForkServerContext:
    context = get_context("forkserver")
    context.set_forkserver_preload(list(MODULES))
    return context


def run_code(code: str, *args: str, timeout_s: float) -> "subprocess.CompletedProcess[str]":
    """Run a script in a process of its own, as `python -c` would."""
    with tempfile.TemporaryDirectory() as folder:
        process = fork_server().Process(target=_run_code, args=(code, args, dict(os.environ), folder))
        process.start()
        process.join(timeout_s)
        if process.exitcode is None:
            process.kill()
            process.join()
        said = [Path(folder, name).read_text() for name in _OUTPUTS]
        return subprocess.CompletedProcess(args, process.exitcode, *said)


def _run_code(code: str, args: tuple[str, ...], environment: dict[str, str], folder: str) -> None:
    os.environ.update(environment)  # the server has that of an earlier moment
    for number, name in enumerate(_OUTPUTS, 1):
        file = os.open(Path(folder, name), os.O_CREAT | os.O_WRONLY | os.O_APPEND)
        os.dup2(file, number)
        os.close(file)
    sys.argv[:] = ["-c", *args]
    main = sys.modules["__main__"] = ModuleType("__main__")
    exec(compile(code, "<script>", "exec"), vars(main))
