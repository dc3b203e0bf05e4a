"""Shows one folder of a store as a store of its own, through the same client.

A listing of a thousand runs would otherwise open a thousand clients, each with connections and credentials of its own.
"""

from collections.abc import Iterable, Iterator
from dataclasses import replace

from raycheck.bucket.store.address import folder_uri
from raycheck.bucket.store.interface import MAX_WHOLE_BYTES, Buffer, Got, Listed, Range, Store, Upload, Written
from raycheck.errors import ConfigError


class Subfolder(Store):
    """Keeps objects in the folder `name` of another store. Its errors name keys as that store does."""

    def __init__(self, store: Store, name: str) -> None:
        if name in ("", ".", "..") or "/" in name:  # clients resolve dots, and so would reach another folder
            raise ConfigError(f"{store}: {name!r} is no folder's name")
        self.uri = folder_uri(store.uri, name)
        self._store = store
        self._prefix = f"{name}/"

    def get(self, key: str, max_bytes: int = MAX_WHOLE_BYTES) -> Got:
        return self._store.get(self._prefix + key, max_bytes)

    def get_data(self, key: str, max_bytes: int = MAX_WHOLE_BYTES) -> bytes:
        return self._store.get_data(self._prefix + key, max_bytes)

    def get_range(self, key: str, start: int, stop: int) -> Buffer:
        return self._store.get_range(self._prefix + key, start, stop)

    def head(self, key: str) -> int:
        return self._store.head(self._prefix + key)

    def list_objects(self, prefix: str) -> Iterator[Listed]:
        for item in self._store.list_objects(self._prefix + prefix):
            yield replace(item, key=item.key.removeprefix(self._prefix))

    def list_names(self, prefix: str) -> list[str]:
        return self._store.list_names(self._prefix + prefix)

    def list_folders(self, prefix: str) -> Iterator[str]:
        return self._store.list_folders(self._prefix + prefix)

    def put(self, key: str, data: Buffer) -> None:
        self._store.put(self._prefix + key, data)

    def put_parts(self, key: str, parts: Iterable[memoryview], size_bytes: int) -> None:
        self._store.put_parts(self._prefix + key, parts, size_bytes)

    def part_bytes(self, size_bytes: int) -> int:
        return self._store.part_bytes(size_bytes)

    def put_assembled(
        self,
        key: str,
        parts: Iterable[Range | memoryview],
        size_bytes: int,
        crc: int | None = None,
        *,
        source: Store | None = None,
    ) -> bool:
        if source is not None:
            return self._store.put_assembled(self._prefix + key, parts, size_bytes, crc, source=source)
        placed = (replace(part, key=self._prefix + part.key) if isinstance(part, Range) else part for part in parts)
        return self._store.put_assembled(self._prefix + key, placed, size_bytes, crc)

    def states_checksum(self, key: str) -> bool:
        return self._store.states_checksum(self._prefix + key)

    def put_if_absent(self, key: str, data: bytes) -> Written:
        return self._store.put_if_absent(self._prefix + key, data)

    def put_if_match(self, key: str, data: bytes, version: str) -> Written:
        return self._store.put_if_match(self._prefix + key, data, version)

    def delete(self, key: str) -> None:
        self._store.delete(self._prefix + key)

    def list_uploads(self, prefix: str) -> Iterator[Upload]:
        for upload in self._store.list_uploads(self._prefix + prefix):
            yield replace(upload, key=upload.key.removeprefix(self._prefix))

    def upload_bytes(self, upload: Upload) -> int:
        return self._store.upload_bytes(replace(upload, key=self._prefix + upload.key))

    def abort_upload(self, upload: Upload) -> None:
        self._store.abort_upload(replace(upload, key=self._prefix + upload.key))
