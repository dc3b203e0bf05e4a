"""A server that takes what alerts post, and answers as it is told."""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from tests.support.servers.ports import free_port

SECRET = "T0PSECRET"


class Webhook:
    """The posts so far, in order. answers: the status of the next answers; 200 once there are no more."""

    def __init__(self, port: int) -> None:
        self.url = f"http://127.0.0.1:{port}/services/{SECRET}"
        self.posts: list[object] = []
        self.answers: list[int] = []

    @property
    def texts(self) -> list[str]:
        assert all(post.keys() == {"text"} for post in self.posts), "as Slack takes it"
        return [post["text"] for post in self.posts]


@contextmanager
def webhook_server() -> Iterator[Webhook]:
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            assert self.path == f"/services/{SECRET}"
            assert self.headers["Content-Type"] == "application/json"
            hook.posts.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(hook.answers.pop(0) if hook.answers else 200)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", free_port()), Handler)
    hook = Webhook(server.server_port)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield hook
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
