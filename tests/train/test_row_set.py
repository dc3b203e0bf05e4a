"""Sets of consumed rows: whatever ids come, in whatever order, each is in the set that was saved, and no other."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raycheck.errors import CorruptError
from raycheck.train.data.row_set import RowSet, ids_of

IDS = st.one_of(st.integers(0, 3000), st.integers(2**63, 2**63 + 3000), st.integers(0, 2**64 - 1))


def array(ids) -> np.ndarray:
    return np.array(sorted(ids), np.uint64)


@settings(deadline=None, max_examples=150)
@given(
    batches=st.lists(st.sets(IDS, max_size=40), max_size=12), others=st.sets(IDS, max_size=40), ranks=st.integers(1, 4)
)
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


@pytest.mark.parametrize(
    "change",
    [{"count": 3}, {"first": 3}, {"first": 2**64 - 8}, {"first": -8}, {"count": -1}, {"bits": False, "count": 9000}],
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
