"""Writes Python values as JSON and reads them back, without loss and without pickle.

Plain JSON turns tuples into lists and keys into strings, and refuses inf; that breaks MultiStepLR, SequentialLR,
ReduceLROnPlateau and `random.setstate`. So a value that JSON cannot express is tagged `{"$kind": ...}`. A value is
restored with its exact type and bits. A type that is not known exactly, such as a subclass of a known one, is refused
with its path in the state, so the user learns which object it is before anything is saved.
"""

import base64
import json
import math
import re
import struct
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from types import NoneType
from typing import Any

from raycheck.bucket.format import class_values, library_values
from raycheck.bucket.format.class_values import FindClass
from raycheck.errors import ConfigError, CorruptError, RaycheckError, StateMismatchError

MAX_DEPTH = 100


NameTensor = Callable[[object, str], str | None]
"""Takes a leaf and its path. Returns the name under which that tensor is stored, None when it is not a tensor."""
NoteClass = Callable[[type, str], None]
"""Takes the class of a value and the value's path. Raises ConfigError when a restore could not find that class."""


def encode(
    value: object,
    path: str,
    tensor: NameTensor = lambda _value, _path: None,
    *,
    note: NoteClass = lambda _kind, _path: None,
) -> Any:
    """Write `value` as a JSON tree. Paths are joined with "." as DCP's names are.

    tensor: names the tensors. note: is called with every value's class. Raises ConfigError, which names the path, for
    an object that cannot be stored.
    """
    return _Encoder(tensor, note).tree(value, path, 0, is_key=False)


def decode(tree: object, tensor: Callable[[str], object], find: FindClass = lambda _name: None) -> Any:
    """Read the value of a tree that `encode` wrote.

    tensor: returns the tensor for a name. find: returns the class for a name; without it, values of a user's own
    classes become plain structures: an enum member its value, a dataclass a dict, a named tuple a tuple. Raises
    CorruptError on a foreign tree, StateMismatchError for a class that has changed since the save.
    """
    return _Decoder(tensor, find).value(tree, 0, is_key=False)


@dataclass(frozen=True, slots=True)
class _Encoder:
    tensor: NameTensor
    note: NoteClass

    def tree(self, value: Any, path: str, depth: int, *, is_key: bool) -> Any:
        """Write one value. is_key: the value is a key or a set's member, so a reader computes its hash."""
        if depth > MAX_DEPTH:
            raise ConfigError(f"state at {path} is nested deeper than {MAX_DEPTH} levels")
        if _is_plain(value):
            return value
        kind = type(value)
        if kind is list:
            return self._each(value, path, depth, is_key=is_key)
        if kind is dict:
            if all(type(key) is str and not key.startswith("$") and _is_plain(key) for key in value):
                return {key: self.tree(item, f"{path}.{key}", depth + 1, is_key=False) for key, item in value.items()}
            return {"$dict": self._pairs(value, path, depth)}
        if kind is tuple:
            return {"$tuple": self._each(value, path, depth, is_key=is_key)}
        if kind is set or kind is frozenset:
            return {f"${kind.__name__}": self._each(sorted(value, key=_text_of), path, depth, is_key=True)}
        if kind is Counter or kind is OrderedDict:
            return {f"${kind.__name__.lower()}": self._pairs(value, path, depth)}
        if kind is deque:
            return {"$deque": [value.maxlen, self._each(value, path, depth, is_key=False)]}
        name = self.tensor(value, path)
        if name is not None:
            return {"$tensor": name}
        found = _encode_scalar(value) or library_values.encode(value)
        if found is not None:
            return found
        return self._other_container(value, path, depth, is_key=is_key)

    def _other_container(self, value: Any, path: str, depth: int, *, is_key: bool) -> Any:
        """Write a defaultdict, or a value of the user's own class. Raises ConfigError for any other value."""
        factory = library_values.factory_of(value)
        if factory is not None:
            return {"$defaultdict": [*factory, self._pairs(value, path, depth)]}
        tag, kind = class_values.tag_of(value), type(value)
        if tag is None or (is_key and not class_values.is_hashed_inertly(kind)):
            raise ConfigError(
                f"state at {path} is a {kind.__module__}.{kind.__qualname__}, which cannot be saved without pickle. "
                "Give it state_dict/load_state_dict, or keep it as numbers, strings, lists, dicts or tensors"
            )
        self.note(kind, path)
        name = class_values.name_of(kind)
        if tag == "$enum":
            return {tag: [name, *self._member(value, path, depth)]}
        form = class_values.form_of(value)
        if tag == "$namedtuple":
            pairs = zip(form, value, strict=True)
            return {tag: [name, form, [self.tree(v, f"{path}.{n}", depth + 1, is_key=is_key) for n, v in pairs]]}
        attributes = class_values.attributes_of(value)
        return {tag: [name, form, self.tree(attributes, path, depth + 1, is_key=False)]}

    def _member(self, value: Any, path: str, depth: int) -> list[Any]:
        """Return name and value of an enum's member.

        The value is for readers without the class. One that cannot be stored, such as a function, is omitted.
        """
        name = value.name if type(value).__members__.get(value.name) is value else None
        try:
            return [name, self.tree(value.value, path, depth + 1, is_key=False)]
        except ConfigError:
            return [name]

    def _each(self, items: Iterable[object], path: str, depth: int, *, is_key: bool) -> list[Any]:
        is_flat = depth < MAX_DEPTH
        return [
            item if is_flat and _is_plain(item) else self.tree(item, f"{path}.{i}", depth + 1, is_key=is_key)
            for i, item in enumerate(items)
        ]

    def _pairs(self, items: Mapping[Any, object], path: str, depth: int) -> list[Any]:
        return [
            [
                self.tree(key, f"{path}.key", depth + 1, is_key=True),
                self.tree(item, f"{path}.{_text_of(key, str)}", depth + 1, is_key=False),
            ]
            for key, item in items.items()
        ]


