"""The fastest bucket there is, for tests that run a protocol thousands of times."""

from collections.abc import Iterable, Iterator
from typing import Self

from raycheck.bucket.store.interface import Upload
from raycheck.bucket.store.memory import MemoryStore


class DictStore(MemoryStore):
    """Keeps a bucket in a dictionary of its own, with unfinished uploads, and a clock that only a test moves (`at`)."""

    def __init__(
        self, objects: dict[str, bytes] | None = None, uploads: Iterable[Upload] = (), at: float = 1e6
    ) -> None:
        super().__init__("dict://run", objects={} if objects is None else objects)
        self.uploads = list(uploads)
        self.at = at

    def copy(self) -> Self:
        return type(self)(dict(self.objects), self.uploads, self.at)

    def list_uploads(self, prefix: str) -> Iterator[Upload]:
        return iter([upload for upload in self.uploads if upload.key.startswith(prefix)])

    def abort_upload(self, upload: Upload) -> None:
        self.uploads = [item for item in self.uploads if item != upload]

    def _now(self) -> float:
        return self.at
