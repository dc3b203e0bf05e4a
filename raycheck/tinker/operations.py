"""Carries out requests on a model: one function per kind, which returns the result in stored form.

All of them can be repeated: when the engine has died, the model is rebuilt from the bucket and the journal, and the
interrupted request runs again. A save first checks whether its checkpoint was already committed. It reports when the
model's state is copied, and continues until the commit while the model's next requests run.
"""

import asyncio
import json
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any

from raycheck.tinker.checkpoint_paths import CheckpointPath
from raycheck.tinker.checkpoint_store import CheckpointStore
from raycheck.tinker.engine.actor import Engine, EngineRefusalError
from raycheck.tinker.engine.lora_shape import AdamParams
from raycheck.tinker.engine.orders import BaseFacts, LoadSource, PassOutput, SaveOrder
from raycheck.tinker.journal import Journal, LoggedRequest, when_there_is_room
from raycheck.tinker.models import ModelFacts, SamplerFacts, note_of
from raycheck.tinker.wire import results
from raycheck.tinker.wire.fields import (
    RefusedRequestError,
    checkpoint_name_in,
    flag_in,
    metadata_in,
    number_in,
    text_in,
    ttl_in,
)
from raycheck.tinker.wire.training_data import (
    Limits,
    TrainingBatch,
    address_in_protobuf,
    batch_in_json,
    batch_in_protobuf,
)

POLL_S = 0.02
"""The interval at which a save's commit is polled."""
Result = tuple[str, bytes]
"""A result's form (see LoggedRequest) and its bytes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Context:
    """The context of an operation: one model's id and facts, and the server's parts.

    life: the engine's life in which the model is open; -1 while it is not open. on_staged: called by a save when the
    model may be changed again.
    """

    run: str
    facts: ModelFacts
    base: BaseFacts
    engine: Engine
    journal: Journal
    checkpoints: CheckpointStore
    life: int = -1
    on_staged: Callable[[], None] = lambda: None

    async def call(self, method: str, *args: Any) -> Any:
        """Call a method of Tenants for the model. Raises EngineGoneError once the model is no longer open, whichever
        request caused the engine's restart."""
        return await self.engine.call(method, self.run, *args, life=self.life)


def as_json(value: Mapping[str, Any]) -> Result:
    return "json", json.dumps(value).encode()


def batch_of(request: LoggedRequest, base: BaseFacts) -> TrainingBatch:
    """Return the batch of a logged pass. Raises MalformedDataError. A JSON body starts with a brace; a protobuf message
    of this type never does."""
    assert request.body is not None, "the body stays until the request is covered"
    limits = Limits(vocab_size=base.vocab_size, max_tokens=base.max_tokens)
    if request.body.startswith(b"{"):
        return batch_in_json(json.loads(request.body), limits, forward_only=request.kind == "forward")
    return batch_in_protobuf(address_in_protobuf(request.body)[2], limits)


def body_of(request: LoggedRequest) -> dict[str, Any]:
    assert request.body is not None, "the body stays until the request is covered"
    body: dict[str, Any] = json.loads(request.body)
    return body


async def run_pass(context: Context, request: LoggedRequest) -> Result:
    batch = await asyncio.to_thread(batch_of, request, context.base)
    output: PassOutput = await context.call("run_pass", batch)
    return "pass", results.pass_in_protobuf(output.logprobs, output.losses, output.loss_sum)


async def optim_step(context: Context, request: LoggedRequest) -> Result:
    """Make a step, unless the client sent it together with a pass that failed."""
    if request.form == "no_step" and request.result is not None:  # a replay
        await context.call("drop_gradients")
        return request.form, request.result
    is_new = request.status == "pending"
    if is_new and (failed := context.journal.untold_failure(context.run, request.seq)) is not None:
        await context.call("drop_gradients")
        return no_step(failed)
    params = adam_params_in(body_of(request))
    metrics = await context.call("optim_step", params)
    return as_json({"metrics": metrics})


def no_step(failed: LoggedRequest) -> Result:
    """Return the result of a step that is not made because an earlier pass failed without the client's knowledge."""
    category = json.loads(failed.result or b"{}").get("category", "server")
    text = (
        f"no step was made, and the gradients since the last step are dropped: request {failed.seq} before it failed, "
        "so its gradient is missing. Send the passes of this step again, then the step"
    )
    return "no_step", json.dumps({"error": text, "category": category}).encode()


def adam_params_in(body: Mapping[str, Any]) -> AdamParams:
    """Return the parameters of an optim_step. Raises RefusedRequestError or ValueError for invalid ones."""
    given = body.get("optim_params") or body.get("adam_params")
    if not isinstance(given, dict):
        raise RefusedRequestError("the body has no adam_params", 422)
    return AdamParams.parse(given)


async def load_weights(context: Context, request: LoggedRequest) -> Result:
    """Load a checkpoint into a model that has processed no request yet."""
    body = body_of(request)
    source = await asyncio.to_thread(source_of, context.checkpoints, context.base, body)
    await context.call("load", source)
    return as_json({"type": "load_weights", "path": body["path"], "model_id": context.run})


def source_of(checkpoints: CheckpointStore, base: BaseFacts, body: Mapping[str, Any]) -> LoadSource:
    """Return the checkpoint named by a load_weights. Raises RefusedRequestError, and ValueError if it belongs to
    another base model."""
    path = CheckpointPath.parse(text_in(body, "path"))
    if path.segment != "weights":
        raise ValueError(f"{path.text} is not a training state: use tinker://RUN/weights/NAME")
    found = checkpoints.find(path)
    if found.note.get("base_fingerprint") != base.fingerprint:
        raise ValueError(f"{path.text}: {other_base(found.note)}")
    return LoadSource(uri=found.uri, key=found.key, with_optimizer=flag_in(body, "optimizer", default=False))


