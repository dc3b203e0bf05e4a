"""Ranks that a store refuses most requests of do not give up, and are not much slower than it allows."""

from dataclasses import replace
from pathlib import Path

import pytest

from raycheck.bucket.store.part_sizes import PART_SIZES, expect_ranks, fewest_in_flight
from tests.bench.throttled_ranks import READS_PER_S, WRITES_PER_S, Client, parts_of, transferred
from tests.support.processes.coordinator_in_thread import group_of

RANKS = 1024


@pytest.mark.parametrize("client", ["obstore", "s3fs"])
def test_every_rank_saves_where_a_prefix_takes_3_500_writes_per_second(client: Client) -> None:
    found = transferred(RANKS, client, is_upload=True)

    assert found.failed == 0
    assert found.refused > 1000
    assert found.seconds < 1.7 * (found.requests - found.refused) / WRITES_PER_S


def test_every_rank_loads_where_a_prefix_takes_5_500_reads_per_second() -> None:
    found = transferred(RANKS, "s3fs", is_upload=False)

    assert found.failed == 0
    assert found.refused > 1000
    assert found.seconds < 2.2 * (found.requests - found.refused) / READS_PER_S


def test_few_ranks_send_small_parts() -> None:
    assert max(parts_of(4, is_upload=True)) <= 16 << 20


@pytest.mark.parametrize(("ranks", "part_mib", "in_flight"), [(255, 16, 4), (512, 16, 2), (4096, 64, 1)])
def test_a_group_of_many_ranks_sends_few_large_parts(tmp_path: Path, ranks: int, part_mib: int, in_flight: int) -> None:
    group = replace(group_of(f"file://{tmp_path}", world_size=1)[0], world_size=ranks)
    try:
        assert group.store.uri
        assert fewest_in_flight(PART_SIZES["s3"].in_flight) == in_flight
        assert PART_SIZES["s3"].part_bytes_of(50 << 30, in_flight) == part_mib << 20
    finally:
        expect_ranks(1)
