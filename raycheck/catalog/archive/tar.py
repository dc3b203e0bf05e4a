"""Writes and reads tar files as streams: the only module that knows the layout of members.

`tarfile` makes and parses every header. Its own stream modes are not used. "w|" pushes bytes into a file, while stores
and HTTP responses pull them and need the length first. "r|" allocates as much memory as a malicious header asks for,
and skips the bytes between members and after the end, so a change there would go unnoticed.
"""

import io
import tarfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from raycheck.bucket.store.interface import Buffer
from raycheck.catalog.archive.files import ArchiveStream
from raycheck.errors import CorruptError

BLOCK = tarfile.BLOCKSIZE
END = bytes(2 * BLOCK)
MAX_PADDING = 1 << 20
"""The maximum number of zero bytes after the end mark: tar pads to a record of 10,240 bytes or of a chosen size."""
MAX_EXTENDED_HEADER = 4096
"""The maximum size of a pax header, which states names over 100 bytes and sizes of 8 GiB and more."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TarStream:
    """A tar file of regular files, written as a stream whose length is known in advance.

    sizes: the size of each file in bytes, by name, in their order. modified_at: the time that tar shows, in seconds
    since 1970.
    """

    sizes: Mapping[str, int]
    modified_at: int = 0

    @property
    def size_bytes(self) -> int:
        """Return the total number of bytes that `chunks` yields."""
        members = (len(self._header(name)) + size + -size % BLOCK for name, size in self.sizes.items())
        return sum(members) + len(END)

    def chunks(self, contents: Iterable[Iterable[Buffer]]) -> Iterator[Buffer]:
        """Yield the tar file. contents: the bytes of each file, which must have the size that was stated."""
        for (name, size), content in zip(self.sizes.items(), contents, strict=True):
            yield self._header(name)
            yield from content
            yield bytes(-size % BLOCK)
        yield END

    def _header(self, name: str) -> bytes:
        """Return a file's header, of one block or with a pax header before it."""
        info = tarfile.TarInfo(name)
        info.size, info.mtime, info.mode = self.sizes[name], self.modified_at, 0o644
        return info.tobuf(tarfile.PAX_FORMAT, "utf-8", "strict")


@dataclass(frozen=True, slots=True)
class TarReader:
    """The members of an untrusted tar file, read in order.

    Ask for `next_file`, then `content`, and so on; at last `check_end`. Each raises CorruptError for anything but
    regular files with zeros between them. A header is parsed from a bounded number of bytes, and its name is only
    returned.
    """

    stream: ArchiveStream

    def next_file(self, expected: str) -> tuple[str, int]:
        """Return the name and size of the next file. expected: its name in errors."""
        what = self.stream.what
        data = self.stream.read(BLOCK)
        try:
            info = tarfile.TarInfo.frombuf(data, "utf-8", "strict")
            if info.type == tarfile.XHDTYPE:
                if not 0 < info.size <= MAX_EXTENDED_HEADER:
                    raise CorruptError(f"{what}: the header of {expected} has {info.size} bytes, too many")
                data += self.stream.read(info.size + -info.size % BLOCK + BLOCK)
                info = _with_extended_header(data)
        except (tarfile.TarError, ValueError, ArithmeticError, LookupError) as error:
            raise CorruptError(f"{what}: no header of {expected}, where it must be: {error}") from None
        is_sparse = info.issparse() or any(key.startswith("GNU.sparse") for key in info.pax_headers)
        if info.type not in (tarfile.REGTYPE, tarfile.AREGTYPE) or is_sparse:
            raise CorruptError(f"{what}: {info.name[:120]!r} is a link, a folder, or otherwise not a regular file")
        return info.name, info.size

    def content(self, size: int) -> Iterator[memoryview]:
        """Yield the `size` bytes of the file whose header was read."""
        yield from self.stream.take(size)
        self._check_zeros(-size % BLOCK)

    def check_end(self) -> None:
        """Raise CorruptError if another member follows or the end mark is missing."""
        self._check_zeros(len(END))
        count = 0
        for piece in self.stream.all():
            count += len(piece)
            if count > MAX_PADDING or any(piece):
                raise CorruptError(f"{self.stream.what}: there are bytes after the end of the archive")

    def _check_zeros(self, count: int) -> None:
        if any(self.stream.read(count)):
            raise CorruptError(f"{self.stream.what}: there are bytes between its members")


def _with_extended_header(data: bytes) -> tarfile.TarInfo:
    """Parse a pax header and the header that follows it. Raises TarError for anything else."""
    with tarfile.open(fileobj=io.BytesIO(data), mode="r:") as archive:
        info = archive.next()
    if info is None or info.offset_data != len(data):
        raise tarfile.ReadError("the header is of another kind")
    return info
