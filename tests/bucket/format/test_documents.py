"""Tests names, documents, the index and values: all that is written can be read back.

Bytes from a bucket are hostile until they are parsed: for any other bytes CorruptError is the only error allowed.
"""

import datetime as dt
import io
import json
import math
import struct
import sys
import zlib
from array import array
from collections import Counter, OrderedDict, defaultdict, deque
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise, product
from pathlib import Path
from types import ModuleType
from typing import Any
from zoneinfo import ZoneInfo

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from raycheck.bucket.assembly.plan_merge import merge_plans, uncovered
from raycheck.bucket.format import object_keys, plan_codec
from raycheck.bucket.format.checksum import SUB_BLOCK
from raycheck.bucket.format.class_values import loaded
from raycheck.bucket.format.document import Document, dump
from raycheck.bucket.format.index import Chunk, Index, Leaf, Tensor, index_of
from raycheck.bucket.format.index_codec import MAGIC, dump_index, join_parts, load_index, parts_of
from raycheck.bucket.format.latest import MAX_BYTES, Attempt, Entry, Evicted, Latest, dump_latest, load_latest
from raycheck.bucket.format.manifest import Blob, Component, Manifest, RankRecord, ShardRecord, load_manifest
from raycheck.bucket.format.object_keys import CheckpointName
from raycheck.bucket.format.plan_codec import dump_plan
from raycheck.bucket.format.values import MAX_DEPTH, decode, encode
from raycheck.errors import ConfigError, CorruptError, StateMismatchError
from tests.support.sample_checkpoints import resealed, sealed, tiny_index
from tests.support.sample_values import (
    Flags,
    Frozen,
    Level,
    Mark,
    Options,
    Phase,
    Point,
    classes_of,
    same,
    values,
)

thorough = settings(
    max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large]
)

ONE, TWO = "step-000000010-a1-s1", "step-000000020-a1-s2"


def a_latest() -> Latest:
    return Latest(
        run_id="run",
        counter=7,
        owners=("ann", "bob"),
        attempts=(
            Attempt(number=1, owner="bob", coordinator="c", group="g", world_size=2, restore_key=None, claimed_at=1.5),
        ),
        head=TWO,
        live=(
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
            ),
        ),
        evicted=(Evicted(key=ONE, at=2.0),),
    )


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
        metrics={"loss": 0.5},
        index=Blob(size_bytes=5, crc32=4),
        components=(own, base),
        ranks=(RankRecord(rank=0, blocked_s=0.1, upload_s=0.2, size_bytes=64),),
    )


def as_latest(data: bytes) -> Latest:
    return load_latest(data, what="latest of a test")


def as_manifest(data: bytes) -> Manifest:
    return load_manifest(data, what="manifest of a test")


def as_index(data: bytes) -> Index:
    return load_index(data, what="index of a test")


DOCUMENTS = [pytest.param(a_latest, as_latest, id="latest"), pytest.param(a_manifest, as_manifest, id="manifest")]


# --- names ---

names = st.builds(
    CheckpointName,
    step=st.integers(0, 10**18 - 1),
    attempt=st.integers(0, 10**9 - 1),
    save=st.integers(0, 10**9 - 1),
)


@thorough
@given(names)
def test_a_checkpoints_name_reads_back(name):
    assert CheckpointName.parse(str(name)) == name


@thorough
@given(names, names)
def test_names_are_ordered_as_commits_are(one, other):
    assert (one < other) == ((one.attempt, one.save, one.step) < (other.attempt, other.save, other.step))


@thorough
@given(st.one_of(st.text(), st.builds("step-{}-a{}-s{}".format, *[st.text("0129\u0660\n", max_size=10)] * 3)))
def test_a_text_that_is_a_name_is_exactly_one_name(text):
    name = CheckpointName.parse(text)

    assert name is None or str(name) == text


