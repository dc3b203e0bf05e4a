"""Ranks that a store refuses most requests of do not give up, and are not much slower than it allows."""

import pytest

from tests.bench.throttled_ranks import READS_PER_S, SIMULATED, WRITES_PER_S, Client, transferred


@pytest.mark.parametrize("ranks", [1024, 4096])
@pytest.mark.parametrize("client", ["obstore", "s3fs"])
def test_every_rank_saves_where_a_prefix_takes_3_500_writes_per_second(client: Client, ranks: int) -> None:
    for found in transferred(ranks, client, is_upload=True):
        assert found.failed == 0
        assert found.refused > 5 * SIMULATED
        assert found.seconds < 1.6 * (found.requests - found.refused) * ranks / SIMULATED / WRITES_PER_S


@pytest.mark.parametrize("ranks", [1024, 4096])
def test_every_rank_loads_where_a_prefix_takes_5_500_reads_per_second(ranks: int) -> None:
    for found in transferred(ranks, "s3fs", is_upload=False):
        assert found.failed == 0
        assert found.refused > 3 * SIMULATED
        assert found.seconds < 1.6 * (found.requests - found.refused) * ranks / SIMULATED / READS_PER_S
