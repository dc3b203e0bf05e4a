"""Serves an aiohttp application so that no client can hold a connection forever, exhaust the server, or write to its
log.

aiohttp waits without limit for the end of a started request, and for a client that does not read its response. It
accepts every connection until the process has no descriptor left. And for each request that is not HTTP it logs a
traceback with the text that the client sent. The page and the Tinker server therefore both use `listen`. Time limits
count from an event, not from a byte: a client that sends one byte a second gets no more time than a silent one.
"""

import asyncio
import errno
import logging
import socket
import traceback
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import Any, cast

from aiohttp import StreamReader, web
from aiohttp.http_exceptions import HttpProcessingError, LineTooLong
from aiohttp.typedefs import Handler, Middleware

from raycheck.errors import ConfigError

logger = logging.getLogger("raycheck.http")
MAX_LINE_BYTES = 8190
"""The maximum length of the request line, and of a header."""
REFUSAL_S = 5.0
"""How long a refused client may take to read its response."""


@dataclass(frozen=True, kw_only=True, slots=True)
class HttpLimits:
    """The limits for one client.

    head_s: the time from the connection, or from the last response, to the end of the next request's headers; also how
        long a client may stop reading a response.
    body_s: the time from the headers to the end of the body.
    connections: how many may be open; any further client gets a 503 immediately.
    """

    head_s: float = 20.0
    body_s: float = 60.0
    connections: int = 256


@contextmanager
def bound(host: str, port: int) -> Iterator[list[socket.socket]]:
    """Bind a port at every address of `host` while the context is open, for a server that is still starting.

    Until `listen` is called, clients are refused and can try again. port: 0 takes a free one. Raises ConfigError for an
    address that cannot be bound, such as one at which another program listens.
    """
    sockets: list[socket.socket] = []
    absent: list[OSError] = []
    try:
        try:
            found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
            for family, kind, protocol, _, address in dict.fromkeys(found):
                try:
                    sockets.append(_bound_socket(family, kind, protocol, address))
                except OSError as error:
                    if error.errno not in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT):
                        raise
                    absent.append(error)  # such as ::1 of localhost, on a machine without IPv6
            if not sockets:
                raise absent[0]
        except OSError as error:
            raise _unusable(host, port, error) from None
        yield sockets
    finally:
        for one in sockets:
            one.close()


def _bound_socket(family: int, kind: int, protocol: int, address: tuple[Any, ...]) -> socket.socket:
    one = socket.socket(family, kind, protocol)
    try:
        one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # also soon after an earlier server has ended
        if family == socket.AF_INET6:
            one.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        one.bind(address)
    except BaseException:
        one.close()
        raise
    return one


def _unusable(host: str, port: int, error: OSError) -> ConfigError:
    cure = "; stop the program that listens there, or choose another port" if error.errno == errno.EADDRINUSE else ""
    return ConfigError(f"host={host} port={port}: {error.strerror or error}{cure}")


@asynccontextmanager
async def listen(
    app: web.Application, sockets: Sequence[socket.socket], *, limits: HttpLimits, auto_decompress: bool = True
) -> AsyncIterator[str]:
    """Serve `app` at sockets from `bound` while the context is open. Yield its address: "http://127.0.0.1:8080".

    auto_decompress: as for aiohttp. Bodies are read, up to the application's client_max_size, after its middlewares and
    before its handlers. Raises ConfigError if another program has begun to listen there.
    """
    app.middlewares.insert(0, _between_requests)
    app.middlewares.append(_body_within(limits.body_s))
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    server = cast("web.Server", runner.server)
    opened: set[_Connection] = set()
    listeners: list[asyncio.Server] = []
    try:
        for one in sockets:
            host, number = one.getsockname()[:2]
            try:
                listener = await asyncio.get_running_loop().create_server(
                    lambda: _Connection(server, limits, opened, auto_decompress=auto_decompress), sock=one
                )
            except OSError as error:
                raise _unusable(host, number, error) from None
            listeners.append(listener)
        host, number = sockets[0].getsockname()[:2]
        yield f"http://{f'[{host}]' if ':' in host else host}:{number}"
    finally:
        for listener in listeners:
            listener.close()
        await runner.cleanup()
        for connection in opened:  # connections that aiohttp does not know about
            connection.abort()


