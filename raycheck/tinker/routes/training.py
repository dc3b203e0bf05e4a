"""Models and operations on them: every request is logged and answered with the id of its future."""

import asyncio
import json

from aiohttp import web

from raycheck.tinker.operations import SAVES
from raycheck.tinker.routes.requests import SERVICE, body_bytes, json_body
from raycheck.tinker.service import canonical, digest_of
from raycheck.tinker.wire.fields import RefusedRequestError, optional_number_in, text_in
from raycheck.tinker.wire.results import PROTOBUF
from raycheck.tinker.wire.tensors import MalformedDataError
from raycheck.tinker.wire.training_data import address_in_protobuf


def add_to(app: web.Application) -> None:
    app.router.add_post("/api/v1/create_model", _create_model)
    app.router.add_post("/api/v1/get_info", _info)
    app.router.add_post("/api/v1/forward_backward", _forward_backward)
    app.router.add_post("/api/v1/forward", _pass_in_json)
    app.router.add_post("/api/v1/load_weights", _load)
    for kind in ("optim_step", *SAVES, "unload_model"):
        app.router.add_post(f"/api/v1/{kind}", _submit)


async def _create_model(request: web.Request) -> web.Response:
    request_id, run = request.app[SERVICE].create_model(await json_body(request))
    return _future(request_id, run)


async def _info(request: web.Request) -> web.Response:
    service = request.app[SERVICE]
    run = text_in(await json_body(request), "model_id")
    facts = service.facts_of(run)
    data = {
        "arch": service.base.arch if service.base else None,
        "model_name": facts.base_model,
        "tokenizer_id": facts.base_model,
    }
    return web.json_response(
        {
            "type": "get_info",
            "model_id": run,
            "model_name": facts.base_model,
            "is_lora": True,
            "lora_rank": facts.shape.rank,
            "model_data": data,
        }
    )


async def _submit(request: web.Request) -> web.Response:
    body = await json_body(request)
    return _future(request.app[SERVICE].submit_json(_kind(request), body), text_in(body, "model_id"))


async def _load(request: web.Request) -> web.Response:
    service, body = request.app[SERVICE], await json_body(request)
    if body.get("model_id") is None:
        return _future(*await service.load_new_model(body))
    return _future(service.submit_json("load_weights", body), text_in(body, "model_id"))


async def _forward_backward(request: web.Request) -> web.Response:
    if request.content_type != PROTOBUF:
        return await _pass_in_json(request)
    data = await body_bytes(request)
    try:
        run, seq, message = await asyncio.to_thread(address_in_protobuf, data)
    except MalformedDataError as error:
        raise RefusedRequestError(str(error), 422) from None
    service = request.app[SERVICE]
    kind = "forward" if message.forward_only else "forward_backward"
    problem = await asyncio.to_thread(service.problem_of, kind, data)
    digest = digest_of(message.SerializeToString(deterministic=True))
    return _future(service.submit(kind, run, seq, data, digest=digest, problem=problem), run)


async def _pass_in_json(request: web.Request) -> web.Response:
    service, kind, body = request.app[SERVICE], _kind(request), await json_body(request)
    run, seq, data = text_in(body, "model_id"), optional_number_in(body, "seq_id"), json.dumps(body).encode()
    problem = await asyncio.to_thread(service.problem_of, kind, data)
    return _future(service.submit(kind, run, seq, data, digest=canonical(body), problem=problem), run)


def _kind(request: web.Request) -> str:
    """Return the kind of a request to a model: the last part of its route."""
    return request.path.rpartition("/")[2]


def _future(request_id: str, run: str) -> web.Response:
    return web.json_response({"request_id": request_id, "model_id": run})
