"""A shard that is copied from the live tensors in slices is the object that a buffer would have been, or no object."""

import threading
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import replace

import pytest
import torch

from raycheck.bucket.format.checksum import SUB_BLOCK
from raycheck.bucket.format.object_keys import shard_key
from raycheck.bucket.store import Store
from raycheck.bucket.store.memory import MemoryStore
from raycheck.errors import SaveFailedError, StoreError
from raycheck.transfer.incremental_upload import StagedState
from raycheck.transfer.stage.local_box import LocalBox, boxes_of, without_memory
from raycheck.transfer.stage.staged_shard import Staged
from raycheck.transfer.stage.stager import Leaves, Stager
from tests.conftest import GOOGLES
from tests.support.servers.s3_engines import by_s3fs_alone

NAME = "step-000000001-a1-s1"
LEAVES: Leaves = {
    "step": (("step",), 3),
    "text": (("text",), "x" * 5000),
    "again": (("again",), 3),
    "odd": (("odd",), [1, "two"]),
}
ALSO = {"step": [("other", ("other", "step"))]}
# aiohttp says so of every body over 1 MiB that the S3 store sends
large_bodies = pytest.mark.filterwarnings("ignore:Sending a large body directly:ResourceWarning")


def every_kind() -> dict[str, torch.Tensor]:
    """Tensors of the dtypes, shapes and memory layouts that a state may have."""
    torch.manual_seed(4)
    wide = torch.randn(6, 4, 5, 7)
    turned = torch.randn(2, 3, dtype=torch.complex64)
    return {
        "matrix": torch.randn(33, 17),
        "empty": torch.empty(0, 4),
        "scalar": torch.randn(()),
        "brain": torch.randn(1001).bfloat16(),
        "flags": torch.rand(7) > 0.5,
        "complex": torch.randn(3, 5, dtype=torch.complex128),
        "eighth": torch.randn(13).to(torch.float8_e4m3fn),
        "transposed": torch.randn(19, 23).t(),
        "channels_last": wide.contiguous(memory_format=torch.channels_last),
        "every_third": torch.arange(100)[::3],
        "window": wide[1:4, :, 2:, ::2],
        "expanded": torch.randn(1, 5).expand(4, 5),
        "one_of_none": torch.ones(1).expand(3)[:1],
        "conjugate": turned.conj(),
        "conjugate_scalar": turned[0, 0].conj(),
        "negative": turned.conj().imag,
        "last": torch.arange(9),
    }


def all_boxes(tensors: dict[str, torch.Tensor]) -> tuple[list[LocalBox], list[torch.Tensor]]:
    boxes = [
        without_memory(box)
        for name, tensor in tensors.items()
        for box in boxes_of(name, (name,), tensor, may_spread=True)
    ]
    boxes[0] = replace(boxes[0], aliases=(("tied", ("tied",)),))
    return boxes, list(tensors.values())


def both(tensors: dict[str, torch.Tensor], leaves: Leaves = LEAVES) -> tuple[Staged, Staged]:
    """Returns the shard of these tensors in a buffer, and in slices."""
    boxes, sources = all_boxes(tensors)
    buffered = Stager("train", 3).stage(boxes, leaves, sources, ALSO)
    return buffered, Stager("train", 3).stage_in_slices(boxes, leaves, sources, ALSO)


def sliced(tensors: dict[str, torch.Tensor]) -> Staged:
    return both(tensors)[1]


def weights(count: int = 8) -> dict[str, torch.Tensor]:
    return {f"w{number}": torch.full((1 << 18,), float(number)) for number in range(count)}


@pytest.mark.parametrize("part_bytes", [1, 63, 4096, 1 << 20, 1 << 30])
def test_slices_are_the_bytes_and_rows_of_the_buffer_however_they_are_cut(part_bytes: int) -> None:
    buffered, slices = both(every_kind())

    parts = [bytes(part) for part in slices.parts(part_bytes)]

    assert b"".join(parts) == bytes(buffered.seal())
    assert all(len(part) == part_bytes for part in parts[:-1])
    assert slices.shard() == buffered.shard()
    assert len(slices.shard().tensors) == len(every_kind()) + 1, "a tied tensor has two names"


@pytest.mark.parametrize("is_turned", [False, True], ids=["contiguous", "transposed"])
@pytest.mark.parametrize("part_bytes", [SUB_BLOCK, 5 * 1024 * 1024 + 3, 1 << 30])
def test_a_tensor_that_is_much_larger_than_a_part_has_the_checksums_of_its_own_blocks(
    part_bytes: int, *, is_turned: bool
) -> None:
    large = torch.randn(3001, 1733)
    buffered, slices = both({"before": torch.ones(3), "large": large.t() if is_turned else large, "b": torch.ones(5)})

    parts = [bytes(part) for part in slices.parts(part_bytes)]

    assert b"".join(parts) == bytes(buffered.seal())
    assert slices.shard() == buffered.shard()


@pytest.mark.parametrize(("tensors", "leaves"), [({}, {}), ({}, LEAVES), ({"a": torch.ones(3)}, {})])
def test_what_has_no_tensors_or_no_leaves_is_the_same_object_too(
    tensors: dict[str, torch.Tensor], leaves: Leaves
) -> None:
    boxes = [box for name, tensor in tensors.items() for box in boxes_of(name, (name,), tensor, may_spread=True)]
    buffered = Stager("train", 0).stage(boxes, leaves)
    slices = Stager("train", 0).stage_in_slices(boxes, leaves)

    assert b"".join(slices.parts(100)) == bytes(buffered.seal())
    assert slices.shard() == buffered.shard()
    StagedState(staged=[slices]).wait_for_slices(time.monotonic() + 60)
    assert slices.slices.copied_at <= time.monotonic()


