"""Sampling sessions and sampling requests."""

from typing import Any

from aiohttp import web

from raycheck.tinker.routes.requests import SAMPLING, json_body, once


def add_to(app: web.Application) -> None:
    app.router.add_post("/api/v1/create_sampling_session", _create)
    app.router.add_post("/api/v1/asample", _sample)
    app.router.add_get("/api/v1/samplers/{sampler}", _sampler)


async def _create(request: web.Request) -> web.Response:
    body = await json_body(request)
    sampler = await request.app[SAMPLING].create_session(body)
    return web.json_response({"type": "create_sampling_session", "sampling_session_id": sampler})


async def _sample(request: web.Request) -> web.Response:
    body = await json_body(request)

    async def answer() -> dict[str, Any]:
        request_id, count = await request.app[SAMPLING].submit(body)
        return {"request_id": request_id, "sample_sequence_ids": [f"{request_id}:{number}" for number in range(count)]}

    return await once(request, answer)


async def _sampler(request: web.Request) -> web.Response:
    sampler = request.match_info["sampler"]
    facts = request.app[SAMPLING].facts_of(sampler)
    return web.json_response({"sampler_id": sampler, "base_model": facts.base_model, "model_path": facts.model_path})
