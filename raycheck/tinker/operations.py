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
    address_in_protobuf,
    batch_in_json,
    batch_in_protobuf,
)

POLL_S = 0.02
"""The interval at which a save's commit is polled."""
SAVES = {
    "save_weights": "weights",
    "save_weights_for_sampler": "sampler_weights",
    "save_weights_external": "external_weights",
}
"""The kinds of request that save, and the segment of the paths of their checkpoints."""
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

    def asked(self, request: LoggedRequest) -> Any:
        """Return what a logged request asks for. See asked_in."""
        assert request.body is not None, "the body stays until the request is covered"
        return asked_in(request.kind, request.body, self.base)


def as_json(value: Mapping[str, Any]) -> Result:
    return "json", json.dumps(value).encode()


@dataclass(frozen=True, kw_only=True, slots=True)
class SaveRequest:
    """The fields of a request to save.

    name: the client's name for the checkpoint; None for one without a name, for a sampling session. session_number: the
    number of that session.
    """

    name: str | None
    session_number: int | None
    ttl_s: int | None
    metadata: Mapping[str, str]
    overwrite: bool


def asked_in(kind: str, body: bytes, base: BaseFacts) -> Any:
    """Return what the body of a request to a model asks for: a batch, the parameters of a step, a SaveRequest, or JSON.

    A request is read so when it arrives, and again when it runs. Raises RefusedRequestError or ValueError for a body
    that is invalid for this kind of request.
    """
    if kind in ("forward_backward", "forward"):
        limits = Limits(vocab_size=base.vocab_size, max_tokens=base.max_tokens)
        if body.startswith(b"{"):  # a protobuf message of this type never does
            return batch_in_json(json.loads(body), limits, forward_only=kind == "forward")
        return batch_in_protobuf(address_in_protobuf(body)[2], limits)
    given: dict[str, Any] = json.loads(body)
    if kind == "optim_step":
        params = given.get("optim_params") or given.get("adam_params")
        if not isinstance(params, dict):
            raise RefusedRequestError("the body has no adam_params", 422)
        return AdamParams.parse(params)
    if kind in SAVES:
        return _save_in(kind, given)
    if kind == "load_weights":
        text_in(given, "path")
    return given


def _save_in(kind: str, given: Mapping[str, Any]) -> SaveRequest:
    if kind == "save_weights_external" and given.get("age_encryption_recipients"):
        raise RefusedRequestError("age_encryption_recipients: this server does not encrypt; leave it out")
    is_named = not _is_for_session(kind, given)
    return SaveRequest(
        name=checkpoint_name_in(given) if is_named else None,
        session_number=None if is_named else number_in(given, "sampling_session_seq_id"),
        ttl_s=ttl_in(given),
        metadata=metadata_in(given),
        overwrite=flag_in(given, "overwrite", default=False),
    )


async def run_pass(context: Context, request: LoggedRequest) -> Result:
    batch = await asyncio.to_thread(context.asked, request)
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
    metrics = await context.call("optim_step", context.asked(request))
    return as_json({"metrics": metrics})


def no_step(failed: LoggedRequest) -> Result:
    """Return the result of a step that is not made because an earlier pass failed without the client's knowledge."""
    category = json.loads(failed.result or b"{}").get("category", "server")
    text = (
        f"no step was made, and the gradients since the last step are dropped: request {failed.seq} before it failed, "
        "so its gradient is missing. Send the passes of this step again, then the step"
    )
    return "no_step", json.dumps({"error": text, "category": category}).encode()


async def load_weights(context: Context, request: LoggedRequest) -> Result:
    """Load a checkpoint into a model that has processed no request yet."""
    body = context.asked(request)
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


async def save(context: Context, request: LoggedRequest) -> Result:
    """Commit a checkpoint, or publish an adapter that has no name. External weights are also written as a Hugging Face
    directory; others, when somebody downloads them."""
    asked: SaveRequest = context.asked(request)
    if asked.name is None:
        return await _publish(context, request, asked)
    path = CheckpointPath(run=context.run, segment=SAVES[request.kind], name=asked.name)
    await _save(context, request, asked, path)
    result: dict[str, object] = {"type": request.kind, "path": path.text}
    if request.kind == "save_weights_external":
        found = await asyncio.to_thread(context.checkpoints.find, path)
        await asyncio.to_thread(context.checkpoints.export_adapter, found)
        files = await asyncio.to_thread(context.checkpoints.adapter_files, found)
        result["size_bytes"] = sum(files.sizes.values())
    return as_json(result)


def is_publish(request: LoggedRequest) -> bool:
    """Return whether a request is a save that commits nothing: it only publishes the adapter."""
    return _is_for_session(request.kind, json.loads(request.body or b"{}"))


def _is_for_session(kind: str, given: Mapping[str, Any]) -> bool:
    return kind == "save_weights_for_sampler" and given.get("path") is None


async def _publish(context: Context, request: LoggedRequest, asked: SaveRequest) -> Result:
    """Publish the adapter as it is, without a commit, and create a sampling session for it."""
    assert asked.session_number is not None, "a save without a name is for a sampling session"
    uri = context.checkpoints.uri_of(context.run)
    await context.call("publish")
    context.on_staged()
    source: LoadSource | None = None
    while source is None:
        source = await context.call("published", uri)
        if source is None:
            await asyncio.sleep(POLL_S)
    facts = SamplerFacts(base_model=context.facts.base_model, source=source, shape=context.facts.shape)
    session, number = context.facts.session, asked.session_number
    sampler = await when_there_is_room(lambda: context.journal.add_sampler(session, number, facts.text))
    return as_json({"type": request.kind, "path": None, "sampling_session_id": sampler})


async def _save(context: Context, request: LoggedRequest, asked: SaveRequest, path: CheckpointPath) -> None:
    """Commit a checkpoint under this name, unless this request has already done so."""
    known = await asyncio.to_thread(context.checkpoints.find_or_none, path)
    covered = context.journal.newest_change(context.run, request.seq)
    if known is None or known.note.get("request") != request.id:
        if known is not None and not asked.overwrite:
            raise EngineRefusalError(f"{path.text} exists already; choose another name, or overwrite it", "user")
        order = SaveOrder(
            name=path.raycheck_name,
            note=_note(context, request.id, covered, asked.metadata),
            expire_after_s=asked.ttl_s,
            overwrite=known is not None,
        )
        await _commit(context, order)
    await when_there_is_room(lambda: context.journal.cover(context.run, covered))


async def _commit(context: Context, order: SaveOrder) -> None:
    """Save the model in its current state, and return when the save is committed.

    The engine's part of it is in engine/commits.py. Raises EngineGoneError if the engine was restarted in the meantime,
    possibly after the commit.
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
    note = _note(context, f"recovery after {request.id}", request.seq, {})
    await _commit(context, SaveOrder(name=None, note=note))
    await when_there_is_room(lambda: context.journal.cover(context.run, request.seq))


def _note(context: Context, request: str, covered: int, metadata: Mapping[str, str]) -> Any:
    """Return the note of a model's checkpoint. request, covered: see note_of."""
    fingerprint = context.base.fingerprint
    return note_of(context.facts, fingerprint=fingerprint, request=request, covered=covered, metadata=metadata)


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
    **dict.fromkeys(SAVES, save),
    "unload_model": unload_model,
}
