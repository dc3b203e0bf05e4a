"""The shared `store`, with one difference: all S3 tests of this folder use one s3fs client.

A botocore client costs 0.1 to 0.2 s of CPU, more than most tests here do with it. Roots differ, so nothing else is
shared.
"""

from collections.abc import Iterator

import pytest

from raycheck.bucket.store import Store, open_store
from raycheck.bucket.store import s3 as s3_module
from raycheck.bucket.store.s3 import S3Store
from tests.bucket.ministack import ministack_server


@pytest.fixture(scope="session")
def s3_client(s3: str):
    return made_by_s3fs(s3)


@pytest.fixture(scope="session")
def ministack() -> Iterator[str]:
    """URI of a bucket on the second S3 server; with --all only."""
    with ministack_server() as uri:
        yield uri


@pytest.fixture(scope="session")
def ministack_client(ministack: str):
    return made_by_s3fs(ministack)


@pytest.fixture
def store(uri: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Store:
    if uri.startswith("s3"):
        share(monkeypatch, request.getfixturevalue("s3_client"))
    return open_store(uri)


def made_by_s3fs(uri: str):
    store = open_store(uri)
    return (store if isinstance(store, S3Store) else store.through_s3fs)._fs


def share(monkeypatch: pytest.MonkeyPatch, client) -> None:
    monkeypatch.setattr(s3_module.s3fs, "S3FileSystem", lambda **_: client)
