"""Starts two real ranks for the adapters' tests without Ray."""

from collections.abc import Iterator

import pytest

from tests.support.processes.gloo_ranks import Ranks


@pytest.fixture(scope="package")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    """Gives two processes, which form a gloo group for each call."""
    ranks = Ranks(2, tmp_path_factory.mktemp("rendezvous"))
    yield ranks
    ranks.stop()
