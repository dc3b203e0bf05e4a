"""Two checkpoints of one tensor that were saved by groups of different sizes."""

import random

import pytest
import torch

from raycheck.bucket.format.checksum import SUB_BLOCK, sub_block_crcs
from raycheck.bucket.format.index import Chunk, Index, Tensor, index_of
from raycheck.views.difference import TensorDifference, compare_indexes


def index_by_rows(values: torch.Tensor, parts: int) -> Index:
    tensor = Tensor(name="w", dtype="float32", shape=tuple(values.shape), path=("w",))
    chunks, at = [], 0
    for rank, part in enumerate(values.chunk(parts)):
        data = memoryview(part.contiguous().numpy().tobytes())
        chunks.append(chunk(rank, (at, 0), tuple(part.shape), data))
        at += part.shape[0]
    random.Random(0).shuffle(chunks)
    return index_of([tensor], chunks)


def index_by_columns(values: torch.Tensor, parts: int) -> Index:
    tensor = Tensor(name="w", dtype="float32", shape=tuple(values.shape), path=("w",))
    chunks, at = [], 0
    for rank, part in enumerate(values.chunk(parts, dim=1)):
        data = memoryview(part.contiguous().numpy().tobytes())
        chunks.append(chunk(rank, (0, at), tuple(part.shape), data))
        at += part.shape[1]
    return index_of([tensor], chunks)


def chunk(rank: int, offsets: tuple[int, ...], sizes: tuple[int, ...], data: memoryview) -> Chunk:
    return Chunk(
        tensor=0,
        component="train",
        rank=rank,
        offsets=offsets,
        sizes=sizes,
        record_offset=0,
        record_size=len(data) + 100,
        payload_offset=64,
        payload_size=len(data),
        crcs=tuple(sub_block_crcs(data)),
    )


def compared(before: Index, after: Index) -> TensorDifference:
    (found,) = compare_indexes(before, after, names=("a", "b")).tensors
    return found


@pytest.mark.parametrize("parts", [1, 2, 3, 5])
def test_equal_values_in_other_row_blocks_are_equal_without_reading_them(parts: int) -> None:
    values = torch.randn(SUB_BLOCK // 1024 + 3, 1024)  # shards of more and of less than a block

    found = compared(index_by_rows(values, 4), index_by_rows(values, parts))

    assert (found.change, found.changed_bytes) == ("equal", 0)


def test_another_value_in_other_row_blocks_is_seen() -> None:
    values = torch.randn(SUB_BLOCK // 1024 + 3, 1024)
    changed = values.clone()
    changed[1000, 1] += 1

    found = compared(index_by_rows(values, 4), index_by_rows(changed, 3))

    assert (found.change, found.changed_bytes) == ("changed", None)


def test_rows_against_columns_is_unknown_and_columns_against_equal_columns_is_not() -> None:
    values = torch.randn(8, 8)

    assert compared(index_by_rows(values, 2), index_by_columns(values, 2)).change == "unknown"
    assert compared(index_by_columns(values, 2), index_by_columns(values, 2)).change == "equal"
