"""Starts the demo's bucket: moto's S3 server as a child process on 127.0.0.1, with its objects in memory."""

import os
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO

from raycheck.errors import ConfigError

BUCKET = "raycheck"
START_TIMEOUT_S = 60.0


@contextmanager
def s3_server() -> Iterator[str]:
    """Run a server with one empty bucket, and yield the bucket's URI. Sets dummy credentials in this process.

    Raises ConfigError when moto is not installed or does not start.
    """
    port = _free_port()
    # moto requires some credentials. Real ones must not be sent to it, and no profile must be looked up.
    os.environ.update(AWS_ACCESS_KEY_ID="demo", AWS_SECRET_ACCESS_KEY="demo", AWS_EC2_METADATA_DISABLED="true")  # noqa: S106
    command = [sys.executable, "-c", _SERVE, str(port)]
    address = f"127.0.0.1:{port}"
    with (
        tempfile.TemporaryFile() as log,
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=log, stderr=log) as server,  # noqa: S603
    ):
        try:
            _wait_until_up(server, log, f"http://{address}/{BUCKET}")
            yield f"s3://{BUCKET}?endpoint_override={address}&scheme=http&region=us-east-1"
        finally:
            server.kill()


# The pipe closes when the parent dies, for whatever reason, and that stops the server. moto checks a condition and then
# writes, so two concurrent requests may both find it true. Therefore conditional requests take turns. To find a host's
# service, moto looks through its whole package: once is enough. Objects above 5 MiB would lie in files.
_SERVE = """
import functools, io, os, sys, threading
os.environ["MOTO_S3_DEFAULT_KEY_BUFFER_SIZE"] = str(1 << 40)
threading.Thread(target=lambda: (sys.stdin.read(), os._exit(0)), daemon=True).start()
from moto.moto_server.werkzeug_app import DomainDispatcherApplication, MotoRequestHandler, create_backend_app
from werkzeug.serving import run_simple

moto, turn = DomainDispatcherApplication(create_backend_app), threading.Lock()
moto.get_backend_for_host = functools.cache(moto.get_backend_for_host)

def serve(environ, start_response):
    if environ["REQUEST_METHOD"] != "PUT" or not {"HTTP_IF_MATCH", "HTTP_IF_NONE_MATCH"} & environ.keys():
        return moto(environ, start_response)
    size = int(environ.get("CONTENT_LENGTH") or 0)
    environ["wsgi.input"] = io.BytesIO(environ["wsgi.input"].read(size))  # a slow sender must not hold the turn
    with turn:
        return moto(environ, start_response)

run_simple("127.0.0.1", int(sys.argv[1]), serve, threaded=True, request_handler=MotoRequestHandler)
"""


def _wait_until_up(server: "subprocess.Popen[bytes]", log: IO[bytes], bucket_url: str) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline:
        if server.poll() is not None:
            log.seek(0)
            text = log.read().decode(errors="replace").strip().splitlines()
            raise ConfigError(
                f"the embedded S3 server did not start: {text[-1] if text else 'no message'}. Install it (pip install "
                "'raycheck[demo]') or use --root"
            )
        try:
            request = urllib.request.Request(bucket_url, method="PUT")  # noqa: S310  our own loopback address
            with urllib.request.urlopen(request, timeout=5):  # noqa: S310
                return
        except (urllib.error.URLError, ConnectionError, TimeoutError):
            time.sleep(0.1)
    raise ConfigError(f"the embedded S3 server did not answer within {START_TIMEOUT_S:.0f} s; use --root instead")


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
