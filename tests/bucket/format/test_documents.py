"""Tests that every document and index that is written can be read back.

Bytes from a bucket are hostile until they are parsed. For any other bytes, CorruptError is the only error allowed.
"""

import json
import struct
import zlib
from collections import Counter
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raycheck.bucket.format import plan_codec
from raycheck.bucket.format.checksum import SUB_BLOCK
from raycheck.bucket.format.document import FORMAT_VERSION, Document, dump
from raycheck.bucket.format.index import Chunk, Index, Leaf, Tensor, index_of
from raycheck.bucket.format.index_codec import MAGIC, dump_index, join_parts, load_index, parts_of
from raycheck.bucket.format.latest import (
    MAX_BYTES,
    Attempt,
    Entry,
    Evicted,
    Latest,
    Page,
    PageRef,
    PastPage,
    dump_latest,
    load_latest,
    load_page,
)
from raycheck.bucket.format.manifest import Blob, Component, Manifest, RankRecord, ShardRecord, load_manifest
from raycheck.bucket.format.plan_codec import dump_plan
from raycheck.bucket.format.values import encode
from raycheck.errors import ConfigError, CorruptError
from tests.support.samples.hostile_documents import ONE, TWO, mutated_bytes, mutated_tree, thorough
from tests.support.samples.sample_checkpoints import resealed, sealed, tiny_index
from tests.support.samples.sample_values import (
    values,
)


def a_latest() -> Latest:
    return Latest(
        run_id="run",
        counter=7,
        newest_owners=("ann", "bob"),
        attempts=(
            Attempt(number=1, owner="bob", coordinator="c", group="g", world_size=2, restore_key=None, claimed_at=1.5),
        ),
        head=TWO,
        newest=(
            Entry(
                key=TWO,
                refs=(ONE,),
                step=20,
                committed_at=3.25,
                size_bytes=9,
                metrics={"loss": 0.5, "accuracy": 1.0},
                manifest_crc32=5,
                pinned=True,
                expires_at=99.0,
                name="before-rlhf",
                scores={"mmlu": 0.625},
            ),
        ),
        newest_evicted=(Evicted(key=ONE, at=2.0),),
    )


def a_paged_latest() -> Latest:
    page = PageRef(key="pages/000000000006-0123abcd.json", crc32=7, size_bytes=100, count=2, first=ONE, last=ONE)
    past = PastPage(key="pages/000000000005-0123abcd.json", since=6)
    return replace(a_latest(), pages=(page,), evicted_pages=(page,), owner_pages=(page,), past_pages=(past,))


LISTED = json.loads(dump(a_latest()))["newest"][0]
PAGED = json.loads(dump(a_paged_latest()))["pages"][0]


def a_page() -> Page:
    return Page(run_id="run", live=a_latest().live, evicted=a_latest().evicted)


def a_manifest() -> Manifest:
    shard = ShardRecord(component="train", rank=0, size_bytes=64, crc32=1)
    own = Component(name="train", checkpoint=TWO, metadata=Blob(size_bytes=3, crc32=2), shards=(shard,))
    base = Component(name="base", checkpoint=ONE, metadata=Blob(size_bytes=4, crc32=3), shards=())
    return Manifest(
        key=TWO,
        step=20,
        attempt=1,
        save=2,
        epoch=0,
        samples=160,
        world_size=1,
        restored_from=None,
        name="before-rlhf",
        note={"why": "to compare", "seed": 7, "lr": 0.5, "is_final": True},
        expire_after_s=60.0,
        metrics={"loss": 0.5},
        index=Blob(size_bytes=5, crc32=4),
        components=(own, base),
        ranks=(RankRecord(rank=0, blocked_s=0.1, upload_s=0.2, size_bytes=64),),
    )


def as_latest(data: bytes) -> Latest:
    return load_latest(data, what="latest of a test")


def as_page(data: bytes) -> Page:
    return load_page(data, what="page of a test")


