"""Opens the file of an archive for reading or writing: a path, a URI in any store, or a stream such as stdin.

Paths and URIs are objects of a store: a file appears completely, by a rename or a completed upload, or not at all.
Compression is detected from the first bytes. A malicious stream can decompress to any length, so its decompressed size
is limited by the bytes actually received, in addition to the sizes that the archive states.
"""

from collections.abc import Generator, Iterable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import IO
from urllib.parse import unquote

from raycheck.bucket.store import Store, open_store
from raycheck.bucket.store.address import kind_of, parse_uri
from raycheck.bucket.store.interface import Buffer
from raycheck.bucket.store.read_ahead import Spans, put_stream, read_ahead
from raycheck.errors import ConfigError, CorruptError, NotFoundError
from raycheck.storage_settings import StorageSettings

ZSTD_MAGIC = b"\x28\xb5\x2f\xfd"
ZSTD_LEVEL, ZSTD_THREADS = 3, 4
MAX_WINDOW_BYTES = 1 << 27
READ_BYTES = 1024 * 1024
ROOM_BYTES, BYTES_PER_BYTE = 1 << 30, 1024
"""Compressed data may decompress to this many bytes, and to this many more for each byte received."""
_PIECE_BYTES = 2048
"""How many bytes to decompress at a time: zstd turns four bytes into at most 128 KiB, so this many into 64 MiB."""


@dataclass(frozen=True, slots=True)
class Place:
    """An object, by its store and key."""

    store: Store
    key: str

    @staticmethod
    def of(file: str, storage: StorageSettings | None, *, beside: str) -> "Place":
        """Return the place of a path or URI. Raises ConfigError if it does not name a file.

        storage: the settings for the store of the URI `beside`; they serve for `file` too if it is of the same kind.
        """
        if "://" not in file:
            path = Path(file).absolute()
            return Place(open_store(str(path.parent)), path.name)
        base, mark, query = file.partition("?")
        folder, _, name = base.rpartition("/")
        if not name or not parse_uri(file).prefix.strip("/"):
            raise ConfigError(f"{base}: name a file, as in s3://bucket/archives/my-run.tar or my-run.tar")
        settings = storage if kind_of(file) == kind_of(beside) else None
        return Place(open_store(f"{folder}{mark}{query}", settings), unquote(name))

    def __str__(self) -> str:
        return f"{str(self.store).rstrip('/')}/{self.key}"


def write_file(place: Place, chunks: Iterable[Buffer], size_bytes: int | None) -> None:
    """Write a new file. size_bytes: None if unknown, which only a local file allows."""
    check_free(place)
    if size_bytes is None and kind_of(place.store.uri) != "file":
        raise ConfigError(
            f"{place}: the size of compressed data is not known in advance; write it to a local file or to a pipe"
        )
    put_stream(place.store, place.key, chunks, size_bytes or 0)


def check_free(place: Place) -> None:
    """Raise ConfigError if the file exists."""
    try:
        place.store.head(place.key)
    except NotFoundError:
        return
    raise ConfigError(f"{place} exists; name a new file, or delete that one first")


class ArchiveStream:
    """A stream of bytes, read once from beginning to end.

    what: its name in errors. size_bytes: its length, if known.
    """

    def __init__(self, chunks: Iterator[Buffer], *, what: str, size_bytes: int | None = None) -> None:
        self.what = what
        self.size_bytes = size_bytes
        self._chunks = chunks
        self._rest = memoryview(b"")

    def take(self, size: int) -> Iterator[memoryview]:
        """Yield the next `size` bytes. Raises CorruptError if there are fewer."""
        while size:
            piece = self.some()[:size]
            if not piece:
                raise CorruptError(f"{self.what} is cut short: {size} bytes are missing where it ends")
            self._rest = self._rest[len(piece) :]
            size -= len(piece)
            yield piece

    def read(self, size: int) -> bytes:
        """Return the next bytes, exactly `size`."""
        return b"".join(self.take(size))

    def begins_with(self, magic: bytes) -> bool:
        """Return whether these bytes come next, without consuming them."""
        while len(self.some()) < len(magic) and (more := next(self._chunks, None)) is not None:
            self._rest = memoryview(bytes(self._rest) + bytes(more))
        return self._rest[: len(magic)] == magic

    def all(self) -> Iterator[memoryview]:
        """Yield all bytes to the end of the stream."""
        while piece := self.some():
            self._rest = memoryview(b"")
            yield piece

    def some(self) -> memoryview:
        """Return some of the next bytes without consuming them: at least one, unless the stream is at its end."""
        while not self._rest:
            chunk = next(self._chunks, None)
            if chunk is None:
                break
            self._rest = memoryview(chunk).cast("B")
        return self._rest


