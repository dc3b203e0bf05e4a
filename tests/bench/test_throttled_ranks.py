"""Ranks that a store refuses most requests of do not give up, and are not much slower than it allows."""

import pytest

from tests.bench.throttled_ranks import READS_PER_S, SIMULATED, WRITES_PER_S, Client, transferred


@pytest.mark.parametrize("ranks", [256, 4096])
@pytest.mark.parametrize("client", ["obstore", "s3fs"])
def test_every_rank_saves_where_a_prefix_takes_3_500_writes_per_second(client: Client, ranks: int) -> None:
    for found in transferred(ranks, client, is_upload=True):
        assert found.failed == 0
        assert found.refused > 5 * SIMULATED
        assert found.seconds < 1.6 * (found.requests - found.refused) * ranks / SIMULATED / WRITES_PER_S


@pytest.mark.parametrize("ranks", [256, 4096])
def test_every_rank_loads_where_a_prefix_takes_5_500_reads_per_second(ranks: int) -> None:
    for found in transferred(ranks, "s3fs", is_upload=False):
        assert found.failed == 0
        assert found.refused > 3 * SIMULATED
        assert found.seconds < 1.6 * (found.requests - found.refused) * ranks / SIMULATED / READS_PER_S


@pytest.mark.parametrize(("client", "is_upload"), [("obstore", True), ("s3fs", True), ("s3fs", False)])
def test_a_thousand_ranks_send_so_few_requests_that_a_prefix_hardly_limits_them(
    client: Client, *, is_upload: bool
) -> None:
    per_s = WRITES_PER_S if is_upload else READS_PER_S
    for found in transferred(1024, client, is_upload=is_upload):
        assert found.failed == 0
        assert found.refused < 5 * SIMULATED
        assert found.requests * 1024 / SIMULATED < 40 * per_s
        assert found.seconds < 70