HOSTILE = [
    "",
    ".",
    "..",
    "../x",
    "/etc/passwd",
    "step-1-a1-s1",
    "step-00000001-a1-s1",
    "step-0000000001-a1-s1",
    "step-000000001-a01-s1",
    "step-000000001-a1-s01",
    "step-000000001-a1",
    "step--00000001-a1-s1",
    "step-000000001-a1-s-1",
    "step-000000001-a1-s1/",
    "step-000000001-a1-s1/../../x",
    "../step-000000001-a1-s1",
    " step-000000001-a1-s1",
    "step-000000001-a1-s1\n",
    "STEP-000000001-a1-s1",
    "step-\u0660\u0660\u0660\u0660\u0660\u0660\u0660\u0660\u0661-a1-s1",
]


@pytest.mark.parametrize("text", HOSTILE)
def test_a_hostile_name_never_becomes_a_key(text):
    assert CheckpointName.parse(text) is None
    for key in (
        object_keys.checkpoint_prefix,
        object_keys.manifest_key,
        object_keys.index_key,
        object_keys.pointer_prefix,
    ):
        with pytest.raises(ValueError, match="name"):
            key(text)


@pytest.mark.parametrize("text", ["", ".", "..", "../x", "a/b", "/a", "-a", ".a", "a b", "a\n", "a\0", "é", "a" * 101])
def test_a_hostile_component_never_becomes_a_key(text):
    for key in (
        object_keys.component_prefix,
        object_keys.metadata_key,
        lambda name, part: object_keys.shard_key(name, part, 0),
    ):
        with pytest.raises(ValueError, match="component"):
            key(ONE, text)


def test_every_object_of_a_checkpoint_lies_under_its_own_name():
    for key in (object_keys.manifest_key(ONE), object_keys.index_key(ONE), object_keys.shard_key(ONE, "train", 3)):
        assert key.startswith(f"checkpoints/{ONE}/")
    assert object_keys.shard_key(ONE, "train", 3) == f"checkpoints/{ONE}/train/__3_0.distcp"
    assert object_keys.metadata_key(ONE, "train") == f"checkpoints/{ONE}/train/.metadata"
    assert object_keys.pointer_key(ONE) == f"ray/{ONE}/pointer.json"


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
    """Yield every object of the tree that is a document of its own, not a mapping of metrics."""
    if isinstance(tree, list):
        return [found for item in tree for found in documents_in(item)]
    if not isinstance(tree, dict):
        return []
    return [tree, *(found for key, item in tree.items() if key != "metrics" for found in documents_in(item))]


@pytest.mark.parametrize(("make", "load"), DOCUMENTS)
@pytest.mark.parametrize("version", [3, 4, 10**6])
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
        ("owners", '"ann"'),
        ("owners", "[1]"),
        ("owners", "{}"),
        ("head", "1"),
        ("attempts", "[]"),
        ("attempts", "[null]"),
        ("attempts", "{}"),
        ("live", "[[]]"),
        ("live", "null"),
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
    entry = tree["live"][0]
    entry.update({"committed_at": "@"} if field == "committed_at" else {"metrics": {"loss": "@"}})

    with pytest.raises(CorruptError):
        as_latest(resealed(json.dumps(tree).replace('"@"', text)))


@pytest.mark.parametrize(("make", "load"), DOCUMENTS)
def test_every_missing_field_that_has_no_default_is_corrupt(make, load):
    tree = json.loads(dump(make()))
    optional = {
        "format_version",
        "live",
        "evicted",
        "partial",
        "proven",
        "trained_s",
        "began_at",
        "rolling",
        "settings",
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
    """A commit goes on from any body that is accepted, so a body that cannot be written must be refused on reading."""
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
        {"evicted": (Evicted(key="../x", at=1.0),)},
        {"live": (a_latest().live[0],) * 2},
        {"live": (replace(a_latest().live[0], refs=("/etc",)),)},
        {"live": (replace(a_latest().live[0], key="../x"),), "head": None},
    ],
)
def test_a_latest_that_contradicts_itself_is_corrupt(change):
    tree = json.loads(dump(a_latest()))
    tree |= {
        key: json.loads(json.dumps(value, default=lambda item: json.loads(dump(item)))) for key, value in change.items()
    }

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


