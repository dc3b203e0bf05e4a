"""Reads bodies, and remembers answers by their idempotency key."""

import json
from collections.abc import Awaitable, Callable
from typing import Any

from aiohttp import web

from raycheck.tinker.service import Service
from raycheck.tinker.wire.fields import RefusedRequestError

SERVICE = web.AppKey("service", Service)
KEEP_ANSWER_S = 1800.0
"""How long an answer is remembered: longer than the SDK repeats one call."""
MAX_KEY = 200


async def json_body(request: web.Request) -> dict[str, Any]:
    """Returns a body that is a JSON object. Raises RefusedRequestError for any other."""
    body = await request.json(loads=json.loads)
    if not isinstance(body, dict):
        raise RefusedRequestError("the body is not a JSON object", 422)
    return body


async def once(request: web.Request, answer: Callable[[], Awaitable[dict[str, Any]]]) -> web.Response:
    """Answers a call once, and repetitions of it, which have its idempotency key, with the same answer."""
    journal = request.app[SERVICE].journal
    given = request.headers.get("x-idempotency-key", "")
    key = f"{request.path} {given}" if 0 < len(given) <= MAX_KEY else ""
    if key and (known := journal.answer_to(key)) is not None:
        return web.Response(status=known[0], text=known[1], content_type="application/json")
    text = json.dumps(await answer())
    if key:
        journal.remember_answer(key, 200, text, keep_s=KEEP_ANSWER_S)
    return web.Response(text=text, content_type="application/json")
