"""Google Cloud Storage as its JSON API documents it, small enough to read, for tests: objects live in this process.

Runs as a child process on 127.0.0.1 (`gcs_server()`). What it is exact about: preconditions on the generation, also
under concurrency (an object is judged and replaced without yielding in between), checksums, resumable uploads (nothing
is visible before the last byte), ranges, listings and their pages. POST /_faults makes the next matching requests fail.

In three things it answers as Google's own storage-testbench does, so that clients cannot lean on more: its JSON leaves
out a size of zero, a checksum that does not match is refused with 412 and without a reason, and a missing bucket or
object with a 404 that says in words only which of the two it is.
"""

import asyncio
import base64
import hashlib
import json
import os
import re
import select
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from email.utils import formatdate
from pathlib import Path
from uuid import uuid4

import google_crc32c
from aiohttp import web

BUCKET = "raycheck"
START_TIMEOUT_S = 90.0


@contextmanager
def gcs_server(**environment: str) -> Iterator[str]:
    """A running server with one empty bucket; yields its endpoint. PAGE=3 makes listings come in pages of three."""
    command = [sys.executable, str(Path(__file__)), "serve"]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(command, env={**os.environ, **environment}, **pipes) as server:
        try:
            assert select.select([server.stdout], [], [], START_TIMEOUT_S)[0], "the GCS server does not start"
            yield server.stdout.readline().decode().strip()
        finally:
            server.kill()


def inject(
    endpoint: str,
    method: str,
    path: str,
    *,
    status: int,
    times: int = 1,
    keep: int = 0,
    reason: str | None = "injected",
) -> None:
    """The next `times` requests of `method` whose path and query match fail with `status`, nothing applied.

    Status 308 is short persistence instead: of a chunk only the first `keep` bytes are kept, and the answer says so.
    """
    fault = {"method": method, "path": path, "status": status, "times": times, "keep": keep, "reason": reason}
    request = urllib.request.Request(f"{endpoint}/_faults", data=json.dumps(fault).encode(), method="POST")
    with urllib.request.urlopen(request, timeout=START_TIMEOUT_S):
        pass


