"""A worker group without Ray: rank 0's process runs the coordinator, and all ranks call it over TCP.

It is for training runs that torchrun starts. When rank 0 dies, the coordinator dies with it. Nothing is lost: it is not
the source of truth, and torchrun restarts the whole group. It answers only callers that know the group's secret: a
random key, which the ranks get from rank 0 through the process group that they already have.
"""

import asyncio
import os
import pickle
import secrets
import socket
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from multiprocessing.managers import BaseManager
from typing import Any
from uuid import uuid4

import torch.distributed as dist

from raycheck.errors import ConfigError, RaycheckError, StoreError
from raycheck.group.coordinator.actor import Coordinator
from raycheck.group.group import Group, same
from raycheck.log import event, logger

LAST_WORDS_S = 5.0
"""How long rank 0's process waits, when that rank fails, until the other ranks have received the error."""
OLD_ADDRESSES = (
    "after a restart by torchrun the ranks may not meet (connectFullMesh ... Connection refused), since its store has "
    "the addresses of the ranks before: start it by TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 torchrun --standalone, or "
    "--rdzv-backend=c10d on several nodes"
)
CALLS = 8
"""How many calls of one rank may be in progress at a time."""


def torchrun_group(uri: str) -> Group:
    """Return this rank's place in the group of torch.distributed, for a training that torchrun starts without Ray.

    All ranks call it, after init_process_group; rank 0's process runs the coordinator. uri: the run's root, such as
    "s3://bucket/runs/my-run". Raises ConfigError if torch.distributed is not initialized. The restore raises it for a
    place that `raycheck doctor` calls wrong, in its words.
    """
    if not dist.is_initialized():
        raise ConfigError(
            "torchrun_group: torch.distributed is not initialized; call torch.distributed.init_process_group first, "
            "and start the script by torchrun"
        )
    rank, world_size = dist.get_rank(), dist.get_world_size()
    if rank == 0 and _meets_by_old_addresses():
        logger.warning(event(OLD_ADDRESSES, run=uri))
    broadcast = _broadcast() if world_size > 1 else same
    id_, served = broadcast((uuid4().hex[:16], serve(uri)) if rank == 0 else None)
    return ServedGroup(
        id=id_,
        uri=uri,
        rank=rank,
        world_size=world_size,
        coordinator=served,
        broadcast=broadcast,
        is_first_on_node=int(os.environ.get("LOCAL_RANK", rank)) == 0,
    )


def _meets_by_old_addresses() -> bool:
    """Return whether torchrun would restart the ranks with the store that the previous ranks have used."""
    restarts = os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0")
    return restarts != "0" and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


@dataclass(frozen=True, kw_only=True)
class Served:
    """The address of a coordinator, and what it requires from callers: plain values, to be sent to each rank."""

    address: tuple[str, int]
    key: bytes