def as_manifest(data: bytes) -> Manifest:
    return load_manifest(data, what="manifest of a test")


def as_index(data: bytes) -> Index:
    return load_index(data, what="index of a test")


USERS = ("metrics", "scores", "note")
DOCUMENTS = [
    pytest.param(a_latest, as_latest, id="latest"),
    pytest.param(a_paged_latest, as_latest, id="latest with pages"),
    pytest.param(a_page, as_page, id="page"),
    pytest.param(a_manifest, as_manifest, id="manifest"),
]


# --- documents ---


@pytest.mark.parametrize(("make", "load"), DOCUMENTS)
def test_a_document_reads_back_equal_and_its_bytes_are_pure(make, load):
    document = make()

    assert load(dump(document)) == document
    assert dump(load(dump(document))) == dump(document)


@pytest.mark.parametrize(("make", "load"), DOCUMENTS)
def test_fields_of_a_newer_writer_are_preserved_at_every_level(make, load):
    tree = json.loads(dump(make()))
    for i, level in enumerate(documents_in(tree)):
        level["of_a_newer_writer"] = {"deep": [i, None, 1.5, "x", {"y": True}]}
    assert len(documents_in(tree)) > 3

    again = json.loads(dump(load(sealed(tree))))

    assert again | {"crc32": ""} == tree | {"crc32": ""}


def test_a_changed_document_keeps_what_it_did_not_understand():
    tree = json.loads(dump(a_latest()))
    tree["new"] = 1
    tree["attempts"][0]["new"] = 2
    body = as_latest(sealed(tree))

    changed = replace(body, counter=8, attempts=(replace(body.attempt, last_save=3),))

    again = json.loads(dump(changed))
    assert (again["new"], again["attempts"][0]["new"], again["counter"]) == (1, 2, 8)


def documents_in(tree: Any) -> list[dict[str, Any]]:
    """Yield every object of the tree that is itself a document, and not a mapping of a user's values."""
    if isinstance(tree, list):
        return [found for item in tree for found in documents_in(item)]
    if not isinstance(tree, dict):
        return []
    return [tree, *(found for key, item in tree.items() if key not in USERS for found in documents_in(item))]


@pytest.mark.parametrize(("make", "load"), DOCUMENTS)
@pytest.mark.parametrize("version", [FORMAT_VERSION + 1, FORMAT_VERSION + 2, 10**6])
def test_a_higher_format_version_is_refused_by_number(make, load, version):
    body = json.dumps({"format_version": version, "all_fields": "are others"}).encode()

    with pytest.raises(CorruptError, match=f"version {version}.*newer raycheck"):
        load(body)


@pytest.mark.parametrize(("make", "load"), DOCUMENTS)
@pytest.mark.parametrize("version", [None, 0, -1, True, "1", 1.0, [1]])
def test_a_body_without_a_format_version_is_corrupt(make, load, version):
    tree = json.loads(dump(make())) | {"format_version": version}

    with pytest.raises(CorruptError, match="no format version"):
        load(sealed(tree))


@pytest.mark.parametrize(
    ("field", "text"),
    [
        ("counter", "1.0"),
        ("counter", "true"),
        ("counter", '"1"'),
        ("counter", "null"),
        ("counter", "NaN"),
        ("run_id", "1"),
        ("newest_owners", '"ann"'),
        ("newest_owners", "[1]"),
        ("newest_owners", "{}"),
        ("head", "1"),
        ("attempts", "[]"),
        ("attempts", "[null]"),
        ("attempts", "{}"),
        ("newest", "[[]]"),
        ("newest", "null"),
    ],
)
def test_a_wrong_type_is_corrupt_and_names_the_object(field, text):
    tree = json.loads(dump(a_latest()))
    body = resealed(json.dumps(tree | {field: "@"}).replace('"@"', text))

    with pytest.raises(CorruptError, match="latest"):
        as_latest(body)


