"""Lists, copies, publishes, and deletes training runs and their checkpoints in the bucket."""

import asyncio
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any
from uuid import uuid4

from aiohttp import web

from raycheck.tinker.checkpoint_paths import CheckpointPath, run_id_of
from raycheck.tinker.checkpoint_store import StoredCheckpoint
from raycheck.tinker.models import shape_in_note
from raycheck.tinker.routes.requests import SERVICE, json_body, once, window
from raycheck.tinker.service import Service, canonical
from raycheck.tinker.wire.fields import RefusedRequestError, text_in, ttl_in

OWNER = "raycheck"
GIGABYTE = 1_000_000_000
CHECKPOINT = r"[^/]+(?:/[^/]+)?"
"""Matches SEGMENT/NAME, and also a name alone, which CheckpointPath refuses with advice instead of a missing route."""


def add_to(app: web.Application) -> None:
    runs = "/api/v1/training_runs"
    app.router.add_post("/api/v1/weights_info", _weights_info)
    app.router.add_post("/api/v1/copy_weights", _copy)
    app.router.add_get("/api/v1/checkpoints", _all_checkpoints)
    app.router.add_get("/api/v1/billing/usage/checkpoints/current", _storage_usage)
    app.router.add_get(runs, _runs)
    app.router.add_get(f"{runs}/{{run}}", _run)
    app.router.add_get(f"{runs}/{{run}}/checkpoints", _checkpoints)
    app.router.add_get("/api/v1/models/{run}/checkpoints", _checkpoints)  # the path used by older SDKs
    one = f"{runs}/{{run}}/checkpoints/{{checkpoint:{CHECKPOINT}}}"
    app.router.add_delete(one, _delete)
    app.router.add_put(f"{one}/ttl", _set_ttl)
    app.router.add_post(f"{one}/publish", _publish)
    app.router.add_delete(f"{one}/publish", _publish)


async def _weights_info(request: web.Request) -> web.Response:
    path = CheckpointPath.parse(text_in(await json_body(request), "tinker_path"))
    if path.segment != "weights":
        raise RefusedRequestError(f"{path.text} is not a training state: use tinker://RUN/weights/NAME")
    found = await asyncio.to_thread(request.app[SERVICE].checkpoints.find, path)
    try:
        shape = shape_in_note(found.note)
    except ValueError as error:
        raise RefusedRequestError(str(error)) from None
    return web.json_response(
        {
            "base_model": found.note["base_model"],
            "is_lora": True,
            "lora_rank": shape.rank,
            "train_attn": shape.train_attn,
            "train_mlp": shape.train_mlp,
            "train_unembed": shape.train_unembed,
            "optimizer_config": {"type": "adamw"},
        }
    )


async def _all_checkpoints(request: web.Request) -> web.Response:
    limit, offset = window(request, default=100)
    found = await asyncio.to_thread(request.app[SERVICE].checkpoints.all)
    return web.json_response(
        {
            "checkpoints": [_checkpoint(item) for item in found[offset : offset + limit]],
            "cursor": {"offset": offset, "limit": limit, "total_count": len(found)},
        }
    )


async def _storage_usage(request: web.Request) -> web.Response:
    """Count the listed checkpoints and their bytes. Bytes that a copy shares with its source are counted once."""
    _check_no_project(request)
    found = await asyncio.to_thread(request.app[SERVICE].checkpoints.all)
    size_bytes = sum({item.stored_as: item.size_bytes for item in found}.values())
    usage = {"checkpoint_count": len(found), "size_bytes": size_bytes, "size_gigabytes": size_bytes / GIGABYTE}
    return web.json_response({"data": [usage] if found else []})


async def _checkpoints(request: web.Request) -> web.Response:
    service, run = request.app[SERVICE], request.match_info["run"]
    found = await asyncio.to_thread(service.checkpoints.of_run, run)
    if not found:
        service.facts_of(run)  # raises the client's error if there is no such run
    return web.json_response({"checkpoints": [_checkpoint(item) for item in found]})


async def _runs(request: web.Request) -> web.Response:
    limit, offset = window(request, default=20)
    _check_no_project(request)
    service = request.app[SERVICE]
    here = service.runs_here()
    there = await asyncio.to_thread(service.checkpoints.runs)
    ids = [*dict.fromkeys([*here, *there])]
    shown = [await _training_run(service, run) for run in ids[offset : offset + limit]]
    return web.json_response(
        {
            "training_runs": [item for item in shown if item],
            "cursor": {"offset": offset, "limit": limit, "total_count": len(ids)},
        }
    )


