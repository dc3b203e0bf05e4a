"""Takes values of a user's own classes apart and reassembles them: enum members, dataclasses and named tuples.

A bucket only names a class; it never provides one. The reader looks it up among the classes of the live state or those
that this process has already loaded, and imports nothing. Reassembling a value runs no code of the class: no
constructor, no `__post_init__`, no `__setattr__`. Classes that could run code later on their own (`__del__`, the hash
of a dataclass) are refused by writer and reader. So is a class whose fields have changed since the save.
"""

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from enum import Enum, Flag
from types import MemberDescriptorType, ModuleType
from typing import Any

from raycheck.errors import StateMismatchError

FindClass = Callable[[str], type | None]
"""Find the class for a name. Return None when the reader has none and uses the plain structure. Raise
StateMismatchError for a class that should exist here and is missing."""

CLASS_TAGS = ("$enum", "$dataclass", "$namedtuple")


def name_of(kind: type) -> str:
    return f"{kind.__module__}:{kind.__qualname__}"


def loaded(name: str) -> type | None:
    """Return the class with this name among those that this process has loaded. Import nothing, and call no module."""
    module, _, path = name.partition(":")
    found: object = sys.modules.get(module)
    for step in path.split("."):
        if not isinstance(found, ModuleType | type):
            return None
        space = vars(found) if isinstance(found, type) else object.__getattribute__(found, "__dict__")
        found = space.get(step)
    return found if isinstance(found, type) and name_of(found) == name else None


def tag_of(value: object) -> str | None:
    """Return which of CLASS_TAGS a value is written under, None when it cannot be reassembled."""
    kind: Any = type(value)
    if isinstance(value, Enum):
        return "$enum" if kind.__members__.get(value.name) is value or _is_combined(value) else None
    if isinstance(value, tuple):
        is_bare = not kind.__dictoffset__ or not object.__getattribute__(value, "__dict__")
        return "$namedtuple" if _is_namedtuple(kind) and is_bare else None
    return "$dataclass" if _is_passive_dataclass(kind) else None


def is_hashed_inertly(kind: type) -> bool:
    """Return whether a value of this class may be a key: its hash is computed while reading, and must run no code."""
    return issubclass(kind, Enum) or (
        issubclass(kind, tuple) and kind.__hash__ is tuple.__hash__ and kind.__eq__ is tuple.__eq__
    )


def form_of(value: object) -> list[str]:
    """Return the fields of the value's class, in order: they must be the same at the restore."""
    return _form(type(value))


def attributes_of(value: object) -> dict[str, object]:
    """Return all attributes of a dataclass instance.

    This includes those beyond its fields, since no `__post_init__` creates them again at the restore.
    """
    found = {}
    for name, slot in _slots(type(value)).items():
        try:
            found[name] = slot.__get__(value)
        except AttributeError:
            continue  # a slot without a value
    return found | (object.__getattribute__(value, "__dict__") if type(value).__dictoffset__ else {})


def enum_member(kind: type, member: str | None, value: object) -> Enum:
    """Return the member of this name; without a name, the combination of flags with this value."""
    if not issubclass(kind, Enum):
        raise StateMismatchError(f"{name_of(kind)} is not an enum here, but was one when saved")
    if member is None and issubclass(kind, Flag) and type(value) is int and _is_passive_flag(kind):
        return kind(value)
    found = kind.__members__.get(member or "")
    if found is None:
        raise StateMismatchError(f"{name_of(kind)} has no member {member!r} here, which was saved")
    return found


def named_tuple(kind: type, form: Sequence[str], items: Sequence[object]) -> object:
    if not issubclass(kind, tuple) or not _is_namedtuple(kind):
        raise StateMismatchError(f"{name_of(kind)} is not a named tuple here, but was one when saved")
    _refuse_other_form(kind, form)
    if len(items) != len(form):
        raise ValueError("a field without a value")
    return tuple.__new__(kind, items)


def dataclass_instance(kind: type, form: Sequence[str], attributes: Mapping[str, object]) -> object:
    if not _is_passive_dataclass(kind):
        raise StateMismatchError(f"{name_of(kind)} is not a plain dataclass here, but was one when saved")
    _refuse_other_form(kind, form)
    made: object = object.__new__(kind)
    set_attributes(made, attributes)
    return made


def set_attributes(instance: object, attributes: Mapping[str, object]) -> None:
    """Set these attributes of a dataclass instance without calling its `__setattr__`. Others are unchanged."""
    slots = _slots(type(instance))
    for name, value in attributes.items():
        if type(name) is not str:
            raise TypeError("an attribute without a name")
        if name in slots:
            slots[name].__set__(instance, value)
        else:
            object.__getattribute__(instance, "__dict__")[name] = value


def _refuse_other_form(kind: type, form: Sequence[str]) -> None:
    here = _form(kind)
    if here != list(form):
        raise StateMismatchError(
            f"{name_of(kind)} has the fields {', '.join(here)} here, and {', '.join(map(str, form))} when saved"
        )


def _form(kind: Any) -> list[str]:
    return list(kind._fields) if issubclass(kind, tuple) else [field.name for field in fields(kind)]


def _is_namedtuple(kind: Any) -> bool:
    form = getattr(kind, "_fields", None)
    return isinstance(form, tuple) and all(type(name) is str for name in form) and not _has_finalizer(kind)


def _is_passive_dataclass(kind: Any) -> bool:
    """Return whether an instance can be created without running code of its class."""
    plain: Any = kind
    if not is_dataclass(kind) or _has_finalizer(plain):
        return False
    try:
        object.__new__(plain)
    except TypeError:  # a subclass of dict, Exception and the like
        return False
    return True


def _has_finalizer(kind: type) -> bool:
    return any("__del__" in vars(base) for base in kind.__mro__)


def _is_combined(value: Enum) -> bool:
    return isinstance(value, Flag) and type(value.value) is int and _is_passive_flag(type(value))


def _is_passive_flag(kind: type[Flag]) -> bool:
    return getattr(kind._missing_, "__func__", None) is getattr(Flag._missing_, "__func__", None)


def _slots(kind: type) -> dict[str, Any]:
    return {
        name: member
        for base in reversed(kind.__mro__)
        for name, member in vars(base).items()
        if isinstance(member, MemberDescriptorType)
    }
