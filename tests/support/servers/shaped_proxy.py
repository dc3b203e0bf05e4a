"""A network of a given shape before a real server: a TCP proxy in a process of its own, for measurements of any client.

Each connection carries so many bytes per second in each direction, and each answer begins later. It knows no protocol:
an answer is what comes back after something was sent.
"""

import asyncio
import json
import os
import random
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from urllib.parse import parse_qs, urlsplit

from tests.support.servers.shaped_bucket import PIECE_BYTES, Line, Shape


@contextmanager
def shaped_proxy(uri: str, *, mb_per_s: float, latency_s: float, cores: Sequence[int] = ()) -> Iterator[str]:
    """Yield the URI of the bucket at `uri`, through the proxy. cores: where it runs; none: anywhere."""
    address = parse_qs(urlsplit(uri).query)["endpoint_override"][0]
    options = {"address": address, "mb_per_s": mb_per_s, "latency_s": latency_s, "cores": list(cores)}
    with subprocess.Popen([sys.executable, "-m", __name__, json.dumps(options)], stdout=subprocess.PIPE) as proxy:
        assert proxy.stdout is not None
        try:
            yield uri.replace(address, f"127.0.0.1:{int(proxy.stdout.readline())}")
        finally:
            proxy.kill()


class _Proxy:
    def __init__(self, address: str, mb_per_s: float, latency_s: float) -> None:
        self._host, _, self._port = address.partition(":")
        self._shape = Shape(mb_per_s=mb_per_s, latency_s=latency_s)

    async def serve(self) -> None:
        server = await asyncio.start_server(self._connection, "127.0.0.1", 0, limit=PIECE_BYTES)
        print(server.sockets[0].getsockname()[1], flush=True)
        await server.serve_forever()

    async def _connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked = asyncio.Event()
        far_reader, far_writer = await asyncio.open_connection(self._host, int(self._port), limit=PIECE_BYTES)
        there = self._carry(reader, far_writer, asked, is_answer=False)
        await asyncio.gather(there, self._carry(far_reader, writer, asked, is_answer=True))

    async def _carry(
        self, source: asyncio.StreamReader, target: asyncio.StreamWriter, asked: asyncio.Event, *, is_answer: bool
    ) -> None:
        line = Line(self._shape, random.Random(0))
        with suppress(ConnectionError):
            while piece := await source.read(PIECE_BYTES):
                if not is_answer:
                    asked.set()
                elif asked.is_set():
                    asked.clear()
                    await asyncio.sleep(self._shape.latency_s)
                await line.carry(len(piece))
                target.write(piece)
                await target.drain()
        target.close()


def main() -> None:
    options = json.loads(sys.argv[1])
    if cores := options.pop("cores"):
        os.sched_setaffinity(0, cores)
    asyncio.run(_Proxy(**options).serve())


if __name__ == "__main__":
    main()