@pytest.mark.parametrize("text", ["NaN", "Infinity", "-Infinity", "1e999", "-1e999", "1" + "0" * 400, "9" * 5000])
@pytest.mark.parametrize("field", ["committed_at", "metric"])
def test_a_number_that_is_none_is_corrupt(field, text):
    tree = json.loads(dump(a_latest()))
    entry = tree["newest"][0]
    entry.update({"committed_at": "@"} if field == "committed_at" else {"metrics": {"loss": "@"}})

    with pytest.raises(CorruptError):
        as_latest(resealed(json.dumps(tree).replace('"@"', text)))


@pytest.mark.parametrize(("make", "load"), DOCUMENTS)
def test_every_missing_field_that_has_no_default_is_corrupt(make, load):
    tree = json.loads(dump(make()))
    optional = {
        "format_version",
        "live",
        "newest",
        "pages",
        "evicted_pages",
        "owner_pages",
        "owners",
        "past_pages",
        "evicted",
        "newest_evicted",
        "partial",
        "proven",
        "trained_s",
        "began_at",
        "rolling",
        "settings",
        "name",
        "note",
        "expire_after_s",
    }

    for field in set(tree) - optional - {"crc32"}:
        with pytest.raises(CorruptError, match=field):
            load(sealed({key: item for key, item in tree.items() if key != field}))


@pytest.mark.parametrize(("make", "load"), DOCUMENTS)
def test_every_truncation_is_corrupt(make, load):
    data = dump(make())

    for length in range(len(data)):
        with pytest.raises(CorruptError):
            load(data[:length])


@pytest.mark.parametrize("depth", [10, 100, 900, 1000, 5000, 100_000])
@pytest.mark.parametrize("brackets", ["[]", "{}"])
@pytest.mark.parametrize(("make", "load"), DOCUMENTS)
def test_deep_nesting_is_corrupt_where_a_field_is_known(make, load, brackets, depth):
    inner = "[" * depth + "]" * depth if brackets == "[]" else '{"a":' * depth + "1" + "}" * depth
    tree = json.loads(dump(make()))

    for field in set(tree) - {"crc32"}:
        with pytest.raises(CorruptError):
            load(resealed(json.dumps(tree | {field: "@"}).replace('"@"', inner)))


@pytest.mark.parametrize("text", ["1e999", '"\\ud800"', "[" * 50 + "]" * 50, "[" * 990 + "]" * 990])
@pytest.mark.parametrize("level", ["top", "attempt"])
def test_whatever_latest_is_read_can_be_written_back(level, text):
    """A commit starts from any body that is accepted, so a body that cannot be written must be refused when read."""
    tree = json.loads(dump(a_latest()))
    (tree if level == "top" else tree["attempts"][0])["of_a_newer_writer"] = "@"
    body = resealed(json.dumps(tree).replace('"@"', text))

    try:
        read = as_latest(body)
    except CorruptError:
        return

    assert as_latest(dump_latest(read)) == read


@pytest.mark.parametrize(
    "change",
    [
        {"head": ONE},
        {"head": "../x"},
        {"attempts": ()},
        {"newest_evicted": [{"key": "../x", "at": 1.0}]},
        {"newest": [LISTED] * 2},
        {"newest": [LISTED | {"refs": ["/etc"]}]},
        {"newest": [LISTED | {"key": "../x"}], "head": None},
        {"newest": [LISTED, LISTED | {"key": ONE}]},
        *({"newest": [LISTED | {"name": name}]} for name in ("7", ONE, "../x", ".x", "a b", "y" * 101)),
        *({"pages": [PAGED | {name: "../x"}]} for name in ("key", "first", "last")),
        {"pages": [PAGED | {"key": "checkpoints/x"}]},
    ],
)
def test_a_latest_that_contradicts_itself_is_corrupt(change):
    tree = json.loads(dump(a_latest())) | change

    with pytest.raises(CorruptError):
        as_latest(sealed(tree))