def test_latest_may_have_256_kib_and_no_byte_more():
    body = a_latest()
    room = MAX_BYTES - len(dump(replace(body, unknown={"x": ""})))
    largest = replace(body, unknown={"x": "y" * room})

    assert len(dump_latest(largest)) == MAX_BYTES
    assert as_latest(dump_latest(largest)) == largest
    with pytest.raises(ConfigError, match="keep-last N"):
        dump_latest(replace(body, unknown={"x": "y" * (room + 1)}))
    with pytest.raises(CorruptError, match=str(MAX_BYTES)):
        as_latest(dump_latest(largest) + b" ")


# --- any bytes at all ---

json_values = st.recursive(
    st.one_of(
        st.none(),
        st.booleans(),
        st.integers(),
        st.just(10**400),
        st.just(2**64),
        st.floats(),
        st.text(max_size=8),
        st.sampled_from([ONE, TWO, *HOSTILE]),
    ),
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(st.text(max_size=4), inner, max_size=4)),
    max_leaves=8,
)


def mutated_tree(data: st.DataObject, tree: Any) -> Any:
    """Return `tree` with one place in it removed, replaced or repeated."""
    if isinstance(tree, dict | list) and tree and data.draw(st.integers(0, 5)):
        keys = list(tree) if isinstance(tree, dict) else list(range(len(tree)))
        key = data.draw(st.sampled_from(keys))
        what = data.draw(st.sampled_from(["go", "go", "go", "remove", "repeat"]))
        copy = tree.copy()
        if what == "remove":
            del copy[key]
        elif what == "repeat" and isinstance(copy, list):
            copy.append(copy[key])
        else:
            copy[key] = mutated_tree(data, copy[key])
        return copy
    return data.draw(json_values)


def mutated_bytes(data: st.DataObject, body: bytes) -> bytes:
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(body)))
        stop = data.draw(st.integers(at, min(len(body), at + 8)))
        body = body[:at] + data.draw(st.binary(max_size=4)) + body[stop:]
    return body


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

    with pytest.raises(CorruptError, match="version 3"):
        as_index(closed(header | {"format_version": 3}, parts))


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

    with pytest.raises(ConfigError, match=f"would have {size} bytes, and readers take {size - 1}"):
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


def test_an_empty_tensor_needs_a_chunk_and_a_scalar_exactly_one():
    assert holes((0, 3), []) == ["w"]
    assert holes((0, 3), [box((0, 0), (0, 3))]) == []
    assert holes((), []) == ["w"]
    assert holes((), [box((), ())]) == []
    assert holes((), [box((), ()), box((), ())]) == ["w"]


# --- values ---


def no_tensor(name: str) -> object:
    raise AssertionError(name)


@thorough
@given(values)
def test_a_value_comes_back_with_its_exact_type_and_bits(value):
    text = json.dumps(encode(value, "state"), allow_nan=False)

    assert same(decode(json.loads(text), no_tensor, classes_of), value)


@thorough
@given(indexes())
def test_an_index_reads_back_equal_and_its_bytes_are_pure(index):
    data = dump_index(index)

    assert as_index(data) == index
    assert dump_index(as_index(data)) == data


@pytest.mark.parametrize(
    "value",
    [
        "\ud83d\ude00",
        {"\ud83d\ude00": 1},
        [2**100_000],
        {2**100_000: 1, frozenset({10**5000}): 2},
        *struct.unpack(">dd", bytes.fromhex("fff80000000000007ff0000000000001")),
        np.arange(3, dtype=">i4"),
        np.array(["text", ""]),
        np.array([b"a\0b"]),
        np.datetime64("2026-01-01"),
        np.array(["NaT"], dtype="<M8[ns]"),
        dt.datetime(2026, 10, 25, 2, 30, fold=1, tzinfo=ZoneInfo("Europe/Berlin")),
        dt.datetime(2026, 1, 1, tzinfo=dt.timezone(dt.timedelta(hours=2), "two")),
        Path("a//b/../c"),
        defaultdict(list, {1: [2]}),
        {"$tuple": [1]},
        {"$": {"$tensor": "x"}},
        {"a": 1, "$b": 2},
        {1: "a", "1": "b"},
        {True: 1, None: 2, (1, "x"): 3, 1.5: 4},
        (3, (1, 2, 3), None),
        [math.inf, -math.inf, math.nan, -0.0],
        Counter({30: 1, 80: 2}),
        OrderedDict([("b", 1), ("a", 2)]),
        deque([1, 2], maxlen=2),
        {frozenset({1, 2}), (), b"x"},
        np.arange(6, dtype="<i4").reshape(2, 3).T,
        np.array(3.5),
        np.zeros((0, 3)),
        np.float16(2),
        10**300,
    ],
)
def test_what_plain_json_would_change_comes_back_as_it_was(value):
    text = json.dumps(encode(value, "state"), allow_nan=False)

    assert same(decode(json.loads(text), no_tensor), value)


