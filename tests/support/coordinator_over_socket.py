"""A coordinator in a thread of the test's process, for ranks that are other processes: a group without Ray."""

import threading
from concurrent.futures import Future, ThreadPoolExecutor
from multiprocessing.connection import Client, Connection, Listener
from typing import Any
from uuid import uuid4

import torch.distributed as dist

from tests.support.coordinator_in_thread import CoordinatorThread, InProcess

Place = tuple[str, str, tuple[str, int]]


class CoordinatorServer:
    """Serves a run's coordinator to other processes. Each start of ranks needs a new `place`."""

    def __init__(self, uri: str, owner: str = "me") -> None:
        self.uri = uri
        self._coordinator = CoordinatorThread(uri, owner)
        self._listener = Listener(("127.0.0.1", 0), backlog=64)
        threading.Thread(target=self._serve, daemon=True).start()

    @property
    def place(self) -> Place:
        """What `group_here` needs, for one start of the ranks."""
        return self.uri, uuid4().hex, self._listener.address

    def _serve(self) -> None:
        while True:
            threading.Thread(target=self._answer, args=(self._listener.accept(),), daemon=True).start()

    def _answer(self, connection: Connection) -> None:
        with connection:
            method, args = connection.recv()
            try:
                answer = (True, self._coordinator.call(method, *args).result())
            except Exception as error:
                answer = (False, error)
            try:
                connection.send(answer)
            except OSError:
                return  # the rank was killed


class Caller:
    """Calls a CoordinatorServer, each call over a connection of its own."""

    def __init__(self, address: tuple[str, int]) -> None:
        self._address = address
        self._threads = ThreadPoolExecutor(16)

    def call(self, method: str, *args: Any) -> Future[Any]:
        return self._threads.submit(self._call, method, args)

    def _call(self, method: str, args: tuple[Any, ...]) -> Any:
        with Client(self._address) as connection:
            connection.send((method, args))
            is_good, answer = connection.recv()
        if not is_good:
            raise answer
        return answer


def group_here(place: Place) -> InProcess:
    """This process's place, whose coordinator is a CoordinatorServer: its rank is that in torch's group."""
    uri, name, address = place
    rank = dist.get_rank()
    return InProcess(
        id=name,
        uri=uri,
        rank=rank,
        world_size=dist.get_world_size(),
        coordinator=Caller(address),
        broadcast=_broadcast,
        is_first_on_node=not rank,
    )


def _broadcast(value: Any) -> Any:
    box = [value]
    dist.broadcast_object_list(box)
    return box[0]