def _text_of(value: object, say: Callable[[object], str] = repr) -> str:
    """Return the text by which a key or a set's member is named: equal values have one text in every process.

    A frozenset prints its members in an order that differs between processes and between equal sets, and Python refuses
    to print the longest integers. Both are named by their JSON.
    """
    try:
        text = say(value)
    except ValueError:
        return json.dumps(encode(value, "a long number"))
    is_unordered = type(value) is not str and "frozenset(" in text
    return json.dumps(encode(value, "a set")) if is_unordered else text


_MAX_INT = 1 << 10_000
"""Python refuses to read integers much longer than this from JSON."""
_JOINED = re.compile("[\ud800-\udbff][\udc00-\udfff]")
"""Two surrogates that JSON would read as one character."""


def _is_plain(value: Any) -> bool:
    """Return whether JSON expresses this value exactly."""
    kind = type(value)
    if kind is str:
        return bool(value.isascii() or not _JOINED.search(value))
    if kind is int:
        return bool(-_MAX_INT < value < _MAX_INT)
    if kind is float:
        return math.isfinite(value)
    return kind is bool or kind is NoneType


def _encode_scalar(value: Any) -> Any:
    """Write a scalar of Python that JSON lacks. Return None for other values."""
    kind = type(value)
    if kind is float:
        bits = struct.pack(">d", value).hex()
        return {"$float": f"nan:{bits}" if math.isnan(value) and bits != _NAN else repr(value)}
    if kind is bytes or kind is bytearray:
        return {f"${kind.__name__}": base64.b64encode(value).decode()}
    if kind is complex:
        parts = (value.real, value.imag)
        return {"$complex": [part if _is_plain(part) else _encode_scalar(part) for part in parts]}
    if kind is int:
        return {"$int": hex(value)}
    if kind is str:
        return {"$str": base64.b64encode(value.encode("utf-8", "surrogatepass")).decode()}
    return None


_NAN = struct.pack(">d", math.nan).hex()


