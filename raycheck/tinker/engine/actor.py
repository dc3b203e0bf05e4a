"""The engine as a Ray actor, and how the server calls it.

Every call names a method of Tenants. What the method raises comes back as a value that says whose fault it was, so that
an exception of Ray's always means that the actor is gone. A new actor is started then, which knows no model yet:
whoever calls opens its models again.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, Protocol
from uuid import uuid4

from raycheck import FencedError, Group, RaycheckError, SupersededError, start_coordinator

Category = Literal["user", "server", "fenced"]


class EngineGoneError(Exception):
    """The engine died, or its node did. All models have to be opened again."""


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

    async def call(self, method: str, *args: Any) -> Any:
        """Calls a method of Tenants. Raises EngineRefusalError, and EngineGoneError after which `life` is another."""


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
    """Runs in the actor's process: Tenants over one base model."""

    def __init__(self, source: str, dtype: str, owner: str) -> None:
        from raycheck.tinker.engine.base_model import BaseModel
        from raycheck.tinker.engine.tenants import Tenants

        self._owner = owner
        self._tenants = Tenants(BaseModel(source, dtype=dtype), self._group)

    def call(self, method: str, args: tuple[Any, ...]) -> EngineAnswer:
        return answer_of(lambda: getattr(self._tenants, method)(*args))

    def _group(self, uri: str) -> Group:
        start = uuid4().hex[:16]
        coordinator = start_coordinator(uri, owner=self._owner, suffix=f":{start}")
        return Group(id=start, uri=uri, rank=0, world_size=1, coordinator=coordinator)


class RayEngine:
    """Starts the actor, and starts it again when it died. num_cpus, num_gpus: what Ray reserves for it."""

    def __init__(self, source: str, *, dtype: str = "float32", num_cpus: float = 1, num_gpus: float = 0) -> None:
        self.life = 0
        self._new = (source, dtype)
        self._resources = {"num_cpus": num_cpus, "num_gpus": num_gpus}
        self._actor: Any = None
        self._starting = asyncio.Lock()

    async def call(self, method: str, *args: Any) -> Any:
        import ray

        if self._actor is None:
            await self._start()
        actor, life = self._actor, self.life
        try:
            answer: EngineAnswer = await actor.call.remote(method, args)
        except ray.exceptions.RayError as error:
            async with self._starting:
                if life == self.life:
                    self.life, self._actor = life + 1, None
                    ray.kill(actor)
            raise EngineGoneError(str(error)) from error
        return value_of(answer)

    async def _start(self) -> None:
        import ray

        async with self._starting:
            if self._actor is None:
                owner = uuid4().hex[:16]
                self._actor = ray.remote(EngineActor).options(**self._resources).remote(*self._new, owner)
