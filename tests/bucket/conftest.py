"""The shared `store`, with one difference: all S3 tests of this folder use one client.

A botocore client costs 0.1 to 0.2 s of CPU, more than most tests here do with it. Roots differ, so nothing else is
shared.
"""

import pytest

from raycheck.bucket.store import Store, open_store


@pytest.fixture(scope="session")
def s3_client(s3: str):
    return open_store(s3)._fs


@pytest.fixture
def store(uri: str, request: pytest.FixtureRequest) -> Store:
    store = open_store(uri)
    if uri.startswith("s3"):
        store._fs = request.getfixturevalue("s3_client")
    return store
