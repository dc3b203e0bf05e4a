"""Tests that documents of an earlier version stay readable. Their bytes are stored, with the JSON of their values."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from raycheck.bucket.format.index import Chunk, Index, Leaf, Tensor, index_of
from raycheck.bucket.format.index_codec import dump_index, load_index

GOLDEN = Path(__file__).parents[2] / "golden" / "v1"


def test_an_index_of_format_version_1_is_read_to_the_last_number() -> None:
    expected = json.loads((GOLDEN / "index.json").read_text())

    index = load_index((GOLDEN / "index").read_bytes(), what="golden index")

    assert as_json(index) == expected


def test_what_the_golden_index_holds_is_still_written_so_that_it_reads_back() -> None:
    expected = json.loads((GOLDEN / "index.json").read_text())

    index = load_index(dump_index(from_json(expected)), what="x")

    assert as_json(index) == expected


def as_json(index: Index) -> Any:
    """Turn a document into plain JSON types."""
    held = {
        "tensors": [asdict(tensor) for tensor in index.tensors],
        "chunks": [asdict(chunk) for chunk in index.chunks],
        "leaves": [asdict(leaf) for leaf in index.leaves],
        "values": index.values,
        "rank_values": index.rank_values,
    }
    return json.loads(json.dumps(held))


def from_json(held: Any) -> Index:
    def tupled(item: dict[str, Any]) -> dict[str, Any]:
        return {name: tuple(value) if isinstance(value, list) else value for name, value in item.items()}

    return index_of(
        [Tensor(**tupled(item)) for item in held["tensors"]],
        [Chunk(**tupled(item)) for item in held["chunks"]],
        leaves=[Leaf(**tupled(item)) for item in held["leaves"]],
        values=held["values"],
        rank_values=held["rank_values"],
    )
