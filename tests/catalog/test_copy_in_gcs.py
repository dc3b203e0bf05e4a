"""Copies within one bucket of GCS, which copies by itself what was read and found right."""

from collections.abc import Iterator
from uuid import uuid4

import pytest

from raycheck.bucket.reading import Checkpoint, read_latest
from raycheck.bucket.store import Store, open_store
from raycheck.catalog.copy import copy_run
from raycheck.errors import DamagedError
from tests.catalog.test_copy import MIB, assert_copy, large
from tests.support.servers.gcs_server import BUCKET, inject

SIZE = 12 * MIB
"""Above the size from which the server copies in two steps."""


@pytest.fixture
def places(gcs: str) -> tuple[str, str]:
    del gcs
    return f"gs://{BUCKET}/{uuid4().hex}/one", f"gs://{BUCKET}/{uuid4().hex}/other"


def shard_of(store: Store) -> str:
    """Return the key of the large shard of the run's head."""
    body = read_latest(store)
    manifest = Checkpoint(store, body.entry(body.head or "")).read_manifest()
    return next(key for key, record in manifest.objects() if record.size_bytes == SIZE)


def test_within_one_bucket_the_large_objects_are_not_sent(places: tuple[str, str]) -> None:
    one, other = places
    large(open_store(one), [SIZE, 100])

    done = copy_run(one, other)

    assert done.in_store_bytes == SIZE
    assert 0 < done.sent_bytes < MIB
    assert_copy(open_store(one), open_store(other))
    assert copy_run(one, other).sent_bytes == 0


def test_a_source_whose_bytes_are_wrong_is_not_copied_though_the_store_could(places: tuple[str, str]) -> None:
    """GCS states a right checksum of the wrong bytes: only the manifest knows better."""
    one, other = places
    store = open_store(one)
    large(store, [SIZE, 100])
    store.put_parts(shard_of(store), iter([memoryview(bytes(SIZE))]), SIZE)

    with pytest.raises(DamagedError, match="has checksum"):
        copy_run(one, other)

    assert not [item for item in open_store(other).list_objects("checkpoints/") if item.size_bytes == SIZE]


@pytest.mark.parametrize("status", [403, 501])
def test_where_the_store_refuses_to_copy_the_bytes_are_sent(gcs: str, places: tuple[str, str], status: int) -> None:
    one, other = places
    large(open_store(one), [SIZE, 100])
    inject(gcs, "POST", f"rewriteTo.*{other.split('/')[3]}", status=status, times=99)

    done = copy_run(one, other)

    assert (done.in_store_bytes, done.sent_bytes > SIZE) == (0, True)
    assert_copy(open_store(one), open_store(other))


def test_only_the_very_bytes_that_were_read_are_copied(places: tuple[str, str]) -> None:
    one, other = (open_store(place) for place in places)
    good, bad = b"1" * SIZE, b"2" * SIZE
    one.put("key", good)

    def read(then: bytes | None) -> Iterator[bytes]:
        yield good[: 5 * MIB]
        yield good[5 * MIB :]
        if then is not None:
            one.put("key", then)

    assert not other.put_copied("copy", [bad], SIZE, source=one, source_key="key"), "it has other bytes"
    assert not other.put_copied("copy", read(None), SIZE - 1, source=one, source_key="key"), "it has another size"
    assert not other.put_copied("copy", read(None), SIZE, source=one, source_key="none"), "it is not there"
    assert not open_store(places[1]).put_copied("copy", read(bad), SIZE, source=one, source_key="key"), "written anew"
    assert list(other.list_objects("")) == []
    one.put("key", good)
    assert other.put_copied("copy", read(None), SIZE, source=one, source_key="key")
    assert other.get("copy").data == good


def test_a_store_that_is_reached_in_another_way_is_no_source(places: tuple[str, str]) -> None:
    open_store(places[0]).put("key", b"1" * SIZE)
    one = open_store(f"{places[0]}?requester_pays=true")

    assert not open_store(places[1]).put_copied("copy", [b"1" * SIZE], SIZE, source=one, source_key="key")
