"""Reads and writes frozen dataclasses as JSON documents: types are checked, and a checksum seals the bytes.

Readers ignore fields they do not know, writers preserve them: each document keeps such fields in `unknown` and writes
them back. A body from the bucket is hostile until it has passed `load`: wrong types, depth or numbers raise
CorruptError with the path of the field.

The last field of a body, its seal, is the CRC-32 of all bytes before its eight digits. So a reader checks the bytes as
received, not a re-encoding of them, and no byte of a response can be corrupted unnoticed. Bodies of format version 1
have no seal.
"""

import json
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, field, fields
from functools import cache, partial
from types import NoneType, UnionType
from typing import Any, ClassVar, TypeVar, Union, cast, get_args, get_origin, get_type_hints

from raycheck.bucket.format.checksum import crc32
from raycheck.errors import CorruptError

FORMAT_VERSION = 5
FIRST_SEALED_VERSION = 2
_SEAL = re.compile(rb'"crc32"\s*:\s*"([0-9a-f]{8})"\s*\}\s*\Z')
_SEAL_BYTES = 64
"""The seal that raycheck writes has 24 bytes; other tools may put more white space around it."""
MAX_INT = 1 << 63
"""Integers in a document have at most 64 bits: they are below this, and at least its negative."""


class NewerFormatError(CorruptError):
    """A newer raycheck wrote the document: it is not damaged, and nobody may overwrite it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Document:
    """The base class of all documents.

    unknown: the fields that a newer writer added. is_long: the document has records of every rank, so it is written on
    one line, not with a line per field. when_true: fields that are omitted while they are False or None. renamed: the
    names that fields had in older format versions, and their names now.
    """

    is_long: ClassVar[bool] = False
    when_true: ClassVar[frozenset[str]] = frozenset()
    renamed: ClassVar[Mapping[str, str]] = {}
    unknown: Mapping[str, Any] = field(default_factory=dict, repr=False)


D = TypeVar("D", bound=Document)


def dump(document: Document) -> bytes:
    """Write a document as UTF-8 JSON with sorted keys: equal documents give equal bytes.

    A body, which is a document with a format version, is sealed.
    """
    tree = _to_json(document)
    assert isinstance(tree, dict), "a document is an object"
    text = (
        _in_pieces(tree) if document.is_long else json.dumps(tree, sort_keys=True, allow_nan=False, indent=1)
    ).encode()
    return seal(text) if "format_version" in _names(cast("Any", type(document))) else text


_ENCODER = json.JSONEncoder(sort_keys=True, allow_nan=False)


def _in_pieces(tree: Mapping[str, object]) -> str:
    """Write an object on one line, item by item: no other thread runs while one is written."""
    said = (
        f"{_ENCODER.encode(name)}: "
        + (f"[{', '.join(map(_ENCODER.encode, value))}]" if isinstance(value, list) else _ENCODER.encode(value))
        for name, value in sorted(tree.items())
    )
    return f"{{{', '.join(said)}}}"


def seal(text: bytes) -> bytes:
    """Add the checksum to a JSON object as its last field."""
    before = text.rstrip().removesuffix(b"}").rstrip() + b',\n "crc32": "'
    return before + f'{crc32(before):08x}"\n}}'.encode()


def load(cls: type[D], data: bytes, *, what: str, max_bytes: int) -> D:
    """Parse `data` as `cls`. The result has this raycheck's format version. what: the object's name, for errors.

    Raises CorruptError for anything that is not such a document, and for a higher format version, naming its number.
    """
    if len(data) > max_bytes:
        raise CorruptError(f"{what} has {len(data)} bytes, more than the {max_bytes} it may have")
    is_sealed = _check_seal(data, what)
    try:
        tree = json.loads(data, parse_constant=_refuse_constant, parse_float=_finite)
    except (ValueError, RecursionError) as error:
        raise CorruptError(f"{what} is not JSON: {error}") from None
    version = check_format_version(tree, what=what)
    if version >= FIRST_SEALED_VERSION and not is_sealed:
        raise CorruptError(f'{what} does not end with its checksum, a last field like "crc32": "0123abcd"')
    body = {name: value for name, value in tree.items() if name != "crc32"}
    try:
        return _parse_document(cls, body | {"format_version": FORMAT_VERSION})
    except _WrongError as error:
        raise CorruptError(f"{what}{error.where} {error.problem}") from None


def _check_seal(data: bytes, what: str) -> bool:
    """Return whether the body states its checksum. Raises CorruptError when its bytes have a different one."""
    start = max(0, len(data) - _SEAL_BYTES)
    found = _SEAL.search(data, start)
    if found is None:
        return False
    said, actual = found[1].decode(), f"{crc32(memoryview(data)[: found.start(1)]):08x}"
    if said != actual:
        raise CorruptError(
            f"{what} was changed: it states the checksum {said}, but has {actual}. If you have edited it by "
            f'hand, make its last field "crc32": "{actual}"'
        )
    return True


def check_format_version(tree: object, *, what: str) -> int:
    """Return the format version of a document, before any other field of it is trusted.

    Raises NewerFormatError, naming the number, for one that a newer raycheck wrote; CorruptError for one without a
    version.
    """
    version = tree.get("format_version") if isinstance(tree, dict) else None
    if not isinstance(version, int) or isinstance(version, bool) or version < 1:
        raise CorruptError(f"{what} has no format version")
    if version > FORMAT_VERSION:
        raise NewerFormatError(
            f"{what} has format version {version}; this raycheck reads up to {FORMAT_VERSION}. Install a newer raycheck"
        )
    return version


def _to_json(value: object) -> object:
    if type(value) in _SCALARS:
        return value
    if isinstance(value, Document):
        known = {name: getattr(value, name) for name in _names(cast("Any", type(value)))}
        said = {
            name: item if type(item) in _SCALARS else _to_json(item)
            for name, item in known.items()
            if item or name not in value.when_true
        }
        return {**value.unknown, **said}
    if isinstance(value, tuple | list):
        return [_to_json(item) for item in value]
    if isinstance(value, Mapping):
        return {key: _to_json(item) for key, item in value.items()}
    return value


_SCALARS = frozenset((str, int, float, bool, NoneType))


@cache
def _names(cls: Any) -> frozenset[str]:
    """Return the names of the fields that this raycheck knows."""
    return frozenset(spec.name for spec in fields(cls)) - {"unknown"}


class _WrongError(Exception):
    """A value is not what a document has there. where: the path to it; problem: what follows the path in the error."""

    def __init__(self, problem: str, where: str = "") -> None:
        super().__init__()
        self.where, self.problem = where, problem

    def below(self, step: str) -> "_WrongError":
        return _WrongError(self.problem, step + self.where)


_Parser = Callable[[Any], Any]


@cache
def _parser(expected: Any) -> _Parser:
    """Return the function that makes a value of this type from JSON, or raises _WrongError.

    A path is put together only for an error: most of the time of a parse would go into paths.
    """
    origin, arguments = get_origin(expected), get_args(expected)
    if len(_arms(expected)) > 1:
        return _one_of(arguments)
    if origin is tuple:
        return partial(_parse_list, _parser(arguments[0]), expected)
    if origin is Mapping:
        return partial(_parse_mapping, _parser(arguments[1]), expected)
    if isinstance(expected, type) and issubclass(expected, Document):
        return partial(_parse_document, expected)
    return _SCALAR_PARSERS[expected]


def _one_of(arms: tuple[Any, ...]) -> _Parser:
    parsers = {arm: _parser(arm) for arm in arms if arm is not NoneType}
    first = next(iter(parsers.values()))

    def parse(value: Any) -> Any:
        if value is None and NoneType in arms:
            return None
        return parsers.get(type(value), first)(value)

    return parse


def _parse_list(item_parser: _Parser, expected: Any, value: Any) -> tuple[Any, ...]:
    if type(value) is not list:
        raise _not_a(expected, value)
    found: list[Any] = []
    try:
        for item in value:
            found.append(item_parser(item))  # noqa: PERF401  its length is the place of a wrong item
    except _WrongError as error:
        raise error.below(f"[{len(found)}]") from None
    return tuple(found)


def _parse_mapping(item_parser: _Parser, expected: Any, value: Any) -> dict[str, Any]:
    if type(value) is not dict:
        raise _not_a(expected, value)
    found: dict[str, Any] = {}
    key = ""
    try:
        for key, item in value.items():
            found[key] = item_parser(item)
    except _WrongError as error:
        raise error.below(f".{key}") from None
    return found


def _parse_int(value: Any) -> int:
    if type(value) is not int:
        raise _not_a(int, value)
    if not -MAX_INT <= value < MAX_INT:
        raise _WrongError("is a number of more than 64 bits")
    return value


def _parse_float(value: Any) -> float:
    if type(value) is int and abs(value) < 1 << 1023:
        return float(value)
    if type(value) is not float:
        raise _not_a(float, value)
    if not math.isfinite(value):
        raise _WrongError("is not a finite number")
    return value


def _parse_exactly(expected: type, value: Any) -> Any:
    if type(value) is not expected:
        raise _not_a(expected, value)
    return value


def _not_a(expected: Any, value: object) -> _WrongError:
    return _WrongError(f"is not {getattr(expected, '__name__', expected)}: {str(value)[:80]!r}")


_SCALAR_PARSERS: Mapping[Any, _Parser] = {
    Any: lambda value: value,
    int: _parse_int,
    float: _parse_float,
    str: partial(_parse_exactly, str),
    bool: partial(_parse_exactly, bool),
}
_HARMLESS = frozenset((str, bool, NoneType))


def _parse_document(cls: type[D], value: Any) -> D:
    if type(value) is not dict:
        raise _not_a(cls, value)
    if cls.renamed:
        value = {cls.renamed.get(name, name): item for name, item in value.items()}
    known: dict[str, Any] = {}
    for name, parser, harmless, is_required in _expected(cast("Any", cls)):
        item = value.get(name, MISSING)
        if type(item) in harmless:  # most fields
            known[name] = item
        elif item is not MISSING:
            try:
                known[name] = parser(item)
            except _WrongError as error:
                raise error.below(f".{name}") from None
        elif is_required:
            raise _WrongError(f"lacks the field {name!r}")
    if len(known) < len(value):
        known["unknown"] = {key: item for key, item in value.items() if key not in known}
    return cls(**known)


def _arms(expected: Any) -> tuple[Any, ...]:
    return get_args(expected) if get_origin(expected) in (Union, UnionType) else (expected,)


@cache
def _expected(cls: Any) -> tuple[tuple[str, _Parser, frozenset[Any], bool], ...]:
    """Return each known field: its name, its parser, which of its types accept any value, and whether a document must
    have it."""
    hints = get_type_hints(cls)
    return tuple(
        (
            spec.name,
            _parser(hints[spec.name]),
            _HARMLESS.intersection(_arms(hints[spec.name])),
            spec.default is MISSING and spec.default_factory is MISSING,
        )
        for spec in fields(cls)
        if spec.name != "unknown"
    )


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text} is not a finite number")
    return value


def _refuse_constant(text: str) -> object:
    raise ValueError(f"{text} is not JSON")
