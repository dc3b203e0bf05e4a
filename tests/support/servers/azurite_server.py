"""Azurite, Microsoft's emulator of Azure Blob Storage, as a child process on 127.0.0.1. Needs node; fetched on first use.

It lies in `.node` at the repository's root, which git ignores. Its objects live in its memory.
"""

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.support.servers.ports import START_TIMEOUT_S, free_port, wait_until_up

FOLDER = Path(__file__).parents[3] / ".node"
PROGRAM = FOLDER / "node_modules/.bin/azurite-blob"
CONTAINER = "raycheck"
ACCOUNT = "devstoreaccount1"
# The one account that every Azurite has; documented, and no secret.
KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
INSTALL_TIMEOUT_S = 240.0


@contextmanager
def azurite() -> Iterator[str]:
    """A running server with one empty container; yields its connection string."""
    install()
    port = free_port()
    serve = [PROGRAM, "--blobHost", "127.0.0.1", "--blobPort", str(port), "--inMemoryPersistence", "--silent"]
    serve += ["--skipApiVersionCheck", "--disableTelemetry"]
    # The pipe closes when the parent dies, however it dies, and takes the server along.
    command = ["sh", "-c", '"$@" </dev/null & cat >/dev/null; kill -9 $!', "sh", *serve]
    connection = (
        f"DefaultEndpointsProtocol=http;AccountName={ACCOUNT};AccountKey={KEY};"
        f"BlobEndpoint=http://127.0.0.1:{port}/{ACCOUNT};"
    )
    with (
        tempfile.TemporaryDirectory() as folder,
        subprocess.Popen(command, stdin=subprocess.PIPE, cwd=folder) as server,
    ):
        try:
            wait_until_up(server, port, what="Azurite")
            create_container(connection, CONTAINER)
            yield connection
        finally:
            server.stdin.close()
            server.wait(START_TIMEOUT_S)


def install() -> None:
    if not PROGRAM.exists():
        npm = shutil.which("npm")
        assert npm, "the tests of az:// need node and npm"
        FOLDER.mkdir(exist_ok=True)
        command = [npm, "install", "--no-audit", "--no-fund", "--prefix", FOLDER, "azurite@3"]
        subprocess.run(command, check=True, timeout=INSTALL_TIMEOUT_S, env=os.environ, capture_output=True)


def create_container(connection: str, name: str) -> None:
    from azure.storage.blob import BlobServiceClient

    with BlobServiceClient.from_connection_string(connection) as service:
        service.create_container(name)
