"""The Tinker server in this process, without Ray: its engine is a thread, and its coordinators are threads, too.

All else is real: HTTP, the state file, the models, and what is written to the bucket. A "kill" of the engine forgets its
models in the middle of whatever it does, as the death of the actor would.
"""

import asyncio
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from raycheck import StorageSettings
from raycheck.group.worker import singleton
from raycheck.http_server import HttpLimits, bound
from raycheck.tinker.checkpoint_store import CheckpointStore
from raycheck.tinker.engine.actor import EngineGoneError, EngineRefusalError, answer_of, value_of
from raycheck.tinker.engine.base_model import BaseModel
from raycheck.tinker.engine.tenants import Tenants
from raycheck.tinker.journal import Journal
from raycheck.tinker.server import LIMITS, serve
from raycheck.tinker.service import ServerSettings, Service
from tests.support.processes.coordinator_in_thread import group_of

START_S = 60.0
VOCABULARY = 64


def write_base_model(folder: Path, seed: int = 0) -> str:
    """Write a tiny Llama, and return its folder's name."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        vocab_size=VOCABULARY,
        max_position_embeddings=64,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return str(folder)


@cache
def base_model(source: str) -> BaseModel:
    return BaseModel(source)


class ThreadEngine:
    """Runs Tenants in a thread. kill: forgets all models. before: called before each operation, with its name; an
    EngineGoneError that it raises is a death at that moment, and after `after` one that comes when it is done."""

    def __init__(self, source: str) -> None:
        self.life = 0
        self.calls: list[str] = []
        self.dies_before: Callable[[str], bool] = lambda _: False
        self.dies_after: Callable[[str], bool] = lambda _: False
        self.hides_commits = self.fails_commits = False  # saves stay under way, or are said to have failed
        self.hides_versions = False  # publishing stays under way
        self._base = BaseModel(source)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="tinker-engine")
        self._tenants: Tenants | None = None
        self._dead: list[Tenants] = []

    def kill(self) -> None:
        self.life += 1
        if self._tenants is not None:
            self._dead.append(self._tenants)
        self._tenants = None

    def clean_up(self) -> None:
        """End the threads of all models, also of those that a kill has forgotten: this process goes on."""
        self.kill()
        for tenants in self._dead:
            for model_id in list(tenants._tenants):
                tenants.close(model_id)

    async def call(self, method: str, *args: Any, life: int | None = None) -> Any:
        if life not in (None, self.life):
            raise EngineGoneError("killed earlier", was_running=False)
        self.calls.append(method)
        if self.dies_before(method):
            self.kill()
            raise EngineGoneError("killed before")
        if method == "is_committed" and self.hides_commits:
            if self.fails_commits:
                raise EngineRefusalError("no space left", "server")
            return False
        if method == "published" and self.hides_versions:
            return None
        if self._tenants is None:
            self._tenants = Tenants(self._base, lambda uri: group_of(uri, owner=str(id(self)))[0])
        life, tenants = self.life, self._tenants

        def run() -> Any:
            singleton._open.clear()  # an engine stands for a process of its own
            return answer_of(lambda: getattr(tenants, method)(*args))

        answer = await asyncio.get_running_loop().run_in_executor(self._thread, run)
        if life != self.life:
            raise EngineGoneError("killed meanwhile")
        if self.dies_after(method):
            self.kill()
            raise EngineGoneError("killed after")
        return value_of(answer)


@dataclass
class RunningServer:
    """A server that runs in a thread of its own."""

    url: str = ""
    key: str = ""
    service: Service | None = None
    engine: ThreadEngine | None = None
    errors: list[BaseException] = field(default_factory=list)
    stop: Callable[[], None] = lambda: None


@contextmanager
def tinker_server(
    base: str,
    checkpoints: str,
    state: Path,
    *,
    model_name: str | None = None,
    key: str | None = "",
    port: int = 0,
    limits: HttpLimits = LIMITS,
    allow_hosts: Sequence[str] = (),
    settings: Mapping[str, Any] | None = None,
    storage: StorageSettings | None = None,
    engine: Any = None,
    on_loop: Callable[[asyncio.AbstractEventLoop], None] = lambda _: None,
) -> Iterator[RunningServer]:
    """Serve until the block ends. settings: of ServerSettings, besides the base model. engine: by default a thread.
    on_loop: called with the server's event loop before anything runs in it."""
    running, started = RunningServer(), threading.Event()
    loop = asyncio.new_event_loop()
    on_loop(loop)

    def make_service() -> Service:
        running.engine = engine or ThreadEngine(base)
        running.service = Service(
            ServerSettings(base_model=model_name or base, **{"hold_s": 5.0, "max_models": 1000, **(settings or {})}),
            journal=Journal(str(state)),
            engine=running.engine,
            checkpoints=CheckpointStore(checkpoints, storage),
        )
        return running.service

    def on_start(address: str, made_key: str) -> None:
        running.url, running.key = address, made_key
        started.set()

    async def run() -> None:
        task = asyncio.current_task()
        running.stop = lambda: loop.call_soon_threadsafe(task.cancel)
        with bound("127.0.0.1", port) as sockets:
            await serve(
                make_service(),
                host="127.0.0.1",
                sockets=sockets,
                key=key,
                on_start=on_start,
                limits=limits,
                allow_hosts=allow_hosts,
            )

    def run_in_thread() -> None:
        try:
            loop.run_until_complete(run())
        except asyncio.CancelledError:
            pass
        except BaseException as error:
            running.errors.append(error)
        finally:
            started.set()
            loop.close()

    thread = threading.Thread(target=run_in_thread, name="tinker-server", daemon=True)
    thread.start()
    assert started.wait(START_S)
    if running.errors:
        raise running.errors[0]
    try:
        yield running
    finally:
        if thread.is_alive():
            running.stop()
        thread.join(START_S)
        assert not thread.is_alive()
        if isinstance(running.engine, ThreadEngine):
            running.engine.clean_up()  # an actor ends with the server that started it


def wait_until(condition: Callable[[], bool], timeout_s: float = 30.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "it did not come true in time"
        time.sleep(0.02)
