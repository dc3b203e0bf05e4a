"""Adapters for download: their files by signed URLs, and archives of them, streamed from the bucket.

A URL is signed by this server and names one checkpoint, one file, and an expiry time. Until then it works without a
key, because the SDK's downloads send none. Nothing is stored on the way: bytes are streamed from the bucket to the
client. With `direct_downloads`, a file's URL is signed with the bucket's credentials, and its bytes bypass this server.
"""

import asyncio
import hmac
import secrets
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from email.utils import format_datetime
from urllib.parse import quote

from aiohttp import web

from raycheck.catalog import TarStream
from raycheck.tinker.access import DOWNLOADS
from raycheck.tinker.checkpoint_paths import CheckpointPath
from raycheck.tinker.checkpoint_store import CheckpointStore
from raycheck.tinker.routes.requests import SERVICE
from raycheck.tinker.wire.fields import RefusedRequestError
from raycheck.values import StoredExport

VALID_S = 3600
ARCHIVE = "archive.tar"
SECRET = web.AppKey("secret", bytes)


def add_to(app: web.Application) -> None:
    app[SECRET] = secrets.token_bytes(32)  # a restart invalidates URLs: clients ask again
    one = "/api/v1/training_runs/{run}/checkpoints/"
    app.router.add_get(one + "{segment}/{name}/external_weights_urls", _urls)
    app.router.add_get(one + "{segment}/{name}/archive", _archive)
    app.router.add_get(one + "{name}/archive", _archive)
    app.router.add_get(DOWNLOADS + "{run}/{segment}/{name}/{expires}/{signature}/{file}", _download)


async def _urls(request: web.Request) -> web.Response:
    """Respond with a signed URL for each file of an adapter."""
    path = await _wanted(request)
    service = request.app[SERVICE]
    files = await asyncio.to_thread(_adapter, service.checkpoints, path)
    expires = int(time.time()) + VALID_S
    if service.settings.direct_downloads:
        urls = await asyncio.to_thread(lambda: {name: files.signed_address(name, VALID_S) for name in files.sizes})
    else:
        urls = {name: _url(request, path, name, expires) for name in files.sizes}
    return web.json_response({"urls": urls, "expires": datetime.fromtimestamp(expires, UTC).isoformat()})


async def _archive(request: web.Request) -> web.Response:
    """Respond as SDK 0.24.1 expects: with the signed URL of a tar file and its expiry time."""
    path = await _wanted(request)
    expires = int(time.time()) + VALID_S
    until = format_datetime(datetime.fromtimestamp(expires, UTC), usegmt=True)
    return web.Response(status=302, headers={"Location": _url(request, path, ARCHIVE, expires), "Expires": until})


async def _wanted(request: web.Request) -> CheckpointPath:
    """Return the existing checkpoint in a request's path. A bare name means sampler weights first."""
    found = request.match_info
    store = request.app[SERVICE].checkpoints
    if "segment" in found:
        path = CheckpointPath.of(found["run"], f"{found['segment']}/{found['name']}")
        return (await asyncio.to_thread(store.find, path)).path
    sampler, training = (
        CheckpointPath.of(found["run"], f"{of}/{found['name']}") for of in ("sampler_weights", "weights")
    )
    first = await asyncio.to_thread(store.find_or_none, sampler)
    return sampler if first is not None else (await asyncio.to_thread(store.find, training)).path


async def _download(request: web.Request) -> web.StreamResponse:
    """Stream one file, or the archive, to any client with the URL."""
    found = request.match_info
    path = CheckpointPath.of(found["run"], f"{found['segment']}/{found['name']}")
    signed = _signature(request.app[SECRET], path, found["file"], found["expires"])
    shown = found["signature"].encode(errors="surrogatepass")
    if not hmac.compare_digest(signed.encode(), shown) or time.time() >= int(found["expires"]):
        raise RefusedRequestError("this URL was not signed by this server, or it has expired: request a new one", 403)
    files = await asyncio.to_thread(_adapter, request.app[SERVICE].checkpoints, path)
    if found["file"] == ARCHIVE:
        tar = TarStream(sizes=files.sizes)
        chunks = tar.chunks(files.read(name) for name in files.sizes)
        return await _stream(request, chunks, tar.size_bytes, "application/x-tar", called=f"{path.run}_{path.name}.tar")
    if found["file"] not in files.sizes:
        raise RefusedRequestError(f"{path.text} has no file {found['file'][:100]!r}", 404)
    chunks, size = files.read(found["file"]), files.sizes[found["file"]]
    return await _stream(request, chunks, size, "application/octet-stream", called=found["file"])


async def _stream(
    request: web.Request,
    chunks: Iterator[bytes | bytearray | memoryview],
    size_bytes: int,
    content_type: str,
    *,
    called: str,
) -> web.StreamResponse:
    headers = {"Content-Disposition": f'attachment; filename="{called}"', "Content-Length": str(size_bytes)}
    answer = web.StreamResponse(headers=headers)
    answer.content_type = content_type
    await answer.prepare(request)
    while (chunk := await asyncio.to_thread(lambda: next(chunks, None))) is not None:
        await answer.write(chunk)
    await answer.write_eof()
    return answer


def _adapter(store: CheckpointStore, path: CheckpointPath) -> StoredExport:
    """Return the files of a checkpoint's adapter, exporting it if necessary."""
    found = store.find(path)
    store.export_adapter(found)
    return store.adapter_files(found)


def _url(request: web.Request, path: CheckpointPath, file: str, expires: int) -> str:
    signature = _signature(request.app[SECRET], path, file, str(expires))
    # Behind a proxy that terminates TLS, this server sees plain HTTP, which the client could not use.
    scheme = "https" if request.headers.get("X-Forwarded-Proto") == "https" else request.scheme
    way = "/".join(quote(part, safe=":") for part in (path.run, path.segment, path.name, str(expires), signature, file))
    return f"{scheme}://{request.host}{DOWNLOADS}{way}"


def _signature(secret: bytes, path: CheckpointPath, file: str, expires: str) -> str:
    return hmac.digest(secret, f"{path.text} {file} {expires}".encode(), "sha256").hex()
