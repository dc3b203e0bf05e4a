"""Tests that the plans of all ranks merge into one, and that every hole and overlap in a tensor is found."""

from array import array
from dataclasses import replace
from itertools import pairwise, product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raycheck.bucket.assembly.plan_merge import merge_plans, uncovered
from raycheck.bucket.format.checksum import SUB_BLOCK
from raycheck.bucket.format.index import Chunk, Index, Tensor, index_of
from raycheck.bucket.format.index_codec import dump_index, load_index
from raycheck.bucket.format.plan_codec import ParsedParts, dump_plan, load_plan
from raycheck.errors import ConfigError, CorruptError
from tests.support.samples.hostile_documents import thorough
from tests.support.samples.sample_checkpoints import tiny_index


def test_of_a_box_that_ranks_wrote_twice_the_first_copy_and_its_checksums_are_kept():
    shapes = {"a": (4,), "b": (SUB_BLOCK // 2,), "c": (4,)}
    tensors = [Tensor(name=name, dtype="float32", shape=shape, path=(name,)) for name, shape in shapes.items()]
    sections = []
    for rank in range(3):
        crcs = {"a": (10 + rank,), "b": (20 + rank, 30 + rank), "c": (40 + rank,)}
        size = 2 if rank == 2 else 1
        boxes = {"a": ((rank,), (size,)), "b": ((0,), shapes["b"]), "c": ((rank,), (size,))}
        chunks = [
            replace(box(*boxes[name]), tensor=number, rank=rank, crcs=own, payload_size=size, record_size=size)
            for number, (name, own) in enumerate(crcs.items())
            for size in [SUB_BLOCK * len(own)]
        ]
        sections.append(index_of(tensors, chunks))

    whole, has_copies = merge(sections)

    assert has_copies
    assert uncovered(whole.plan) == []
    assert [(chunk.rank, chunk.crcs) for chunk in whole.chunks_of(1)] == [(0, (20, 30))]
    assert [chunk.crcs for chunk in whole.chunks_of(2)] == [(40,), (41,), (42,)]
    assert len(whole.crcs) == 8
    assert load_index(dump_index(whole), what="x") == whole


@thorough
@given(st.lists(st.lists(st.integers(0, 4), min_size=1, max_size=4), min_size=1, max_size=4))
def test_a_merge_gives_what_chunk_by_chunk_is_the_first_copy_of_each_box(ranks):
    sections = [
        index_of(
            [
                Tensor(name=f"t{n % 3}", dtype="int8", shape=(9,), path=(n % 3,))
                for n in dict.fromkeys(k % 3 for k in rank)
            ],
            [
                replace(
                    box((n,), (2,)),
                    tensor=list(dict.fromkeys(k % 3 for k in rank)).index(n % 3),
                    rank=number,
                    record_offset=64 * place,
                    payload_offset=64 * place + 8,
                    record_size=64,
                    payload_size=2,
                    crcs=(100 * number + place,),
                )
                for place, n in enumerate(rank)
            ],
        )
        for number, rank in enumerate(ranks)
    ]
    first: dict[tuple[object, ...], Chunk] = {}
    for section in sections:
        for chunk in section.chunks:
            first.setdefault((section.tensors[chunk.tensor].name, chunk.offsets), chunk)

    whole, has_copies = merge(sections)

    found = {(whole.tensors[chunk.tensor].name, chunk.offsets): chunk for chunk in whole.chunks}
    assert {key: replace(chunk, tensor=0) for key, chunk in found.items()} == {
        key: replace(chunk, tensor=0) for key, chunk in first.items()
    }
    assert len(found) == len(whole.chunks) == len(first)
    assert has_copies == (sum(len(section.chunks) for section in sections) > len(first))
    assert load_index(dump_index(whole), what="x") == whole


def test_ranks_that_disagree_on_a_tensor_are_told_its_name():
    one = tiny_index()

    for change in ({"dtype": "float16"}, {"shape": (8,)}, {"shape": (4, 1)}):
        other = index_of([replace(one.tensors[0], **change)], ())
        with pytest.raises(ConfigError, match=r"model\.w"):
            merge([one, other])


def test_a_box_outside_one_dimension_is_refused_also_when_the_others_are_known():
    """Both dimensions have equal columns, and these are those of a plan that was loaded before."""
    known = ParsedParts()
    inside, outside = (
        dump_plan(index_of([Tensor(name="w", dtype="int8", shape=shape, path=("w",))], [box((0, 0), (8, 8))]).plan)
        for shape in ((8, 8), (8, 4))
    )

    for _ in range(2):
        assert load_plan(inside, what="x", known=known).sizes[0] is load_plan(inside, what="x", known=known).sizes[1]
        with pytest.raises(CorruptError, match="outside its shape"):
            load_plan(outside, what="x", known=known)


def test_sections_of_all_ranks_merge_into_one_index():
    shape, dtype = (4,), "float32"
    tensor = {name: Tensor(name=name, dtype=dtype, shape=shape, path=(name,)) for name in "abc"}
    of_rank = [("a", "b"), ("c", "b"), ()]
    sections = [
        index_of(
            [tensor[name] for name in names],
            [replace(box((2 * rank,), (2,)), tensor=i, rank=rank) for i, _ in enumerate(names)],
            values={"shared": 1},
            rank_values=[{"rank": rank}],
        )
        for rank, names in enumerate(of_rank)
    ]

    whole, has_copies = merge(sections)

    assert not has_copies
    assert whole.tensors == (tensor["a"], tensor["b"], tensor["c"])
    assert [(whole.tensors[chunk.tensor].name, chunk.rank) for chunk in whole.chunks] == [
        ("a", 0),
        ("b", 0),
        ("b", 1),
        ("c", 1),
    ]
    assert uncovered(whole.plan) == ["a", "c"]
    assert whole.values == {"shared": 1}
    assert [item["rank"] for item in whole.rank_values] == [0, 1, 2]
    assert load_index(dump_index(whole), what="x") == whole


def merge(sections: list[Index]) -> tuple[Index, bool]:
    """Return the whole index, and whether ranks wrote one box twice."""
    merged = merge_plans([section.plan for section in sections])
    kept = [
        crc for section, cuts in zip(sections, merged.cuts, strict=True) for cut in cuts for crc in section.crcs[cut]
    ]
    whole = Index(
        plan=merged.plan,
        crcs=array("I", kept),
        values=sections[0].values,
        rank_values=tuple(values for section in sections for values in section.rank_values),
    )
    return whole, merged.has_copies


def box(offsets: tuple[int, ...], sizes: tuple[int, ...]) -> Chunk:
    return Chunk(
        tensor=0,
        component="train",
        rank=0,
        offsets=offsets,
        sizes=sizes,
        record_offset=0,
        record_size=0,
        payload_offset=0,
        payload_size=0,
        crcs=(),
    )


@st.composite
def tilings(draw) -> tuple[tuple[int, ...], list[Chunk]]:
    """Draw a shape, and boxes that cover it exactly once: every dimension is cut at random places."""
    shape = tuple(draw(st.lists(st.integers(1, 6), max_size=3)))
    cuts = [sorted({0, size, *draw(st.lists(st.integers(0, size), max_size=2))}) for size in shape]
    spans = product(*(list(pairwise(dimension)) for dimension in cuts))
    boxes = [box(tuple(a for a, _ in span), tuple(b - a for a, b in span)) for span in spans]
    return shape, draw(st.permutations(boxes))


def holes(shape: tuple[int, ...], boxes: list[Chunk]) -> list[str]:
    return uncovered(index_of([Tensor(name="w", dtype="float32", shape=shape, path=("w",))], boxes).plan)


@thorough
@given(tilings())
def test_boxes_that_cover_a_tensor_exactly_once_leave_no_hole(tiling):
    shape, boxes = tiling

    assert holes(shape, boxes) == []


@thorough
@given(tilings(), st.data())
def test_a_missing_box_is_a_hole(tiling, data):
    shape, boxes = tiling
    del boxes[data.draw(st.sampled_from(range(len(boxes))))]

    assert holes(shape, boxes) == ["w"]


@thorough
@given(tilings(), st.data())
def test_a_repeated_box_is_an_overlap(tiling, data):
    shape, boxes = tiling
    boxes.append(data.draw(st.sampled_from(boxes)))

    assert holes(shape, boxes) == ["w"]


@thorough
@given(tilings(), st.data())
def test_a_hole_as_large_as_an_overlap_is_still_found(tiling, data):
    shape, boxes = tiling
    shifted = data.draw(st.sampled_from(range(len(boxes))))
    other = data.draw(st.sampled_from(range(len(boxes))))
    changed = boxes[shifted].sizes == boxes[other].sizes and shifted != other
    boxes[shifted] = boxes[other] if changed else boxes[shifted]

    assert holes(shape, boxes) == (["w"] if changed else [])


@pytest.mark.parametrize("is_in_order", [True, False])
@pytest.mark.parametrize("cuts", [(40, 1), (1, 40), (8, 8)])
def test_many_boxes_cover_a_tensor_only_as_all_cells_of_a_grid(cuts: tuple[int, int], is_in_order: bool) -> None:
    shape, (height, width) = (80, 80), (80 // cuts[0], 80 // cuts[1])
    boxes = [box((row, column), (height, width)) for row in range(0, 80, height) for column in range(0, 80, width)]
    if not is_in_order:
        boxes = [*boxes[1::2], *boxes[::2]]

    assert holes(shape, boxes) == []

    for number in (0, 17, len(boxes) - 1):
        row, column = boxes[number].offsets
        moved = [box((abs(row - 1), column), (height, width))] if height < 80 else []
        moved += [box((row, abs(column - 1)), (height, width))] if width < 80 else []
        smaller = [box((row, column), (height - 1, width)), box((row, column), (height, width - 1))]
        for wrong in ([], [boxes[number - 1]], *([one] for one in (*moved, *smaller))):
            assert holes(shape, [*boxes[:number], *wrong, *boxes[number + 1 :]]) == ["w"]


def test_an_empty_tensor_needs_a_chunk_and_a_scalar_exactly_one():
    assert holes((0, 3), []) == ["w"]
    assert holes((0, 3), [box((0, 0), (0, 3))]) == []
    assert holes((), []) == ["w"]
    assert holes((), [box((), ())]) == []
    assert holes((), [box((), ()), box((), ())]) == ["w"]