def other_base(note: Mapping[str, Any]) -> str:
    """Return why a checkpoint does not fit this server's base model."""
    return f"it is an adapter of {note.get('base_model')!r} with other weights than this server's base model has"


async def save_weights(context: Context, request: LoggedRequest) -> Result:
    path = CheckpointPath(run=context.run, segment="weights", name=checkpoint_name_in(body_of(request)))
    await _save(context, request, path)
    return as_json({"type": "save_weights", "path": path.text})


async def save_weights_for_sampler(context: Context, request: LoggedRequest) -> Result:
    if body_of(request).get("path") is None:
        return await _save_for_sampling_session(context, request)
    path = CheckpointPath(run=context.run, segment="sampler_weights", name=checkpoint_name_in(body_of(request)))
    await _save(context, request, path)
    found = await asyncio.to_thread(context.checkpoints.find, path)
    await asyncio.to_thread(context.checkpoints.export_adapter, found)
    return as_json({"type": "save_weights_for_sampler", "path": path.text})


async def save_weights_external(context: Context, request: LoggedRequest) -> Result:
    """Commit a checkpoint and write its adapter as a Hugging Face directory for download."""
    path = CheckpointPath(run=context.run, segment="external_weights", name=checkpoint_name_in(body_of(request)))
    await _save(context, request, path)
    found = await asyncio.to_thread(context.checkpoints.find, path)
    await asyncio.to_thread(context.checkpoints.export_adapter, found)
    files = await asyncio.to_thread(context.checkpoints.adapter_files, found)
    return as_json({"type": "save_weights_external", "path": path.text, "size_bytes": sum(files.sizes.values())})


async def _save_for_sampling_session(context: Context, request: LoggedRequest) -> Result:
    """Commit an unnamed checkpoint, of which the newest two are kept, and create a sampling session for it."""
    body = body_of(request)
    covered = context.journal.newest_change(context.run, request.seq)
    for is_saved in (False, True):
        key, note = await asyncio.to_thread(context.checkpoints.head_of, context.run)
        if note.get("request") == request.id:
            break
        if is_saved:
            raise EngineRefusalError("the weights were saved, but another checkpoint is newer", "server")
        await _commit(context, SaveOrder(name=None, note=_note(context, request, covered)))
    await when_there_is_room(lambda: context.journal.cover(context.run, covered))
    facts = SamplerFacts(
        base_model=context.facts.base_model,
        source=LoadSource(uri=context.checkpoints.uri_of(context.run), key=key, with_optimizer=False),
        shape=context.facts.shape,
    )
    number = number_in(body, "sampling_session_seq_id")
    session = context.facts.session
    sampler = await when_there_is_room(lambda: context.journal.add_sampler(session, number, facts.text))
    return as_json({"type": "save_weights_for_sampler", "path": None, "sampling_session_id": sampler})


async def _save(context: Context, request: LoggedRequest, path: CheckpointPath) -> None:
    """Commit a checkpoint under this name, unless this request has already done so."""
    body = body_of(request)
    overwrite = flag_in(body, "overwrite", default=False)
    known = await asyncio.to_thread(context.checkpoints.find_or_none, path)
    covered = context.journal.newest_change(context.run, request.seq)
    if known is None or known.note.get("request") != request.id:
        if known is not None and not overwrite:
            raise EngineRefusalError(f"{path.text} exists already; choose another name, or overwrite it", "user")
        order = SaveOrder(
            name=path.raycheck_name,
            note=_note(context, request, covered),
            expire_after_s=ttl_in(body),
            overwrite=known is not None,
        )
        await _commit(context, order)
    await when_there_is_room(lambda: context.journal.cover(context.run, covered))


async def _commit(context: Context, order: SaveOrder) -> None:
    """Save the model in its current state, and return when the save is committed.

    Raises EngineGoneError if the engine was restarted in the meantime, possibly after the commit.
    """
    await context.call("save", order)
    context.on_staged()
    is_committed = False
    while not is_committed:
        is_committed = await context.call("is_committed")
        if not is_committed:
            await asyncio.sleep(POLL_S)


async def save_for_recovery(context: Context, request: LoggedRequest) -> None:
    """Commit an unnamed checkpoint after a step, from which the model can be rebuilt if the engine dies."""
    note = note_of(
        context.facts,
        fingerprint=context.base.fingerprint,
        request=f"recovery after {request.id}",
        covered=request.seq,
        metadata={},
    )
    await _commit(context, SaveOrder(name=None, note=note))
    await when_there_is_room(lambda: context.journal.cover(context.run, request.seq))


def _note(context: Context, request: LoggedRequest, covered: int) -> Any:
    return note_of(
        context.facts,
        fingerprint=context.base.fingerprint,
        request=request.id,
        covered=covered,
        metadata=metadata_in(body_of(request)),
    )


async def unload_model(context: Context, request: LoggedRequest) -> Result:
    """Unload the model. Its checkpoints stay."""
    del request
    await context.call("close")
    await when_there_is_room(lambda: context.journal.unload(context.run))
    return as_json({"type": "unload_model", "model_id": context.run, "status": "unloaded"})


Operation = Callable[[Context, LoggedRequest], Awaitable[Result]]
OPERATIONS: Mapping[str, Operation] = {
    "forward_backward": run_pass,
    "forward": run_pass,
    "optim_step": optim_step,
    "load_weights": load_weights,
    "save_weights": save_weights,
    "save_weights_for_sampler": save_weights_for_sampler,
    "save_weights_external": save_weights_external,
    "unload_model": unload_model,
}
