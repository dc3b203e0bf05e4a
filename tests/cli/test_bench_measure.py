"""Measuring a store: what it leaves behind (nothing, however it ends), and what it makes of its samples."""

import os
import signal
import threading
from uuid import uuid4

import pytest

from raycheck import ConfigError, CorruptError, StoreError
from raycheck.bucket.format import object_keys
from raycheck.bucket.store import Store, open_store
from raycheck.bucket.store.address import join_uri
from raycheck.cli.bench import measurement
from raycheck.cli.bench.measurement import MIB, WAYS, Direction, Series, Way, measure
from raycheck.shards.transfer import reader
from tests.support.http_fault_proxy import fault_proxy
from tests.support.memory_store import DictStore
from tests.support.s3_engines import by_s3fs_alone

KIB = 1024
SMALL_WAYS = tuple(Way(part_bytes=size * KIB, in_flight=count) for size in (16, 64) for count in (2, 4))
SCRATCH = "probes/[0-9a-f]{32}/"


def measured(store: Store, **settings) -> measurement.Measured:
    token = uuid4().hex
    return measure(store, **{"token": token, "size_bytes": 256 * KIB, "budget_s": 1.0, "ways": SMALL_WAYS} | settings)


def there(store: Store) -> dict[str, bytes]:
    return {item.key: store.get(item.key).data for item in store.list_objects("")}


def assert_measures_and_leaves_all_as_it_was(store: Store) -> None:
    store.put(object_keys.LATEST_KEY, b"of a run")
    store.put(object_keys.probe_key("another"), b"of a claim")
    before = there(store)

    found = measured(store)

    assert there(store) == before
    assert list(store.list_uploads("")) == []
    assert found.latencies.keys() == {"get", "create", "swap"}
    assert all(item.median > 0 for item in found.latencies.values())
    for direction in (found.writing, found.reading):
        assert direction.own.median > 0
        assert {*direction.plain, *found.left_out} == set(SMALL_WAYS)
        assert direction.best in direction.alike


def test_a_store_is_measured_and_left_as_it_was(store):
    assert_measures_and_leaves_all_as_it_was(store)


def test_a_cloud_is_measured_and_left_as_it_was(cloud_uri):
    store = open_store(cloud_uri)

    assert_measures_and_leaves_all_as_it_was(store)


def test_s3_without_obstore_is_measured_and_left_as_it_was(s3):
    store = open_store(join_uri(s3, uuid4().hex))

    assert_measures_and_leaves_all_as_it_was(by_s3fs_alone(store))


def test_ctrl_c_during_an_upload_in_parts_leaves_nothing(s3):
    with fault_proxy(s3) as proxy:
        store = open_store(join_uri(proxy.uri, uuid4().hex))
        upload = proxy.rule("hold", "PUT", f"{SCRATCH}.*partNumber")

        def interrupt() -> None:
            upload.wait()
            os.kill(os.getpid(), signal.SIGINT)
            upload.release()

        watcher = threading.Thread(target=interrupt)
        watcher.start()
        with pytest.raises(KeyboardInterrupt):
            measured(store, size_bytes=20 * MIB, budget_s=100.0, ways=WAYS[:1])
        watcher.join()

        assert upload.seen
        assert there(store) == {}
        assert list(store.list_uploads("")) == []


def test_an_error_in_the_middle_leaves_nothing(s3):
    with fault_proxy(s3) as proxy:
        store = open_store(join_uri(proxy.uri, uuid4().hex))
        rule = proxy.rule("deny", "PUT", f"{SCRATCH}000010", times=100)

        with pytest.raises(StoreError, match="s3:PutObject"):
            measured(store)

        assert rule.seen
        assert there(store) == {}


def test_what_cannot_be_deleted_is_named(s3):
    with fault_proxy(s3) as proxy:
        store = open_store(join_uri(proxy.uri, uuid4().hex))
        proxy.rule("deny", "DELETE", f"{SCRATCH}000002", times=100)

        with pytest.raises(StoreError, match=rf"1 objects below {SCRATCH} .*by hand.*s3:DeleteObject"):
            measured(store)

        assert len(there(store)) == 1


def test_who_may_only_read_is_told_so_before_anything_is_measured(s3):
    with fault_proxy(s3) as proxy:
        proxy.rule("deny", "PUT", "", times=100)

        with pytest.raises(ConfigError, match=r"put: .*s3:PutObject"):
            measured(open_store(join_uri(proxy.uri, uuid4().hex)))

        assert len({head.target for head in proxy.heads if head.method == "PUT"}) == 1


def test_a_store_that_returns_other_bytes_is_not_measured():
    class Flipping(DictStore):
        def get_range(self, key: str, start: int, stop: int) -> bytes:
            data = super().get_range(key, start, stop)
            return data[:-1] + bytes([data[-1] ^ 1])

    store = Flipping()

    with pytest.raises(CorruptError, match="other bytes came back"):
        measured(store)

    assert store.objects == {}


def test_the_budget_ends_the_measurement_but_something_is_always_measured():
    ticks = iter(range(0, 10_000_000, 10))

    found = measured(DictStore(), budget_s=5.0, clock=lambda: float(next(ticks)))

    assert len(found.writing.plain) == len(found.reading.plain) == 1
    assert len(found.left_out) == len(SMALL_WAYS) - 1
    assert len(found.writing.own.samples) == 1


def test_a_size_smaller_than_any_way_is_refused():
    with pytest.raises(ConfigError, match=str(32 * KIB)):
        measured(DictStore(), size_bytes=16 * KIB)


def test_objects_become_smaller_and_ways_fewer_until_three_rounds_fit():
    fast = measurement._choose_size(WAYS, 512 * MIB, (2e9, 4e9), left_s=100.0)
    slow = measurement._choose_size(WAYS, 512 * MIB, (20e6, 20e6), left_s=100.0)
    hopeless = measurement._choose_size(WAYS, 512 * MIB, (1.0, 1.0), left_s=100.0)

    assert fast == (512 * MIB, tuple(way for way in WAYS if way != Way(part_bytes=64 * MIB, in_flight=16)))
    assert slow[0] == 32 * MIB
    assert all(way.wave_bytes <= 32 * MIB for way in slow[1])
    assert hopeless == (16 * MIB, (Way(part_bytes=8 * MIB, in_flight=2),))


def test_what_the_noise_does_not_tell_apart_counts_as_equally_fast():
    small, middle, large = (Way(part_bytes=size * MIB, in_flight=4) for size in (8, 16, 64))
    plain = {
        small: Series((50.0, 60.0, 70.0)),
        middle: Series((80.0, 95.0, 110.0)),
        large: Series((90.0, 100.0, 110.0)),
    }

    found = Direction(plain=plain, own=Series((80.0, 90.0, 95.0)))

    assert found.best == large
    assert found.noise == pytest.approx(15 / 95)
    assert found.alike == (middle, large)
    assert found.share == pytest.approx(0.9)


def test_on_a_noisy_store_a_way_that_looked_slower_may_be_as_fast_and_is_not_the_best():
    small, large = Way(part_bytes=8 * MIB, in_flight=2), Way(part_bytes=8 * MIB, in_flight=16)
    plain = {small: Series((20.0, 50.0, 90.0)), large: Series((30.0, 100.0, 180.0))}

    found = Direction(plain=plain, own=Series((50.0,)))

    assert found.alike == (small, large)
    assert found.best == large


def test_reads_are_measured_as_a_restore_makes_them():
    own = Way(part_bytes=reader.REQUEST_BYTES, in_flight=reader.REQUESTS_IN_FLIGHT)

    assert own == measurement.OWN_READ
