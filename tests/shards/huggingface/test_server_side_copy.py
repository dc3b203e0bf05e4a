"""Files of an export that the store assembles by itself, when it proves what it has copied.

No S3 server that runs here answers a copied range with its CRC-32, as S3 does. So a proxy adds to the real server's
answer the checksum of what really lies in the named range.
"""

import base64
import re
import zlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, cast
from urllib.parse import unquote
from uuid import uuid4

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from raycheck.bucket.format.checksum import SUB_BLOCK, combined, sub_block_lengths
from raycheck.bucket.format.index import Chunk, Tensor
from raycheck.bucket.format.object_keys import exports_prefix
from raycheck.bucket.reading import Checkpoint
from raycheck.bucket.store import Store, open_store
from raycheck.bucket.store.address import join_uri
from raycheck.bucket.store.interface import Range
from raycheck.bucket.store.part_sizes import MAX_COPIED_BYTES, MIN_PART_BYTES, PART_SIZES, PartSizes
from raycheck.settings import ExportOptions
from raycheck.shards.huggingface.export import export_hf
from raycheck.shards.huggingface.server_side_copy import FETCHED_BYTES, _parts
from raycheck.shards.huggingface.weight_stream import SavedTensor, Weight, WeightSource
from tests.shards.huggingface.test_export import Holder, config_folder
from tests.support.http_fault_proxy import FaultProxy, Head
from tests.support.save_without_ray import save_state

MIB = 1024 * 1024
PARTS = "/exports/.*partNumber"


