"""Clients that stay silent, send nonsense, or do not read, against a small application. Waits end with the event."""

import asyncio
import logging
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from aiohttp import web

from raycheck.errors import ConfigError
from raycheck.http_server import HttpLimits, _Connection, bound, listen

LONG_S = 600.0
"""A limit that no test reaches."""
DEADLINE_S = 60.0
"""For an answer, or for an end of the connection, that has to come."""
SECRET = b"my-secret-word"
Client = tuple[asyncio.StreamReader, asyncio.StreamWriter]
CLIENTS: set[Client] = set()
"""Those of the test that runs, to be closed after it."""


def run(test: Callable[[], Awaitable[None]]) -> None:
    async def within_deadline() -> None:
        try:
            async with asyncio.timeout(DEADLINE_S):
                await test()
        finally:
            for _, writer in CLIENTS:
                writer.transport.abort()
            await asyncio.gather(*(writer.wait_closed() for _, writer in CLIENTS), return_exceptions=True)
            CLIENTS.clear()

    asyncio.run(within_deadline())


@asynccontextmanager
async def serving(
    limits: HttpLimits, *handlers: tuple[str, Callable[[web.Request], Awaitable[web.StreamResponse]]]
) -> AsyncIterator[int]:
    """Serve an echo and `handlers`; yield the port."""

    async def echo(request: web.Request) -> web.Response:
        return web.Response(body=await request.read())

    app = web.Application()
    app.router.add_route("*", "/", echo)
    for path, handler in handlers:
        app.router.add_get(path, handler)
    with bound("127.0.0.1", 0) as sockets:
        async with listen(app, sockets, limits=limits) as address:
            yield int(address.rpartition(":")[2])


async def sent(port: int, data: bytes = b"") -> Client:
    client = await asyncio.open_connection("127.0.0.1", port)
    CLIENTS.add(client)
    client[1].write(data)
    return client


async def answer(client: Client) -> tuple[int, bytes]:
    """Read all until the server ends the connection; return the status, 0 for none, and the whole text."""
    text = await client[0].read()
    client[1].close()
    return (int(text.split()[1]) if text else 0), text


def test_a_bound_port_refuses_clients_and_other_programs_until_it_is_listened_at() -> None:
    async def test() -> None:
        with bound("127.0.0.1", 0) as sockets:
            port = sockets[0].getsockname()[1]
            with pytest.raises(ConnectionRefusedError):
                await sent(port)
            with socket.socket() as other, pytest.raises(OSError, match="in use"):
                other.bind(("127.0.0.1", port))
            async with listen(web.Application(), sockets, limits=HttpLimits()) as address:
                assert address == f"http://127.0.0.1:{port}"
                assert (await answer(await sent(port, b"GET / HTTP/1.0\r\n\r\n")))[0] == 404
        with bound("127.0.0.1", port):
            pass  # it is free again

    run(test)


@pytest.mark.parametrize("starts", ["before", "in the meantime"])
def test_a_port_at_which_another_program_listens_is_refused_with_advice(starts) -> None:
    advice = r"port=\d+: Address already in use; stop the program that listens there, or choose another port"

    async def test() -> None:
        with bound("127.0.0.1", 0) as first:
            port = first[0].getsockname()[1]
            if starts == "before":
                first[0].listen()
                with pytest.raises(ConfigError, match=advice), bound("127.0.0.1", port):
                    pass
                return
            with bound("127.0.0.1", port) as second:
                first[0].listen()
                with pytest.raises(ConfigError, match=advice):
                    async with listen(web.Application(), second, limits=HttpLimits()):
                        pass

    run(test)


def test_a_name_that_is_no_host_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"host=no\.such\.invalid"), bound("no.such.invalid", 0):
        pass


def test_a_silent_client_is_let_go() -> None:
    async def test() -> None:
        async with serving(HttpLimits(head_s=0.05)) as port:
            silent = [await sent(port) for _ in range(20)]
            assert [await answer(client) for client in silent] == [(0, b"")] * 20

    run(test)


def test_a_request_that_does_not_end_is_answered_in_time_be_it_the_first_or_a_later_one() -> None:
    async def test() -> None:
        async with serving(HttpLimits(head_s=1.0)) as port:
            whole = b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"
            begun = [b"G", b"GET / HTTP/1.1\r\n", b"GET / HTTP/1.1\r\nHost: x\r\nA: b"]
            first = [await sent(port, part) for part in begun]
            later, idle = await sent(port, whole), await sent(port, whole)
            for reader, _ in (later, idle):
                assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200")
            later[1].write(begun[1])

            assert [(await answer(client))[0] for client in (*first, later)] == [408] * 4
            assert await answer(idle) == (0, b"")

    run(test)


