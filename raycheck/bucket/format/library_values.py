"""Writes and reads values of types of the standard library, NumPy and torch, by exact type.

Writing imports neither NumPy nor torch: none of their values exist before the library is loaded. Reading an array needs
NumPy. Reading never needs torch: a process without it gets a dtype or a device as its name, and a size as a tuple.
"""

import base64
import datetime as dt
import io
import pathlib
import re
import sys
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Sequence
from typing import Any
from zoneinfo import ZoneInfo


def encode(value: object) -> Any:
    """Write a value as a tagged tree. Return None for a value of another type."""
    kind = type(value)
    if kind in _ENCODERS:
        return _ENCODERS[kind](value)
    return _encode_numpy(value) or _encode_torch(value)


def factory_of(value: object) -> list[str | None] | None:
    """Return the name of a defaultdict's factory in a list.

    Return None for a value of another type, and for a factory that is not in _FACTORIES.
    """
    if type(value) is not defaultdict:
        return None
    factory = value.default_factory
    return [name for name, known in _FACTORIES.items() if known is factory] or None


def defaultdict_of(factory: Sequence[str | None], items: dict[Any, Any]) -> Any:
    (name,) = factory
    return defaultdict(_FACTORIES[name], items)


_FACTORIES: dict[str | None, Any] = {
    None: None,
    **{kind.__name__: kind for kind in (int, float, complex, bool, str, bytes, list, tuple, dict, set, frozenset)},
    **{kind.__name__: kind for kind in (Counter, OrderedDict, deque, defaultdict)},
}


# --- the standard library ---


def _encode_moment(value: Any) -> Any:
    """Write a datetime or time as its text, its fold and its zone."""
    zone = value.tzinfo
    encoded = None if zone is None else encode(zone)
    if zone is not None and encoded is None:
        return None  # a user-defined time zone class
    return {f"${type(value).__name__}": [value.replace(tzinfo=None, fold=0).isoformat(), value.fold, encoded]}


def _decode_moment(kind: Any, body: Any) -> Any:
    text, fold, zone = body
    moment = kind.fromisoformat(text).replace(fold=fold)
    if zone is None:
        return moment
    ((tag, about),) = zone.items()
    return moment.replace(tzinfo={"$timezone": _decode_timezone, "$zoneinfo": _decode_zoneinfo}[tag](about))


def _encode_timezone(zone: Any) -> Any:
    offset, *name = zone.__getinitargs__()
    return {"$timezone": [_encode_timedelta(offset)["$timedelta"], *name]}


def _decode_timezone(body: Any) -> dt.timezone:
    offset, *name = body
    return dt.timezone(_decode_timedelta(offset), *name)


def _decode_zoneinfo(key: Any) -> ZoneInfo:
    if not isinstance(key, str):
        raise TypeError("a zone without a name")
    return ZoneInfo(key)


def _encode_timedelta(value: Any) -> Any:
    return {"$timedelta": [value.days, value.seconds, value.microseconds]}


def _decode_timedelta(body: Any) -> dt.timedelta:
    days, seconds, microseconds = body
    return dt.timedelta(days, seconds, microseconds)


_PATHS = {
    kind.__name__: kind
    for kind in (pathlib.PosixPath, pathlib.PurePosixPath, pathlib.WindowsPath, pathlib.PureWindowsPath)
}


def _encode_path(path: Any) -> Any:
    return {"$path": [type(path).__name__, base64.b64encode(str(path).encode("utf-8", "surrogatepass")).decode()]}


def _decode_path(body: Any) -> Any:
    kind, text = body
    return _PATHS[kind](base64.b64decode(text, validate=True).decode("utf-8", "surrogatepass"))


def _encode_bytesio(value: Any) -> Any:
    if value.closed:
        return None
    return {"$bytesio": [base64.b64encode(value.getbuffer()).decode(), value.tell()]}


def _decode_bytesio(body: Any) -> io.BytesIO:
    data, position = body
    made = io.BytesIO(base64.b64decode(data, validate=True))
    made.seek(position)
    return made


