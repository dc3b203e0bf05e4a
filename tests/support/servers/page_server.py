"""`raycheck page` as a process of its own, and proxies before it."""

import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from tests.support.servers.ports import free_port

TOKEN = "a-token-of-this-test"
END_TO_END = {"accept", "cookie", "content-type", "content-length", "origin", "x-raycheck-act", "user-agent"}
HOP_BY_HOP = {"connection", "transfer-encoding", "server", "date", "content-length"}


@contextmanager
def page_server(prefix: str, *options: str) -> Iterator[str]:
    """A page over the runs below `prefix`; yields its address without the token, ending in "/"."""
    command = [sys.executable, "-m", "raycheck", "page", prefix, "--port", "0", "--token", TOKEN, *options]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            line = server.stdout.readline()
            found = re.search(r"http://127\.0\.0\.1:\d+/", line)
            assert found, line
            yield found[0]
        finally:
            server.terminate()


@contextmanager
def below_a_path(address: str, path: str) -> Iterator[str]:
    """A proxy that serves `address` below `path` ("/user/ann/proxy/8766/"), as Jupyter's does: the path is cut off, and
    answers are handed on as they are. Yields where the page is then."""
    upstream = address.removeprefix("http://").rstrip("/")

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if not self.path.startswith(path):
                self.send_error(404)
                return
            link = HTTPConnection(upstream, timeout=60)
            length = int(self.headers.get("Content-Length") or 0)
            headers = {name: value for name, value in self.headers.items() if name.lower() in END_TO_END}
            headers["Host"] = self.headers["Host"]
            link.request(self.command, f"/{self.path.removeprefix(path)}", self.rfile.read(length) or None, headers)
            answer = link.getresponse()
            body = answer.read()
            self.send_response(answer.status)
            for name, value in answer.getheaders():
                if name.lower() not in HOP_BY_HOP:
                    self.send_header(name, value)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)
            link.close()

        def do_POST(self) -> None:
            self.do_GET()

        def log_message(self, *_: object) -> None:
            pass

    with serving(Handler) as place:
        yield f"{place}{path}"


@contextmanager
def site_with(html: str) -> Iterator[str]:
    """Another site with one page; yields its address by a host name that is not the page's."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = html.encode()
            self.send_response(200)
            self.send_header("Content-Type", "text/html")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    with serving(Handler) as place:
        yield place.replace("127.0.0.1", "localhost") + "/"


@contextmanager
def serving(handler: type[BaseHTTPRequestHandler]) -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", free_port()), handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join(10)
