"""Sets of consumed rows: whatever ids come, in whatever order, each is in the set that was saved, and no other."""

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from raycheck.errors import CorruptError
from raycheck.on_ray.data.row_set import CHUNK_BYTES, RowSet, ids_of

RANGES = [(0, 3000), (2**63 - 1500, 2**63 + 1500), (2**64 - 3000, 2**64 - 1), (0, 2**64 - 1)]
IDS = st.one_of(*(st.integers(*ends) for ends in RANGES))
BATCHES = st.one_of(
    *(st.lists(st.sets(ids, max_size=40), max_size=12) for ids in [IDS, *(st.integers(*ends) for ends in RANGES)])
)
"""Ids of one range may become a map of bits, and those of several do not."""


def array(ids) -> np.ndarray:
    return np.array(sorted(ids), np.uint64)


@settings(deadline=None, max_examples=150)
@given(batches=BATCHES, others=st.sets(IDS, max_size=40), ranks=st.integers(1, 4))
@example(batches=[{2**64 - 512}], others=set(), ranks=1)
def test_what_the_ranks_added_is_what_a_restore_finds(batches: list[set[int]], others: set[int], ranks: int):
    sets, seen = [RowSet() for _ in range(ranks)], set[int]()
    for number, batch in enumerate(batches):
        sets[number % ranks].add(array(batch - seen))
        seen |= batch

    found = RowSet.union(RowSet.of_state(one.state_dict()) for one in sets)

    asked = array(seen | others)
    assert len(found) == len(seen)
    assert found.contains(asked).tolist() == [int(number) in seen for number in asked]
    assert array({int(number) for part in found.parts() for number in part}).tolist() == array(seen).tolist()


@pytest.mark.parametrize("low", [0, 2**63 - 300, 2**64 - 600])
def test_a_set_of_any_one_id_at_an_end_of_64_bits_comes_back(low: int):
    for number in range(low, low + 600):
        rows = RowSet()
        rows.add(array({number}))

        found = RowSet.union([RowSet.of_state(rows.state_dict())])

        assert [int(one) for part in found.parts() for one in part] == [number]
        assert found.contains(array({0, number, 2**64 - 1})).tolist() == [
            one == number for one in sorted({0, number, 2**64 - 1})
        ]


@pytest.mark.parametrize("is_falling", [False, True])
@pytest.mark.parametrize("low", [0, 2**64 - 12 * CHUNK_BYTES])
def test_a_map_of_bits_that_grows_at_an_end_of_64_bits_comes_back(low: int, is_falling: bool):
    """It doubles, which at the upper end would lead beyond the last id."""
    ids = np.arange(12 * CHUNK_BYTES, dtype=np.uint64) + np.uint64(low)
    rows, blocks = RowSet(), np.split(ids, 16)
    for block in reversed(blocks) if is_falling else blocks:
        rows.add(block)

    found = RowSet.union([RowSet.of_state(rows.state_dict())])

    assert np.array_equal(np.concatenate(list(found.parts())), ids)
    assert found.contains(ids[[0, -1]]).all()


def test_a_map_of_bits_that_an_older_version_wrote_beyond_the_last_id_is_read():
    data = np.zeros(64, np.uint8)
    data[0] = 0b1010_0000

    found = RowSet.of_state({"first": 2**64 - 8, "count": 2, "bits": True, "data": torch.from_numpy(data)})

    assert [int(one) for part in found.parts() for one in part] == [2**64 - 3, 2**64 - 1]
    found.add(array({2**64 - 4000}))
    assert len(RowSet.of_state(found.state_dict())) == 3


def test_ids_that_lie_close_together_take_a_bit_each_and_others_take_8_bytes():
    close, spread = RowSet(), RowSet()
    order = np.random.default_rng(0).permutation(1_000_000).astype(np.uint64)
    for at in range(0, 1_000_000, 1000):
        close.add(order[at : at + 1000])
    hashes = np.unique(np.random.default_rng(0).integers(0, 2**64, 100_000, np.uint64))
    for at in range(0, hashes.size, 1000):
        spread.add(hashes[at : at + 1000])

    sizes = [one.state_dict()["data"].numel() for one in (close, spread)]

    assert sizes[0] <= 2 * 1_000_000 / 8 + 1000
    assert sizes[1] <= 2 * 8 * 100_000 + 1000


def test_a_set_keeps_its_memory_until_it_must_grow():
    rows, places = RowSet(), set()

    for at in range(0, 500_000, 100):
        rows.add(np.arange(at, at + 100, dtype=np.uint64))
        places.add(rows.state_dict()["data"].data_ptr())

    assert len(places) < 20


def test_a_row_that_comes_twice_is_named():
    rows = RowSet()
    rows.add(array({5, 7}))

    assert rows.repeated(array({6, 8})) is None
    assert rows.repeated(array({6, 7})) == 7
    assert rows.repeated(np.array([9, 9], np.uint64)) == 9


NONE = {"bits": False, "count": 0}  # no numbers are never kept as numbers


@pytest.mark.parametrize(
    "change",
    [{"count": 3}, {"first": 3}, {"first": 2**64}, {"first": -8}, {"count": -1}, {"bits": False, "count": 9000}, NONE],
    ids=str,
)
def test_a_set_from_a_bucket_whose_parts_do_not_fit_is_refused(change: dict):
    rows = RowSet()
    rows.add(array({5, 7}))

    with pytest.raises(CorruptError):
        RowSet.of_state({**rows.state_dict(), **change})


@pytest.mark.parametrize("column", [np.array([-1, 2]), np.array(["a"]), np.array([1.5])], ids=str)
def test_what_is_no_id_is_told_from_ids(column: np.ndarray):
    assert ids_of(column) is None
