"""Sessions, and the requests of a starting client."""

import json
from typing import Any

from aiohttp import web

from raycheck.tinker.routes.requests import SERVICE, json_body, once, window
from raycheck.tinker.wire.fields import RefusedRequestError, text_in

CLIENT_CONFIG = {
    "pjwt_auth_enabled": False,
    "proto_write_fwdbwd": True,  # these three make an older SDK use the newest protocol
    "fwd_via_fwdbwd": True,
    "create_model_via_load_weights": True,
}


def add_to(app: web.Application) -> None:
    app.router.add_post("/api/v1/client/config", _config)
    app.router.add_post("/api/v1/client/dynamic_config", _dynamic_config)
    app.router.add_post("/api/v1/create_session", _create)
    app.router.add_post("/api/v1/session_heartbeat", _heartbeat)
    app.router.add_post("/api/v1/sessions/{session}/finish", _finish)
    app.router.add_get("/api/v1/sessions", _list)
    app.router.add_get("/api/v1/sessions/{session}", _show)
    app.router.add_get("/api/v1/get_server_capabilities", _capabilities)
    app.router.add_post("/api/v1/telemetry", _telemetry)
    app.router.add_get("/api/v1/healthz", _health)


async def _config(request: web.Request) -> web.Response:
    await json_body(request)
    return web.json_response(CLIENT_CONFIG)


async def _dynamic_config(request: web.Request) -> web.Response:
    await json_body(request)
    return web.json_response({})


async def _create(request: web.Request) -> web.Response:
    body = await json_body(request)

    async def answer() -> dict[str, Any]:
        return {"session_id": request.app[SERVICE].create_session(body), "type": "create_session"}

    return await once(request, answer)


async def _heartbeat(request: web.Request) -> web.Response:
    request.app[SERVICE].heartbeat(text_in(await json_body(request), "session_id"))
    return web.json_response({"type": "session_heartbeat"})


async def _finish(request: web.Request) -> web.Response:
    await request.app[SERVICE].end_session(request.match_info["session"], "finished")
    return web.Response(status=204)


async def _list(request: web.Request) -> web.Response:
    """List the sessions in this server's state file, most recent heartbeat first."""
    limit, offset = window(request, default=20)
    query = "SELECT id FROM sessions ORDER BY seen_at DESC LIMIT ? OFFSET ?"
    rows = request.app[SERVICE].journal.rows(query, limit, offset)
    return web.json_response({"sessions": [session for (session,) in rows]})


async def _show(request: web.Request) -> web.Response:
    session, journal = request.match_info["session"], request.app[SERVICE].journal
    found = journal.rows("SELECT body FROM sessions WHERE id = ?", session)
    if not found:
        raise RefusedRequestError(f"there is no session {session[:200]}", 404)
    runs = journal.rows("SELECT id FROM models WHERE session = ? ORDER BY id", session)
    samplers = journal.rows("SELECT id FROM samplers WHERE session = ? ORDER BY id", session)
    body = json.loads(found[0][0])
    return web.json_response(
        {
            "training_run_ids": [run for (run,) in runs],
            "sampler_ids": [sampler for (sampler,) in samplers],
            "user_metadata": body.get("user_metadata") or None,
            "display_name": body.get("display_name"),
        }
    )


async def _capabilities(request: web.Request) -> web.Response:
    service = request.app[SERVICE]
    base = service.base
    model = {
        "model_name": service.settings.base_model,
        "max_context_length": (base.max_tokens if base else 0) or None,
        "trainable": True,
        "sampleable": True,
    }
    return web.json_response({"supported_models": [model]})


async def _telemetry(request: web.Request) -> web.Response:
    """Accept a client's telemetry and discard it."""
    await request.read()
    return web.json_response({"status": "accepted"})


async def _health(request: web.Request) -> web.Response:
    del request
    return web.json_response({"status": "ok"})
