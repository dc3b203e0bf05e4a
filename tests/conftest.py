"""Fixtures that all tests share: real stores, and a limit on how long a test may take."""

import faulthandler
import sys
from collections.abc import Iterator
from uuid import uuid4

import pytest

from raycheck.bucket.store import Store, open_store
from raycheck.bucket.store.uri import join_uri
from raycheck.demo.server import s3_server


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--all", action="store_true", help="also the long profiles")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Without --all the tests marked slow are deselected, which pytest counts in its summary; none is skipped."""
    if config.getoption("--all"):
        return
    slow = [item for item in items if "slow" in item.keywords]
    config.hook.pytest_deselected(items=slow)
    items[:] = [item for item in items if "slow" not in item.keywords]


@pytest.fixture(autouse=True)
def deadline(request: pytest.FixtureRequest) -> Iterator[None]:
    """No test waits for ever: after its limit all threads' stacks are printed and the process ends."""
    limit = 300 if "ray" in request.keywords else 120
    faulthandler.dump_traceback_later(limit, exit=True, file=sys.__stderr__)
    yield
    faulthandler.cancel_dump_traceback_later()


@pytest.fixture(scope="session")
def s3() -> Iterator[str]:
    """URI of a bucket on a real S3 server over HTTP, for the whole session."""
    with s3_server() as uri:
        yield uri


@pytest.fixture(params=["memory", "file", "s3"])
def uri(request: pytest.FixtureRequest, tmp_path) -> str:
    """The root of a run that does not exist yet, on each store."""
    if request.param == "memory":
        return f"memory://{uuid4().hex}"
    if request.param == "file":
        return f"file://{tmp_path}/run"
    return join_uri(request.getfixturevalue("s3"), uuid4().hex)


@pytest.fixture
def store(uri: str) -> Store:
    return open_store(uri)