def test_a_restored_array_may_be_written_to():
    again = decode(encode(np.zeros(3), "state"), no_tensor)

    again[0] = 1

    assert again.tolist() == [1, 0, 0]


def closed_stream() -> io.BytesIO:
    stream = io.BytesIO()
    stream.close()
    return stream


def with_finalizer() -> object:
    kind = dataclass(type("Gadget", (), {"__annotations__": {"path": str}, "__del__": lambda self: None}))
    return kind("/tmp/x")


@pytest.mark.parametrize(
    "thing",
    [
        object(),
        len,
        lambda: None,
        type("Mine", (dict,), {})(),
        type("Mine", (str,), {})("text"),
        type("Mine", (int,), {})(1),
        type("Mine", (float,), {})(1.0),
        type("Mine", (np.float64,), {})(1.0),
        type("Mine", (Counter,), {})(),
        type("Mine", (deque,), {})(),
        type("Mine", (dt.datetime,), {})(2026, 1, 1),
        type("Mine", (io.BytesIO,), {})(),
        type("Mine", (tuple,), {})(),
        type("Mine", (Options,), {"__del__": lambda self: None})(1),
        dataclass(type("Mine", (dict,), {}))(),
        with_finalizer(),
        defaultdict(lambda: 0),
        np.longlong(1),
        np.str_("text"),
        np.array([object()]),
        np.ma.masked_array([1.0]),
        range(3),
        closed_stream(),
        dt.datetime(2026, 1, 1, tzinfo=type("Zone", (dt.tzinfo,), {})()),
        json,
        iter([]),
    ],
    ids=lambda thing: type(thing).__name__,
)
def test_what_cannot_be_saved_is_named_by_its_path(thing):
    with pytest.raises(ConfigError, match=r"state at model\.layers\.1\.extra "):
        encode({"layers": [0, {"extra": thing}]}, "model")
    with pytest.raises(ConfigError, match=r"state at model\.0\.1 "):
        encode([(0, thing)], "model")
    with pytest.raises(ConfigError, match=r"state at model\.0\.7 "):
        encode(deque([{7: thing}]), "model")


@pytest.mark.parametrize("thing", [Options(1), Frozen((1,))], ids=["plain", "frozen"])
def test_a_dataclass_is_no_key_since_its_hash_would_run_while_reading(thing):
    tree = encode(thing, "x")
    with pytest.raises(ConfigError, match=r"state at x\.key is a tests\.support\.sample_values"):
        encode({Frozen(1): 2}, "x")

    with pytest.raises(CorruptError, match="a key is a tests"):
        decode({"$dict": [[tree, 1]]}, no_tensor, classes_of)
    with pytest.raises(CorruptError, match="a key is a tests"):
        decode({"$set": [{"$tuple": [tree]}]}, no_tensor, classes_of)


@pytest.mark.parametrize(
    ("value", "plain"),
    [
        (Level.LOW, 1),
        (Phase.WARMUP, (1, "warm")),
        (Flags.FAST | Flags.RARE, 9),
        (Point(1, [2]), (1, [2])),
        (Options(0.5), {"rate": 0.5, "tags": [], "derived": "<class 'float'>"}),
        (Frozen(Mark.A), {"inner": "a"}),
        ({Mark.B: 1}, {"b": 1}),
    ],
)
def test_a_reader_without_the_class_sees_a_plain_structure(value, plain):
    again = decode(json.loads(json.dumps(encode(value, "x"))), no_tensor)

    assert same(again, plain)


def forged(name: str, fields: list[str] | None = None) -> Any:
    return {"$dataclass": [name, fields or ["inner"], {"inner": 1}]}