async def _run(request: web.Request) -> web.Response:
    run = request.match_info["run"]
    found = await _training_run(request.app[SERVICE], run)
    if found is None:
        raise RefusedRequestError(f"there is no training run {run[:200]}", 404)
    return web.json_response(found)


async def _training_run(service: Service, run: str) -> dict[str, Any] | None:
    """Return the facts of a run from this server or from its checkpoints, or None if neither has it."""
    known = service.runs_here(run).get(run)
    found = await asyncio.to_thread(service.checkpoints.of_run, run)
    if known is None and not found:
        return None
    if known is not None:
        facts, used_at = known
        base_model, rank, metadata = facts.base_model, facts.shape.rank, dict(facts.metadata) or None
    else:
        note, used_at = found[-1].note, found[-1].committed_at
        base_model, rank, metadata = str(note.get("base_model")), int(note.get("lora_rank", 0)), found[-1].run_metadata
    return {
        "training_run_id": run,
        "base_model": base_model,
        "model_owner": OWNER,
        "is_lora": True,
        "corrupted": False,
        "lora_rank": rank,
        "last_request_time": _time(used_at),
        "last_checkpoint": _newest(found, "training"),
        "last_sampler_checkpoint": _newest(found, "sampler"),
        "user_metadata": metadata,
    }


async def _copy(request: web.Request) -> web.Response:
    """Copy a checkpoint into a new run. The run's id is derived from the call's idempotency key, so a retry finds it,
    even on another server."""
    service, body = request.app[SERVICE], await json_body(request)
    source, ttl_s = CheckpointPath.parse(text_in(body, "source_path")), ttl_in(body)
    if body.get("session_id") is not None or body.get("model_seq_id") is not None:
        raise RefusedRequestError(
            "session_id, model_seq_id: this server copies into a new session only; leave both out"
        )
    key = request.headers.get("x-idempotency-key") or uuid4().hex
    run = run_id_of(f"session_{canonical({'key': key, 'body': body})[:16]}", 0)

    async def answer() -> dict[str, Any]:
        copied = await asyncio.to_thread(service.checkpoints.copy, source, run, ttl_s)
        return {"tinker_path": copied.text}

    return await once(request, answer)


async def _delete(request: web.Request) -> web.Response:
    await asyncio.to_thread(request.app[SERVICE].checkpoints.delete, _path(request))
    return web.Response(status=204)


async def _publish(request: web.Request) -> web.Response:
    """Publish a checkpoint, or with DELETE unpublish it. Repeating either succeeds as well: the SDK would retry a 409,
    as the official service sends, for five minutes."""
    is_public = request.method == "POST"
    await asyncio.to_thread(request.app[SERVICE].checkpoints.set_public, _path(request), is_public)
    return web.Response(status=204)


async def _set_ttl(request: web.Request) -> web.Response:
    ttl_s = ttl_in(await json_body(request))
    await asyncio.to_thread(request.app[SERVICE].checkpoints.set_ttl, _path(request), ttl_s)
    return web.Response(status=204)


def _check_no_project(request: web.Request) -> None:
    if "project_id" in request.query:
        raise RefusedRequestError("project_id: this server has no projects; leave it out to see everything")


def _path(request: web.Request) -> CheckpointPath:
    return CheckpointPath.of(request.match_info["run"], request.match_info["checkpoint"])


def _newest(found: Sequence[StoredCheckpoint], kind: str) -> dict[str, Any] | None:
    of_kind = [item for item in found if item.path.type == kind]
    return _checkpoint(of_kind[-1]) if of_kind else None


def _checkpoint(found: StoredCheckpoint) -> dict[str, Any]:
    return {
        "checkpoint_id": f"{found.path.segment}/{found.path.name}",
        "checkpoint_type": found.path.type,
        "time": _time(found.committed_at),
        "tinker_path": found.path.text,
        "size_bytes": found.size_bytes,
        "public": found.is_public,
        "expires_at": None if found.expires_at is None else _time(found.expires_at),
        "user_metadata": found.user_metadata,
    }


def _time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat()
