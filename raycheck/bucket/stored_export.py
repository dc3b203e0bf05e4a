"""Reads and deletes a directory below `exports/` of a run."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from raycheck.bucket.format.object_keys import EXPORT_ENDS, exports_prefix
from raycheck.bucket.store import Store
from raycheck.errors import ConfigError

READ_BYTES = 4 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class StoredExport:
    """A directory below `exports/` of a run, such as `export_hf` writes.

    name: its name there. sizes: the bytes of each file, by file name; empty if there is no such directory.
    """

    name: str
    sizes: Mapping[str, int]
    _store: Store = field(repr=False, compare=False)

    @classmethod
    def at(cls, store: Store, name: str) -> "StoredExport":
        """List the directory of this name. Raises ConfigError for a name that leads elsewhere."""
        if name in ("", ".", "..") or "/" in name:
            raise ConfigError(f"{store}: {name!r} is not the name of a directory below exports/")
        prefix = exports_prefix(name)
        sizes = {item.key.removeprefix(prefix): item.size_bytes for item in store.list_objects(prefix)}
        return cls(name, dict(sorted(sizes.items())), store)

    @property
    def is_complete(self) -> bool:
        """Return whether it has the index or the configuration that an export writes last."""
        return not self.sizes.keys().isdisjoint(EXPORT_ENDS)

    def read(self, file: str) -> Iterator[bytes]:
        """Yield the bytes of a file. Raises NotFoundError when it is gone."""
        size = self.sizes[file]
        for start in range(0, size, READ_BYTES):
            yield bytes(self._store.get_range(self._key(file), start, min(start + READ_BYTES, size)))

    def signed_address(self, file: str, valid_s: int) -> str:
        """Return an HTTP address at which anyone may read a file for this long. Raises ConfigError if there is none."""
        return self._store.signed_address(self._key(file), valid_s)

    def delete(self) -> None:
        """Delete its files, first those without which no reader starts."""
        for file in sorted(self.sizes, key=lambda file: file not in EXPORT_ENDS):
            self._store.delete(self._key(file))

    def _key(self, file: str) -> str:
        return exports_prefix(self.name) + file
