"""Tests that Python values come back from JSON with their exact type and bits, and that foreign trees are refused."""

import datetime as dt
import io
import json
import math
import struct
import sys
from collections import Counter, OrderedDict, defaultdict, deque
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any
from zoneinfo import ZoneInfo

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from raycheck.bucket.format.class_values import loaded
from raycheck.bucket.format.values import MAX_DEPTH, decode, encode
from raycheck.errors import ConfigError, CorruptError, StateMismatchError
from tests.support.samples.hostile_documents import mutated_tree, thorough
from tests.support.samples.sample_values import (
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


def no_tensor(name: str) -> object:
    raise AssertionError(name)


@thorough
@given(values)
def test_a_value_comes_back_with_its_exact_type_and_bits(value):
    text = json.dumps(encode(value, "state"), allow_nan=False)

    assert same(decode(json.loads(text), no_tensor, classes_of), value)


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
    with pytest.raises(ConfigError, match=r"state at x\.key is a tests\.support\.samples\.sample_values"):
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
        (forged("subprocess:Popen"), "not a plain dataclass here"),
        (forged("tests.support.samples.sample_values:Level"), "not a plain dataclass here"),
        (
            forged("tests.support.samples.sample_values:Frozen", ["other"]),
            "has the fields inner here, and other when saved",
        ),
        ({"$namedtuple": ["tests.support.samples.sample_values:Frozen", ["inner"], [1]]}, "not a named tuple here"),
        (
            {"$namedtuple": ["tests.support.samples.sample_values:Point", ["x"], [1]]},
            "has the fields x, y here, and x when saved",
        ),
        ({"$enum": ["tests.support.samples.sample_values:Point", "x", 1]}, "not an enum here"),
        ({"$enum": ["tests.support.samples.sample_values:Level", "NONE", 1]}, "has no member 'NONE' here"),
        ({"$enum": ["tests.support.samples.sample_values:Level", "LOW", 7]}, "has another value here"),
        ({"$enum": ["tests.support.samples.sample_values:Level", "LOW", True]}, "has another value here"),
    ],
)
def test_a_class_that_is_not_alike_here_is_a_mismatch(tree, message):
    with pytest.raises(StateMismatchError, match=message):
        decode([tree], no_tensor, lambda name: loaded(name) or object)


def test_a_class_is_found_among_the_loaded_ones_and_nothing_is_imported():
    assert loaded("tests.support.samples.sample_values:Options") is Options
    assert "this" not in sys.modules
    module = ModuleType("lazy_for_raycheck")
    module.__getattr__ = lambda name: pytest.fail(f"{name} was asked for")  # type: ignore[method-assign]
    sys.modules["lazy_for_raycheck"] = module

    names = [
        "this:anything",
        "lazy_for_raycheck:Model",
        "os:system",
        "tests.support.samples.sample_values:np.ndarray",
        "tests.support.samples.sample_values:Nope",
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
        {"$enum": ["tests.support.samples.sample_values:Level"]},
        {"$namedtuple": ["tests.support.samples.sample_values:Point", ["x", "y"]]},
        {"$namedtuple": ["tests.support.samples.sample_values:Point", ["x", "y"], [1]]},
        {"$dataclass": ["tests.support.samples.sample_values:Frozen", ["inner"], {"$dict": [[1, 2]]}]},
        {"$dataclass": ["tests.support.samples.sample_values:Frozen", ["inner"], {"other": 2}]},
        {"$dataclass": ["tests.support.samples.sample_values:Frozen", ["inner"], [1]]},
        {"$dataclass": ["tests.support.samples.sample_values:Frozen", 5, {}]},
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


@pytest.mark.parametrize("wrapped", [lambda key: key, lambda key: (key, "a"), lambda key: Point(key, 1)])
def test_a_set_as_a_key_gives_one_path_in_whatever_order_it_prints_its_members(wrapped) -> None:
    one, other = frozenset([0, 8]), frozenset([8, 0])
    assert str(one) != str(other), "this is the case that is tested"
    paths: list[str] = []

    def name(value: object, path: str) -> str | None:
        if value is not no_tensor:
            return None
        paths.append(path)
        return "a tensor"

    for key in (one, other):
        encode({wrapped(key): no_tensor}, "x", name)

    assert paths[0] == paths[1]