def test_a_connection_on_which_nothing_came_after_a_body_is_closed_without_an_answer() -> None:
    async def test() -> None:
        async with serving(HttpLimits(head_s=0.3)) as port:
            head = b"POST / HTTP/1.1\r\nHost: x\r\nExpect: 100-continue\r\nContent-Length: 5\r\n\r\n"
            idle = await sent(port)
            for _ in range(2):
                idle[1].write(head)
                assert (await idle[0].readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 100")
                idle[1].write(b"\n\nabc")
                assert (await idle[0].readuntil(b"\r\n\r\n\n\nabc")).startswith(b"HTTP/1.1 200")

            assert await answer(idle) == (0, b"")

    run(test)


def test_a_long_header_after_a_body_is_not_taken_for_a_long_address() -> None:
    async def test() -> None:
        async with serving(HttpLimits()) as port:
            body, line = b"x" * 9000, b"POST / HTTP/1.1\r\nHost: x\r\n"
            client = await sent(port, line + b"Expect: 100-continue\r\nContent-Length: 9000\r\n\r\n")
            assert (await client[0].readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 100")
            client[1].write(body)
            assert (await client[0].readuntil(body)).startswith(b"HTTP/1.1 200")
            client[1].write(line + b"A: " + body + b"\r\n\r\n")

            assert (await answer(client))[0] == 431

    run(test)


def test_a_body_that_does_not_end_is_answered_in_time() -> None:
    async def test() -> None:
        async with serving(HttpLimits(head_s=1.0, body_s=0.05)) as port:
            for body in (
                b"Content-Length: 100\r\n\r\nabc",
                b"Transfer-Encoding: chunked\r\n\r\n5\r\nab",
                b"Transfer-Encoding: chunked\r\n\r\n5\r\nab\r\nnonsense",
            ):
                status, text = await answer(await sent(port, b"POST / HTTP/1.1\r\nHost: x\r\n" + body))
                assert status in (408, 400 if b"nonsense" in body else 408)
                assert text.count(b"HTTP/1") == 1

    run(test)


def test_a_client_that_reads_nothing_is_let_go_also_while_its_answer_is_made() -> None:
    async def test() -> None:
        async def whole(request: web.Request) -> web.StreamResponse:
            return web.Response(body=bytes(16 << 20))

        async def in_parts(request: web.Request) -> web.StreamResponse:
            response = web.StreamResponse()
            await response.prepare(request)
            while True:
                await response.write(bytes(1 << 20))

        async with serving(HttpLimits(head_s=0.3), ("/whole", whole), ("/parts", in_parts)) as port:
            before = open_files()
            for path in (b"/whole", b"/parts"):
                assert open_files() == before
                with socket.create_connection(("127.0.0.1", port)) as silent:
                    silent.sendall(b"GET " + path + b" HTTP/1.1\r\nHost: x\r\n\r\n")
                    await until(lambda: open_files() == before + 2)  # the server has taken the connection
                    await until(lambda: open_files() == before + 1)

    run(test)


def open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


async def until(is_so: Callable[[], bool]) -> None:
    while not is_so():  # noqa: ASYNC110  descriptors have no event to wait for
        await asyncio.sleep(0)


class SlowReader(asyncio.Transport):
    """Is a transport whose client reads a part of the answer before each of some looks, and then no more."""

    def __init__(self, unread: list[int]) -> None:
        super().__init__()
        self.unread = unread
        self.is_given_up = asyncio.Event()

    def get_write_buffer_size(self) -> int:
        return self.unread.pop(0) if len(self.unread) > 1 else self.unread[0]

    def abort(self) -> None:
        self.is_given_up.set()

    def close(self) -> None:
        pass


def test_a_client_that_reads_slowly_is_waited_for_as_long_as_it_reads() -> None:
    async def test() -> None:
        transport = SlowReader([0, 900, 700, 700, 500, 500, 300, 300])
        runner = web.AppRunner(web.Application())
        await runner.setup()
        assert runner.server is not None
        connection = _Connection(runner.server, HttpLimits(head_s=0.001), set(), auto_decompress=True)
        connection.connection_made(transport)
        connection.pause_writing()
        await transport.is_given_up.wait()
        connection.connection_lost(None)
        await runner.cleanup()
        assert transport.unread == [300], "it was given up only when it had stopped to read"

    run(test)


def test_more_clients_than_the_limit_are_answered_and_find_room_once_others_are_gone() -> None:
    async def test() -> None:
        async with serving(HttpLimits(head_s=LONG_S, connections=3)) as port:
            request = b"GET / HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
            silent = [await sent(port, b"GET / HT") for _ in range(3)]
            refused = [await sent(port, request) for _ in range(2)]
            for client in refused:
                status, text = await answer(client)
                assert status == 503
                assert b"3 connections are open; try again later" in text

            for _, writer in silent:
                writer.close()
            while (status := (await answer(await sent(port, request)))[0]) != 200:
                assert status == 503

    run(test)


def test_refused_clients_that_stay_cost_no_more_than_the_limit_again() -> None:
    async def test() -> None:
        async with serving(HttpLimits(head_s=LONG_S, connections=3)) as port:
            stay = [await sent(port) for _ in range(6)]
            for reader, _ in stay[3:]:
                await reader.readuntil(b"try again later")

            with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):
                await (await sent(port))[0].readexactly(1)

    run(test)


NONSENSE = {
    "a long address": (414, b"GET /" + SECRET + b"a" * 9000 + b" HTTP/1.1\r\nHost: x\r\n\r\n"),
    "a long address without an end": (414, b"GET /" + SECRET + b"a" * 9000),
    "a long header": (431, b"GET / HTTP/1.1\r\nHost: x\r\nA: " + SECRET + b"a" * 9000 + b"\r\n\r\n"),
    "a long header name": (431, b"GET / HTTP/1.1\r\nHost: x\r\n" + b"a" * 9000 + b": b\r\n\r\n"),
    "no HTTP": (400, SECRET + b"\r\n\r\n"),
    "TLS": (400, b"\x16\x03\x01\x02\x00\x01\r\n" + SECRET + b"\r\n\r\n"),
    "a version of its own": (400, b"GET / HTTP/9.9\r\nA: " + SECRET + b"\r\n\r\n"),
    "no URL": (400, b"GET http://[" + SECRET + b" HTTP/1.1\r\nHost: x\r\n\r\n"),
    "a length that is none": (400, b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: " + SECRET + b"\r\n\r\n"),
    "a chunk that is none": (
        400,
        b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n" + SECRET + b"\r\n",
    ),
    "no gzip": (
        400,
        b"POST / HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Encoding: gzip\r\nContent-Length: 14\r\n\r\n"
        + SECRET,
    ),
}


@pytest.mark.parametrize("case", NONSENSE)
def test_nonsense_is_named_and_neither_repeated_nor_logged(case: str, caplog: pytest.LogCaptureFixture) -> None:
    expected, data = NONSENSE[case]

    async def test() -> None:
        async with serving(HttpLimits(head_s=LONG_S, body_s=LONG_S)) as port:
            status, text = await answer(await sent(port, data))
            assert status == expected
            assert SECRET not in text

    with caplog.at_level(logging.DEBUG):
        run(test)
    assert [record for record in caplog.records if record.name != "asyncio"] == []


def test_a_body_of_nonsense_that_comes_after_its_headers_is_named_too(caplog: pytest.LogCaptureFixture) -> None:
    expected, data = NONSENSE["no gzip"]
    head, _, body = data.partition(b"\r\n\r\n")

    async def test() -> None:
        async with serving(HttpLimits(head_s=LONG_S, body_s=LONG_S)) as port:
            client = await sent(port, head + b"\r\nExpect: 100-continue\r\n\r\n")
            assert b"100 Continue" in await client[0].readuntil(b"\r\n\r\n")
            client[1].write(body)
            status, text = await answer(client)
            assert status == expected
            assert SECRET not in text

    with caplog.at_level(logging.DEBUG):
        run(test)
    assert [record for record in caplog.records if record.name != "asyncio"] == []


def test_a_fault_of_a_handler_is_logged_by_its_place_without_what_was_sent(caplog: pytest.LogCaptureFixture) -> None:
    async def faulty(request: web.Request) -> web.Response:
        raise KeyError(request.query["a"])

    async def test() -> None:
        async with serving(HttpLimits(), ("/faulty", faulty)) as port:
            status, text = await answer(await sent(port, b"GET /faulty?a=" + SECRET + b" HTTP/1.1\r\nHost: x\r\n\r\n"))
            assert status == 500
            assert SECRET not in text

    run(test)
    (record,) = [record for record in caplog.records if record.name == "raycheck.http"]
    assert "KeyError" in record.getMessage()
    assert "in faulty" in record.getMessage()
    assert SECRET.decode() not in record.getMessage()


def test_a_client_that_goes_away_amid_its_body_leaves_no_trace_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    async def test() -> None:
        before = open_files()
        async with serving(HttpLimits(head_s=LONG_S, body_s=LONG_S)) as port:
            served = open_files()
            client = await sent(port, b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\nabc")
            await until(lambda: open_files() == served + 2)
            client[1].close()
            await until(lambda: open_files() == served)
        assert open_files() == before

    run(test)
    assert [record.getMessage() for record in caplog.records if record.name != "asyncio"] == []
