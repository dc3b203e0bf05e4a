"""A bucket on S3 that is far away: every answer comes late, and costs the server next to nothing.

For measurements of a client alone. It knows GET, also of a range, and the listing of folders and objects, of what it was
given at the start; what a store must do is the matter of the real servers. `traffic` says what was asked of it.
"""

import asyncio
import json
import pickle
import re
import subprocess
import sys
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from email.utils import formatdate
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape

BUCKET = "distant"


@contextmanager
def distant_bucket(objects: Mapping[str, bytes], *, delay_s: float) -> Iterator[str]:
    """A server in a process of its own; yields its bucket's URI."""
    command = [sys.executable, "-m", __name__]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as server:
        assert server.stdin is not None
        assert server.stdout is not None
        try:
            pickle.dump((dict(objects), delay_s), server.stdin)
            server.stdin.flush()
            port = int(server.stdout.readline())
            yield f"s3://{BUCKET}?endpoint_override=127.0.0.1:{port}&scheme=http&region=us-east-1"
        finally:
            server.kill()


def traffic(uri: str) -> tuple[int, int]:
    """How many requests the server of this bucket has answered since the last call, and with how many bytes of bodies."""
    address = parse_qs(urlsplit(uri).query)["endpoint_override"][0]
    with urllib.request.urlopen(f"http://{address}{_TRAFFIC}", timeout=30) as answer:
        requests, size = json.load(answer)
    return requests, size


_TRAFFIC = "/-traffic"


class _Server:
    def __init__(self, objects: Mapping[str, bytes], delay_s: float) -> None:
        self._objects = objects
        self._delay_s = delay_s
        self._requests = self._bytes = 0

    async def serve(self) -> None:
        server = await asyncio.start_server(self._connection, "127.0.0.1", 0)
        print(server.sockets[0].getsockname()[1], flush=True)
        await server.serve_forever()

    async def _connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode()
                target = head.split(" ", 2)[1]
                if target == _TRAFFIC:
                    body = json.dumps([self._requests, self._bytes]).encode()
                    self._requests = self._bytes = 0
                    writer.write(f"HTTP/1.1 200 OK\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body)
                    await writer.drain()
                    continue
                await asyncio.sleep(self._delay_s)
                status, more, body = self._ranged(head, *self._answer(target))
                self._requests, self._bytes = self._requests + 1, self._bytes + len(body)
                date = formatdate(usegmt=True)
                lines = (f"HTTP/1.1 {status}", *more, f"Date: {date}", f"Last-Modified: {date}", 'ETag: "1"')
                writer.write("\r\n".join((*lines, f"Content-Length: {len(body)}", "", "")).encode() + body)
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            writer.close()

    def _ranged(self, head: str, status: str, body: bytes) -> tuple[str, tuple[str, ...], bytes]:
        """An answer, or the part of it that the request's head asks for."""
        found = re.search(r"^range: *bytes=(\d+)-(\d+)", head, re.IGNORECASE | re.MULTILINE)
        if found is None or not status.startswith("200"):
            return status, (), body
        start, last = int(found[1]), min(int(found[2]), len(body) - 1)
        return "206 Partial Content", (f"Content-Range: bytes {start}-{last}/{len(body)}",), body[start : last + 1]

    def _answer(self, target: str) -> tuple[str, bytes]:
        parts = urlsplit(target)
        if "list-type=2" in parts.query:
            query = parse_qs(parts.query)
            prefix = query.get("prefix", [""])[0]
            return "200 OK", self._folders(prefix) if "delimiter" in query else self._listed(prefix)
        data = self._objects.get(unquote(parts.path).removeprefix(f"/{BUCKET}/"))
        return ("404 Not Found", b"<Error><Code>NoSuchKey</Code></Error>") if data is None else ("200 OK", data)

    def _listed(self, prefix: str) -> bytes:
        found = "".join(
            f"<Contents><Key>{escape(key)}</Key><Size>{len(data)}</Size><ETag>1</ETag>"
            "<LastModified>2026-01-01T00:00:00.000Z</LastModified></Contents>"
            for key, data in sorted(self._objects.items())
            if key.startswith(prefix)
        )
        return f"<ListBucketResult><IsTruncated>false</IsTruncated>{found}</ListBucketResult>".encode()

    def _folders(self, prefix: str) -> bytes:
        below = (key.removeprefix(prefix).partition("/") for key in self._objects if key.startswith(prefix))
        names = sorted({name for name, slash, _ in below if slash})
        found = "".join(f"<CommonPrefixes><Prefix>{escape(prefix + name)}/</Prefix></CommonPrefixes>" for name in names)
        return f"<ListBucketResult><IsTruncated>false</IsTruncated>{found}</ListBucketResult>".encode()


if __name__ == "__main__":
    asyncio.run(_Server(*pickle.load(sys.stdin.buffer)).serve())
