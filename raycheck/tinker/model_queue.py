"""Runs the requests of one model, one at a time in the order of their numbers, and logs each result.

If the engine has died since the last request, the model is rebuilt first: from its run's newest checkpoint in the
bucket, or from its initial state, and then by replaying the journal's requests since then. The queue waits for a
missing number. When the wait is over, it gives up on that number and on the request that waited, because a later number
must never take its place.

During a save, the next requests run as soon as the model's state is copied; the save has its result after the commit.
If the engine dies meanwhile, the save is repeated first: the model is rebuilt to its state before the save, and the
later requests run again after it. So a commit waits for all earlier saves: once it is there, no earlier state can be
rebuilt. Weights may be published while an earlier commit is under way.
"""

import asyncio
import json
import logging
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, replace
from functools import partial
from typing import Any
from uuid import uuid4

from raycheck.errors import ConfigError, RaycheckError
from raycheck.tinker.engine.actor import Category, EngineGoneError, EngineRefusalError
from raycheck.tinker.journal import Journal, LoggedRequest, ReplacedError, when_there_is_room
from raycheck.tinker.operations import OPERATIONS, SAVES, Context, Result, as_json, is_publish, save_for_recovery
from raycheck.tinker.wire.fields import RefusedRequestError

logger = logging.getLogger("raycheck.tinker")
MAX_DEATHS = 3
"""A request during which the engine has died this many times fails."""


@dataclass(frozen=True, slots=True)
class _Save:
    """A save under way. request: the one it belongs to. is_publish: it commits nothing. task: gives its result."""

    request: LoggedRequest
    is_publish: bool
    task: "asyncio.Task[Result | None]"


