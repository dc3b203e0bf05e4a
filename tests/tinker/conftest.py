"""Fixtures: a tiny base model, a server in this process, and clients of the real SDK."""

import gc
import os
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from uuid import uuid4

import pytest

os.environ["TINKER_TELEMETRY"] = "0"  # read when the SDK is imported

import tinker

from tests.support.servers.tinker_server import RunningServer, tinker_server, write_base_model

KEY = "tml-for-tests-only"
HERE = Path(__file__).parent
LEAKS = (
    "ignore::ResourceWarning",
    "ignore::pytest.PytestUnraisableExceptionWarning",
    "ignore:DEPRECATED:FutureWarning",
)
"""The SDK leaves the connection of its first call to the garbage collector, and deprecates what its users still call."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.is_relative_to(HERE):
            for leak in LEAKS:
                item.add_marker(pytest.mark.filterwarnings(leak))


@pytest.fixture(scope="session")
def base(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_base_model(tmp_path_factory.mktemp("base") / "llama")


@pytest.fixture(scope="module")
def server(base: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """One server for all tests of a file: each test creates models of its own."""
    state: Path = tmp_path_factory.mktemp("state") / "server.sqlite"
    with tinker_server(base, f"memory://{uuid4().hex}", state) as running:
        yield running


@pytest.fixture
def connect() -> Iterator[Callable[[RunningServer], tinker.ServiceClient]]:
    """Makes clients, and closes them after the test."""
    clients = []

    def make(server: RunningServer, key: str = KEY) -> tinker.ServiceClient:
        clients.append(tinker.ServiceClient(base_url=server.url, api_key=key))
        return clients[-1]

    yield make
    for client in clients:
        if client._session_holder is not None:
            client._session_holder.close()


def collect() -> None:
    """Collects what the SDK has leaked: here, and not in whatever test comes later."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        gc.collect()


@pytest.fixture(autouse=True, scope="module")
def leaks_of_file() -> Iterator[None]:
    """Each test of this folder ignores what another leaked: a collection after each would be half of all their work."""
    yield
    collect()


@pytest.fixture(autouse=True, scope="session")
def leaks_of_session() -> Iterator[None]:
    yield
    collect()
