"""A bucket on S3 behind a network of a given shape, in a process of its own, for measurements of a client.

Each connection carries so many bytes per second, every answer comes late, a piece of 64 KiB may be lost and comes 200 ms
later, and above a number of requests at a time the server answers 503 to a further one. One range of each object that
was uploaded in parts may be stuck for a while, the first time that it is requested. It knows objects, uploads in
parts and ranged GETs, and verifies nothing; what a store must do is the matter of the real servers.
"""

import asyncio
import json
import random
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from urllib.parse import parse_qs, urlsplit

PIECE_BYTES = 64 * 1024
LOST_S = 0.2
BUCKET = "shaped"


@dataclass(frozen=True, kw_only=True, slots=True)
class Shape:
    """mb_per_s: of one connection; 0 for no limit. latency_s: of each answer. loss: the share of pieces that are lost.
    limit: how many requests for data are served at a time; 0 for no limit. stuck_s: how much later the first answer
        comes to the range with the middle of an object."""

    mb_per_s: float = 0.0
    latency_s: float = 0.001
    loss: float = 0.0
    limit: int = 0
    stuck_s: float = 0.0


@contextmanager
def shaped_bucket(shape: Shape) -> Iterator[str]:
    """Yield the bucket's URI."""
    with subprocess.Popen(
        [sys.executable, "-m", __name__, json.dumps(asdict(shape))], stdout=subprocess.PIPE
    ) as server:
        assert server.stdout is not None
        try:
            port = int(server.stdout.readline())
            yield f"s3://{BUCKET}?endpoint_override=127.0.0.1:{port}&scheme=http&region=us-east-1"
        finally:
            server.kill()


class Line:
    """One connection, whose bytes take their time."""

    def __init__(self, shape: Shape, chance: random.Random) -> None:
        self._shape = shape
        self._chance = chance
        self._free_at = 0.0

    async def carry(self, size_bytes: int) -> None:
        now = time.monotonic()
        self._free_at = max(self._free_at, now)
        if self._shape.mb_per_s:
            self._free_at += size_bytes / self._shape.mb_per_s / 1e6
        if self._chance.random() < self._shape.loss * size_bytes / PIECE_BYTES:
            self._free_at += LOST_S
        if self._free_at > now + 0.002:
            await asyncio.sleep(self._free_at - now)


class _Server:
    def __init__(self, shape: Shape) -> None:
        self._shape = shape
        self._chance = random.Random(0)
        self._objects: dict[str, bytes | bytearray] = {}
        self._uploads: dict[str, dict[int, bytearray]] = {}
        self._served = 0
        self._is_unread = False  # whether nobody has read the middle of the newest object

    async def serve(self) -> None:
        server = await asyncio.start_server(self._connection, "127.0.0.1", 0, limit=1 << 20)
        print(server.sockets[0].getsockname()[1], flush=True)
        await server.serve_forever()

    async def _connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        line = Line(self._shape, self._chance)
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode("latin1")
                await self._exchange(head, reader, writer, line)
        except (asyncio.IncompleteReadError, ConnectionError):
            writer.close()

    async def _exchange(
        self, head: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, line: Line
    ) -> None:
        method, target = head.split(" ", 2)[:2]
        found = re.search(r"^content-length: *(\d+)", head, re.IGNORECASE | re.MULTILINE)
        size = int(found[1]) if found else 0
        is_data = method == "GET" or size > PIECE_BYTES
        is_refused = bool(is_data and self._shape.limit and self._served >= self._shape.limit)
        self._served += is_data and not is_refused
        try:
            await asyncio.sleep(self._shape.latency_s)
            if re.search(r"^expect: *100", head, re.IGNORECASE | re.MULTILINE):
                writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
            body = await self._body(reader, size, None if is_refused else line)
            if is_refused:
                status, more, answer = "503 Slow Down", (), b"<Error><Code>SlowDown</Code></Error>"
            else:
                status, more, answer = self._answer(method, target, head, body)
            if self._shape.stuck_s and self._is_stuck(more):
                await asyncio.sleep(self._shape.stuck_s)
            writer.write("\r\n".join((f"HTTP/1.1 {status}", *more, f"Content-Length: {len(answer)}", "", "")).encode())
            view = memoryview(answer)
            for at in range(0, len(view), PIECE_BYTES):
                writer.write(view[at : at + PIECE_BYTES])
                await line.carry(min(PIECE_BYTES, len(view) - at))
                await writer.drain()
        finally:
            self._served -= is_data and not is_refused

    def _is_stuck(self, more: tuple[str, ...]) -> bool:
        """Return whether an answer, of which these are headers, has an object's middle for the first time since then."""
        found = re.search(r"bytes (\d+)-(\d+)/(\d+)", more[0]) if more and self._is_unread else None
        is_stuck = found is not None and int(found[1]) <= int(found[3]) // 2 <= int(found[2])
        self._is_unread &= not is_stuck
        return is_stuck

    async def _body(self, reader: asyncio.StreamReader, size: int, line: Line | None) -> bytearray:
        body = bytearray()
        while len(body) < size:
            piece = await reader.read(min(PIECE_BYTES, size - len(body)))
            if not piece:
                raise ConnectionError
            body += piece
            if line is not None:
                await line.carry(len(piece))
        return body

    def _answer(self, method: str, target: str, head: str, body: bytearray) -> tuple[str, tuple[str, ...], bytes]:
        parts = urlsplit(target)
        query = parse_qs(parts.query, keep_blank_values=True)
        key, ok = parts.path.removeprefix(f"/{BUCKET}/"), ("200 OK", ('ETag: "1"',), b"")
        upload = query.get("uploadId", [""])[0]
        if method == "POST" and "uploads" in query:
            upload = str(len(self._uploads))
            self._uploads[upload] = {}
            return "200 OK", (), f"<{_BEGUN}><UploadId>{upload}</UploadId></{_BEGUN}>".encode()
        if method == "POST":
            made = self._uploads.pop(upload)
            self._objects[key] = b"".join(made[number] for number in sorted(made))
            self._is_unread = True
            return "200 OK", (), f"<{_DONE}><ETag>1</ETag></{_DONE}>".encode()
        if method == "PUT" and upload:
            self._uploads[upload][int(query["partNumber"][0])] = body
            return ok
        if method == "PUT":
            self._objects[key] = body
            return ok
        if method == "DELETE":
            self._objects.pop(key, None)
            return "204 No Content", (), b""
        return self._ranged(key, head)

    def _ranged(self, key: str, head: str) -> tuple[str, tuple[str, ...], bytes]:
        data = self._objects.get(key)
        if data is None:
            return "404 Not Found", (), b"<Error><Code>NoSuchKey</Code></Error>"
        found = re.search(r"^range: *bytes=(\d+)-(\d+)", head, re.IGNORECASE | re.MULTILINE)
        start, last = (int(found[1]), min(int(found[2]), len(data) - 1)) if found else (0, len(data) - 1)
        more = (
            f"Content-Range: bytes {start}-{last}/{len(data)}",
            'ETag: "1"',
            "Last-Modified: Mon, 01 Jan 2024 00:00:00 GMT",
        )
        return "206 Partial Content" if found else "200 OK", more, bytes(data[start : last + 1])


_BEGUN, _DONE = "InitiateMultipartUploadResult", "CompleteMultipartUploadResult"


if __name__ == "__main__":
    asyncio.run(_Server(Shape(**json.loads(sys.argv[1]))).serve())
