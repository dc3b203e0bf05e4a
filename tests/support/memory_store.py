"""The fastest bucket there is, for tests that run a protocol thousands of times."""

import hashlib
from collections.abc import Iterable, Iterator
from typing import Self

from raycheck.bucket.store.interface import (
    MAX_WHOLE_BYTES,
    Buffer,
    Got,
    Listed,
    Store,
    Upload,
    check_conditional_size,
    check_length,
    check_whole,
)
from raycheck.errors import ConflictError, NotFoundError


class DictStore(Store):
    """A bucket in a dictionary, with a clock that stands still until a test moves `at`.

    Equal bytes have equal versions, as on stores whose ETag is the content's MD5: the worst case for compare-and-swap.
    """

    def __init__(
        self, objects: dict[str, bytes] | None = None, uploads: Iterable[Upload] = (), at: float = 1e6
    ) -> None:
        self.uri = "dict://run"
        self.objects = objects or {}
        self.uploads = list(uploads)
        self.at = at

    def copy(self) -> Self:
        return type(self)(self.objects.copy(), self.uploads, self.at)

    def get(self, key: str, max_bytes: int = MAX_WHOLE_BYTES) -> Got:
        data = self._there(key)
        check_whole(self.uri, key, len(data), max_bytes)
        return Got(data, hashlib.blake2b(data, digest_size=16).hexdigest(), self.at)

    def get_range(self, key: str, start: int, stop: int) -> bytes:
        return check_length(self.uri, key, self._there(key)[start:stop], start, stop)

    def head(self, key: str) -> int:
        return len(self._there(key))

    def list_objects(self, prefix: str) -> Iterator[Listed]:
        return iter([Listed(key, len(data)) for key, data in self.objects.items() if key.startswith(prefix)])

    def list_names(self, prefix: str) -> list[str]:
        below = (key[len(prefix) :].partition("/") for key in self.objects if key.startswith(prefix))
        return sorted({name for name, slash, _ in below if slash})

    def put(self, key: str, data: Buffer) -> None:
        self.objects[key] = bytes(data)

    def put_parts(self, key: str, parts: Iterable[memoryview], size_bytes: int) -> None:
        del size_bytes
        self.put(key, b"".join(parts))

    def part_bytes(self, size_bytes: int) -> int:
        return max(size_bytes, 1)

    def put_if_absent(self, key: str, data: bytes) -> None:
        check_conditional_size(key, data)
        if key in self.objects:
            raise ConflictError(f"{key} exists")
        self.objects[key] = data

    def put_if_match(self, key: str, data: bytes, version: str) -> None:
        check_conditional_size(key, data)
        if key not in self.objects or self.get(key).version != version:
            raise ConflictError(f"{key} is another version")
        self.objects[key] = data

    def delete(self, key: str) -> None:
        self.objects.pop(key, None)

    def list_uploads(self, prefix: str) -> Iterator[Upload]:
        return iter([upload for upload in self.uploads if upload.key.startswith(prefix)])

    def abort_upload(self, upload: Upload) -> None:
        self.uploads = [item for item in self.uploads if item != upload]

    def _there(self, key: str) -> bytes:
        try:
            return self.objects[key]
        except KeyError:
            raise NotFoundError(f"{self.uri}: no object {key}") from None
