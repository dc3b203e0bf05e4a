"""Tests the number of requests in flight against a simulated store in virtual time: as good as the best fixed number."""

import math
from collections.abc import Iterator
from itertools import product

import pytest

from raycheck.bucket.store.part_sizes import PartSizes
from raycheck.bucket.store.request_window import (
    FIRST,
    RISES_TO,
    UNANSWERED_S,
    Flight,
    Share,
    fewest_requests,
    window_of,
)
from tests.support.samples.simulated_store import (
    LEAST,
    MB,
    MOST,
    OBJECT_BYTES,
    SAVES,
    Job,
    SimulatedStore,
    best_fixed_s,
    mean_s,
    new_window,
    parts_for,
    window_in,
)

WARM_UPS = 4


def shapes() -> Iterator[dict[str, float]]:
    for each, total in ((10, math.inf), (10, 110), (50, 1000), (50, 300), (400, 1000)):
        for latency_s, limit, noise in product((0.001, 0.04), (math.inf, 16), (0.0, 0.15)):
            yield {"each": each * MB, "total": total * MB, "latency_s": latency_s, "limit": limit, "noise": noise}


def test_it_is_nearly_as_fast_as_the_best_fixed_number() -> None:
    found = {}
    for shape in shapes():
        store = SimulatedStore(**shape)
        window = window_in(store)
        mean_s(store, window, saves=WARM_UPS)
        found[tuple(shape.values())] = best_fixed_s(**shape) / mean_s(store, window)

    assert min(found.values()) > 0.8, found
    assert sum(found.values()) / len(found) > 0.93, found


def test_a_new_window_is_nearly_as_fast_as_the_best_fixed_number_from_the_first_object_on() -> None:
    first, warm = {}, {}
    for shape in shapes():
        store, best_s, name = SimulatedStore(**shape), best_fixed_s(**shape), tuple(shape.values())
        window = new_window(store)
        first[name] = best_s / mean_s(store, window, saves=1)
        mean_s(store, window, saves=WARM_UPS)
        warm[name] = best_s / mean_s(store, window)

    assert min(first.values()) > 0.75, first
    assert sum(first.values()) / len(first) > 0.93, first
    assert min(warm.values()) > 0.8, warm
    assert sum(warm.values()) / len(warm) > 0.93, warm


def test_a_new_window_that_begins_with_few_rises_within_the_first_large_object() -> None:
    found = {}
    for shape in shapes():
        store = SimulatedStore(**shape)
        window = window_in(store, rises_to=RISES_TO)
        took_s = mean_s(store, window, saves=1, size_bytes=4 * OBJECT_BYTES)
        found[tuple(shape.values())] = best_fixed_s(**shape, size_bytes=4 * OBJECT_BYTES) / took_s

    assert min(found.values()) > 0.38, found
    assert sum(found.values()) / len(found) > 0.88, found


def test_a_new_window_doubles_while_no_answer_comes() -> None:
    store = SimulatedStore(each=MB)
    window = window_in(store, first=8, rises_to=24)

    with Share(window) as share:
        for number, more in enumerate((8, 8, 8, 0)):
            store.now = number * UNANSWERED_S
            for _ in range(more):
                assert share.may_begin()
                share.begin()
            assert not share.may_begin()


def test_a_new_window_does_not_double_where_answers_come_or_the_store_refuses() -> None:
    for happens in (lambda flight: flight.end(MB), Flight.refused):
        store = SimulatedStore(each=MB)
        window = window_in(store, first=8, rises_to=MOST)
        with Share(window) as share:
            flights = [share.begin() for _ in range(8)]
            happens(flights[0])
            share.begin()
            store.now = 1.0

            assert not share.may_begin()
            assert window.size <= 8


def test_a_new_window_is_halved_by_the_first_refusals() -> None:
    store = SimulatedStore(each=10 * MB)
    window = new_window(store)

    with Share(window) as share:
        for flight in [share.begin() for _ in range(32)]:
            flight.refused()

    assert window.size == 16


def test_a_new_window_shrinks_to_its_least_size_where_one_connection_carries_all() -> None:
    store = SimulatedStore(each=400 * MB, total=400 * MB)
    window = new_window(store)
    mean_s(store, window, saves=2 * SAVES)

    assert window.size <= 2 * LEAST


def test_it_grows_within_the_first_object() -> None:
    store = SimulatedStore(each=50 * MB)
    window = window_in(store)

    mean_s(store, window, saves=1)

    assert window.size >= 16


def test_it_does_not_grow_where_one_connection_carries_all() -> None:
    store = SimulatedStore(each=400 * MB, total=400 * MB)
    window = window_in(store)
    sizes = []
    for _ in range(20):
        mean_s(store, window, saves=1)
        sizes.append(window.size)

    assert max(sizes) <= 2 * LEAST
    assert sum(size == LEAST for size in sizes) > 10


