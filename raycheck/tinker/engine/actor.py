"""The engine as Ray actors, one per rank, and how the server calls them.

Every call names a method of Tenants and is sent to all ranks, in the same order to each. An exception of the method is
returned as a value that says whose fault it was, so an exception from Ray always means that an actor is gone. Then all
actors are restarted without any model, and the callers open their models again. All actors are also restarted when a
call failed on some ranks only, because the ranks may then differ.
"""

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, Protocol
from uuid import uuid4

from raycheck.adapters import RayGroup, start_coordinator
from raycheck.errors import ConfigError, FencedError, RaycheckError, SupersededError
from raycheck.tinker.engine.ranks import Ranks

logger = logging.getLogger("raycheck.tinker")
GRACE_S = 60.0
"""How much longer the other ranks may take after one has failed."""
PLACED_S = 20.0
"""How long Ray may take to start an actor before a warning is logged."""
Category = Literal["user", "server", "fenced"]


class EngineGoneError(Exception):
    """The engine or its node died. All models must be opened again.

    was_running: whether the engine died while running this call; False for calls waiting behind another one.
    """

    def __init__(self, text: str, *, was_running: bool = True) -> None:
        super().__init__(text)
        self.was_running = was_running


class EngineRefusalError(Exception):
    """An operation failed, but the engine lives. category: whose fault it was; "fenced": another server has the run."""

    def __init__(self, text: str, category: Category) -> None:
        super().__init__(text)
        self.category = category


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineAnswer:
    """The return value of an operation, or why it failed."""

    value: Any = None
    error: str | None = None
    category: Category = "server"


class Engine(Protocol):
    """The interface of an engine. life: changes with each start; models exist for one life only."""

    life: int

    async def call(self, method: str, *args: Any, life: int | None = None) -> Any:
        """Call a method of Tenants. Raises EngineRefusalError, and EngineGoneError, after which `life` has changed.

        life: the life in which the model was opened; an engine of another life never receives the call. None: any
        engine.
        """


def answer_of(call: Callable[[], Any]) -> EngineAnswer:
    """Make a call and return its outcome as a value."""
    try:
        return EngineAnswer(value=call())
    except (FencedError, SupersededError) as error:
        return EngineAnswer(error=str(error), category="fenced")
    except ValueError as error:  # includes ConfigError
        return EngineAnswer(error=str(error), category="user")
    except RaycheckError as error:
        return EngineAnswer(error=str(error), category="server")
    except Exception as error:  # noqa: BLE001  torch's errors have many classes; the engine must outlive them
        return EngineAnswer(error=f"{type(error).__name__}: {error}", category="server")


def value_of(answer: EngineAnswer) -> Any:
    """Return the value of an answer. Raises EngineRefusalError if the answer is an error."""
    if answer.error is not None:
        raise EngineRefusalError(answer.error, answer.category)
    return answer.value


class EngineActor:
    """The actor of one rank: Tenants over one base model."""

    def __init__(self, owner: str) -> None:
        self._owner = owner
        self._tenants: Any = None
        self._ranks = Ranks()
        self._nodes: list[str] = []
        self._store: Any = None

    def serve_rendezvous(self, size: int) -> tuple[str, int]:
        """Make this rank the first one, where the others rendezvous. Returns its address and port."""
        from ray.util import get_node_ip_address

        host = str(get_node_ip_address())
        self._store = _tcp_store(host, 0, size, is_master=True, wait_for_workers=False)
        return host, self._store.port

    def start(self, source: str, dtype: str, ranks: Ranks, rendezvous: tuple[str, int] | None) -> None:
        """Join the other ranks and load the base model. Raises ConfigError if it cannot be loaded."""
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

    def _group(self, uri: str) -> RayGroup:
        rank = self._ranks.rank
        start, coordinator = self._ranks.from_first(lambda: self._new_group(uri))
        return RayGroup(
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
    """Create the process group: gloo for CPU tensors, NCCL for GPU tensors."""
    import torch
    import torch.distributed as dist

    if store is None:
        store = _tcp_store(*rendezvous, ranks.size, is_master=False)
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    dist.init_process_group(backend, store=store, rank=ranks.rank, world_size=ranks.size)


def _tcp_store(*args: Any, **settings: Any) -> Any:
    import torch.distributed

    return vars(torch.distributed)["TCPStore"](*args, **settings)  # missing in torch's type hints


class RayEngine:
    """An engine of Ray actors, which are all restarted when one dies.

    ranks: how many actors; the base model is sharded over them. num_cpus, num_gpus: what Ray reserves for each.
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
        self._sent: list[object] = []  # this life's unanswered calls; the actors run them in this order

    async def call(self, method: str, *args: Any, life: int | None = None) -> Any:
        while not self._actors:
            await self._start()
        if life not in (None, self.life):  # no await from here until the call is sent
            raise EngineGoneError("the engine was restarted since the model was opened", was_running=False)
        now, sent, mark = self.life, self._sent, object()
        sent.append(mark)
        try:
            return await self._answer(method, args, is_next=lambda: sent[0] is mark)
        finally:
            if now == self.life:  # the list of an ended life is kept, so that one call is blamed for the death
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
            logger.warning("restarting all ranks because %s failed on some ranks only: %s", method, refusals[0])
            await self._end(life)
        raise (fenced or refusals)[0]

    async def _end(self, life: int) -> None:
        """Stop all actors of this life. The next call starts new ones."""
        async with self._starting:
            if life == self.life:
                _kill(self._actors)
                self.life, self._actors, self._sent = life + 1, [], []

    async def _start(self) -> None:
        """Start the actors. Raises EngineGoneError if one dies, and ConfigError if the base model cannot be loaded."""
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
        """Wait until Ray has started the actors. Warn if it takes long: no node may ever have room for them."""
        import ray

        starting = [asyncio.ensure_future(_ready(actor)) for actor in actors]
        waiting = (await asyncio.wait(starting, timeout=PLACED_S, return_when=asyncio.FIRST_EXCEPTION))[1]
        if waiting and not any(map(_error, starting)):
            has: dict[str, float] = ray.cluster_resources()
            needs = self._resources
            logger.warning(
                "%d of %d ranks wait until Ray has room: each needs %g CPUs and %g GPUs, and the cluster has %g and "
                "%g in total. Add nodes, stop other work on them, or restart with fewer ranks or GPUs",
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
    """Return a rank's answer. Raises EngineRefusalError for an error, and Ray's exception for a death."""
    return value_of(await call)


def _error(call: "asyncio.Task[Any]") -> BaseException | None:
    """Return the exception of a call, or None if it has not raised one (yet)."""
    return None if not call.done() or call.cancelled() else call.exception()


def _deaths(calls: "list[asyncio.Task[Any]]") -> list[BaseException]:
    """Return the exceptions of calls that got no answer."""
    return [error for call in calls if (error := _error(call)) and not isinstance(error, EngineRefusalError)]


def _kill(actors: list[Any]) -> None:
    import ray

    for actor in actors:
        ray.kill(actor)
