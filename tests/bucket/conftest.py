"""Replaces the shared `store` fixture: in this folder, all tests share one client per cloud.

Creating a botocore client costs 0.1 to 0.2 s of CPU, more than most tests here need for anything else, and an Azure
client costs nearly as much. Each test has a different root, so the tests share nothing else.
"""

from collections.abc import Iterator

import pytest

from raycheck.bucket.store import Store, open_store
from raycheck.bucket.store.s3 import s3fs_store as s3_module
from raycheck.bucket.store.s3.s3fs_store import S3Store
from tests.support.servers.ceph_server import ceph_server
from tests.support.servers.ministack_server import ministack_server
from tests.support.servers.seaweed_server import seaweed_server


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


@pytest.fixture(scope="session")
def ceph() -> Iterator[str]:
    """URI of a bucket on Ceph RGW, its objects in memory; with --all only."""
    with ceph_server("memstore") as cluster:
        yield cluster.uri


@pytest.fixture(scope="session")
def ceph_client(ceph: str):
    return made_by_s3fs(ceph)


@pytest.fixture(scope="session")
def seaweed() -> Iterator[str]:
    """URI of a bucket on SeaweedFS; with --all only."""
    with seaweed_server() as uri:
        yield uri


@pytest.fixture(scope="session")
def az_client(azure: str):
    return open_store("az://raycheck/any?account_name=devstoreaccount1")._fs


@pytest.fixture(scope="session")
def gs_client(gcs: str):
    return open_store("gs://raycheck/any")._api


@pytest.fixture(scope="session")
def emulator_client(emulator: str):
    return open_store(emulator)._api


@pytest.fixture
def store(uri: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Store:
    if uri.startswith("s3"):
        share(monkeypatch, request.getfixturevalue("s3_client"))
    store = open_store(uri)
    share_cloud(store, request)
    return store


def share_cloud(store: Store, request: pytest.FixtureRequest) -> None:
    if store.uri.startswith("az"):
        store._fs = request.getfixturevalue("az_client")
    if store.uri.startswith("gs"):
        is_ours = "endpoint_override" not in store.uri
        store._api = request.getfixturevalue("gs_client" if is_ours else "emulator_client")


def made_by_s3fs(uri: str):
    store = open_store(uri)
    assert isinstance(store, S3Store)
    return store._fs


def share(monkeypatch: pytest.MonkeyPatch, client) -> None:
    monkeypatch.setattr(s3_module, "ChainedFiles", lambda **_: client)