_ENCODERS: dict[Any, Callable[[Any], Any]] = {
    dt.datetime: _encode_moment,
    dt.time: _encode_moment,
    dt.date: lambda value: {"$date": value.isoformat()},
    dt.timedelta: _encode_timedelta,
    dt.timezone: _encode_timezone,
    ZoneInfo: lambda zone: None if zone.key is None else {"$zoneinfo": zone.key},
    io.BytesIO: _encode_bytesio,
    **dict.fromkeys(_PATHS.values(), _encode_path),
}


# --- NumPy ---

_DTYPE = re.compile(r"[<>|](?:[biufcSU]\d{1,9}|[mM]8(?:\[\d{0,9}[A-Za-zμ]{1,7}\])?)")


def _encode_numpy(value: Any) -> Any:
    numpy = sys.modules.get("numpy")
    if numpy is None or not isinstance(value, numpy.ndarray | numpy.generic):
        return None
    dtype = value.dtype
    if dtype.kind not in "biufcmMSU" or not dtype.itemsize or dtype.metadata or not _DTYPE.fullmatch(dtype.str):
        return None
    if type(value) is numpy.ndarray:
        data = base64.b64encode(numpy.ascontiguousarray(value).tobytes()).decode()
        return {"$ndarray": [dtype.str, list(value.shape), data]}
    # A scalar type with another name for the same bits (longlong), or one that strips zeros (str_), is not restorable.
    if dtype.kind in "SU" or type(value) is not numpy.dtype(dtype.str).type:
        return None
    return {"$npscalar": [dtype.str, [], base64.b64encode(value.tobytes()).decode()]}


def _decode_numpy(body: Any) -> Any:
    import numpy as np

    dtype, shape, data = body
    if not _DTYPE.fullmatch(dtype):
        raise ValueError(f"dtype {dtype!r}")
    array = np.frombuffer(base64.b64decode(data, validate=True), dtype=dtype).reshape(shape).copy()
    return array.astype(array.dtype.newbyteorder("="), copy=False) if dtype[0] == "<" else array


# --- torch ---


def _encode_torch(value: Any) -> Any:
    torch = sys.modules.get("torch")
    if torch is None:
        return None
    kind = type(value)
    if kind in (torch.dtype, torch.layout, torch.memory_format):
        name = str(value).removeprefix("torch.")
        return {"$torch": name} if getattr(torch, name, None) is value else None
    if kind is torch.device:
        return {"$device": str(value)}
    if kind is torch.Size:
        return {"$size": list(value)} if all(type(item) is int for item in value) else None
    return None


def _decode_torch(name: Any) -> Any:
    torch = sys.modules.get("torch")
    if torch is None:
        return str(name)
    found = vars(torch).get(name)
    if type(found) not in (torch.dtype, torch.layout, torch.memory_format):
        raise ValueError(f"{name!r} is not a dtype")
    return found


def _decode_device(name: Any) -> Any:
    if not isinstance(name, str):
        raise TypeError("a device without a name")
    torch = sys.modules.get("torch")
    return name if torch is None else torch.device(name)


def _decode_size(sizes: Any) -> Any:
    if not all(type(size) is int for size in sizes):
        raise TypeError("a size that is not a number")
    torch = sys.modules.get("torch")
    return tuple(sizes) if torch is None else torch.Size(sizes)


DECODERS: dict[str, Callable[[Any], Any]] = {
    "$datetime": lambda body: _decode_moment(dt.datetime, body),
    "$time": lambda body: _decode_moment(dt.time, body),
    "$date": dt.date.fromisoformat,
    "$timedelta": _decode_timedelta,
    "$timezone": _decode_timezone,
    "$zoneinfo": _decode_zoneinfo,
    "$path": _decode_path,
    "$bytesio": _decode_bytesio,
    "$ndarray": _decode_numpy,
    "$npscalar": lambda body: _decode_numpy(body)[()],
    "$torch": _decode_torch,
    "$device": _decode_device,
    "$size": _decode_size,
}
