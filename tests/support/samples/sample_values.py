"""Values of every type that can be saved, as strategies, and what it means that two are the same."""

import datetime as dt
import io
import math
import pathlib
import struct
import zoneinfo
from collections import Counter, OrderedDict, defaultdict, deque, namedtuple
from dataclasses import dataclass, field, is_dataclass
from enum import Enum, Flag, IntEnum
from typing import Any, NamedTuple

import numpy as np
import torch
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp


class Level(IntEnum):
    LOW = 1
    HIGH = 2


class Phase(Enum):
    WARMUP = (1, "warm")
    MAIN = None


class Mark(str, Enum):  # noqa: UP042  the older way is what users have
    A = "a"
    B = "b"


class Flags(Flag):
    FAST = 1
    SAFE = 2
    BOTH = 3
    RARE = 8


Point = namedtuple("Point", "x y")  # noqa: PYI024  the untyped kind is what users have


class Pair(NamedTuple):
    first: Any
    second: Any = None


@dataclass
class Options:
    rate: Any
    tags: Any = field(default_factory=list)

    def __post_init__(self) -> None:
        self.derived = repr(type(self.rate))


@dataclass(frozen=True, slots=True)
class Frozen:
    inner: Any


def classes_of(name: str) -> type:
    """The sample class of this name."""
    return {f"{kind.__module__}:{kind.__qualname__}": kind for kind in SAMPLES}[name]


SAMPLES: tuple[type, ...] = (Level, Phase, Mark, Flags, Point, Pair, Options, Frozen)
DTYPES = ["?", "<i1", "<u1", "<i4", "<i8", "<u8", "<f2", "<f4", "<f8", "<c8", "<c16"]
ODD_DTYPES = [">i4", ">f8", "<M8[s]", ">m8[ns]", "<U3", "|S2"]

bits = st.integers(0, 2**64 - 1).map(lambda number: struct.unpack(">d", number.to_bytes(8, "big"))[0])
texts = st.one_of(st.text(), st.text(st.characters(), max_size=4), st.text("\ud83d\ude00$a", max_size=4))
zones = st.one_of(
    st.none(),
    st.just(dt.UTC),
    st.sampled_from(["Europe/Berlin", "America/New_York"]).map(zoneinfo.ZoneInfo),
    st.builds(dt.timezone, st.timedeltas(dt.timedelta(hours=-23), dt.timedelta(hours=23))),
    st.builds(dt.timezone, st.timedeltas(dt.timedelta(hours=-23), dt.timedelta(hours=23)), st.text(max_size=3)),
)
moments = st.one_of(
    st.builds(
        lambda moment, zone, fold: moment.replace(tzinfo=zone, fold=fold), st.datetimes(), zones, st.integers(0, 1)
    ),
    st.times(),
    st.dates(),
    st.timedeltas(),
    zones,
)
paths = st.sampled_from(["", ".", "a/b", "/x/../y", "é", "\udcff"]).flatmap(
    lambda text: st.sampled_from([pathlib.PosixPath, pathlib.PurePosixPath, pathlib.PureWindowsPath]).map(
        lambda kind: kind(text)
    )
)
members = st.sampled_from([*Level, *Phase, *Mark, *Flags, Flags.FAST | Flags.RARE, Flags(0)])
of_torch = st.sampled_from(
    [
        *(torch.float32, torch.bfloat16, torch.bool, torch.strided, torch.channels_last),
        *(torch.Size([]), torch.Size([2, 3]), torch.device("cpu"), torch.device("cuda:1"), torch.device("meta")),
    ]
)
hashables = st.recursive(
    st.one_of(
        st.none(),
        st.booleans(),
        st.integers(),
        st.integers(9_990, 20_000).map(lambda bits: -(2**bits)),
        st.floats(),
        bits,
        texts,
        st.binary(),
        st.complex_numbers(),
        st.builds(complex, bits, bits),
        st.just("$x"),
        moments,
        paths,
        members,
        of_torch,
    ),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3).map(tuple),
        st.frozensets(inner, max_size=3),
        st.tuples(inner, inner).map(Point._make),
        st.builds(Pair, inner, st.none()),
    ),
    max_leaves=4,
)
arrays = hnp.arrays(
    st.sampled_from([*DTYPES, *ODD_DTYPES]), hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=3)
)
scalars = st.sampled_from([dtype for dtype in [*DTYPES, "<M8[s]", "<m8[ns]"] if dtype != "?"]).flatmap(
    lambda dtype: hnp.arrays(dtype, ()).map(lambda array: array[()])
)
streams = st.builds(io.BytesIO, st.binary()).flatmap(
    lambda stream: st.integers(0, 5).map(lambda at: (stream.seek(at), stream)[1])
)
FACTORIES = [None, int, float, list, dict, set, str, Counter, defaultdict]