def test_it_leaves_a_store_that_refuses_requests_alone() -> None:
    store = SimulatedStore(each=10 * MB, limit=16)
    window = window_in(store)
    mean_s(store, window, saves=WARM_UPS)
    before = store.refusals

    mean_s(store, window, saves=20)

    assert window.size <= 20
    assert store.refusals - before < 20 * len(parts_for(window)) // 20  # one in twenty


def test_it_falls_below_its_least_size_only_where_the_store_refuses() -> None:
    store = SimulatedStore(each=10 * MB, limit=2)
    window = window_in(store)
    mean_s(store, window, saves=WARM_UPS)
    assert window.size <= 3

    store.limit = math.inf
    mean_s(store, window, saves=20)
    assert window.size >= 16


def test_it_finds_out_when_the_store_has_become_faster() -> None:
    store = SimulatedStore(each=50 * MB, total=300 * MB)
    window = window_in(store)
    mean_s(store, window, saves=WARM_UPS)
    assert window.size <= 12

    store.total = math.inf
    mean_s(store, window, saves=20)
    assert window.size >= 32


def test_the_saves_of_a_process_share_it_equally() -> None:
    store = SimulatedStore(each=10 * MB, limit=16)
    window = window_in(store)
    mean_s(store, window, saves=WARM_UPS)

    one, other = store.send([Job(window, parts_for(window)) for _ in range(2)])

    assert one == pytest.approx(other, rel=0.1)


def test_processes_of_which_a_store_refuses_requests_get_similar_windows() -> None:
    store = SimulatedStore(each=10 * MB, requests_per_s=40)
    windows = [window_in(store) for _ in range(4)]
    for _ in range(4 * WARM_UPS):
        store.send([Job(window, parts_for(window)) for window in windows])

    took = store.send([Job(window, parts_for(window)) for window in windows])

    assert store.refusals
    assert max(took) < 2 * min(took)


def test_many_saves_have_at_least_one_request_each() -> None:
    store = SimulatedStore(each=10 * MB)
    window = window_in(store, 2, 2)

    assert len(store.send([Job(window, parts_for(window)) for _ in range(5)])) == 5


def test_a_short_object_says_nothing_about_a_large_window() -> None:
    store = SimulatedStore(each=10 * MB)
    window = window_in(store)
    mean_s(store, window, saves=WARM_UPS)
    before = window.size

    for _ in range(100):
        store.send([Job(window, [1024 * 1024] * 3)])

    assert window.size == before


def test_slices_of_live_tensors_keep_to_the_least_size() -> None:
    window = window_in(SimulatedStore(each=MB), 4, 4)
    window.size = 64
    with fewest_requests():
        share = Share(window)
    with share:
        for _ in range(4):
            assert share.may_begin()
            share.begin()

        assert not share.may_begin()


@pytest.mark.parametrize(
    ("ranks", "part_mib", "least", "most"),
    [("", 16, 4, 64), ("255", 16, 4, 64), ("512", 32, 2, 8), ("1024", 64, 1, 4), ("4096", 64, 1, 4)],
)
def test_one_of_many_ranks_sends_few_large_parts(
    monkeypatch: pytest.MonkeyPatch, ranks: str, part_mib: int, least: int, most: int
) -> None:
    monkeypatch.setenv("WORLD_SIZE", ranks)
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    window = window_of(f"bucket of {ranks}", "uploads", least=4)

    assert (window.size, window.most) == (least, most)
    assert PartSizes().part_bytes_of(8 << 30, window.size) == part_mib << 20
    assert PartSizes().part_bytes_of(8 << 30, window.most) * window.most <= 512 << 20
    assert PartSizes().part_bytes_of(0, window.size) == 5 << 20


@pytest.mark.parametrize(
    ("ranks", "on_node", "first"), [(1, 1, 32), (8, 8, 16), (64, 8, 16), (128, 8, 8), (256, 8, 4), (4096, 8, 1)]
)
def test_the_ranks_of_a_group_begin_with_about_a_thousand_requests_together(
    monkeypatch: pytest.MonkeyPatch, ranks: int, on_node: int, first: int
) -> None:
    monkeypatch.setenv("WORLD_SIZE", str(ranks))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(on_node))

    assert window_of(f"bucket of {ranks} that begin", "uploads", least=4, first=FIRST).size == first


def test_all_stores_of_one_bucket_have_one_window_in_each_direction(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    window = window_of("bucket", "uploads", least=4)

    assert window_of("bucket", "uploads", least=4) is window
    assert window_of("bucket", "reads", least=4) is not window
    assert window_of("other", "uploads", least=4) is not window
    assert window.most == 32
