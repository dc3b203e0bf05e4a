"""What the tests of the shard layer share: four real ranks, started when the first test wants them."""

from collections.abc import Iterator

import pytest

from tests.shards.ranks import Ranks


@pytest.fixture(scope="session")
def ranks(s3: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    """Four processes. They inherit the S3 server's throw-away credentials, hence `s3`."""
    ranks = Ranks(4, tmp_path_factory.mktemp("rendezvous"))
    yield ranks
    ranks.stop()
