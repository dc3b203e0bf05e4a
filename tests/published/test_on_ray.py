"""Samplers in the publisher's Ray cluster: they have the bucket's versions to the bit, and ask it only for the list."""

import asyncio
import multiprocessing
import os
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import ray

import raycheck
from raycheck.bucket.store import open_store
from raycheck.bucket.store.local import LocalStore
from raycheck.host import VersionCopies
from raycheck.on_ray import version_copies
from raycheck.on_ray.version_copies import RayVersionCopies, VersionShelf
from raycheck.published import follower as follower_module
from raycheck.published import publish as publish_module
from raycheck.published.follower import PulledVersion
from tests.published.weights import Trained, assert_has
from tests.support.processes.background_call import InThread

pytestmark = pytest.mark.ray
WITHIN_S = 60.0


@pytest.fixture
def trained(cluster: None, tmp_path: Path) -> Iterator[Trained]:
    trained = Trained(open_store(f"file://{tmp_path}/run"), tmp_path / "cache")
    start_shelf(trained)
    yield trained
    version_copies._held.clear()  # the actor ends, and what it has


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The keys of versions' files that this process has read from the bucket."""
    keys: list[str] = []

    def noting(verb: str) -> Callable[..., object]:
        apply = getattr(LocalStore, verb)

        def read(self: LocalStore, key: str, *args: object) -> object:
            keys.extend([key] if "/version-" in key else [])
            return apply(self, key, *args)

        return read

    for verb in ("get", "get_data", "get_range"):
        monkeypatch.setattr(LocalStore, verb, noting(verb))
    return keys


class NoCopies(VersionCopies):
    """What a process without Ray has."""

    def __init__(self, uri: str) -> None:
        del uri


def files_of(version: PulledVersion | None) -> dict[str, bytes]:
    assert version is not None
    return {path.name: path.read_bytes() for path in version.path.iterdir()}


def shelf_of(trained: Trained) -> object:
    return ray.get_actor(copies_of(trained)._name, namespace=version_copies.NAMESPACE)


def start_shelf(trained: Trained) -> None:
    """Start the actor and wait for it: on a machine that is busy, a publisher would do without."""
    deadline = time.monotonic() + 2 * WITHIN_S
    while True:
        copies_of(trained).start("")
        with suppress(ValueError, ray.exceptions.RayError):  # one that was killed may still have the name
            ray.get(shelf_of(trained).begin.remote("none"), timeout=WITHIN_S)
            return
        assert time.monotonic() < deadline
        time.sleep(0.05)


def copies_of(trained: Trained) -> RayVersionCopies:
    return RayVersionCopies(f"{trained.store.uri}/published")


def test_a_sampler_has_the_buckets_version_to_the_bit_without_reading_it(
    trained: Trained, tmp_path: Path, read: list[str], monkeypatch: pytest.MonkeyPatch
):
    """The first version is whole, two are patches, and one is both."""
    with raycheck.follow(trained.store.uri, tmp_path / "ray") as sampler:
        with monkeypatch.context() as patch:
            for module in (follower_module, publish_module):
                patch.setattr(module, "version_copies", NoCopies)
            reader = raycheck.follow(trained.store.uri, tmp_path / "bucket")
            trained.publish()
            assert_has(reader.update(), trained)
        for number in range(1, 5):
            done = trained.publish(whole_every=4)
            assert done.version.is_whole == (number == 4)
            read.clear()
            from_ray = sampler.update()
            assert read == [] or number == 1  # the first version was published without copies
            assert_has(from_ray, trained)
            from_bucket = reader.update()
            assert read
            assert files_of(from_ray) == files_of(from_bucket)
            assert number == 1 or from_ray.bytes_fetched == from_bucket.bytes_fetched == done.version.patch_bytes
            assert from_ray.changed == from_bucket.changed or number == 1
        reader.close()


def test_a_new_sampler_takes_a_whole_version_that_has_no_patches(trained: Trained, tmp_path: Path, read: list[str]):
    trained.publish()
    read.clear()
    with raycheck.follow(trained.store.uri, tmp_path / "local") as sampler:
        assert_has(sampler.update(), trained)
    assert read == []


@ray.remote(num_cpus=0)
class Sampler:
    """A process that looks at the bucket every 500 seconds only."""

    def __init__(self, uri: str, folder: str) -> None:
        self.follower = raycheck.follow(uri, folder, poll_s=500)

    def step(self) -> int | None:
        version = self.follower.wait(10 * WITHIN_S)  # it looks once more in the end
        return None if version is None else version.step


def test_an_announcement_wakes_samplers_that_hardly_ever_look(trained: Trained, tmp_path: Path):
    trained.publish()
    samplers = [Sampler.remote(trained.store.uri, str(tmp_path / name)) for name in ("one", "other")]
    for step in (1, 2, 3):
        waiting = [sampler.step.remote() for sampler in samplers]
        if step > 1:
            trained.publish(whole_every=100)
        assert ray.get(waiting, timeout=WITHIN_S) == [step, step]