def containers(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.one_of(
        st.lists(inner, max_size=4),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(st.text(max_size=4), inner, max_size=3),
        st.dictionaries(hashables, inner, max_size=3),
        st.dictionaries(hashables, inner, max_size=3).map(OrderedDict),
        st.dictionaries(hashables, st.integers(), max_size=3).map(Counter),
        st.sets(hashables, max_size=3),
        st.builds(deque, st.lists(inner, max_size=3), st.one_of(st.none(), st.integers(3, 9))),
        st.builds(defaultdict, st.sampled_from(FACTORIES), st.dictionaries(hashables, inner, max_size=3)),
        st.tuples(inner, inner).map(Point._make),
        st.tuples(inner, st.lists(inner, max_size=2)).map(lambda two: Options(*two)),
        inner.map(Frozen),
    )


leaves = st.one_of(
    hashables, st.binary().map(bytearray), arrays, scalars, streams, st.sampled_from([np.True_, np.False_])
)
values = st.recursive(leaves, containers, max_leaves=12)


def same(one: Any, other: Any) -> bool:
    """Equal in type, order and bits; nan is nan and -0.0 is not 0.0."""
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        form = (one.dtype, one.shape, one.device) == (other.dtype, other.shape, other.device)
        return form and raw(one) == raw(other)
    if isinstance(one, np.ndarray | np.generic):
        return (one.dtype, one.dtype.str, one.shape, one.tobytes()) == (
            *(other.dtype, other.dtype.str, other.shape, other.tobytes()),
        )
    if isinstance(one, float):
        return struct.pack(">d", one) == struct.pack(">d", other)
    if isinstance(one, complex):
        return same((one.real, one.imag), (other.real, other.imag))
    if isinstance(one, Enum):
        return one is other
    if isinstance(one, io.BytesIO):
        return (one.getvalue(), one.tell()) == (other.getvalue(), other.tell())
    if isinstance(one, dt.datetime | dt.time):
        return (one.replace(tzinfo=None), one.fold) == (other.replace(tzinfo=None), other.fold) and same(
            one.tzinfo, other.tzinfo
        )
    if isinstance(one, dt.timezone):
        return one.__getinitargs__() == other.__getinitargs__()
    if isinstance(one, set | frozenset):
        return sorted(map(canonical, one)) == sorted(map(canonical, other))
    if isinstance(one, dict):
        factories = (getattr(one, "default_factory", None), getattr(other, "default_factory", None))
        return factories[0] is factories[1] and same(list(one.items()), list(other.items()))
    if isinstance(one, list | tuple | deque):
        lengths = (len(one), getattr(one, "maxlen", None)) == (len(other), getattr(other, "maxlen", None))
        return lengths and all(same(a, b) for a, b in zip(one, other, strict=True))
    if is_dataclass(one):
        return same(attributes(one), attributes(other))
    return bool(one == other)


def attributes(instance: Any) -> dict[str, Any]:
    return vars(instance) if hasattr(instance, "__dict__") else {"inner": instance.inner}


def raw(tensor: torch.Tensor) -> bytes:
    flat = tensor.detach().reshape(-1).contiguous()
    return bytes(flat.view(torch.uint8).tolist()) if flat.numel() else b""


def canonical(item: Any) -> str:
    """One text per hashable value: the repr of a set depends on the order in which it was filled."""
    if isinstance(item, frozenset):
        return f"frozenset{sorted(map(canonical, item))}"
    if isinstance(item, tuple):
        return f"{type(item).__name__}{[canonical(part) for part in item]}"
    if isinstance(item, float) and math.isnan(item):
        return struct.pack(">d", item).hex()
    if isinstance(item, complex):
        return f"complex{canonical(item.real)}{canonical(item.imag)}"
    if isinstance(item, int) and abs(item) > 2**60:
        return hex(item)  # Python does not print the longest ones
    return f"{type(item).__name__} {item!r}"