@pytest.fixture
def checkpoint(wire: FaultProxy, monkeypatch: pytest.MonkeyPatch) -> Checkpoint:
    """Saves a model with large and small weights, some of odd sizes, one in another type."""
    monkeypatch.setitem(PART_SIZES, "s3", PartSizes(part_bytes=5 * MIB))
    torch.manual_seed(0)
    sizes = {"a_norm": 100, "b_large": 6 * MIB, "c_bias": 3, "d_large": 5 * MIB + 7, "e_small": MIB // 8}
    tensors = {name: torch.randn(size) for name, size in sizes.items()}
    tensors["f_half"] = torch.randn(4 * MIB).half()
    return save_state(open_store(join_uri(wire.uri, uuid4().hex)), {"model": Holder(tensors)})


@pytest.fixture
def direct(s3: str, checkpoint: Checkpoint) -> Store:
    """Returns the checkpoint's store without the proxy."""
    return open_store(join_uri(s3, checkpoint.store.uri.rpartition("/")[2].partition("?")[0]))


def prover(direct: Store, crc: Callable[[bytes], int] = zlib.crc32) -> Callable[[Head, bytes], bytes]:
    """An answer to a copy with the checksum of the range that the request names, as S3 sends it."""

    def edit(request: Head, body: bytes) -> bytes:
        if "x-amz-copy-source" not in request.headers:
            return body
        key = unquote(request.headers["x-amz-copy-source"]).split("/", 2)[2]
        start, last = map(int, re.findall(r"\d+", request.headers["x-amz-copy-source-range"]))
        data = bytes(direct.get_range(key, start, last + 1))
        proof = base64.b64encode(crc(data).to_bytes(4, "big"))
        return body.replace(b"</CopyPartResult>", b"<ChecksumCRC32>" + proof + b"</ChecksumCRC32></CopyPartResult>")

    return edit


def export(checkpoint: Checkpoint, tmp_path: Path) -> dict[str, bytes]:
    """The files of an export into the run, which are those of one into a folder."""
    options = ExportOptions(config_from=config_folder(tmp_path))
    place = exports_prefix(checkpoint.entry.key)
    export_hf(checkpoint, checkpoint.store, options, prefix=place)
    export_hf(checkpoint, str(tmp_path / "hf"), options)
    store = checkpoint.store
    files = {item.key.removeprefix(place): bytes(store.get(item.key).data) for item in store.list_objects(place)}
    assert files == {path.name: path.read_bytes() for path in (tmp_path / "hf").iterdir()}
    assert list(store.list_uploads("")) == []
    return files


def sent_bytes(wire: FaultProxy) -> int:
    sent = [head for head in wire.heads if "/exports/" in head.target and "partNumber" in head.target]
    return sum(int(head.headers.get("content-length", 0)) for head in sent)


def test_large_weights_are_copied_in_the_store_and_the_file_is_the_same(checkpoint, direct, wire, tmp_path):
    wire.rule("edit", "PUT", PARTS, times=99, edit=prover(direct))

    files = export(checkpoint, tmp_path)

    assert len([head for head in wire.heads if "x-amz-copy-source" in head.headers]) == 3
    assert sent_bytes(wire) < max(map(len, files.values())) / 3


@pytest.mark.parametrize("proof", ["none", "of other bytes"])
def test_what_the_store_does_not_prove_is_not_believed(checkpoint, direct, wire, tmp_path, proof: str):
    if proof == "of other bytes":
        wire.rule("edit", "PUT", PARTS, times=99, edit=prover(direct, lambda data: zlib.crc32(data) ^ 1))

    files = export(checkpoint, tmp_path)

    assert sent_bytes(wire) >= max(map(len, files.values()))
    assert not checkpoint.store.put_assembled("x", iter([Range("latest", 0, 1, 0)]), 1)


def test_a_range_that_was_changed_in_the_bucket_is_told_as_damage(checkpoint, direct, wire, tmp_path):
    wire.rule("edit", "PUT", PARTS, times=99, edit=prover(direct))
    (shard,) = [item for item in direct.list_objects("checkpoints/") if item.key.endswith(".distcp")]
    data = bytearray(direct.get(shard.key).data)
    data[len(data) // 2] ^= 1
    direct.put(shard.key, bytes(data))

    with pytest.raises(Exception, match=r"damaged|checksum"):
        export(checkpoint, tmp_path)

    assert not any(item.key.endswith("safetensors") for item in direct.list_objects("exports/"))


class Objects:
    """Stands in for a WeightSource: knows which object a chunk lies in."""

    @staticmethod
    def key_of(chunk: Chunk) -> str:
        return f"rank {chunk.rank}"


def weights_of(told: list[tuple[list[int], torch.dtype]]) -> list[Weight]:
    """Make weights of ranks that hold this many elements each, with payloads one after the other in one object."""
    weights, end = [], 1000
    for number, (sizes, dtype) in enumerate(told):
        chunks, at = [], 0
        for size in sizes:
            payload = size * dtype.itemsize
            crcs = tuple(range(len(sub_block_lengths(payload))))
            place = {"record_offset": end, "record_size": payload, "payload_offset": end, "payload_size": payload}
            box = {"tensor": number, "component": "train", "rank": 0, "offsets": (at,), "sizes": (size,)}
            chunks.append(Chunk(**box, **place, crcs=crcs))
            at, end = at + size, end + payload + 64
        tensor = Tensor(name=str(number), dtype="", shape=(at,), path=())
        saved = SavedTensor(tensor=tensor, chunks=tuple(reversed(chunks)), dtype=dtype, is_flat=True)
        weights.append(Weight(name=str(number), saved=saved, shape=(at,), dtype=dtype))
    return weights


def payload_of(weight: Weight, start: int, stop: int) -> list[tuple[int, int]]:
    """Returns where the bytes of a run of its elements lie in the object."""
    item, found = weight.dtype.itemsize, []
    for chunk in sorted(weight.saved.chunks, key=lambda chunk: chunk.payload_offset):
        low, high = max(start, chunk.offsets[0]), min(stop, chunk.offsets[0] + chunk.sizes[0])
        if low < high:
            shift = chunk.payload_offset - chunk.offsets[0] * item
            found.append((low * item + shift, high * item + shift))
    return found


def joined(intervals: list[tuple[int, int]]) -> list[tuple[int, int]]:
    whole: list[tuple[int, int]] = []
    for start, stop in intervals:
        if whole and whole[-1][1] == start:
            whole[-1] = (whole[-1][0], stop)
        else:
            whole.append((start, stop))
    return whole


SIZES = st.one_of(st.integers(0, 1000), st.integers(0, 12 * MIB), st.sampled_from([SUB_BLOCK, 80 * MIB]))
TENSORS = st.tuples(st.lists(SIZES, min_size=1, max_size=5), st.sampled_from([torch.float32, torch.int8]))


@given(st.lists(TENSORS, min_size=1, max_size=8))
def test_parts_are_the_file_in_order_and_none_is_too_small_or_too_large(told: list[Any]):
    weights = weights_of(told)

    parts = list(_parts(cast("WeightSource", Objects()), weights, 100))

    intervals: list[tuple[int, int]] = []
    for number, part in enumerate(parts):
        mine = (
            [(part.start, part.stop)]
            if isinstance(part, Range)
            else [interval for span in part for interval in payload_of(*span)]
        )
        size = sum(stop - start for start, stop in mine) + 100 * (number == 0)
        assert size >= MIN_PART_BYTES or part is parts[-1]
        assert size < MAX_COPIED_BYTES + MIN_PART_BYTES if isinstance(part, Range) else size < 2 * FETCHED_BYTES
        intervals += mine
    assert not isinstance(parts[0], Range)
    assert joined(intervals) == joined([at for weight in weights for at in payload_of(weight, 0, weight.saved.count)])


def test_the_checksum_of_a_range_is_that_of_its_sub_blocks():
    (weight,) = weights_of([([30 * MIB], torch.int8)])

    fetched, copied = _parts(cast("WeightSource", Objects()), [weight], 100)

    assert fetched == [(weight, 0, 8 * MIB)]
    crc = combined([(2, SUB_BLOCK), (3, SUB_BLOCK), (4, SUB_BLOCK), (5, SUB_BLOCK), (6, SUB_BLOCK), (7, 2 * MIB)])
    assert copied == Range("rank 0", 1000 + 8 * MIB, 1000 + 30 * MIB, crc)


@pytest.mark.parametrize("change", ["type", "hole", "size", "checksums"])
def test_what_is_not_as_saved_or_not_clear_is_fetched(change: str):
    (weight,) = weights_of([([30 * MIB, 10 * MIB], torch.int8)])
    second, first = weight.saved.chunks
    changed = {
        "hole": replace(first, offsets=(1,)),
        "size": replace(first, payload_size=5),
        "checksums": replace(first, crcs=(1,)),
        "type": first,
    }
    weight = replace(weight, saved=replace(weight.saved, chunks=(second, changed[change])))
    if change == "type":
        weight = replace(weight, dtype=torch.float16)

    assert list(_parts(cast("WeightSource", Objects()), [weight], 100)) == [[(weight, 0, 40 * MIB)]]
