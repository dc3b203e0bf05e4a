"""Python values as JSON and back, without loss and without pickle.

Plain JSON turns tuples into lists, keys into strings and refuses inf; that breaks MultiStepLR, SequentialLR,
ReduceLROnPlateau and `random.setstate`. What JSON cannot say is tagged `{"$kind": ...}`. What fits neither is
refused with its path in the state, so that the user learns which object it is before anything is saved.
"""

import base64
import math
import re
import sys
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterable, Mapping
from types import NoneType
from typing import Any

from raycheck.errors import ConfigError, CorruptError

MAX_DEPTH = 100


NameTensor = Callable[[object, str], str | None]
"""Given a leaf and its path: the name under which that tensor is kept, or None when it is not a tensor."""


def encode(value: object, path: str, tensor: NameTensor = lambda _value, _path: None, *, depth: int = 0) -> Any:
    """`value` as a JSON tree. Paths join with "." as DCP's names do.

    Raises ConfigError that names `path` for an object which cannot be kept.
    """
    if depth > MAX_DEPTH:
        raise ConfigError(f"state at {path} is nested deeper than {MAX_DEPTH} levels")

    def go(item: object, step: object) -> Any:
        return encode(item, f"{path}.{step}", tensor, depth=depth + 1)

    def each(items: Iterable[object]) -> list[Any]:
        known = _PLAIN if depth < MAX_DEPTH else ()
        return [item if type(item) in known else go(item, i) for i, item in enumerate(items)]

    def pairs(items: Mapping[Any, object]) -> list[Any]:
        return [[go(key, "key"), go(item, key)] for key, item in items.items()]

    if isinstance(value, _PLAIN) and type(value) in _PLAIN:
        return value
    if type(value) is float:
        return value if math.isfinite(value) else {"$float": repr(value)}
    if type(value) is list:
        return each(value)
    if type(value) is dict:
        if all(type(key) is str and not key.startswith("$") for key in value):
            return {key: go(item, key) for key, item in value.items()}
        return {"$dict": pairs(value)}
    if isinstance(value, Counter | OrderedDict) and type(value) in (Counter, OrderedDict):
        return {f"${type(value).__name__.lower()}": pairs(value)}
    if type(value) is tuple:
        return {"$tuple": each(value)}
    if isinstance(value, set | frozenset) and type(value) in (set, frozenset):
        return {f"${type(value).__name__}": each(sorted(value, key=repr))}
    if type(value) is deque:
        return {"$deque": [value.maxlen, each(value)]}
    if isinstance(value, bytes | bytearray) and type(value) in (bytes, bytearray):
        return {f"${type(value).__name__}": base64.b64encode(value).decode()}
    if type(value) is complex:
        return {"$complex": each((value.real, value.imag))}
    name = tensor(value, path)
    if name is not None:
        return {"$tensor": name}
    encoded = _encode_numpy(value)
    if encoded is not None:
        return encoded
    kind = type(value)
    raise ConfigError(
        f"state at {path} is a {kind.__module__}.{kind.__qualname__}, which cannot be saved without pickle. "
        "Give it state_dict/load_state_dict, or keep it as numbers, strings, lists, dicts or tensors"
    )


def decode(tree: object, tensor: Callable[[str], object], *, depth: int = 0) -> Any:
    """The value behind a tree of `encode`. `tensor(name)` supplies tensors. Raises CorruptError on a foreign tree."""
    if depth > MAX_DEPTH:
        raise CorruptError(f"a value is nested deeper than {MAX_DEPTH} levels")

    def each(items: Any) -> Any:
        return (decode(item, tensor, depth=depth + 1) for item in items)

    if isinstance(tree, list):
        return list(each(tree))
    if not isinstance(tree, dict):
        return tree
    tag = next(iter(tree), "")
    if not tag.startswith("$"):
        return {key: decode(item, tensor, depth=depth + 1) for key, item in tree.items()}
    body = tree[tag]
    try:
        if tag == "$tensor":
            return tensor(body)
        if tag == "$float":
            return {"inf": math.inf, "-inf": -math.inf, "nan": math.nan}[body]
        if tag == "$bytes":
            return base64.b64decode(body, validate=True)
        if tag == "$bytearray":
            return bytearray(base64.b64decode(body, validate=True))
        if tag == "$complex":
            return complex(*each(body))
        if tag == "$deque":
            return deque(each(body[1]), maxlen=body[0])
        if tag in ("$dict", "$counter", "$ordereddict"):
            make: Any = {"$dict": dict, "$counter": Counter, "$ordereddict": OrderedDict}[tag]
            return make(dict(tuple(each(pair)) for pair in body))
        if tag in ("$tuple", "$set", "$frozenset"):
            make = {"$tuple": tuple, "$set": set, "$frozenset": frozenset}[tag]
            return make(each(body))
        if tag in ("$ndarray", "$npscalar"):
            return _decode_numpy(tag, body)
    except (TypeError, ValueError, KeyError, IndexError, OverflowError) as error:
        raise CorruptError(f"a {tag} value is malformed: {error}") from None
    raise CorruptError(f"a value has the unknown kind {tag[:40]!r}")


_PLAIN = (bool, int, str, NoneType)


def _encode_numpy(value: Any) -> Any:
    numpy = sys.modules.get("numpy")  # a numpy object cannot exist before numpy is loaded
    if numpy is None:
        return None
    if type(value) is numpy.ndarray and value.dtype.kind in "biufc":
        little = value.dtype.newbyteorder("<")
        data = base64.b64encode(numpy.ascontiguousarray(value, dtype=little).tobytes()).decode()
        return {"$ndarray": [little.str, list(value.shape), data]}
    if isinstance(value, numpy.generic) and value.dtype.kind in "biufc":
        return {"$npscalar": _encode_numpy(numpy.asarray(value))["$ndarray"]}
    return None


def _decode_numpy(tag: str, body: Any) -> Any:
    import numpy as np

    dtype, shape, data = body
    if not re.fullmatch(r"[<|][biufc]\d{1,2}", dtype):
        raise ValueError(f"dtype {dtype!r}")
    array = np.frombuffer(base64.b64decode(data, validate=True), dtype=dtype).reshape(shape).copy()
    array = array.astype(array.dtype.newbyteorder("="), copy=False)
    return array if tag == "$ndarray" else array[()]
