"""A proxy before a real S3 server that makes faults happen at an exact request, so that kills need no luck and no mock.

Rules match a request by method and key. `hold` stops a request before it reaches the server until it is released and
tells the test that it got there; `reset` breaks the connection before the server sees the request; `lose_answer`
lets the server apply it and breaks the connection instead of answering, `short_answer` in the middle of the answer;
`cut` breaks it in the middle of the body, `flip` changes the body's last byte but `back`;
`check_first` checks the condition of a write, and writes once another such request has checked it too, or after
`delay_s`: a gateway that is not atomic;
`delay` lets it through late; `throttle` makes all transfers slow; `deny` and `busy` answer 403 and 503 as S3 does, `answer` what the rule says, `edit` what
the rule makes of the server's body. It also keeps every request's head, so that a test can assert what was really sent.
"""

import asyncio
import math
import random
import re
import socket
import ssl
import struct
import threading
import time
import urllib.error
import urllib.request
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, Literal
from urllib.parse import parse_qs, urlsplit

from tests.support.servers.ports import free_port

Kind = Literal[
    "hold",
    "reset",
    "cut",
    "lose_answer",
    "short_answer",
    "delay",
    "deny",
    "busy",
    "answer",
    "edit",
    "flip",
    "check_first",
]


@dataclass(frozen=True)
class Answer:
    """status: with its reason, as in the status line. header: one more of them, name and value."""

    status: str
    body: str = ""
    header: tuple[str, str] = ("Content-Type", "application/xml")


def of_s3(status: str, code: str) -> Answer:
    return Answer(status, f"<?xml version='1.0'?><Error><Code>{code}</Code><Message>{code}</Message></Error>")


_ANSWERS = {"deny": of_s3("403 Forbidden", "AccessDenied"), "busy": of_s3("503 Slow Down", "SlowDown")}


@dataclass(frozen=True)
class Head:
    """One request as it arrived; header names in lower case."""

    method: str
    target: str  # path and query, also where a client took the server for its HTTP proxy
    headers: dict[str, str]
    at: float  # seconds since the epoch

    @property
    def key_id(self) -> str:
        """The access key that signed it; empty for an anonymous request."""
        found = re.search(r"Credential=([^/]*)/", self.headers.get("authorization", ""))
        return found[1] if found else ""

    @property
    def first_byte(self) -> int:
        """Where the range begins that it asks for."""
        return int(re.findall(r"\d+", self.headers.get("range", "0"))[0])

    @property
    def region(self) -> str:
        return self.headers["authorization"].partition("Credential=")[2].split("/")[2]


@dataclass
class Rule:
    """What happens to the next `times` requests of `method` whose path matches the regular expression `key`.

    from_byte: only to those of a range that begins there or later.
    """

    kind: Kind
    method: str
    key: str
    times: int = 1
    from_byte: int = 0
    delay_s: float = 0.0
    back: int = 0
    answer: Answer | None = None
    edit: Callable[[Head, bytes], bytes] | None = None
    reached: threading.Event = field(default_factory=threading.Event)
    released: threading.Event = field(default_factory=threading.Event)
    seen: list[str] = field(default_factory=list)

    def wait(self, timeout_s: float = 150.0) -> str:
        """Until a request has met the rule; returns its path."""
        assert self.reached.wait(timeout_s), f"no {self.method} of {self.key} came within {timeout_s:.0f} s"
        return self.seen[0]

    def release(self) -> None:
        self.released.set()


class _Line:
    """Carries bytes of all connections in one direction, one after the other."""

    def __init__(self) -> None:
        self.bytes_per_s = math.inf
        self._free_at = 0.0

    async def carry(self, size_bytes: int) -> None:
        now = time.monotonic()
        self._free_at = max(self._free_at, now) + size_bytes / self.bytes_per_s
        if self._free_at > now:
            await asyncio.sleep(self._free_at - now)