@dataclass(frozen=True, kw_only=True)
class ServedGroup(Group):
    """One rank's place in a group whose coordinator is served by a process of the training.

    coordinator: a Served.
    """

    @property
    def node(self) -> str:
        return socket.gethostname()

    def fetch(self, references: list[Any]) -> Any:
        """Return None: each rank reads a checkpoint's documents itself, since there is no object store."""
        del references

    def tell(self, method: str, *args: Any) -> Future[Any]:
        return self._threads.submit(self._call, method, args)

    def answer(self, told: Any) -> Any:
        return told.result() if told.done() and told.exception() is None else None

    def ask(self, method: str, *args: Any, timeout_s: float, what: str) -> Any:
        """Call the coordinator. Raise StoreError when rank 0 is gone, or does not answer within timeout_s."""
        try:
            return self.tell(method, *args).result(timeout_s)
        except RaycheckError as error:
            if self.rank:
                said = str(error)
                with suppress(Exception):
                    self._threads.submit(lambda: self._caller.heard(self.rank, said)).result(LAST_WORDS_S)
            raise
        except (OSError, EOFError) as error:
            why = "that process has ended, and its own output says why"
            if isinstance(error, TimeoutError):
                why = f"no answer within {timeout_s:.0f} s"
            raise StoreError(
                f"rank {self.rank}: {what}: the coordinator in rank 0's process does not answer: {why}. Start the "
                "training again"
            ) from error

    def pickled(self, name: str, function: Callable[..., Any]) -> bytes:
        """Return a pickled call of rank 0's function of this name: tasks run in its process."""
        if self.rank == 0:
            _functions[self.id, name] = function
        return pickle.dumps(OfRankZero(group=self.id, name=name))

    def tell_failure(self, error: Exception, *, saves: int = 0) -> bool:
        """Tell the other ranks. On rank 0, wait a while until they know, since the coordinator ends with rank 0."""
        is_told = super().tell_failure(error, saves=saves)
        if is_told and self.rank == 0:
            with suppress(Exception):
                self._caller.wait_until_heard(str(error), self.world_size - 1, LAST_WORDS_S)
        return is_told

    def tell_end(self, error: Exception) -> None:
        cause = f"rank {self.rank}: {type(error).__name__}: {error}".partition("\n")[0]
        is_final = isinstance(error, RaycheckError) and error.ends_run
        with suppress(Exception):
            self.tell("give_up", cause, is_final).result(LAST_WORDS_S)

    @cached_property
    def _threads(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(CALLS, thread_name_prefix="raycheck-calls")

    @cached_property
    def _caller(self) -> Any:
        manager: Any = _Client(address=self.coordinator.address, authkey=self.coordinator.key)
        manager.connect()
        return manager.caller()

    def _call(self, method: str, args: tuple[Any, ...]) -> Any:
        return self._caller.call(method, args)


_functions: dict[tuple[str, str], Callable[..., Any]] = {}
"""The functions that follow commits of this process's groups, by group and name."""


@dataclass(frozen=True, kw_only=True)
class OfRankZero:
    """A call of a function that rank 0's process has under a name."""

    group: str
    name: str

    def __call__(self, *args: object) -> object:
        return _functions[self.group, self.name](*args)


def serve(uri: str) -> Served:
    """Start a coordinator in threads of this process, which end with it. Return where the ranks reach it."""
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="raycheck-coordinator", daemon=True).start()
    is_restart = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"
    coordinator = Coordinator(uri, uuid4().hex[:16], examines=not is_restart)
    asyncio.run_coroutine_threadsafe(coordinator.prepare(), loop)  # while the script builds its state
    caller = _Caller(coordinator, loop)

    class Serving(BaseManager):
        """A separate class for each coordinator: what is registered belongs to the class."""

    Serving.register("caller", callable=lambda: caller, exposed=("call", "heard", "wait_until_heard"))
    key = secrets.token_bytes(32)
    host = os.environ.get("MASTER_ADDR", "127.0.0.1")  # under torchrun: where rank 0 is reached
    server: Any = Serving(address=(_own(host), 0), authkey=key).get_server()
    threading.Thread(target=server.serve_forever, name="raycheck-server", daemon=True).start()
    return Served(address=(host, server.address[1]), key=key)


def _own(host: str) -> str:
    """Return the address to listen on: this host's, or all addresses if `host` is not this host's own name."""
    try:
        with socket.socket() as probe:
            probe.bind((host, 0))
    except OSError:
        return "0.0.0.0"  # noqa: S104  behind a name that only others resolve; the key keeps strangers out
    return host


class _Client(BaseManager):
    """A client of a coordinator that another process serves."""


_Client.register("caller")


class _Caller:
    """The calls of all ranks, made in the coordinator's event loop."""

    def __init__(self, coordinator: Coordinator, loop: asyncio.AbstractEventLoop) -> None:
        self._coordinator = coordinator
        self._loop = loop
        self._heard: set[tuple[int, str]] = set()
        self._change = threading.Condition()

    def call(self, method: str, args: tuple[Any, ...]) -> Any:
        return asyncio.run_coroutine_threadsafe(getattr(self._coordinator, method)(*args), self._loop).result()

    def heard(self, rank: int, said: str) -> None:
        """Record that a rank was given a raycheck error with this text."""
        with self._change:
            self._heard.add((rank, said))
            self._change.notify_all()

    def wait_until_heard(self, text: str, count: int, timeout_s: float) -> bool:
        """Wait, for timeout_s seconds at most, until this many ranks were given an error with this text. Return whether
        they were.
        """
        with self._change:
            return self._change.wait_for(
                lambda: len({rank for rank, said in self._heard if text in said}) >= count, timeout_s
            )


def _broadcast() -> Callable[[Any], Any]:
    """Return a broadcast from rank 0 over a separate process group, on the CPU."""
    group = dist.new_group(backend="gloo")

    def broadcast(value: Any) -> Any:
        box = [value]
        dist.broadcast_object_list(box, src=0, group=group)
        return box[0]

    return broadcast