class ModelQueue:
    """The queue of one model's requests.

    hold_s: how long to wait for a missing number. recovery_steps, recovery_s: after how many steps, or how long after
    the newest commit has begun, a step is followed by a save without a name. on_result: called with the id of each
    request that now has a result. on_replaced: called when another server has taken over.
    """

    def __init__(
        self,
        context: Context,
        *,
        hold_s: float,
        recovery_steps: int,
        recovery_s: float,
        on_result: Callable[[str], None],
        on_replaced: Callable[[], None],
    ) -> None:
        self._context = context
        self._journal: Journal = context.journal
        self._hold_s = hold_s
        self._recovery_steps = recovery_steps
        self._recovery_s = recovery_s
        self._saved_at: float | None = None  # when the newest commit has begun, or the first step was made
        self._on_result = on_result
        self._on_replaced = on_replaced
        self._came = asyncio.Event()
        self._over = ""  # why the model can never be opened again
        self._deadlines: dict[int, float] = {}  # how long each request, by number, waits for earlier ones
        self._at = 0  # the number of the last request applied to the open model
        self._deaths: dict[int, int] = {}  # how often the engine has died during each request, by number
        self._saves: list[_Save] = []  # by the number of the request
        self._task = asyncio.create_task(self._run())

    def wake(self) -> None:
        """Call this when a request has been logged."""
        self._came.set()

    async def stop(self) -> None:
        tasks = [self._task, *(save.task for save in self._saves)]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _run(self) -> None:
        try:
            while True:
                self._came.clear()
                for save in [save for save in self._saves if save.task.done()]:
                    await self._end(save)
                after = self._saves[-1].request.seq if self._saves else -1
                request = self._journal.first_pending(self._context.run, after=after)
                if request is None:
                    await self._came.wait()
                elif missing := self._journal.missing_before(self._context.run, request.seq):
                    await self._wait_for(missing, request)
                elif earlier := self._must_end_before(request):
                    await self._end(earlier)
                elif request.kind in SAVES:
                    is_published = is_publish(request)
                    await self._begin(request, partial(self._result_of, request), is_publish=is_published)
                elif (result := await self._result_of(request)) is not None:
                    await self._log(request, *result)
                    await self._after(request, *result)
        except ReplacedError as error:
            logger.warning("stopping: %s model=%s", error, self._context.run)
            self._on_replaced()

    def _must_end_before(self, request: LoggedRequest) -> _Save | None:
        """Return a save under way for which a request has to wait."""
        is_gone = self._context.life != self._context.engine.life  # the saves run first when the model is rebuilt
        if is_gone or request.kind == "unload_model":
            return next(iter(self._saves), None)
        if request.kind not in SAVES:
            return None
        return next((save for save in self._saves if save.is_publish or not is_publish(request)), None)

    async def _begin(
        self,
        request: LoggedRequest,
        save: Callable[[Callable[[], None]], Coroutine[Any, Any, Result | None]],
        *,
        is_publish: bool,
    ) -> None:
        """Start a save and wait until the model may be changed again. save: called with what it calls then."""
        staged = asyncio.Event()
        if not is_publish:
            self._saved_at = asyncio.get_running_loop().time()
        task = asyncio.create_task(save(staged.set))
        self._saves.append(_Save(request, is_publish, task))
        task.add_done_callback(lambda _: staged.set())
        task.add_done_callback(lambda _: self._came.set())
        await staged.wait()

    async def _end(self, save: _Save) -> None:
        """Wait for a save under way. If the engine has died, it has no result, and runs again."""
        result = await save.task
        self._saves.remove(save)
        if result is not None:
            await self._log(save.request, *result)
            await self._after(save.request, *result)

    async def _wait_for(self, missing: list[int], request: LoggedRequest) -> None:
        """Wait until another request arrives. At the deadline, fail this one and the missing ones before it."""
        now = asyncio.get_running_loop().time()
        left = self._deadlines.setdefault(request.seq, now + self._hold_s) - now
        try:
            await asyncio.wait_for(self._came.wait(), max(0.0, left))
        except TimeoutError:
            for seq in missing:
                lost = _lost(request.lane, seq)
                await when_there_is_room(partial(self._journal.submit, lost))
            text = f"request {request.seq} came, and {missing[0]} did not within {self._hold_s:.0f} s"
            await self._log(request, *failure(text, "user"))

    async def _after(self, request: LoggedRequest, form: str, _: bytes) -> None:
        """Begin a recovery save when much would have to be replayed. The client does not see it."""
        self._deadlines.pop(request.seq, None)
        self._deaths.pop(request.seq, None)
        if request.kind == "unload_model":
            self._over = f"model {self._context.run} was unloaded"
        if request.kind != "optim_step" or form != "json" or self._over:
            return  # a step that was not made leaves gradients, which no checkpoint has
        now, steps = asyncio.get_running_loop().time(), self._journal.uncovered(self._context.run)
        self._saved_at = now if self._saved_at is None else self._saved_at
        is_due = steps >= self._recovery_steps or now - self._saved_at >= self._recovery_s
        if is_due and not self._saves:
            await self._begin(request, partial(self._recovery, request), is_publish=False)

    async def _recovery(self, request: LoggedRequest, on_staged: Callable[[], None]) -> None:
        context = replace(self._context, on_staged=on_staged)
        try:
            await save_for_recovery(context, request)
        except (EngineGoneError, EngineRefusalError, RaycheckError) as error:
            logger.warning("recovery save failed: %s model=%s", error, context.run)

    async def _result_of(self, request: LoggedRequest, on_staged: Callable[[], None] = lambda: None) -> Result | None:
        """Return a request's result, or None if the engine died and the request must run again."""
        context = self._context
        if self._over:
            return failure(self._over, "server")
        if context.life != context.engine.life and any(save.request.seq < request.seq for save in self._saves):
            return None  # the earlier save runs first when the model is rebuilt
        try:
            if context.life != context.engine.life:
                await self._open()
            context = replace(self._context, on_staged=on_staged)
            await self._catch_up(context, request)
            self._at = request.seq
            if request.seq == 0:
                return as_json(_created(context))
            return await OPERATIONS[request.kind](context, request)
        except EngineGoneError as error:
            logger.warning("the engine died and is restarted: %s model=%s", error, context.run)
            self._context = replace(self._context, life=-1)
            self._deaths[request.seq] = self._deaths.get(request.seq, 0) + error.was_running
            if self._deaths[request.seq] < MAX_DEATHS:
                return None
            return failure(f"the engine died {MAX_DEATHS} times while running this request", "server")
        except EngineRefusalError as error:
            if error.category == "fenced":
                self._over = f"another server has taken over model {context.run}: {error}"
            return failure(str(error), error.category)
        except (ValueError, RefusedRequestError) as error:  # includes ConfigError
            return failure(str(error), "user")
        except RaycheckError as error:
            return failure(str(error), "server")
        except ReplacedError:
            raise
        except Exception as error:
            logger.exception("request failed: kind=%s model=%s", request.kind, context.run)
            return failure(f"{type(error).__name__}: {error}", "server")

    async def _open(self) -> None:
        """Restore the model to its newest checkpoint, or to its initial state."""
        context = replace(self._context, life=self._context.engine.life)
        self._journal.check_current()  # otherwise this claim would fence the server that has taken over
        uri = context.checkpoints.uri_of(context.run)
        note = await context.call("open", context.facts.shape, uri, context.facts.source)
        found = note.get("covered", 0)
        self._at, self._context = found if isinstance(found, int) else 0, context

    async def _catch_up(self, context: Context, request: LoggedRequest) -> None:
        """Replay the requests before this one that the open model lacks."""
        begin = self._at
        assert begin <= request.seq, "the model is not open in a state after the request"
        if begin >= request.seq - 1:
            return
        replayed = [item for item in self._journal.to_replay(context.run, begin) if item.seq < request.seq]
        if any(item.body is None for item in replayed):
            raise ConfigError(
                f"model {context.run} cannot be rebuilt: its checkpoint is gone. Resume from an existing checkpoint"
            )
        for item in replayed:
            await OPERATIONS[item.kind](context, item)
            self._at = item.seq
        if replayed:
            logger.info("rebuilt model=%s from_request=%d requests=%d", context.run, begin, len(replayed))

    async def _log(self, request: LoggedRequest, form: str, result: bytes) -> None:
        if request.seq == 0 and form == "error":
            self._over = self._over or f"model {self._context.run} was not created"
        await self._journal.log_result(request.id, form, result)
        self._on_result(request.id)


def _created(context: Context) -> dict[str, object]:
    if context.facts.source_path is None:
        return {"type": "create_model", "model_id": context.run}
    return {"type": "load_weights", "path": context.facts.source_path, "model_id": context.run}


def _lost(lane: str, seq: int) -> LoggedRequest:
    """Return a placeholder for a number that has not arrived in time."""
    form, result = failure("the request did not arrive in time", "user")
    return LoggedRequest(
        id=uuid4().hex,
        lane=lane,
        seq=seq,
        kind="lost",
        digest="",
        body=None,
        status="failed",
        form=form,
        result=result,
    )


def failure(text: str, category: Category) -> Result:
    """Return the result that makes the SDK raise RequestFailedError at once."""
    named = "user" if category == "user" else "server"
    return "error", json.dumps({"error": text, "category": named}).encode()
