"""Starts two real ranks for the adapters' tests without Ray."""

from collections.abc import Iterator

import pytest

from tests.support.processes.gloo_ranks import Ranks


@pytest.fixture(scope="package")
def pair(s3: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    """Gives two processes, which form a gloo group for each call. They inherit the S3 server's credentials, hence `s3`."""
    ranks = Ranks(2, tmp_path_factory.mktemp("rendezvous"))
    yield ranks
    ranks.stop()
