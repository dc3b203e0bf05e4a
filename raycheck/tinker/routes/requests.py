"""Reads bodies and the windows of listings, and stores answers by their idempotency key."""

import asyncio
import json
import re
from collections.abc import Awaitable, Callable
from typing import Any

from aiohttp import web

from raycheck.tinker.sampling import Sampling
from raycheck.tinker.service import Service
from raycheck.tinker.wire.fields import RefusedRequestError

SERVICE = web.AppKey("service", Service)
SAMPLING = web.AppKey("sampling", Sampling)
KEEP_ANSWER_S = 1800.0
"""How long an answer is stored: longer than the SDK retries one call."""
MAX_KEY = 200
MAX_LISTED = 1000
MAX_BODY_BYTES = 256 * 1024 * 1024
"""The SDK splits its requests into parts of 5 MB."""
MAX_WINDOW_BYTES = 1 << 27
SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")
"""Bytes that every body with a lone surrogate contains; a pair of surrogates in order is a character."""


async def body_bytes(request: web.Request) -> bytes:
    """Return a body, decompressed if it is zstd. Raises RefusedRequestError for another encoding, and for a body that
    is too large, of which no more than the limit is decompressed."""
    data = await request.read()
    encoding = request.headers.get("Content-Encoding", "identity").lower()
    if encoding == "identity":
        return data
    if encoding != "zstd":
        raise RefusedRequestError(f"Content-Encoding {encoding[:20]!r}: this server reads zstd only", 415)
    return await asyncio.to_thread(_unpacked, data)


def _unpacked(data: bytes) -> bytes:
    from zstandard import ZstdDecompressor, ZstdError

    try:
        with ZstdDecompressor(max_window_size=MAX_WINDOW_BYTES).stream_reader(data) as reader:
            found = bytes(reader.read(MAX_BODY_BYTES + 1))
    except ZstdError as error:
        raise RefusedRequestError(f"the body is not zstd data: {error}", 422) from None
    if len(found) > MAX_BODY_BYTES:
        raise RefusedRequestError(f"the body has more than {MAX_BODY_BYTES} bytes", 413)
    return found


async def json_body(request: web.Request) -> dict[str, Any]:
    """Return the JSON object in a body. Raises RefusedRequestError for any other body."""
    data = await body_bytes(request)
    try:
        text = data.decode()  # json.loads would accept bytes that are not UTF-8
        body = json.loads(text)
    except (ValueError, RecursionError) as error:  # includes numbers that Python refuses to read
        raise RefusedRequestError(f"the body is not JSON: {error}", 422) from None
    if not isinstance(body, dict):
        raise RefusedRequestError("the body is not a JSON object", 422)
    if SURROGATE.search(text):
        for name, value in body.items():
            _check_surrogates(name, value)
    return body


def _check_surrogates(name: str, value: object) -> None:
    """Raise RefusedRequestError for half of a character, which no file name and no other program accepts."""
    try:
        json.dumps({name: value}, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        text = f"{name[:100]!a} contains a lone surrogate (such as \\ud800), which is not a character"
        raise RefusedRequestError(text, 422) from None


async def once(request: web.Request, answer: Callable[[], Awaitable[dict[str, Any]]]) -> web.Response:
    """Run a call once, and answer retries with the same idempotency key with the same answer."""
    journal = request.app[SERVICE].journal
    given = request.headers.get("x-idempotency-key", "")
    key = f"{request.path} {given}".encode(errors="backslashreplace").decode() if 0 < len(given) <= MAX_KEY else ""
    if key and (known := journal.answer_to(key)) is not None:
        return web.Response(status=known[0], text=known[1], content_type="application/json")
    text = json.dumps(await answer())
    if key:
        journal.remember_answer(key, 200, text, keep_s=KEEP_ANSWER_S)
    return web.Response(text=text, content_type="application/json")


def window(request: web.Request, *, default: int) -> tuple[int, int]:
    """Return the limit and offset of a listing. Raises RefusedRequestError."""
    found = []
    for name, value in (("limit", str(default)), ("offset", "0")):
        text = request.query.get(name, value)
        if not text.isdecimal() or len(text) > 9:
            raise RefusedRequestError(f"{name}={text[:20]!r}: give a whole number", 422)
        found.append(int(text))
    return min(found[0], MAX_LISTED), found[1]
