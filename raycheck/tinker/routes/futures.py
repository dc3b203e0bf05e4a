"""Results of requests, which clients poll for."""

from aiohttp import web

from raycheck.tinker.routes.requests import SERVICE, json_body
from raycheck.tinker.wire.fields import text_in
from raycheck.tinker.wire.results import FORMS, PROTOBUF

WAIT_S = 30.0
"""How long a call waits for a result; the SDK abandons a call after 45 s and retries."""


def add_to(app: web.Application) -> None:
    app.router.add_post("/api/v1/retrieve_future", _retrieve)


async def _retrieve(request: web.Request) -> web.Response:
    request_id = text_in(await json_body(request), "request_id")
    found = await request.app[SERVICE].result_of(request_id, wait_s=WAIT_S)
    if found.status == "pending":
        answer = {"type": "try_again", "request_id": request_id, "queue_state": "active"}
        return web.json_response(answer, status=408)
    assert found.result is not None, "a request that is not pending has a result"
    if found.form is not None and found.form in FORMS:
        if PROTOBUF in request.headers.get("Accept", ""):
            return web.Response(body=found.result, content_type=PROTOBUF)
        return web.json_response(FORMS[found.form](found.result))
    if found.form == "refusal":
        return web.json_response({"error": found.result.decode(), "category": "user"})
    return web.Response(body=found.result, content_type="application/json")
