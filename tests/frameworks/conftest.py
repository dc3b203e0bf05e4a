"""Fixtures of the adapters' tests: two real ranks for those without Ray, and the Ray that tests/train has too."""

from collections.abc import Iterator

import pytest

from tests.support.gloo_ranks import Ranks
from tests.train.conftest import cluster

__all__ = ["cluster", "pair"]


@pytest.fixture(scope="package")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    """Gives two processes, which form a gloo group for each call."""
    ranks = Ranks(2, tmp_path_factory.mktemp("rendezvous"))
    yield ranks
    ranks.stop()
