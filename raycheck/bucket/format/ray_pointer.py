"""Defines the pointer to a checkpoint that Ray receives: its run's URI and its name. Ray may copy and delete it."""

import json
from dataclasses import dataclass

from raycheck.bucket.format.document import FORMAT_VERSION, Document, load
from raycheck.bucket.format.object_keys import CheckpointName
from raycheck.errors import CorruptError

MAX_BYTES = 64 * 1024


@dataclass(frozen=True, kw_only=True, slots=True)
class Pointer(Document):
    """A pointer to the checkpoint named `key` in the run at `uri`."""

    format_version: int = FORMAT_VERSION
    uri: str
    key: str


def load_pointer(data: bytes, *, what: str) -> Pointer:
    """Parse a pointer. Raises CorruptError.

    Pointers of format version 1 have no `format_version`.
    """
    try:
        tree = json.loads(data) if len(data) <= MAX_BYTES else None
    except (ValueError, RecursionError) as error:
        raise CorruptError(f"{what} is not JSON: {error}") from None
    if isinstance(tree, dict) and "format_version" not in tree:
        data = json.dumps({"format_version": 1, **tree}).encode()
    found = load(Pointer, data, what=what, max_bytes=MAX_BYTES)
    if CheckpointName.parse(found.key) is None:
        raise CorruptError(f"{what} names {found.key!r}, which is not a checkpoint's name")
    return found