@pytest.mark.parametrize(
    ("tree", "message"),
    [
        (forged("subprocess:Popen"), "no plain dataclass here"),
        (forged("tests.support.sample_values:Level"), "no plain dataclass here"),
        (forged("tests.support.sample_values:Frozen", ["other"]), "has the fields inner here, and other when saved"),
        ({"$namedtuple": ["tests.support.sample_values:Frozen", ["inner"], [1]]}, "no named tuple here"),
        (
            {"$namedtuple": ["tests.support.sample_values:Point", ["x"], [1]]},
            "has the fields x, y here, and x when saved",
        ),
        ({"$enum": ["tests.support.sample_values:Point", "x", 1]}, "no enum here"),
        ({"$enum": ["tests.support.sample_values:Level", "NONE", 1]}, "has no member 'NONE' here"),
        ({"$enum": ["tests.support.sample_values:Level", "LOW", 7]}, "has another value here"),
        ({"$enum": ["tests.support.sample_values:Level", "LOW", True]}, "has another value here"),
    ],
)
def test_a_class_that_is_not_alike_here_is_a_mismatch(tree, message):
    with pytest.raises(StateMismatchError, match=message):
        decode([tree], no_tensor, lambda name: loaded(name) or object)


def test_a_class_is_found_among_the_loaded_ones_and_nothing_is_imported():
    assert loaded("tests.support.sample_values:Options") is Options
    assert "this" not in sys.modules
    module = ModuleType("lazy_for_raycheck")
    module.__getattr__ = lambda name: pytest.fail(f"{name} was asked for")  # type: ignore[method-assign]
    sys.modules["lazy_for_raycheck"] = module

    names = [
        "this:anything",
        "lazy_for_raycheck:Model",
        "os:system",
        "tests.support.sample_values:np.ndarray",
        "tests.support.sample_values:Nope",
        "",
    ]
    found = [loaded(name) for name in names]

    del sys.modules["lazy_for_raycheck"]
    assert found == [None] * len(names)
    assert "this" not in sys.modules


def test_no_code_of_a_class_runs_while_a_value_is_put_together():
    ran: list[str] = []

    def noted(name: str) -> Any:
        return lambda *_: ran.append(name)

    kind = dataclass(type("Loud", (), {"__annotations__": {"a": int}, "__slots__": ("a",)}))
    loud = kind(1)
    tree = encode([loud, Phase.MAIN, Point(1, 2)], "x")
    for name in ("__init__", "__post_init__", "__new__", "__setattr__", "__getattribute__", "__hash__", "__eq__"):
        setattr(kind, name, noted(name))

    decode(tree, no_tensor, lambda name: {"Loud": kind}.get(name.partition(":")[2]) or classes_of(name))

    assert ran == []


def test_tensors_are_named_by_their_path_and_given_back_by_name():
    first, second = object(), object()
    kept = {id(first): first, id(second): second}
    by_name: dict[str, object] = {}

    def name(leaf: object, path: str) -> str | None:
        if id(leaf) not in kept:
            return None
        by_name[path] = leaf
        return path

    tree = encode({"a": [first, 1], 3: (second,)}, "model", name)

    assert set(by_name) == {"model.a.0", "model.3.0"}
    again = decode(json.loads(json.dumps(tree)), by_name.__getitem__)
    assert again["a"][0] is first
    assert again[3][0] is second


@pytest.mark.parametrize("wrap", [lambda value: [value], lambda value: (value,), lambda value: {1: value}])
def test_a_hundred_levels_are_kept_and_no_more(wrap):
    value: Any = 1
    for _ in range(MAX_DEPTH):
        value = wrap(value)

    again = decode(json.loads(json.dumps(encode(value, "x"))), no_tensor)

    assert same(again, value)
    with pytest.raises(ConfigError, match="nested deeper"):
        encode(wrap(value), "x")


@pytest.mark.parametrize("depth", [MAX_DEPTH + 1, 900])
@pytest.mark.parametrize("wrap", [lambda tree: [tree], lambda tree: {"a": tree}, lambda tree: {"$tuple": [tree]}])
def test_a_foreign_tree_that_is_too_deep_is_corrupt(wrap, depth):
    tree: Any = 1
    for _ in range(depth):
        tree = wrap(tree)

    with pytest.raises(CorruptError, match="nested deeper"):
        decode(tree, no_tensor)


