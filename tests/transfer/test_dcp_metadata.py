"""`.metadata` is written without torch: stock torch says whether it is what torch itself would have written."""

import pickle
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from raycheck.bucket.assembly.dcp_metadata import _plain, dcp_metadata
from raycheck.bucket.format.index import Chunk, Index, Leaf, Tensor, index_of
from raycheck.bucket.format.object_keys import shard_file
from tests.bucket.format.test_documents import indexes
from tests.bucket.format.test_golden_documents import GOLDEN, load_index


def as_torch_builds_it(index: Index, component: str) -> Metadata:
    """Returns the metadata that torch itself would build, made of its own objects."""
    entries: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {}
    storage: dict[MetadataIndex, _StorageInfo] = {}
    paths: dict[str, tuple[str | int, ...]] = {}
    for chunk in index.chunks:
        if chunk.component != component:
            continue
        tensor = index.tensors[chunk.tensor]
        if tensor.name not in entries:
            entries[tensor.name] = TensorStorageMetadata(
                properties=TensorProperties(dtype=getattr(torch, tensor.dtype)),
                size=torch.Size(tensor.shape),
                chunks=[],
            )
            paths[tensor.name] = tensor.path
        entry = entries[tensor.name]
        assert isinstance(entry, TensorStorageMetadata)
        place = MetadataIndex(tensor.name, torch.Size(chunk.offsets), len(entry.chunks))
        entry.chunks.append(ChunkStorageMetadata(offsets=torch.Size(chunk.offsets), sizes=torch.Size(chunk.sizes)))
        storage[place] = _StorageInfo(shard_file(chunk.rank), chunk.record_offset, chunk.record_size)
    for leaf in index.leaves:
        if leaf.component == component:
            entries[leaf.name] = BytesStorageMetadata()
            paths[leaf.name] = leaf.path
            storage[MetadataIndex(leaf.name)] = _StorageInfo(
                shard_file(leaf.rank), leaf.record_offset, leaf.record_size
            )
    return Metadata(state_dict_metadata=entries, planner_data=paths, storage_data=storage)


def assert_torch_reads_the_same(index: Index, component: str) -> None:
    expected = as_torch_builds_it(index, component)

    found = pickle.loads(dcp_metadata(index.plan, component))

    assert found == expected
    assert list(found.state_dict_metadata) == list(expected.state_dict_metadata)
    assert [place.index for place in found.storage_data] == [place.index for place in expected.storage_data]
    for ours, torchs in zip(found.storage_data, expected.storage_data, strict=True):
        assert type(ours.offset) is type(torchs.offset)
    assert all(type(entry.size) is torch.Size for entry in found.state_dict_metadata.values() if hasattr(entry, "size"))


@settings(deadline=None)
@given(indexes())
def test_of_any_index_stock_torch_reads_what_it_would_have_written(index: Index) -> None:
    for component in ("train", "base", "none"):
        assert_torch_reads_the_same(index, component)


def test_uneven_empty_scalar_tied_and_huge_tensors_are_read_by_stock_torch() -> None:
    index = load_index((GOLDEN / "index").read_bytes(), what="golden index")

    for component in ("train", "base"):
        assert_torch_reads_the_same(index, component)


@pytest.mark.parametrize("dims", range(7))
def test_any_number_of_dimensions_and_ranks_is_read_by_stock_torch(dims: int) -> None:
    shape = (300, *range(2, dims + 1))[:dims]
    name = Tensor(name="w", dtype="bfloat16", shape=shape, path=("deep", 3, "w"))
    ranks = range(300 if dims else 1)
    chunks = [
        Chunk(
            tensor=0,
            component="train",
            rank=rank,
            offsets=(rank, *(0 for _ in shape[1:]))[:dims],
            sizes=(1, *shape[1:])[:dims],
            record_offset=rank << 30,
            record_size=900,
            payload_offset=(rank << 30) + 704,
            payload_size=8,
            crcs=(rank,),
        )
        for rank in ranks
    ]
    leaf = Leaf(name="x", path=("x",), component="train", rank=301, record_offset=1 << 40, record_size=7)
    index = index_of([name, replace(name, name="none here")], chunks, leaves=[leaf])

    assert_torch_reads_the_same(index, "train")


def test_every_dtype_of_the_installed_torch_is_read_by_stock_torch() -> None:
    dtypes = sorted({str(value).removeprefix("torch.") for value in vars(torch).values() if type(value) is torch.dtype})
    tensors = [Tensor(name=dtype, dtype=dtype, shape=(), path=(dtype,)) for dtype in dtypes]
    chunks = [
        Chunk(
            tensor=number,
            component="train",
            rank=0,
            offsets=(),
            sizes=(),
            record_offset=64 * number,
            record_size=64,
            payload_offset=64 * number,
            payload_size=1,
            crcs=(0,),
        )
        for number in range(len(dtypes))
    ]

    assert_torch_reads_the_same(index_of(tensors, chunks), "train")


def test_a_coordinator_starts_without_torch() -> None:
    code = "import raycheck.group.coordinator.actor, sys; print('torch' in sys.modules)"

    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)

    assert found.stdout.strip() == "False"


@pytest.mark.parametrize(
    "value",
    [
        "",
        "\ud800 and more",
        "é" * 300,
        0,
        255,
        65536,
        2**31 - 1,
        2**31,
        2**62,
        -1,
        -(2**40),
        (),
        ("a", 1),
        (1, 2, 3, "b"),
    ],
)
def test_plain_data_is_read_as_it_was(value: object) -> None:
    assert pickle.loads(b"\x80\x03" + _plain(value) + b".") == value


def test_many_tensors_of_one_form_beside_others_are_read_by_stock_torch() -> None:
    """What is equal of them is made once, and where all boxes lie is one array."""
    tensors = [Tensor(name=f"w{n}", dtype="float32", shape=(4, 2 + n % 2), path=("w", n)) for n in range(50)]
    chunks = [
        Chunk(
            tensor=number,
            rank=rank,
            component="train",
            offsets=(2 * rank, 0),
            sizes=(2, tensor.shape[1]),
            record_offset=100_000 * number + (3 << 30) * rank,
            payload_offset=64,
            payload_size=8 * tensor.shape[1],
            record_size=8 * tensor.shape[1] + 64,
            crcs=(),
        )
        for number, tensor in enumerate(tensors)
        for rank in range(2)
    ]

    assert_torch_reads_the_same(index_of(tensors, chunks), "train")
