"""Puts two runs into one simulated bucket, so that every fault can be tried on what they share."""

from collections.abc import Hashable, Iterable, Iterator

from raycheck.bucket.store.address import located
from raycheck.bucket.store.interface import MAX_WHOLE_BYTES, Buffer, Got, Listed, Store, Upload, Written

HOME = "runs/fork"
"""The run whose keys are those of the world. Those of another run begin with "elsewhere/" there."""


class Placed(Store):
    """Is the store of the run at `place`, a path in the bucket, on a wire or store whose keys are those of HOME."""

    def __init__(self, inner: Store, place: str) -> None:
        self.uri = f"dict://{place}"
        self.inner = inner
        self.place = place

    @property
    def bucket_id(self) -> Hashable:
        return "placed"

    @property
    def root_path(self) -> str:
        return self.place

    def _rerooted(self, way: str, uri: str) -> "Placed":
        del uri
        return Placed(self.inner, located(f"{self.place}/", way))

    def full(self, key: str) -> str:
        path = located(f"{self.place}/", key)
        if path.startswith(f"{HOME}/"):
            return path[len(HOME) + 1 :]
        return f"elsewhere/{path}"

    def get(self, key: str, max_bytes: int = MAX_WHOLE_BYTES) -> Got:
        return self.inner.get(self.full(key), max_bytes)

    def get_range(self, key: str, start: int, stop: int) -> Buffer:
        return self.inner.get_range(self.full(key), start, stop)

    def head(self, key: str) -> int:
        return self.inner.head(self.full(key))

    def list_objects(self, prefix: str) -> Iterator[Listed]:
        under = self.full(prefix)
        for item in self.inner.list_objects(under):
            if not under and item.key.startswith("elsewhere/"):
                continue
            yield Listed(prefix + item.key[len(under) :], item.size_bytes)

    def list_names(self, prefix: str) -> list[str]:
        under = self.full(prefix)
        return [name for name in self.inner.list_names(under) if under or name != "elsewhere"]

    def list_uploads(self, prefix: str) -> Iterator[Upload]:
        return self.inner.list_uploads(self.full(prefix))

    def put(self, key: str, data: Buffer) -> None:
        self.inner.put(self.full(key), data)

    def put_parts(self, key: str, parts: Iterable[memoryview], size_bytes: int) -> None:
        self.inner.put_parts(self.full(key), parts, size_bytes)

    def part_bytes(self, size_bytes: int) -> int:
        return self.inner.part_bytes(size_bytes)

    def put_if_absent(self, key: str, data: bytes) -> Written:
        return self.inner.put_if_absent(self.full(key), data)

    def put_if_match(self, key: str, data: bytes, version: str) -> Written:
        return self.inner.put_if_match(self.full(key), data, version)

    def delete(self, key: str) -> None:
        self.inner.delete(self.full(key))