@dataclass(frozen=True, slots=True)
class _Decoder:
    tensor: Callable[[str], object]
    find: FindClass

    def value(self, tree: Any, depth: int, *, is_key: bool) -> Any:
        if depth > MAX_DEPTH:
            raise CorruptError(f"a value is nested deeper than {MAX_DEPTH} levels")
        if isinstance(tree, list):
            return self._each(tree, depth, is_key=is_key)
        if not isinstance(tree, dict):
            return tree
        tag = next(iter(tree), "")
        if not tag.startswith("$"):
            return {key: self.value(item, depth + 1, is_key=False) for key, item in tree.items()}
        try:
            return self._tagged(tag, tree[tag], depth, is_key=is_key)
        except RaycheckError:
            raise
        except (TypeError, ValueError, KeyError, IndexError, OverflowError, AttributeError, RuntimeError) as error:
            raise CorruptError(f"a {tag} value is malformed: {error}") from None

    def _tagged(self, tag: str, body: Any, depth: int, *, is_key: bool) -> Any:
        if tag == "$tensor":
            return self.tensor(body)
        if tag in _SCALARS:
            return _SCALARS[tag](body)
        if tag == "$tuple":
            return tuple(self._each(body, depth, is_key=is_key))
        if tag in ("$set", "$frozenset"):
            items = self._each(body, depth, is_key=True)
            return set(items) if tag == "$set" else frozenset(items)
        if tag == "$deque":
            return deque(self._each(body[1], depth, is_key=False), maxlen=body[0])
        if tag == "$dict":
            return self._pairs(body, depth)
        if tag in ("$counter", "$ordereddict"):
            return (Counter if tag == "$counter" else OrderedDict)(self._pairs(body, depth))
        if tag == "$defaultdict":
            return library_values.defaultdict_of(body[:-1], self._pairs(body[-1], depth))
        if tag in class_values.CLASS_TAGS:
            return self._of_class(tag, *body, depth=depth, is_key=is_key)
        if tag in library_values.DECODERS:
            return library_values.DECODERS[tag](body)
        raise CorruptError(f"a value has the unknown kind {tag[:40]!r}")

    def _of_class(self, tag: str, name: Any, form: Any, body: Any = None, *, depth: int, is_key: bool) -> Any:
        """Read a value of a user's own class. form: the name of an enum's member, otherwise the fields of the class."""
        kind = self.find(name) if isinstance(name, str) else None
        if is_key and kind is not None and not class_values.is_hashed_inertly(kind):
            raise CorruptError(f"a key is a {name[:80]}")
        if tag == "$namedtuple":
            items = self._each(body, depth, is_key=is_key)
            return tuple(items) if kind is None else class_values.named_tuple(kind, form, items)
        value = self.value(body, depth + 1, is_key=is_key)
        if tag == "$dataclass":
            return value if kind is None else class_values.dataclass_instance(kind, form, value)
        if kind is None:
            return form if body is None else value
        member = class_values.enum_member(kind, form, value)
        if body is not None and not _is_same(member.value, body):
            raise StateMismatchError(f"{name}.{member.name} has another value here than when saved")
        return member

    def _each(self, items: Any, depth: int, *, is_key: bool) -> list[Any]:
        return [self.value(item, depth + 1, is_key=is_key) for item in items]

    def _pairs(self, items: Any, depth: int) -> dict[Any, Any]:
        return {
            self.value(key, depth + 1, is_key=True): self.value(item, depth + 1, is_key=False) for key, item in items
        }


def _is_same(value: object, tree: Any) -> bool:
    try:
        return json.dumps(encode(value, "")) == json.dumps(tree)
    except ConfigError:
        return False


def _decode_float(text: Any) -> float:
    if re.fullmatch("nan:[0-9a-f]{16}", text):
        (value,) = struct.unpack(">d", bytes.fromhex(text[4:]))
        if not math.isnan(value):
            raise ValueError("a number that is not nan")
        return float(value)
    return {"inf": math.inf, "-inf": -math.inf, "nan": math.nan}[text]


def _decode_complex(parts: Any) -> complex:
    real, imaginary = (_decode_float(part["$float"]) if isinstance(part, dict) else part for part in parts)
    return complex(real, imaginary)


_SCALARS: dict[str, Callable[[Any], Any]] = {
    "$float": _decode_float,
    "$complex": _decode_complex,
    "$int": lambda text: int(text, 16),
    "$str": lambda text: base64.b64decode(text, validate=True).decode("utf-8", "surrogatepass"),
    "$bytes": lambda text: base64.b64decode(text, validate=True),
    "$bytearray": lambda text: bytearray(base64.b64decode(text, validate=True)),
}
