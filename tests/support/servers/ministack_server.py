"""ministack, a second and independent S3 server: what only moto accepts is not S3.

It pins botocore, so it lives in a virtual environment of its own beside the repository's, made when it is not there.
"""

import os
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.support.processes.virtual_environments import prepare_venv
from tests.support.servers.ports import free_port

VERSION = "1.5.33"
FOLDER = Path(__file__).parents[3] / ".venv-ministack"
BUCKET = "raycheck"
START_TIMEOUT_S = 60.0


@contextmanager
def ministack_server() -> Iterator[str]:
    """A running server with one empty bucket; yields its URI."""
    prepare()
    os.environ.update(AWS_ACCESS_KEY_ID="demo", AWS_SECRET_ACCESS_KEY="demo", AWS_EC2_METADATA_DISABLED="true")
    port = free_port()
    settings = {"BIND_HOST": "127.0.0.1", "MINISTACK_HOST": "127.0.0.1", "GATEWAY_PORT": str(port), "SERVICES": "s3"}
    with (
        tempfile.TemporaryFile() as log,
        subprocess.Popen([FOLDER / "bin/ministack"], env=os.environ | settings, stdout=log, stderr=log) as server,
    ):
        try:
            wait_until_up(server, log, f"http://127.0.0.1:{port}/{BUCKET}")
            yield f"s3://{BUCKET}?endpoint_override=127.0.0.1:{port}&scheme=http&region=us-east-1"
        finally:
            server.kill()


def prepare() -> None:
    prepare_venv(FOLDER, f"ministack-{VERSION}", f"ministack=={VERSION}")


def wait_until_up(server: subprocess.Popen, log, bucket_url: str) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline:
        if server.poll() is not None:
            break
        try:
            request = urllib.request.Request(bucket_url, method="PUT")
            with urllib.request.urlopen(request, timeout=5):
                return
        except (urllib.error.URLError, ConnectionError, TimeoutError):
            time.sleep(0.1)
    log.seek(0)
    raise RuntimeError(f"ministack did not start: {log.read().decode(errors='replace')[-2000:]}")


if __name__ == "__main__":
    prepare()
