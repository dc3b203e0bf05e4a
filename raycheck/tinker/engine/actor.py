"""The engine as Ray actors, one for each rank, and how the server calls them.

Every call names a method of Tenants, and goes to all ranks, in the same order to each. What the method raises comes
back as a value that says whose fault it was, so that an exception of Ray's always means that an actor is gone. All of
them are started anew then, and know no model yet: whoever calls opens its models again. So they are when a call failed
on some ranks only, for then the ranks may differ.
"""

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, Protocol
from uuid import uuid4

from raycheck.adapters import Group, start_coordinator
from raycheck.errors import ConfigError, FencedError, RaycheckError, SupersededError
from raycheck.tinker.engine.ranks import Ranks

logger = logging.getLogger("raycheck.tinker")
GRACE_S = 60.0
"""How much longer the other ranks may take than the one that has failed."""
PLACED_S = 20.0
"""After how long it is said that Ray has not started an actor."""
Category = Literal["user", "server", "fenced"]


class EngineGoneError(Exception):
    """The engine died, or its node did. All models have to be opened again.

    was_running: the engine was busy with this very call when it died; False for calls that waited behind another one.
    """

    def __init__(self, text: str, *, was_running: bool = True) -> None:
        super().__init__(text)
        self.was_running = was_running


class EngineRefusalError(Exception):
    """An operation failed, and the engine lives. category: whose fault it was; "fenced": another server has the run."""

    def __init__(self, text: str, category: Category) -> None:
        super().__init__(text)
        self.category = category


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineAnswer:
    """Holds what an operation returned, or why it failed."""

    value: Any = None
    error: str | None = None
    category: Category = "server"


class Engine(Protocol):
    """What the server needs of an engine. life: differs after each start; models live as long as one life."""

    life: int

    async def call(self, method: str, *args: Any, life: int | None = None) -> Any:
        """Call a method of Tenants. Raises EngineRefusalError, and EngineGoneError after which `life` is another.

        life: the one that the call belongs to, since a model was opened in it; the engine of any other life never gets
        the call. None: whichever engine there is.
        """


def answer_of(call: Callable[[], Any]) -> EngineAnswer:
    """Makes a call, and returns its outcome as a value."""
    try:
        return EngineAnswer(value=call())
    except (FencedError, SupersededError) as error:
        return EngineAnswer(error=str(error), category="fenced")
    except ValueError as error:  # a ConfigError is one, too
        return EngineAnswer(error=str(error), category="user")
    except RaycheckError as error:
        return EngineAnswer(error=str(error), category="server")
    except Exception as error:  # noqa: BLE001  torch's errors have many classes; the engine must outlive them
        return EngineAnswer(error=f"{type(error).__name__}: {error}", category="server")


def value_of(answer: EngineAnswer) -> Any:
    """Returns the value of an answer. Raises EngineRefusalError for an error."""
    if answer.error is not None:
        raise EngineRefusalError(answer.error, answer.category)
    return answer.value


class EngineActor:
    """Runs in one rank's process: Tenants over one base model."""

    def __init__(self, owner: str) -> None:
        self._owner = owner
        self._tenants: Any = None
        self._ranks = Ranks()
        self._nodes: list[str] = []
        self._store: Any = None

    def serve_rendezvous(self, size: int) -> tuple[str, int]:
        """Let this rank be the first one, at which the others find each other. Returns its address and port."""
        from ray.util import get_node_ip_address

        host = str(get_node_ip_address())  # type: ignore[no-untyped-call]
        self._store = _tcp_store(host, 0, size, is_master=True, wait_for_workers=False)
        return host, self._store.port

    def start(self, source: str, dtype: str, ranks: Ranks, rendezvous: tuple[str, int] | None) -> None:
        """Join the other ranks, and load the base model. Raises ConfigError when it cannot be loaded."""
        import ray

        from raycheck.tinker.engine.base_model import BaseModel
        from raycheck.tinker.engine.tenants import Tenants

        if rendezvous is not None:
            _join(ranks, self._store, rendezvous)
        self._ranks = ranks
        self._nodes = ranks.gather(ray.get_runtime_context().get_node_id())
        self._tenants = Tenants(BaseModel(source, dtype=dtype, ranks=ranks), self._group)

    def call(self, method: str, args: tuple[Any, ...]) -> EngineAnswer:
        return answer_of(lambda: getattr(self._tenants, method)(*args))

    def _group(self, uri: str) -> Group:
        rank = self._ranks.rank
        start, coordinator = self._ranks.from_first(lambda: self._new_group(uri))
        return Group(
            id=start,
            uri=uri,
            rank=rank,
            world_size=self._ranks.size,
            coordinator=coordinator,
            is_first_on_node=self._nodes.index(self._nodes[rank]) == rank,
        )

    def _new_group(self, uri: str) -> tuple[str, Any]:
        start = uuid4().hex[:16]
        return start, start_coordinator(uri, owner=self._owner, suffix=f":{start}")


def _join(ranks: Ranks, store: Any, rendezvous: tuple[str, int]) -> None:
    """Make the process group: values of the CPU go by gloo, and those of GPUs by NCCL."""
    import torch
    import torch.distributed as dist

    if store is None:
        store = _tcp_store(*rendezvous, ranks.size, is_master=False)
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    dist.init_process_group(backend, store=store, rank=ranks.rank, world_size=ranks.size)


def _tcp_store(*args: Any, **settings: Any) -> Any:
    import torch.distributed

    return vars(torch.distributed)["TCPStore"](*args, **settings)  # torch's type hints do not have it