def test_a_list_that_holds_itself_is_refused_by_its_path():
    loop: list[object] = []
    loop.append(loop)

    with pytest.raises(ConfigError, match=r"state at x\.0\.0"):
        encode(loop, "x")


@pytest.mark.parametrize(
    "tree",
    [
        {"$unknown": 1},
        {"$pickle": "gASVAAAA"},
        {"$float": "1.5"},
        {"$float": []},
        {"$tuple": 3},
        {"$set": [[1]]},
        {"$dict": [[1]]},
        {"$dict": [[[], 1]]},
        {"$counter": [1]},
        {"$bytes": "not base64!"},
        {"$bytes": 3},
        {"$deque": 5},
        {"$deque": [-1, []]},
        {"$deque": [10**30, []]},
        {"$complex": ["x", 1]},
        {"$complex": [10**400, 1]},
        {"$ndarray": ["|O", [1], "AAAAAAAAAAA="]},
        {"$ndarray": ["<f4", [3], "AAAAAAAAAAA="]},
        {"$ndarray": ["<f4", [10**30], ""]},
        {"$ndarray": ["<f4", 1.5, ""]},
        {"$ndarray": ["no dtype", [0], ""]},
        {"$ndarray": ["(1,f4", [0], ""]},
        {"$ndarray": [",f4", [0], ""]},
        {"$ndarray": {}},
        {"$npscalar": ["<f4"]},
        {"$ndarray": ["<U999999999", [1], "AAAA"]},
        {"$ndarray": ["<M8[zz]", [1], "AAAAAAAAAAA="]},
        {"$float": "nan:0000000000000000"},
        {"$int": "zz"},
        {"$str": "/w=="},
        {"$datetime": ["2026-01-01", 7, None]},
        {"$datetime": ["yesterday", 0, None]},
        {"$datetime": ["2026-01-01T00:00:00", 0, {"$zoneinfo": "../../etc/passwd"}]},
        {"$datetime": ["2026-01-01T00:00:00", 0, {"$path": ["PosixPath", "YQ=="]}]},
        {"$zoneinfo": "/etc/passwd"},
        {"$zoneinfo": 3},
        {"$timedelta": [10**20, 0, 0]},
        {"$timezone": [[9, 0, 0]]},
        {"$path": ["Popen", "YQ=="]},
        {"$path": "x"},
        {"$bytesio": ["AAAA", -1]},
        {"$defaultdict": ["system", []]},
        {"$defaultdict": []},
        {"$torch": "load"},
        {"$torch": "__name__"},
        {"$device": "nowhere:7:8"},
        {"$device": 3},
        {"$size": [1.5]},
        {"$size": "ab"},
        {"$enum": []},
        {"$enum": ["tests.support.sample_values:Level"]},
        {"$namedtuple": ["tests.support.sample_values:Point", ["x", "y"]]},
        {"$namedtuple": ["tests.support.sample_values:Point", ["x", "y"], [1]]},
        {"$dataclass": ["tests.support.sample_values:Frozen", ["inner"], {"$dict": [[1, 2]]}]},
        {"$dataclass": ["tests.support.sample_values:Frozen", ["inner"], {"other": 2}]},
        {"$dataclass": ["tests.support.sample_values:Frozen", ["inner"], [1]]},
        {"$dataclass": ["tests.support.sample_values:Frozen", 5, {}]},
        {"$held": 1},
    ],
    ids=lambda tree: str(tree)[:40],
)
def test_a_foreign_tree_is_corrupt(tree):
    with pytest.raises(CorruptError):
        decode([tree], no_tensor, classes_of)


@thorough
@given(values, st.data())
def test_of_a_hostile_value_nothing_but_corrupt_comes_out(value, data):
    tree = mutated_tree(data, encode([value], "x"))

    try:
        decode(tree, lambda name: name, lambda name: loaded(name) or Frozen)
    except (CorruptError, StateMismatchError):
        return