@dataclass
class Stored:
    data: bytes
    generation: int
    about: dict
    updated: str = field(default_factory=lambda: datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ"))

    def resource(self, bucket: str, name: str) -> dict:
        found = {
            "kind": "storage#object",
            "bucket": bucket,
            "name": name,
            "generation": str(self.generation),
            "metageneration": "1",
            "size": str(len(self.data)),
            "crc32c": crc32c(self.data),
            "md5Hash": base64.b64encode(hashlib.md5(self.data).digest()).decode(),
            "etag": self.etag,
            "updated": self.updated,
            "contentType": self.about.get("contentType", "application/octet-stream"),
            "metadata": self.about.get("metadata", {}),
        }
        if not self.data:
            del found["size"]
        return found

    @property
    def etag(self) -> str:
        return f'"g{self.generation}"'


@dataclass
class Upload:
    """A resumable upload under way."""

    bucket: str
    name: str
    about: dict
    conditions: dict[str, str]
    data: bytearray = field(default_factory=bytearray)
    finished: Stored | None = None


class RefusedError(Exception):
    def __init__(self, status: int, message: str, reason: str | None = "invalid") -> None:
        super().__init__(message)
        self.status, self.message, self.reason = status, message, reason


class Gcs:
    """The state, and its rules. No method awaits: each is one step as far as other requests are concerned."""

    def __init__(self) -> None:
        self.buckets: dict[str, dict[str, Stored]] = {BUCKET: {}}
        self.about: dict[str, dict] = {}  # what somebody has set of a bucket's metadata: rules, versioning
        self.uploads: dict[str, Upload] = {}
        self.faults: list[dict] = []
        self._generation = time.time_ns() // 1000

    def bucket(self, name: str) -> dict[str, Stored]:
        if name not in self.buckets:
            raise RefusedError(404, f"Bucket {name} does not exist.", None)
        return self.buckets[name]

    def object(self, bucket: str, name: str) -> Stored:
        found = self.bucket(bucket).get(name)
        if found is None:
            raise RefusedError(404, f"Live version of object {bucket}/{name} does not exist.", None)
        return found

    def check(self, bucket: str, name: str, conditions: dict[str, str]) -> None:
        found = self.bucket(bucket).get(name)
        generation = found.generation if found else 0
        wanted, unwanted = conditions.get("ifGenerationMatch"), conditions.get("ifGenerationNotMatch")
        if (wanted is not None and int(wanted) != generation) or (unwanted is not None and int(unwanted) == generation):
            raise RefusedError(412, "At least one of the pre-conditions you specified did not hold.", "conditionNotMet")

    def insert(self, bucket: str, name: str, data: bytes, about: dict, conditions: dict[str, str]) -> Stored:
        if not name or len(name.encode()) > 1024:
            raise RefusedError(400, "Invalid object name", "invalid")
        self.check(bucket, name, conditions)
        for key, actual in (("crc32c", crc32c), ("md5Hash", md5)):
            if key in about and about[key] != actual(data):
                message = f"{key} validation failed. Expected = {actual(data)} vs Actual = {about[key]}."
                raise RefusedError(412, message, None)
        self._generation += 1
        stored = self.bucket(bucket)[name] = Stored(bytes(data), self._generation, about)
        return stored

    def delete(self, bucket: str, name: str, conditions: dict[str, str]) -> None:
        self.object(bucket, name)
        self.check(bucket, name, conditions)
        del self.bucket(bucket)[name]

    def compose(self, bucket: str, name: str, order: dict, conditions: dict[str, str]) -> Stored:
        sources = order["sourceObjects"]
        if not 1 <= len(sources) <= 32:
            raise RefusedError(400, "The number of source components must be between 1 and 32", "invalid")
        data = bytearray()
        for source in sources:
            self.check(bucket, source["name"], source.get("objectPreconditions", {}))
            data += self.object(bucket, source["name"]).data
        return self.insert(bucket, name, data, order.get("destination", {}), conditions)

    def rewrite(self, source: tuple[str, str], target: tuple[str, str], about: dict, query: dict[str, str]) -> dict:
        """A copy of more than 8 MiB takes two requests, the second of which has the token that the first answered."""
        found = self.object(*source)
        wanted = query.get("ifSourceGenerationMatch")
        if wanted is not None and int(wanted) != found.generation:
            raise RefusedError(412, "At least one of the pre-conditions you specified did not hold.", "conditionNotMet")
        token = f"{source} {target} {found.generation}"
        if len(found.data) > 8 << 20 and query.get("rewriteToken") != token:
            return {"kind": "storage#rewriteResponse", "done": False, "rewriteToken": token}
        stored = self.insert(*target, found.data, about, query)
        return {"kind": "storage#rewriteResponse", "done": True, "resource": stored.resource(*target)}

    def list(self, bucket: str, query: dict[str, str]) -> dict:
        """A page is so many items and prefixes together; its token is the last name seen."""
        prefix, delimiter, after = query.get("prefix", ""), query.get("delimiter"), query.get("pageToken", "")
        limit = min(int(query.get("maxResults", "1000")), int(os.environ.get("PAGE", "1000")))
        items, prefixes, last = [], [], ""
        for name, stored in sorted(self.bucket(bucket).items()):
            head, found, _ = name[len(prefix) :].partition(delimiter) if delimiter else (name, "", "")
            shown = prefix + head + delimiter if found else name
            if not name.startswith(prefix) or shown <= after or shown in prefixes:
                continue
            if len(items) + len(prefixes) == limit:
                return {"items": items, "prefixes": prefixes, "nextPageToken": last}
            last = shown
            if found:
                prefixes.append(shown)
            else:
                items.append(stored.resource(bucket, name))
        return {"items": items, "prefixes": prefixes}

    def append(self, upload: Upload, content_range: str, data: bytes, query: dict[str, str], crc: str | None) -> None:
        """One chunk. The object appears with the last byte and not before."""
        span, total = re.fullmatch(r"bytes (\*|\d+-\d+)/(\*|\d+)", content_range).groups()
        if span != "*":
            start, last = (int(number) for number in span.split("-"))
            if start != len(upload.data) or last - start + 1 != len(data):
                raise RefusedError(503, f"chunk at {start}, expected {len(upload.data)}", "backendError")
            is_last = total != "*" and last + 1 == int(total)
            if not is_last and len(data) % (256 * 1024):
                raise RefusedError(400, "chunks must be multiples of 256 KiB", "invalid")
            upload.data += data
        if total != "*" and len(upload.data) == int(total):
            about = {**upload.about, **({"crc32c": crc} if crc else {})}
            upload.finished = self.insert(upload.bucket, upload.name, upload.data, about, upload.conditions)


class Server:
    """HTTP around it."""

    def __init__(self) -> None:
        self.gcs = Gcs()
        self.app = web.Application(client_max_size=1 << 31, middlewares=[self._middle])
        one = "/storage/v1/b/{bucket}/o/{name}"
        self.app.add_routes(
            [
                web.post("/_faults", self._add_fault),
                web.get("/_uploads", self._open_uploads),
                web.post("/upload/storage/v1/b/{bucket}/o", self._upload),
                web.put("/upload/storage/v1/b/{bucket}/o", self._chunk),
                web.delete("/upload/storage/v1/b/{bucket}/o", self._cancel),
                web.get("/storage/v1/b/{bucket}", self._look),
                web.patch("/storage/v1/b/{bucket}", self._change),
                web.get("/storage/v1/b/{bucket}/o", self._list),
                web.get(one, self._get, allow_head=False),
                web.get(f"/download{one}", self._media, allow_head=False),
                web.delete(one, self._delete),
                web.post(f"{one}/compose", self._compose),
                web.post(f"{one}/rewriteTo/b/{{bucket2}}/o/{{name2}}", self._rewrite),
            ]
        )

    @web.middleware
    async def _middle(self, request: web.Request, handler) -> web.StreamResponse:
        try:
            request["keep"] = await self._meet_faults(request)
            answer = await handler(request)
        except RefusedError as refused:
            answer = _refusal(request, refused)
        answer.headers["Date"] = formatdate(usegmt=True)
        return answer

    async def _meet_faults(self, request: web.Request) -> int | None:
        for fault in self.gcs.faults:
            if fault["times"] > 0 and fault["method"] == request.method and re.search(fault["path"], request.path_qs):
                fault["times"] -= 1
                if fault["status"] == 308:
                    return fault["keep"]
                await request.read()
                raise RefusedError(fault["status"], "injected", fault["reason"])
        return None

    async def _add_fault(self, request: web.Request) -> web.Response:
        self.gcs.faults.append(await request.json())
        return web.Response(status=204)

    async def _open_uploads(self, request: web.Request) -> web.Response:
        return web.json_response([upload.name for upload in self.gcs.uploads.values() if not upload.finished])

    async def _upload(self, request: web.Request) -> web.Response:
        bucket, query = request.match_info["bucket"], dict(request.query)
        if "upload_id" in query:  # gcsfs sends its chunks by POST
            return await self._chunk(request)
        self.gcs.bucket(bucket)
        body = await request.read()
        kind = query.get("uploadType")
        if kind == "resumable":
            about = json.loads(body) if body else {}
            name = query.get("name") or about["name"]
            self.gcs.check(bucket, name, query)
            key = uuid4().hex
            self.gcs.uploads[key] = Upload(bucket, name, about, query)
            return web.Response(headers={"Location": f"{request.url.origin()}{request.path}?upload_id={key}"})
        if kind == "multipart":
            about, body = related(request.headers["Content-Type"], body)
        elif kind == "media":
            about = {"contentEncoding": query["contentEncoding"]} if "contentEncoding" in query else {}
        else:
            raise RefusedError(400, "uploadType is missing", "required")
        name = query.get("name") or about["name"]
        stored = self.gcs.insert(bucket, name, body, about, query)
        return web.json_response(stored.resource(bucket, name))

    async def _chunk(self, request: web.Request) -> web.Response:
        upload = self._upload_of(request)
        data = await request.read()
        span = request.headers["Content-Range"]
        if request["keep"] is not None:  # as GCS may: only so much of the chunk was kept
            data = data[: request["keep"]]
            start = len(upload.data)
            span = f"bytes {start}-{start + len(data) - 1}/*"
        if upload.finished is None:
            crc = re.search(r"crc32c=(\S+)", request.headers.get("x-goog-hash", ""))
            self.gcs.append(upload, span, data, dict(request.query), crc[1] if crc else None)
        if upload.finished is not None:
            return web.json_response(upload.finished.resource(upload.bucket, upload.name))
        return web.Response(status=308, headers={"Range": f"bytes=0-{len(upload.data) - 1}"} if upload.data else {})

    async def _cancel(self, request: web.Request) -> web.Response:
        self._upload_of(request)
        del self.gcs.uploads[request.query["upload_id"]]
        return web.Response(status=499)

    def _upload_of(self, request: web.Request) -> Upload:
        found = self.gcs.uploads.get(request.query.get("upload_id", ""))
        if found is None:
            raise RefusedError(404, "no such upload", "notFound")
        return found

    async def _rewrite(self, request: web.Request) -> web.Response:
        at = request.match_info
        places = (at["bucket"], at["name"]), (at["bucket2"], at["name2"])
        return web.json_response(self.gcs.rewrite(*places, await request.json(), dict(request.query)))

    async def _look(self, request: web.Request) -> web.Response:
        name = request.match_info["bucket"]
        self.gcs.bucket(name)
        about = {"kind": "storage#bucket", "id": name, "name": name, "location": "US", **self.gcs.about.get(name, {})}
        return web.json_response({key: value for key, value in about.items() if value is not None})

    async def _change(self, request: web.Request) -> web.Response:
        name = request.match_info["bucket"]
        self.gcs.bucket(name)
        self.gcs.about.setdefault(name, {}).update(await request.json())
        return await self._look(request)

    async def _list(self, request: web.Request) -> web.Response:
        return web.json_response(self.gcs.list(request.match_info["bucket"], dict(request.query)))

    async def _get(self, request: web.Request) -> web.Response:
        if request.query.get("alt") == "media":
            return await self._media(request)
        stored = self.gcs.object(request.match_info["bucket"], request.match_info["name"])
        return web.json_response(stored.resource(request.match_info["bucket"], request.match_info["name"]))

    async def _media(self, request: web.Request) -> web.Response:
        stored = self.gcs.object(request.match_info["bucket"], request.match_info["name"])
        headers = {
            "ETag": stored.etag,
            "x-goog-generation": str(stored.generation),
            "x-goog-hash": f"crc32c={crc32c(stored.data)},md5={md5(stored.data)}",
        }
        if "contentEncoding" in stored.about:
            headers["Content-Encoding"] = stored.about["contentEncoding"]
        span = re.fullmatch(r"bytes=(\d+)-(\d*)", request.headers.get("Range", ""))
        if span is None:
            return web.Response(body=stored.data, headers=headers)
        start, stop = int(span[1]), min(int(span[2] or len(stored.data)) + 1, len(stored.data))
        if start >= len(stored.data):
            raise RefusedError(416, "Request range not satisfiable", "requestedRangeNotSatisfiable")
        headers["Content-Range"] = f"bytes {start}-{stop - 1}/{len(stored.data)}"
        return web.Response(status=206, body=stored.data[start:stop], headers=headers)

    async def _delete(self, request: web.Request) -> web.Response:
        self.gcs.delete(request.match_info["bucket"], request.match_info["name"], dict(request.query))
        return web.Response(status=204)

    async def _compose(self, request: web.Request) -> web.Response:
        bucket, name = request.match_info["bucket"], request.match_info["name"]
        stored = self.gcs.compose(bucket, name, await request.json(), dict(request.query))
        return web.json_response(stored.resource(bucket, name))


def related(content_type: str, body: bytes) -> tuple[dict, bytes]:
    """Metadata and bytes of a multipart/related body. Lines may end in bare LF, as gcsfs writes them."""
    mark = b"--" + re.search(r'boundary="?([^";]+)', content_type)[1].encode()
    line = b"\r\n" if body.startswith(mark + b"\r\n") else b"\n"
    if not body.startswith(mark + line) or not body.rstrip().endswith(line + mark + b"--"):
        raise RefusedError(400, "the multipart body is malformed")
    first, rest = body[len(mark + line) :].split(line + mark + line, maxsplit=1)
    second = rest[: rest.rindex(line + mark + b"--")]
    return json.loads(first.split(2 * line, maxsplit=1)[1]), second.split(2 * line, maxsplit=1)[1]


def _refusal(request: web.Request, refused: RefusedError) -> web.Response:
    """As JSON, or as bare text where the request asked for bytes. Without a reason as storage-testbench does: the message
    is another such JSON."""
    error = {"code": refused.status, "message": refused.message}
    if refused.reason is None:
        inner = {"errors": [{"domain": "global", "message": refused.message}]}
        error["message"] = json.dumps({"error": inner})
        return web.json_response({"error": error}, status=refused.status)
    if request.query.get("alt") == "media":
        return web.Response(status=refused.status, text=refused.message)
    error["errors"] = [{"domain": "global", "reason": refused.reason, "message": refused.message}]
    return web.json_response({"error": error}, status=refused.status)


def crc32c(data: bytes) -> str:
    return base64.b64encode(google_crc32c.value(bytes(data)).to_bytes(4, "big")).decode()


def md5(data: bytes) -> str:
    return base64.b64encode(hashlib.md5(data).digest()).decode()


async def serve() -> None:
    runner = web.AppRunner(Server().app, access_log=None)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    print(f"http://127.0.0.1:{runner.addresses[0][1]}", flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    # The pipe closes when the parent dies, however it dies, and takes the server along.
    threading.Thread(target=lambda: (sys.stdin.read(), os._exit(0)), daemon=True).start()
    asyncio.run(serve())