class FaultProxy:
    """`uri` is the store behind it, through the proxy; `requests` is every request line it saw, `heads` more of it, and
    `answered_bytes` what the store answered, with the heads of the answers.

    With `tls` it speaks HTTPS. A host name that begins with a bucket's is taken for that bucket, so that both ways of
    addressing, and clients that take it for their HTTP proxy, end at the store.
    """

    def __init__(self, upstream_uri: str, tls: ssl.SSLContext | None = None) -> None:
        query = parse_qs(urlsplit(upstream_uri).query)
        self._upstream = query["endpoint_override"][0].split(":")
        self._base = upstream_uri
        self._bucket = urlsplit(upstream_uri).netloc
        self._tls = tls
        self.requests: list[str] = []
        self.heads: list[Head] = []
        self.answered_bytes = 0
        self._rules: list[Rule] = []
        self._chaos: Callable[[], Kind | None] = lambda: None
        self._up, self._down = _Line(), _Line()
        self._tasks: set[asyncio.Task[None]] = set()
        self._connections: weakref.WeakSet[asyncio.BaseTransport] = weakref.WeakSet()
        self._checked: dict[str, list[asyncio.Event]] = {}
        self.port = free_port()
        self._started = threading.Event()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="fault-proxy", daemon=True)

    @property
    def uri(self) -> str:
        return self._base.replace(":".join(self._upstream), f"127.0.0.1:{self.port}")

    @property
    def under_way(self) -> int:
        """How many requests have no whole answer yet, those that are held among them."""
        return len(self._tasks)

    def rule(self, kind: Kind, method: str, key: str, **more: Any) -> Rule:
        """`method` is a regular expression too. more: times, from_byte, delay_s, back, answer, edit."""
        rule = Rule(kind=kind, method=method, key=key, **more)
        self._rules.append(rule)
        return rule

    def chaos(self, share: float, *, seed: int) -> None:
        """From now on that share of all requests fails, each in one of all ways."""
        chance = random.Random(seed)
        kinds: list[Kind] = ["reset", "cut", "lose_answer", "short_answer", "busy"]
        self._chaos = lambda: chance.choice(kinds) if chance.random() < share else None

    def throttle(self, bytes_per_s: float) -> None:
        """From now on all requests together take so many bytes per second at most, and all answers as many."""
        self._up.bytes_per_s = self._down.bytes_per_s = bytes_per_s

    def start(self) -> None:
        self._thread.start()
        assert self._started.wait(60.0)

    def stop(self) -> None:
        for rule in self._rules:
            rule.release()
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(10.0)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_until_complete(self._serve())
        self._loop.run_until_complete(self._loop.shutdown_default_executor())
        self._loop.close()

    async def _serve(self) -> None:
        self._stop = asyncio.Event()
        server = await asyncio.start_server(self._accept, "127.0.0.1", self.port, limit=1 << 20, ssl=self._tls)
        self._started.set()
        await self._stop.wait()
        server.close()
        while others := asyncio.all_tasks() - {asyncio.current_task()}:
            for task in self._tasks:  # asyncio's own, which take in the last connections, end by themselves
                task.cancel()
            await asyncio.wait(others)
        for connection in self._connections:  # that of a task which was cancelled before it began, too
            connection.abort()
        await asyncio.sleep(0.05)  # closing transports take a turn of the loop to go

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._connections.add(writer.transport)
        task = self._loop.create_task(self._handle(reader, writer))
        self._tasks.add(task)  # asyncio itself holds a task by a weak reference only
        task.add_done_callback(self._tasks.discard)

    async def _handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await self._exchange(reader, writer)
            writer.close()
        except (ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
            writer.transport.abort()

    async def _exchange(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One request per connection: both sides are told to close, which keeps the proxy's state in one place."""
        head = await reader.readuntil(b"\r\n\r\n")
        line = head.split(b"\r\n", 1)[0].decode("latin1")
        method, path = line.split(" ")[:2]
        self.requests.append(f"{method} {path}")
        request = Head(method, re.sub("^http://[^/]*", "", path), _headers(head), time.time())
        self.heads.append(request)
        rule = self._match(request, path)
        if rule is not None:
            rule.seen.append(path)
            rule.reached.set()
            if rule.kind == "hold":
                await asyncio.to_thread(rule.released.wait, 120.0)
            elif rule.kind == "delay":
                await asyncio.sleep(rule.delay_s)
            elif rule.kind == "reset":
                _reset(writer)
                return
            elif rule.kind == "cut":
                await reader.readexactly(int(request.headers.get("content-length", 0)) // 2)
                _reset(writer)
                return
            elif rule.kind == "check_first" and {"if-match", "if-none-match"} & request.headers.keys():
                if not await asyncio.to_thread(self._holds, request):
                    await _refuse(reader, writer, request, of_s3("412 Precondition Failed", "PreconditionFailed"))
                    return
                await self._until_two_have_checked(request, rule.delay_s)
                head = re.sub(rb"(?im)^if-(none-)?match:[^\r]*\r\n", b"", head)
            elif answer := rule.answer or _ANSWERS.get(rule.kind):
                await _refuse(reader, writer, request, answer)
                return
        up_reader, up_writer = await asyncio.open_connection(self._upstream[0], int(self._upstream[1]))
        head = re.sub(rb"(?im)^connection:[^\r]*\r\n", b"", self._for_upstream(request, head))
        up_writer.write(head.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n", 1))
        size = int(request.headers.get("content-length", 0))
        flip = size - 1 - rule.back if rule is not None and rule.kind == "flip" else None
        sending = asyncio.ensure_future(_pump(reader, up_writer, flip, line=self._up))
        try:
            if rule is not None and rule.kind in ("lose_answer", "short_answer", "edit"):
                answer = b""
                while data := await up_reader.read(65536):
                    if data.startswith(b"HTTP/1.1 100"):  # else the client never sends the body
                        writer.write(data)
                        await writer.drain()
                    else:
                        answer += data
                if rule.kind == "short_answer":
                    writer.write(answer[: len(answer) // 2])
                    await writer.drain()
                if rule.kind == "edit":
                    writer.write(_edited(rule, request, answer))
                    await writer.drain()
                else:
                    _reset(writer)
            else:
                await _pump(up_reader, writer, told=self._count, line=self._down)
        finally:
            up_writer.transport.abort()
            sending.cancel()
            await asyncio.gather(sending, return_exceptions=True)

    def _holds(self, request: Head) -> bool:
        """Asks the server whether the condition of a write is true now."""
        # Signed for another request, so not for all servers; Azure also takes a token in the address.
        signed = {name: value for name, value in request.headers.items() if name == "authorization"}
        ask = urllib.request.Request(f"http://{':'.join(self._upstream)}{request.target}", None, signed, method="HEAD")
        try:
            with urllib.request.urlopen(ask, timeout=60.0) as answer:
                etag = answer.headers["ETag"]
        except urllib.error.HTTPError as error:
            error.close()
            etag = None
        if "if-none-match" in request.headers:
            return etag is None
        return etag is not None and request.headers["if-match"].strip('"') == etag.strip('"')

    async def _until_two_have_checked(self, request: Head, at_most_s: float) -> None:
        turn = f"{request.target} {request.headers.get('if-match')}"
        waiting = self._checked.setdefault(turn, [])
        waiting.append(asyncio.Event())
        if len(waiting) >= 2:
            for event in waiting:
                event.set()
        with suppress(TimeoutError):
            await asyncio.wait_for(waiting[-1].wait(), at_most_s)

    def _count(self, size_bytes: int) -> None:
        self.answered_bytes += size_bytes

    def _for_upstream(self, request: Head, head: bytes) -> bytes:
        """As an origin server that knows path style only wants it."""
        line, rest = head.split(b"\r\n", 1)
        method, target, version = line.split(b" ")
        target = re.sub(rb"^http://[^/]*", b"", target)
        if request.headers.get("host", "").startswith(f"{self._bucket}."):
            target = b"/" + self._bucket.encode() + target
            rest = re.sub(rb"(?im)^host:[^\r]*", b"Host: " + ":".join(self._upstream).encode(), rest)
        return b" ".join((method, target, version)) + b"\r\n" + rest

    def _match(self, request: Head, path: str) -> Rule | None:
        method = request.method
        for rule in self._rules:
            if request.first_byte < rule.from_byte:
                continue
            if rule.times > 0 and re.fullmatch(rule.method, method) and re.search(rule.key, path):
                rule.times -= 1
                return rule
        kind = self._chaos()
        return Rule(kind=kind, method=method, key=path) if kind else None


@contextmanager
def fault_proxy(upstream_uri: str, tls: ssl.SSLContext | None = None) -> Iterator[FaultProxy]:
    proxy = FaultProxy(upstream_uri, tls)
    proxy.start()
    try:
        yield proxy
    finally:
        proxy.stop()


def _edited(rule: Rule, request: Head, answer: bytes) -> bytes:
    head, _, body = answer.partition(b"\r\n\r\n")
    body = rule.edit(request, body)
    head = re.sub(rb"(?i)\r\ncontent-length:[^\r]*", b"", head)
    return head + f"\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body


async def _pump(
    reader: asyncio.StreamReader,
    writer: asyncio.StreamWriter,
    flip: int | None = None,
    told: Callable[[int], None] = lambda _: None,
    *,
    line: "_Line",
) -> None:
    """flip: the place of a byte that arrives as another. told: is told the length of each piece."""
    at = 0
    while data := await reader.read(65536):
        if flip is not None and at <= flip < at + len(data):
            data = data[: flip - at] + bytes([data[flip - at] ^ 1]) + data[flip - at + 1 :]
        at += len(data)
        told(len(data))
        await line.carry(len(data))
        writer.write(data)
        await writer.drain()


def _headers(head: bytes) -> dict[str, str]:
    lines = (line.partition(":") for line in head.decode("latin1").split("\r\n")[1:] if line)
    return {name.lower(): value.strip() for name, _, value in lines}


async def _refuse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, head: Head, answer: Answer) -> None:
    if head.headers.get("expect"):
        writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        await writer.drain()
    await reader.readexactly(int(head.headers.get("content-length", 0)))
    body = "" if head.method == "HEAD" else answer.body
    lines = (f"HTTP/1.1 {answer.status}", "Connection: close", ": ".join(answer.header), f"Content-Length: {len(body)}")
    writer.write("\r\n".join((*lines, "", body)).encode())
    await writer.drain()


def _reset(writer: asyncio.StreamWriter) -> None:
    """A real RST: what a client sees when a load balancer drops it."""
    writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()