@pytest.mark.parametrize("where", ["key", "checkpoint", "component"])
def test_a_manifest_that_names_what_is_no_key_of_a_run_is_corrupt(where):
    tree = json.loads(dump(a_manifest()))
    if where == "key":
        tree["key"] = "../x"
    elif where == "checkpoint":
        tree["components"][0]["checkpoint"] = "../../other-run/checkpoints"
    else:
        tree["components"][0]["name"] = "../x"

    with pytest.raises(CorruptError):
        list(as_manifest(sealed(tree)).objects())


@pytest.mark.parametrize(
    "change", [{"note": {"deep": {}}}, {"note": {"a": None}}, {"name": "7"}, {"name": ""}, {"expire_after_s": 0.0}]
)
def test_a_label_in_a_manifest_that_no_save_can_have_given_is_corrupt(change):
    with pytest.raises(CorruptError):
        as_manifest(sealed(json.loads(dump(a_manifest())) | change))


def test_latest_may_have_256_kib_and_no_byte_more():
    body = a_latest()
    room = MAX_BYTES - len(dump(replace(body, unknown={"x": ""})))
    largest = replace(body, unknown={"x": "y" * room})

    assert len(dump_latest(largest)) == MAX_BYTES
    assert as_latest(dump_latest(largest)) == largest
    with pytest.raises(ConfigError, match="raycheck prune"):
        dump_latest(replace(body, unknown={"x": "y" * (room + 1)}))
    with pytest.raises(CorruptError, match=str(MAX_BYTES)):
        as_latest(dump_latest(largest) + b" ")


# --- any bytes at all ---


def only_corrupt(load: Any, body: bytes) -> None:
    try:
        read = load(body)
    except CorruptError:
        return
    if isinstance(read, Document):
        assert load(dump(read)) == read
    else:
        assert isinstance(read, Index)


LOADS = [
    pytest.param(as_latest, partial(dump, a_latest()), id="latest"),
    pytest.param(as_manifest, partial(dump, a_manifest()), id="manifest"),
    pytest.param(as_index, partial(dump_index, tiny_index(world_size=2)), id="index"),
]


@pytest.mark.parametrize(("load", "body"), LOADS)
@thorough
@given(data=st.data())
def test_of_random_bytes_nothing_but_corrupt_comes_out(load, body, data):
    random_bytes = data.draw(st.binary(max_size=200))

    only_corrupt(load, random_bytes)
    only_corrupt(load, MAGIC + random_bytes)
    only_corrupt(load, MAGIC + zlib.compress(random_bytes))


@pytest.mark.parametrize(("load", "body"), LOADS)
@thorough
@given(data=st.data())
def test_of_damaged_bytes_nothing_but_corrupt_comes_out(load, body, data):
    only_corrupt(load, mutated_bytes(data, body()))


@pytest.mark.parametrize(("load", "body"), LOADS[:2])
@thorough
@given(data=st.data())
def test_of_a_hostile_tree_nothing_but_corrupt_comes_out(load, body, data):
    tree = mutated_tree(data, json.loads(body()))

    only_corrupt(load, sealed(tree) if isinstance(tree, dict) else json.dumps(tree).encode())


@thorough
@given(data=st.data())
def test_of_a_hostile_index_nothing_but_corrupt_comes_out(data):
    header, parts = opened(dump_index(an_index()))
    plan, lines, columns = opened_plan(an_index())

    only_corrupt(as_index, closed(mutated_tree(data, header), parts))
    only_corrupt(as_index, closed(header, mutated_bytes(data, parts)))
    only_corrupt(as_index, with_plan(mutated_tree(data, plan), lines, columns))
    only_corrupt(as_index, with_plan(plan, mutated_bytes(data, lines), columns))
    only_corrupt(as_index, with_plan(plan, lines, mutated_bytes(data, columns)))