def test_a_stager_goes_from_slices_to_a_buffer_and_back() -> None:
    stager, (boxes, sources) = Stager("train", 3), all_boxes(every_kind())
    expected = bytes(both(every_kind())[0].seal())

    found = []
    for number in range(4):
        stage = stager.stage if number % 2 else stager.stage_in_slices
        found.append(b"".join(bytes(part) for part in stage(boxes, LEAVES, sources, ALSO).parts(1 << 16)))

    assert found == [expected] * 4
    assert stager.has_buffer


@large_bodies
@pytest.mark.parametrize(
    "uri", ["memory", "file", "s3", *GOOGLES, pytest.param("az", marks=pytest.mark.slow)], indirect=True
)
def test_every_store_sends_slices_and_training_may_go_on_after_the_last(store: Store) -> None:
    assert_sent(store)


@large_bodies
@pytest.mark.parametrize("uri", ["s3"], indirect=True)
def test_s3fs_sends_slices_too(store: Store) -> None:
    assert_sent(by_s3fs_alone(store))


def assert_sent(store: Store) -> None:
    """Send slices of a shard of several parts, and change its tensors as soon as they may be."""
    tensors = {"w": torch.randn(1 << 11, 1 << 11), "turned": torch.randn(1 << 11, 1 << 11).t(), "b": torch.ones(7)}
    buffered, slices = both(tensors)
    save = StagedState(staged=[slices])
    training = threading.Thread(target=lambda: (save.wait_for_slices(time.monotonic() + 60), change(tensors)))
    training.start()

    save.upload(store, NAME)
    training.join()

    assert tensors["w"].isnan().all()
    assert store.get(shard_key(NAME, "train", 3)).data == bytes(buffered.seal())
    assert save.records == (buffered.shard().record,)
    assert 0 < save.sliced_s < 60


def change(tensors: dict[str, torch.Tensor]) -> None:
    for tensor in tensors.values():
        tensor.fill_(torch.nan)


def test_the_last_slice_lets_training_go_on_though_the_upload_has_not_ended() -> None:
    slices = sliced(weights())
    parts = slices.parts(1 << 20)

    states = []
    for _ in parts:
        slices.slices.wait(time.monotonic())
        states.append(slices.slices._is_over.is_set())

    assert states == [False] * (len(states) - 1) + [True]


def test_nothing_is_copied_any_more_once_training_goes_on() -> None:
    tensors = weights()
    slices = sliced(tensors)
    parts = slices.parts(1 << 20)
    first = bytes(next(parts))

    slices.slices.let_go()
    change(tensors)

    assert first == bytes(both(weights())[0].seal()[: 1 << 20])
    with pytest.raises(SaveFailedError, match="before the last slice"):
        next(parts)


def test_a_slice_on_its_way_is_copied_before_training_goes_on() -> None:
    """The tensors are overwritten the moment that they are let go, while another thread copies them."""
    deadline, ended_within = time.monotonic() + 60, 0
    while not ended_within:
        assert time.monotonic() < deadline, "no upload was let go while it copied"
        tensors = weights(count=32)
        expected = bytes(both(tensors)[0].seal())
        slices, found, is_copying = sliced(tensors), bytearray(), threading.Event()

        def upload(slices: Staged = slices, found: bytearray = found, begun: threading.Event = is_copying) -> None:
            with suppress(SaveFailedError):
                for part in slices.parts(1 << 20):
                    found.extend(part)
                    begun.set()

        thread = threading.Thread(target=upload)
        thread.start()
        assert is_copying.wait(30)
        slices.slices.let_go()
        change(tensors)
        thread.join()

        assert found == expected[: len(found)]
        ended_within += len(found) < len(expected)


class Broken(MemoryStore):
    """A store that fails in the middle of an upload, and only then answers."""

    def part_bytes(self, size_bytes: int) -> int:
        return 1 << 20

    def put_parts(self, key: str, parts: Iterable[memoryview], size_bytes: int) -> None:
        next(iter(parts))
        raise StoreError("the store is away")


def test_training_does_not_wait_for_an_upload_that_has_failed() -> None:
    save = StagedState(staged=[sliced(weights()), sliced(weights())])

    with pytest.raises(StoreError):
        save.upload(Broken("memory://broken", objects={}), NAME)
    save.wait_for_slices(time.monotonic() + 3600)  # as long as this test would take, which may not

    for shard in save.staged:
        with pytest.raises(SaveFailedError):
            list(shard.parts(1 << 20))


def test_training_waits_for_the_deadline_and_no_longer() -> None:
    save = StagedState(staged=[sliced(weights())])
    began = time.monotonic()

    save.wait_for_slices(began + 0.2)

    assert time.monotonic() - began >= 0.2
    with pytest.raises(SaveFailedError):
        save.upload(MemoryStore("memory://late", objects={}), NAME)


def test_the_memory_of_a_part_stays_until_who_sends_it_is_done() -> None:
    buffered, slices = both(weights())

    parts = list(slices.parts(100_000))  # as many in flight as there are

    assert b"".join(parts) == bytes(buffered.seal())


def test_slices_cannot_be_shared_with_another_process() -> None:
    assert StagedState(staged=[sliced(weights())]).to_share() is None
