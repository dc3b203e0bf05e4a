"""Real processes with a real gloo group, started once for the session."""

import functools
import os
import sys
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any
from uuid import uuid4

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.tensor._collective_utils import MeshTopoInfo
from torch.distributed.tensor._redistribute import clear_redistribute_planner_cache
from torch.distributed.tensor.debug import _clear_sharding_prop_cache

from tests.support.processes.fork_server import fork_server

ANSWER_WITHIN_S = 220.0


class Ranks:
    """`run` gives every rank the same call; the first `world_size` processes form the group."""

    def __init__(self, count: int, folder: Path) -> None:
        context = fork_server()
        self._folder = folder
        self._connections: list[Connection] = []
        self._processes = []
        for _ in range(count):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(theirs, dict(os.environ)), daemon=True)
            process.start()
            theirs.close()
            self._connections.append(ours)
            self._processes.append(process)

    def run(self, function: Callable[..., Any], world_size: int, *args: object) -> list[Any]:
        """`function(rank, world_size, *args)` on each rank; their results by rank. Raises what any of them raised."""
        rendezvous = str(self._folder / uuid4().hex)
        for rank in range(world_size):
            self._connections[rank].send((function, rank, world_size, rendezvous, args))
        deadline = time.monotonic() + ANSWER_WITHIN_S
        answers = []
        for rank, connection in enumerate(self._connections[:world_size]):
            if not connection.poll(max(0.0, deadline - time.monotonic())):
                self.stop()
                raise TimeoutError(f"rank {rank} did not answer within {ANSWER_WITHIN_S:.0f} s")
            answers.append(connection.recv())
        failures = [f"rank {rank}:\n{answer}" for rank, (is_good, answer) in enumerate(answers) if not is_good]
        if failures:
            raise AssertionError("\n".join(failures))
        return [answer for _, answer in answers]

    def stop(self) -> None:
        for process, connection in zip(self._processes, self._connections, strict=True):
            process.kill()
            process.join()
            connection.close()


def mesh_of(world_size: int) -> "dist.DeviceMesh":
    """A mesh with a name of its own: torch caches DTensor specs by equal meshes, across destroyed groups."""
    return dist.init_device_mesh("cpu", (world_size,), mesh_dim_names=(f"mesh{uuid4().hex}",))


def _forget_meshes() -> None:
    """Clear the caches of DTensor, which hold meshes, and with these their groups: a group of gloo that is held has a
    thread that wakes a hundred times a second, and hundreds of them take a fifth of the machine."""
    _clear_sharding_prop_cache()
    clear_redistribute_planner_cache()
    MeshTopoInfo.build_from_mesh.cache_clear()
    tensor_modules = [module for name, module in sys.modules.items() if name.startswith("torch.distributed.tensor")]
    for cached in [value for module in tensor_modules for value in vars(module).values()]:
        if isinstance(cached, functools._lru_cache_wrapper):
            cached.cache_clear()


def _serve(connection: Connection, environment: dict[str, str]) -> None:
    os.environ.update(environment)  # the server has that of an earlier moment
    np.random.seed()  # noqa: NPY002  # Python's own generator is seeded anew by a fork, numpy's is not
    torch.set_num_threads(1)
    while True:
        try:
            function, rank, world_size, rendezvous, args = connection.recv()
        except EOFError:
            return  # the test session is over
        try:
            store = dist.FileStore(rendezvous, world_size)
            dist.init_process_group(
                "gloo", store=store, rank=rank, world_size=world_size, timeout=timedelta(seconds=ANSWER_WITHIN_S / 2)
            )
            try:
                answer = (True, function(rank, world_size, *args))
            finally:
                dist.destroy_process_group()
                _forget_meshes()
        except BaseException:  # DCP's CheckpointException is one
            answer = (False, traceback.format_exc())
        connection.send(answer)
