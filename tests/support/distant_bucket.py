"""A bucket on S3 that is far away: every answer comes late, and costs the server next to nothing.

For measurements of a client alone. It knows GET and the listing of folders, of objects that it was given at the start;
what a store must do is the matter of the real servers.
"""

import asyncio
import pickle
import subprocess
import sys
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


class _Server:
    def __init__(self, objects: Mapping[str, bytes], delay_s: float) -> None:
        self._objects = objects
        self._delay_s = delay_s

    async def serve(self) -> None:
        server = await asyncio.start_server(self._connection, "127.0.0.1", 0)
        print(server.sockets[0].getsockname()[1], flush=True)
        await server.serve_forever()

    async def _connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                await asyncio.sleep(self._delay_s)
                status, body = self._answer(head.split(b" ", 2)[1].decode())
                date = formatdate(usegmt=True)
                lines = (f"HTTP/1.1 {status}", f"Date: {date}", f"Last-Modified: {date}", 'ETag: "1"')
                writer.write("\r\n".join((*lines, f"Content-Length: {len(body)}", "", "")).encode() + body)
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            writer.close()

    def _answer(self, target: str) -> tuple[str, bytes]:
        parts = urlsplit(target)
        if "list-type=2" in parts.query:
            prefix = parse_qs(parts.query).get("prefix", [""])[0]
            return "200 OK", self._folders(prefix)
        data = self._objects.get(unquote(parts.path).removeprefix(f"/{BUCKET}/"))
        return ("404 Not Found", b"<Error><Code>NoSuchKey</Code></Error>") if data is None else ("200 OK", data)

    def _folders(self, prefix: str) -> bytes:
        below = (key.removeprefix(prefix).partition("/") for key in self._objects if key.startswith(prefix))
        names = sorted({name for name, slash, _ in below if slash})
        found = "".join(f"<CommonPrefixes><Prefix>{escape(prefix + name)}/</Prefix></CommonPrefixes>" for name in names)
        return f"<ListBucketResult><IsTruncated>false</IsTruncated>{found}</ListBucketResult>".encode()


if __name__ == "__main__":
    asyncio.run(_Server(*pickle.load(sys.stdin.buffer)).serve())
