"""Serves metadata on 127.0.0.1 as the clouds document it; raycheck/on_ray/watch_node/cloud_notices.py names the pages."""

import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from tests.support.servers.ports import free_port

WAIT_S = 60.0


@dataclass
class Asked:
    method: str
    path: str
    headers: Mapping[str, str]


Reply = tuple[int, str, dict[str, str]]


@dataclass
class Service:
    """Remembers what it was asked. trouble: answers the next requests instead, one each; None passes the request on."""

    requests: list[Asked] = field(default_factory=list)
    trouble: list[Callable[[], Reply] | None] = field(default_factory=list)

    def reply(self, asked: Asked) -> Reply:
        self.requests.append(asked)
        trouble = self.trouble.pop(0) if self.trouble else None
        return trouble() if trouble else self.answer(asked)

    def answer(self, asked: Asked) -> Reply:
        return 404, "", {}

    def paths(self) -> list[str]:
        return [f"{asked.method} {asked.path}" for asked in self.requests]

    def wait_for(self, count: int) -> None:
        """Wait until this many requests have come."""
        end = time.monotonic() + WAIT_S
        while len(self.requests) < count:
            assert time.monotonic() < end, f"{self.paths()} is all that came in {WAIT_S:.0f} s"
            time.sleep(0.02)


@dataclass
class Ec2Service(Service):
    """Answers as EC2 does with IMDSv2 only: 401 without a token that it gave out."""

    items: dict[str, str] = field(default_factory=dict)
    tokens: list[str] = field(default_factory=list)

    def answer(self, asked: Asked) -> Reply:
        if asked.path == "/latest/api/token":
            ttl = asked.headers.get("X-aws-ec2-metadata-token-ttl-seconds", "")
            if asked.method != "PUT" or not ttl.isdecimal() or not 1 <= int(ttl) <= 21600:
                return 400, "Bad Request", {}
            self.tokens.append(f"token-{len(self.requests)}==")
            return 200, self.tokens[-1], {"X-aws-ec2-metadata-token-ttl-seconds": ttl}
        if asked.headers.get("X-aws-ec2-metadata-token") not in self.tokens:
            return 401, "Unauthorized", {}
        item = self.items.get(asked.path.removeprefix("/latest/meta-data/"))
        return (404, "<html>404 - Not Found</html>", {}) if item is None else (200, item, {})

    def interrupt(self, at: float, action: str = "terminate") -> None:
        text = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(at))
        self.items["spot/instance-action"] = json.dumps({"action": action, "time": text})


@dataclass
class GceService(Service):
    """Answers as Google does: refuses requests without its header, and puts that header into every answer."""

    items: dict[str, str] = field(default_factory=lambda: {"preempted": "FALSE", "maintenance-event": "NONE"})

    def answer(self, asked: Asked) -> Reply:
        own = {"Metadata-Flavor": "Google", "Server": "Metadata Server for VM"}
        if asked.headers.get("Metadata-Flavor") != "Google":
            return 403, "Your client does not have permission", own
        item = self.items.get(asked.path.removeprefix("/computeMetadata/v1/instance/"))
        return (404, "", own) if item is None else (200, item, own)


@dataclass
class AzureService(Service):
    """Answers as Azure does for one VM of a scale set, which also gets the events of the others."""

    name: str = "WestNO_0"
    events: list[dict[str, object]] = field(default_factory=list)

    def answer(self, asked: Asked) -> Reply:
        if asked.headers.get("Metadata") != "true":
            return 400, "Bad request. Required metadata header not specified", {}
        if asked.path == "/metadata/instance/compute/name?api-version=2021-02-01&format=text":
            return 200, self.name, {}
        if asked.path == "/metadata/scheduledevents?api-version=2020-07-01":
            return 200, json.dumps({"DocumentIncarnation": len(self.events), "Events": self.events}), {}
        return 400, json.dumps({"error": "Bad request. api-version is invalid or was not specified"}), {}

    def schedule(
        self, kind: str, at: str, *, names: tuple[str, ...] = ("WestNO_0",), status: str = "Scheduled"
    ) -> None:
        event = {"EventId": f"id-{kind}", "EventType": kind, "ResourceType": "VirtualMachine", "Resources": list(names)}
        self.events = [event | {"EventStatus": status, "NotBefore": at, "EventSource": "Platform"}]


@contextmanager
def serving(service: Service) -> Iterator[str]:
    """Yields the service's endpoint."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            status, text, headers = service.reply(Asked(self.command, self.path, self.headers))
            self.send_response_only(status)
            for name, value in {"Content-Length": str(len(text.encode())), **headers}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(text.encode())

        def do_PUT(self) -> None:
            self.do_GET()

        def log_message(self, *args: object) -> None:
            pass

    class Server(ThreadingHTTPServer):
        def handle_error(self, *args: object) -> None:
            """Print nothing for a client that gave up and closed its end."""

    with Server(("127.0.0.1", free_port()), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join(WAIT_S)