@contextmanager
def opened(source: Place | IO[bytes]) -> Iterator[ArchiveStream]:
    """Open an archive, compressed or not, at its beginning. Only a Place can be opened again."""
    if isinstance(source, Place):
        size, what = source.store.head(source.key), str(source)
        chunks = read_ahead(Spans(source.store, source.key, 0, size))
    else:
        size, what = None, str(getattr(source, "name", "the archive"))
        chunks = _chunks_of(source)
    with closing(chunks):  # stops the threads that read ahead
        plain = ArchiveStream(chunks, what=what, size_bytes=size)
        if plain.begins_with(ZSTD_MAGIC):
            yield ArchiveStream(decompressed(plain.all(), what=what), what=what)
        else:
            yield plain


def _chunks_of(source: IO[bytes]) -> Generator[Buffer, None, None]:
    while chunk := source.read(READ_BYTES):
        yield chunk


def compressed(chunks: Iterable[Buffer]) -> Iterator[Buffer]:
    """Compress a stream with zstd. Raises ConfigError if it becomes so small that unpacking would refuse it."""
    stream = _zstandard().ZstdCompressor(level=ZSTD_LEVEL, threads=ZSTD_THREADS, write_checksum=True).compressobj()
    taken = made = 0
    for chunk in chunks:
        data = stream.compress(chunk)
        taken, made = taken + len(chunk), made + len(data)
        if _is_too_dense(taken, made):
            raise ConfigError(
                "the checkpoint compresses so well that the archive would be refused; leave zstd=True out"
            )
        yield data
    yield stream.flush()


def decompressed(chunks: Iterable[Buffer], *, what: str) -> Iterator[Buffer]:
    """Decompress one zstd stream, which must end where the chunks end. Raises CorruptError for anything else."""
    zstandard = _zstandard()
    stream = zstandard.ZstdDecompressor(max_window_size=MAX_WINDOW_BYTES).decompressobj()
    taken = made = 0
    try:
        for chunk in chunks:
            view = memoryview(chunk).cast("B")
            for at in range(0, len(view), _PIECE_BYTES):
                if stream.eof:
                    raise CorruptError(f"{what}: there are bytes after the end of what is compressed")
                piece = view[at : at + _PIECE_BYTES]
                data = stream.decompress(piece)
                taken, made = taken + len(piece), made + len(data)
                if _is_too_dense(made, taken):
                    raise CorruptError(f"{what}: {taken} bytes unpack to more than {made}, which no archive does")
                yield data
    except zstandard.ZstdError as error:
        raise CorruptError(f"{what} cannot be decompressed: {error}") from None
    if not stream.eof or stream.unused_data:
        raise CorruptError(f"{what} does not end where what is compressed ends: it was cut short, or added to")


def _is_too_dense(unpacked: int, packed: int) -> bool:
    return unpacked > ROOM_BYTES + BYTES_PER_BYTE * packed


def _zstandard() -> ModuleType:
    try:
        return import_module("zstandard")
    except ImportError as error:
        raise ConfigError("zstandard is not installed: pip install 'raycheck[zstd]'") from error
