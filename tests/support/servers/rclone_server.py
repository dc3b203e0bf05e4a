"""rclone's S3 server, on a folder: a real server that ignores the conditions of a write."""

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.support.servers.ports import free_port, wait_until_up

BUCKET = "bucket"


@contextmanager
def rclone_server() -> Iterator[str]:
    """A running server with one empty bucket, which takes this process's keys; yields the bucket's URI."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / BUCKET).mkdir()
        port = free_port()
        keys = os.environ["AWS_ACCESS_KEY_ID"], os.environ["AWS_SECRET_ACCESS_KEY"]
        command = [Path(sys.executable).with_name("rclone"), "serve", "s3", "--addr", f"127.0.0.1:{port}"]
        server = subprocess.Popen([*command, "--auth-key", ",".join(keys), folder], stderr=subprocess.DEVNULL)
        try:
            wait_until_up(server, port, what="rclone")
            yield f"s3://{BUCKET}?endpoint_override=127.0.0.1:{port}&scheme=http&region=us-east-1"
        finally:
            server.kill()
            server.wait()