class RayEngine:
    """Starts the actors, and starts all of them again when one died.

    ranks: how many there are; the base model is sharded over them. num_cpus, num_gpus: what Ray reserves for each.
    """

    def __init__(
        self, source: str, *, dtype: str = "float32", ranks: int = 1, num_cpus: float = 1, num_gpus: float = 0
    ) -> None:
        self.life = 0
        self._new = (source, dtype)
        self._size = ranks
        self._resources = {"num_cpus": num_cpus, "num_gpus": num_gpus}
        self._actors: list[Any] = []
        self._starting = asyncio.Lock()
        self._sent: list[object] = []  # the calls of this life without an answer; the actors run them in this order

    async def call(self, method: str, *args: Any, life: int | None = None) -> Any:
        while not self._actors:
            await self._start()
        if life not in (None, self.life):  # nothing is waited for from here until the call is sent
            raise EngineGoneError("another engine has been started since the model was opened", was_running=False)
        now, sent, mark = self.life, self._sent, object()
        sent.append(mark)
        try:
            return await self._answer(method, args, is_next=lambda: sent[0] is mark)
        finally:
            if now == self.life:  # a list of a life that is over stays, so that one call is blamed for the death
                sent.remove(mark)

    async def _answer(self, method: str, args: tuple[Any, ...], *, is_next: Callable[[], bool]) -> Any:
        import ray

        actors, life = self._actors, self.life
        given = (method, args) if len(actors) == 1 else (method, ray.put(args))
        calls = [asyncio.ensure_future(_successful(actor.call.remote(*given))) for actor in actors]
        waiting = (await asyncio.wait(calls, return_when=asyncio.FIRST_EXCEPTION))[1]
        if waiting and not _deaths(calls):
            waiting = (await asyncio.wait(waiting, timeout=GRACE_S, return_when=asyncio.FIRST_EXCEPTION))[1]
        for call in waiting:
            call.cancel()
        if died := _deaths(calls):
            await self._end(life)
            raise EngineGoneError(str(died[0]), was_running=is_next()) from died[0]
        refusals = [error for error in map(_error, calls) if isinstance(error, EngineRefusalError)]
        if not refusals:
            return calls[0].result()
        fenced = [error for error in refusals if error.category == "fenced"]
        if len(refusals) < len(actors) and not fenced:
            logger.warning("the ranks are started again: %s failed on some only: %s", method, refusals[0])
            await self._end(life)
        raise (fenced or refusals)[0]

    async def _end(self, life: int) -> None:
        """End all actors of this life. The next call starts new ones."""
        async with self._starting:
            if life == self.life:
                _kill(self._actors)
                self.life, self._actors, self._sent = life + 1, [], []

    async def _start(self) -> None:
        """Start the actors. Raises EngineGoneError when one ends, and ConfigError for a base model that cannot be."""
        import ray

        async with self._starting:
            if self._actors:
                return
            owner = uuid4().hex[:16]
            kind: Any = ray.remote(EngineActor)
            new = kind.options(**self._resources)
            actors = [new.remote(owner) for _ in range(self._size)]
            try:
                await self._placed(actors)
                found = await actors[0].serve_rendezvous.remote(self._size) if self._size > 1 else None
                places = [Ranks(rank=rank, size=self._size) for rank in range(self._size)]
                pairs = zip(actors, places, strict=True)
                await asyncio.gather(*[actor.start.remote(*self._new, place, found) for actor, place in pairs])
            except ray.exceptions.RayError as error:
                _kill(actors)
                self.life += 1
                if isinstance(error, ray.exceptions.RayTaskError) and isinstance(error.cause, ConfigError):
                    raise error.cause from None
                raise EngineGoneError(str(error)) from error
            self._actors = actors

    async def _placed(self, actors: list[Any]) -> None:
        """Wait until Ray has started the actors. Say so when it takes long: no node may ever have room for them."""
        import ray

        starting = [asyncio.ensure_future(_ready(actor)) for actor in actors]
        waiting = (await asyncio.wait(starting, timeout=PLACED_S, return_when=asyncio.FIRST_EXCEPTION))[1]
        if waiting and not any(map(_error, starting)):
            has: dict[str, float] = ray.cluster_resources()  # type: ignore[no-untyped-call]
            needs = self._resources
            logger.warning(
                "%d of %d ranks wait until Ray has room: each needs %g CPUs and %g GPUs, and the cluster has %g and %g "
                "in all. Add nodes, end what else runs there, or start again with fewer ranks or GPUs",
                len(waiting),
                len(actors),
                needs["num_cpus"],
                needs["num_gpus"],
                has.get("CPU", 0),
                has.get("GPU", 0),
            )
        await asyncio.gather(*starting)


async def _ready(actor: Any) -> None:
    await actor.__ray_ready__.remote()


async def _successful(call: Any) -> Any:
    """Returns the value that a rank answers with. Raises EngineRefusalError for an error, and Ray's for a death."""
    return value_of(await call)


def _error(call: "asyncio.Task[Any]") -> BaseException | None:
    """Returns what a call has raised; None for one that has not, or not yet."""
    return None if not call.done() or call.cancelled() else call.exception()


def _deaths(calls: "list[asyncio.Task[Any]]") -> list[BaseException]:
    """Returns the errors of the calls that no rank has answered."""
    return [error for call in calls if (error := _error(call)) and not isinstance(error, EngineRefusalError)]


def _kill(actors: list[Any]) -> None:
    import ray

    for actor in actors:
        ray.kill(actor)