class _Connection(web.RequestHandler):
    """aiohttp's protocol for one connection, with one timer for the client's next action."""

    def __init__(
        self, server: web.Server, limits: HttpLimits, opened: "set[_Connection]", *, auto_decompress: bool
    ) -> None:
        super().__init__(
            server,
            loop=asyncio.get_running_loop(),
            access_log=_NO_LOG,
            logger=logger,
            max_line_size=MAX_LINE_BYTES,
            max_field_size=MAX_LINE_BYTES,
            auto_decompress=auto_decompress,
        )
        self._limits = limits
        self._opened = opened
        self._wire: asyncio.Transport
        self._timer: asyncio.TimerHandle | None = None
        self._is_refused = False
        self._is_last = False  # no further request is read from this connection
        self._is_answering = False
        self._line_bytes = 0  # bytes received of the next request's first line
        self._has_line = False
        self._body: StreamReader | None = None  # of the newest request
        self._unread_bytes = 0  # of responses, when the timer was last checked

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Accept the client or refuse it. Far beyond the limit, refuse it without a response."""
        self._wire = cast("asyncio.Transport", transport)
        others = len(self._opened)
        self._opened.add(self)
        self._is_refused = others >= self._limits.connections
        if others >= 2 * self._limits.connections:
            self._wire.abort()
        elif self._is_refused:
            self._wire.write(_plain_answer(503, f"{self._limits.connections} connections are open; try again later"))
            self._wire.write_eof()
            self._wait(REFUSAL_S)
        else:
            super().connection_made(transport)
            self._wait(self._limits.head_s)

    def connection_lost(self, exc: BaseException | None) -> None:
        self._opened.discard(self)
        self._stop_waiting()
        if not self._is_refused:
            super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._is_refused:
            return
        if not self._has_line and (self._body is None or self._body.is_eof()):
            line, end, _ = data.partition(b"\n")
            self._line_bytes += len(line)
            self._has_line = bool(end)
        super().data_received(data)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._wait(self._limits.head_s)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._is_answering:
            self._stop_waiting()
        else:
            self._wait(self._limits.head_s)

    def abort(self) -> None:
        """Close the connection at once."""
        self._wire.abort()

    def begin_answer(self, body: StreamReader) -> None:
        """Note that a request's headers have arrived: now the client waits for the server."""
        self._stop_waiting()
        self._is_answering, self._body = True, body
        self._line_bytes, self._has_line = 0, False

    def end_answer(self, *, is_last: bool) -> None:
        """Note that a response is sent: now the server waits for the client. is_last: no other request follows."""
        self._is_answering, self._is_last = False, is_last
        self._wait(self._limits.head_s)

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,  # noqa: ARG002  aiohttp's text, which repeats what was sent
    ) -> web.StreamResponse:
        """Return the response to an invalid request or an internal error; neither repeats what the client sent."""
        self._is_last = True
        text = "internal error, see the server's log"
        if isinstance(exc, LineTooLong):
            is_address = self._line_bytes > MAX_LINE_BYTES
            status = 414 if is_address else 431
            text = f"the {'address' if is_address else 'header'} has more than {MAX_LINE_BYTES} bytes"
        elif isinstance(exc, HttpProcessingError):
            status, text = 400, "this is not an HTTP request that the server can read"
        elif exc is not None:
            self.log_exception("a request failed", exc_info=exc)
        if request.writer.output_size > 0:
            raise ConnectionError("part of the answer is sent")  # as aiohttp does: the connection is closed
        response = web.Response(status=status, text=f"{text}\n")
        response.force_close()
        return response

    def log_exception(self, *args: object, **kw: object) -> None:
        """Log where the server failed, without the error's text, which may repeat what a client sent."""
        error = kw.get("exc_info")
        if isinstance(error, (HttpProcessingError, web.RequestPayloadError, web.HTTPException, ConnectionError)):
            return  # the client's fault, or it has gone
        if isinstance(error, BaseException):
            where = "".join(traceback.format_tb(error.__traceback__))
            self.logger.error("%s: %s\n%s", args[0], type(error).__name__, where)
        else:
            self.logger.error("%s", args[0])

    def _wait(self, seconds: float) -> None:
        """Give the client this long for its next action."""
        self._stop_waiting()
        if self not in self._opened:
            return
        self._unread_bytes = self._wire.get_write_buffer_size()
        self._timer = asyncio.get_running_loop().call_later(seconds, self._end_waiting)

    def _stop_waiting(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _end_waiting(self) -> None:
        unread = self._wire.get_write_buffer_size()
        if 0 < unread < self._unread_bytes:
            self._wait(self._limits.head_s)  # the client is reading
        elif unread:
            self._wire.abort()
        else:
            if not (self._is_refused or self._is_last or self._is_answering) and self._line_bytes + self._has_line:
                self._wire.write(_plain_answer(408, f"no complete request arrived within {self._limits.head_s:g} s"))
            self._wire.close()


_NO_LOG = logging.getLogger("raycheck.http.access")
_NO_LOG.disabled = True


def _plain_answer(status: int, text: str) -> bytes:
    """Return a response to a client whose request was not read."""
    reason = {408: "Request Timeout", 503: "Service Unavailable"}[status]
    head = f"HTTP/1.1 {status} {reason}\r\nContent-Type: text/plain\r\nContent-Length: {len(text) + 1}"
    return f"{head}\r\nRetry-After: 10\r\nConnection: close\r\n\r\n{text}\n".encode()


@web.middleware
async def _between_requests(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Stop the connection's timer while the server handles a request."""
    connection = request.protocol
    if not isinstance(connection, _Connection):
        return await handler(request)
    connection.begin_answer(request.content)
    try:
        return await handler(request)
    finally:
        connection.end_answer(is_last=not request.content.is_eof())


def _body_within(seconds: float) -> Middleware:
    """Return the middleware that reads the body before the handler does."""

    @web.middleware
    async def whole_body(request: web.Request, handler: Handler) -> web.StreamResponse:
        try:
            async with asyncio.timeout(seconds):
                await request.read()
        except TimeoutError:
            raise web.HTTPRequestTimeout(text=f"no complete body arrived within {seconds:g} s\n") from None
        except (web.RequestPayloadError, HttpProcessingError, ConnectionError):
            raise web.HTTPBadRequest(text="the body cannot be read\n") from None
        return await handler(request)

    return whole_body