@thorough
@given(data=st.data())
def test_an_index_with_hostile_numbers_is_corrupt_or_can_be_read_to_the_last_chunk(data):
    plan, lines, columns = opened_plan(an_index())
    number = data.draw(st.sampled_from(range(len(plan["columns"]))))
    _, count, width, _ = plan["columns"][number]
    at = sum(count * width for _, count, width, _ in plan["columns"][:number])
    numbers = st.integers(-(2 ** (8 * width - 1)), 2 ** (8 * width - 1) - 1).map(
        lambda number: number.to_bytes(width, "little", signed=True)
    )
    body = with_plan(plan, lines, columns[:at] + data.draw(numbers) + columns[at + width :] if count else columns)

    try:
        index = as_index(body)
    except CorruptError:
        return
    for chunk in index.chunks:
        assert len(chunk.crcs) == -(-chunk.payload_size // SUB_BLOCK)
        assert 0 <= chunk.record_offset <= chunk.payload_offset
        for start, size, whole in zip(chunk.offsets, chunk.sizes, index.tensors[chunk.tensor].shape, strict=True):
            assert 0 <= start <= start + size <= whole


def test_what_an_index_holds_beside_what_this_version_knows_is_ignored():
    header, parts = opened(dump_index(an_index()))
    plan, lines, columns = opened_plan(an_index())
    more = header | {"new": 1, "parts": [*header["parts"], ["new", 3]]}
    wider = plan | {"new": {}, "columns": [*plan["columns"], ["new", 1, 3, "new"]]}

    assert as_index(closed(more, parts + b"new")) == an_index()
    assert as_index(with_plan(wider, lines, columns + b"new")) == an_index()


@pytest.mark.parametrize("shape", ["[Infinity]", "[NaN]", '["x"]', "null", "[-1]", "[8],[8]"])
def test_an_index_with_an_impossible_shape_is_corrupt(shape):
    plan, lines, columns = opened_plan(an_index())
    changed = lines.replace(b"[8]", shape.encode())

    with pytest.raises(CorruptError):
        as_index(with_plan(plan, changed, columns))


def test_an_index_of_a_higher_format_version_is_refused_by_number():
    header, parts = opened(dump_index(an_index()))

    with pytest.raises(CorruptError, match=f"version {FORMAT_VERSION + 1}"):
        as_index(closed(header | {"format_version": FORMAT_VERSION + 1}, parts))


def test_an_index_that_says_it_holds_more_than_memory_is_refused_before_it_is_unpacked():
    plan, lines, columns = opened_plan(an_index())

    with pytest.raises(CorruptError, match="more than"):
        as_index(with_plan(plan | {"columns": [["rows", 1 << 40, 0, "plain"]]}, lines, columns))


def test_every_truncation_of_an_index_is_corrupt():
    body = dump_index(an_index())

    for length in range(len(body)):
        with pytest.raises(CorruptError):
            as_index(body[:length])


def test_a_chunk_outside_its_tensor_is_corrupt():
    index = tiny_index(world_size=2)
    outside = replace(index.chunks[1], offsets=(5,))

    with pytest.raises(CorruptError, match=r"model\.w"):
        as_index(dump_index(index_of(index.tensors, (index.chunks[0], outside))))


def opened(body: bytes) -> tuple[dict[str, Any], bytes]:
    """Split an index into header and parts."""
    (length,) = struct.unpack_from("<Q", body, len(MAGIC))
    at = len(MAGIC) + 8
    return json.loads(body[at : at + length]), body[at + length :]


def closed(header: object, parts: bytes) -> bytes:
    text = json.dumps(header).encode()
    return MAGIC + struct.pack("<Q", len(text)) + text + parts


def opened_plan(index: Index) -> tuple[dict[str, Any], bytes, bytes]:
    """Split the plan of an index into header, lines and columns."""
    raw = zlib.decompress(parts_of(index).plan)
    (length,) = struct.unpack_from("<Q", raw)
    header = json.loads(raw[8 : 8 + length])
    end = 8 + length + header["tensors"][1]
    return header, raw[8 + length : end], raw[end:]


def with_plan(header: Any, lines: bytes, columns: bytes) -> bytes:
    """Encode the index with this plan."""
    if isinstance(header, dict) and isinstance(header.get("tensors"), list) and header["tensors"][1:] != [len(lines)]:
        header = header | {"tensors": [*header["tensors"][:1], len(lines)]}
    text = json.dumps(header).encode()
    plan = zlib.compress(struct.pack("<Q", len(text)) + text + lines + columns)
    return join_parts(replace(parts_of(an_index()), plan=plan))


# --- the index ---


def an_index() -> Index:
    index = tiny_index(world_size=2)
    leaf = Leaf(name="scheduler.x", path=("scheduler", "x"), component="train", rank=1, record_offset=64, record_size=9)
    tree = {"scheduler": encode({"milestones": Counter({30: 1})}, "scheduler")}
    return replace(index, plan=replace(index.plan, leaves=(leaf,)), values=tree)


def test_an_index_that_no_reader_would_take_is_not_written(monkeypatch: pytest.MonkeyPatch) -> None:
    index = an_index()
    size = len(zlib.decompress(dump_plan(index.plan)))
    monkeypatch.setattr(plan_codec, "MAX_DECODED_BYTES", size - 1)

    with pytest.raises(ConfigError, match=f"would have {size} bytes, and readers accept {size - 1}"):
        dump_plan(index.plan)


paths = st.lists(st.one_of(st.text(max_size=5), st.integers(0, 99)), max_size=3).map(tuple)


@st.composite
def indexes(draw) -> Index:
    tensors = []
    for i in range(draw(st.integers(0, 4))):
        shape = tuple(draw(st.lists(st.integers(0, 2**40), max_size=3)))
        dtype = draw(st.sampled_from(["float32", "bfloat16", "int64"]))
        tensors.append(Tensor(name=f"{i}{draw(st.text(max_size=5))}", dtype=dtype, shape=shape, path=draw(paths)))
    chunks = []
    for number in draw(st.lists(st.sampled_from(range(len(tensors))), max_size=6)) if tensors else ():
        offsets = tuple(draw(st.integers(0, size)) for size in tensors[number].shape)
        sizes = tuple(
            draw(st.integers(0, size - start)) for start, size in zip(offsets, tensors[number].shape, strict=True)
        )
        start = draw(st.integers(0, 2**62))
        payload = draw(st.one_of(st.integers(0, 9), st.integers(0, 5 * SUB_BLOCK)))
        crcs = [draw(st.integers(0, 2**32 - 1)) for _ in range(-(-payload // SUB_BLOCK))]
        chunks.append(
            Chunk(
                tensor=number,
                component=draw(st.sampled_from(["train", "base"])),
                rank=draw(st.integers(0, 9999)),
                offsets=offsets,
                sizes=sizes,
                record_offset=start,
                record_size=payload + 900,
                payload_offset=start + draw(st.integers(0, 900)),
                payload_size=payload,
                crcs=tuple(crcs),
            )
        )
    leaf = st.builds(
        Leaf,
        name=st.text(max_size=5),
        path=paths,
        component=st.just("train"),
        rank=st.integers(0, 9),
        record_offset=st.integers(0, 2**50),
        record_size=st.integers(0, 2**50),
    )
    tree = st.dictionaries(st.text(max_size=4), values.map(lambda value: encode(value, "x")), max_size=2)
    return index_of(
        tensors,
        chunks,
        leaves=draw(st.lists(leaf, max_size=3)),
        values=draw(tree),
        rank_values=draw(st.lists(tree, max_size=2)),
    )


@thorough
@given(indexes())
def test_an_index_reads_back_equal_and_its_bytes_are_pure(index):
    data = dump_index(index)

    assert as_index(data) == index
    assert dump_index(as_index(data)) == data