def test_without_the_actor_the_bucket_is_read_until_there_is_another(
    trained: Trained, tmp_path: Path, read: list[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(version_copies, "SILENT_S", 0.0)
    monkeypatch.setattr(version_copies, "ABSENT_S", 0.0)
    with raycheck.follow(trained.store.uri, tmp_path / "local") as sampler:
        for _ in range(2):
            trained.publish(whole_every=100)
            ray.kill(shelf_of(trained))
            read.clear()
            assert_has(sampler.update(), trained)
            assert read
            start_shelf(trained)
        trained.publish(whole_every=100)
        read.clear()
        assert_has(sampler.update(), trained)
        assert read == []


def test_a_copy_that_is_damaged_is_read_from_the_bucket(
    trained: Trained, tmp_path: Path, read: list[str], monkeypatch: pytest.MonkeyPatch
):
    with raycheck.follow(trained.store.uri, tmp_path / "local") as sampler:
        trained.publish()
        sampler.update()
        add = RayVersionCopies.add

        def flipped(self: RayVersionCopies, name: str, data: memoryview) -> None:
            add(self, name, memoryview(bytes(data[:-1]) + bytes([data[-1] ^ (".patch-" in name)])))

        monkeypatch.setattr(RayVersionCopies, "add", flipped)
        trained.publish(whole_every=100)
        read.clear()
        assert_has(sampler.update(), trained)
        assert {key.rpartition(".")[2] for key in read} == {"patch-00001"}


def test_a_version_that_was_not_announced_is_found_by_nobody(trained: Trained):
    trained.publish()
    late, copies = copies_of(trained), copies_of(trained)
    late.begin("version-000000002-00000000")
    late.add("version.json", memoryview(b"{}"))
    assert copies.take("version-000000002-00000000", "version.json") is None
    copies.begin("version-000000002-11111111")
    copies.add("version.json", memoryview(b"{}"))
    late.announce()
    copies.announce()
    assert copies.take("version-000000002-00000000", "version.json") is None
    assert copies.take("version-000000002-11111111", "version.json") == b"{}"


def test_an_actor_that_does_not_answer_is_not_asked_for_each_file(trained: Trained, monkeypatch: pytest.MonkeyPatch):
    trained.publish()
    directory = raycheck.open_run(trained.store.uri).published().versions[0].directory
    copies = copies_of(trained)
    ray.kill(shelf_of(trained))
    deadline = time.monotonic() + WITHIN_S
    while copies.take(directory, "version.json") is not None and time.monotonic() < deadline:
        time.sleep(0.05)
    start_shelf(trained)
    again = copies_of(trained)
    again.begin(directory)
    again.add("version.json", memoryview(b"{}"))
    again.announce()

    assert again.take(directory, "version.json") == b"{}"
    assert copies.take(directory, "version.json") is None


def test_a_process_that_was_forked_from_one_of_ray_reads_the_bucket(trained: Trained, tmp_path: Path):
    trained.publish()

    def follow() -> None:
        with raycheck.follow(trained.store.uri, tmp_path / "local") as sampler:
            os._exit(0 if sampler.update() is not None else 1)

    child = multiprocessing.get_context("fork").Process(target=follow)
    child.start()
    child.join(WITHIN_S)
    assert child.exitcode == 0


def test_samplers_that_share_a_folder_all_have_what_was_announced(trained: Trained, tmp_path: Path):
    trained.publish()
    samplers = [raycheck.follow(trained.store.uri, tmp_path / "local", poll_s=500) for _ in range(3)]
    assert [sampler.wait(WITHIN_S).step for sampler in samplers] == [1, 1, 1]
    waiting = [InThread(partial(sampler.wait, 10 * WITHIN_S)) for sampler in samplers]
    trained.publish(whole_every=100)
    assert [one.join(WITHIN_S).step for one in waiting] == [2, 2, 2]
    for sampler in samplers:
        sampler.close()


def test_a_process_keeps_the_actors_of_two_series(trained: Trained):
    places = [RayVersionCopies(f"{trained.store.uri}/other-{number}") for number in range(3)]
    for place in places:
        place.begin("version-000000001-00000000")
        assert place._shelf is not None
    assert list(version_copies._held) == [place._name for place in places[1:]]


def test_the_shelf_has_few_versions_and_only_what_there_is_room_for(cluster: None):
    async def versions_after(sizes: list[int], room: int) -> list[str]:
        shelf = VersionShelf()
        shelf._room = room
        for number, size in enumerate(sizes):
            await shelf.begin(str(number))
            await shelf.add(str(number), "patch", np.zeros(size, np.uint8))
            await shelf.announce(str(number))
        return list(shelf._versions)

    assert asyncio.run(versions_after([1] * 6, room=100)) == ["2", "3", "4", "5"]
    assert asyncio.run(versions_after([60, 40, 30, 30], room=100)) == ["1", "2", "3"]
    assert asyncio.run(versions_after([60, 40, 100], room=100)) == ["2"]


def test_more_than_there_is_room_for_is_left_to_the_bucket(trained: Trained):
    trained.publish()
    copies = copies_of(trained)
    copies.begin("version-000000002-00000000")
    copies._room = 5
    copies.add("large", memoryview(b"123456"))
    copies.add("small", memoryview(b"1234"))
    copies.add("second", memoryview(b"12"))
    copies.announce()
    found = {name: copies.take("version-000000002-00000000", name) for name in ("large", "small", "second")}
    assert found == {"large": None, "small": b"1234", "second": None}


def test_a_few_files_are_lent_at_a_time_and_a_turn_that_is_not_given_back_ends(
    cluster: None, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(version_copies, "QUEUE_S", 0.05)

    async def lend() -> None:
        shelf = VersionShelf()
        await shelf.begin("v")
        await shelf.add("v", "patch", np.zeros(1, np.uint8))
        await shelf.announce("v")
        lent = [await shelf.lend("v", "patch") for _ in range(version_copies.TURNS)]
        assert all(lent)
        with pytest.raises(TimeoutError):
            await shelf.lend("v", "patch")
        await shelf.give_back(lent[0][0])
        await shelf.give_back(lent[0][0])  # twice is as once
        monkeypatch.setattr(version_copies, "TURN_S", 0.01)
        assert await shelf.lend("v", "patch") is not None
        monkeypatch.setattr(version_copies, "QUEUE_S", WITHIN_S)
        assert await shelf.lend("v", "patch") is not None  # its reader has died

    asyncio.run(lend())
