"""Streams bytes from and to stores in bounded memory: several ranged reads at a time, handed out in order.

It also splits a stream into the parts that a store requires. The last part is held back until the stream has ended
without an error, so that an object never appears if the check at the stream's end fails.
"""

from collections import deque
from collections.abc import Generator, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass

from raycheck.bucket.format.checksum import crc32
from raycheck.bucket.store import Store
from raycheck.bucket.store.interface import Buffer
from raycheck.bucket.store.part_sizes import BYTES_IN_FLIGHT
from raycheck.bucket.store.request_window import MOST, Share
from raycheck.bucket.store.retry import noting_refusals
from raycheck.errors import CorruptError, RaycheckError

SPAN_BYTES = 8 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class Span:
    """The bytes start..stop of an object, read in one request."""

    store: Store
    key: str
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Spans:
    """The bytes of an object from `start` to `stop`, divided into spans."""

    store: Store
    key: str
    start: int
    stop: int

    def __iter__(self) -> Iterator[Span]:
        for at in range(self.start, self.stop, SPAN_BYTES):
            yield Span(self.store, self.key, at, min(at + SPAN_BYTES, self.stop))


def read_ahead(spans: Iterable[Span]) -> Generator[Buffer, None, None]:
    """Yield the bytes of each span in order while the next ones are being read. Raises the errors of `get_range`.

    As many are read at a time as the window of the first span's bucket allows.
    """
    ahead: deque[Future[Buffer]] = deque()
    share: Share | None = None
    with ThreadPoolExecutor(MOST, thread_name_prefix="raycheck-ahead") as pool, ExitStack() as shared:
        try:
            for span in spans:
                share = share or shared.enter_context(Share(span.store.reads))
                while len(ahead) >= min(share.window.part, BYTES_IN_FLIGHT // SPAN_BYTES):
                    yield ahead.popleft().result()
                ahead.append(pool.submit(_read, span, share))
            while ahead:
                yield ahead.popleft().result()
        finally:
            for future in ahead:
                future.cancel()


def _read(span: Span, share: Share) -> Buffer:
    flight, size_bytes = share.begin(), 0
    try:
        with noting_refusals(flight.refused):
            data = span.store.get_range(span.key, span.start, span.stop)
        size_bytes = len(data)
        return data
    finally:
        flight.end(size_bytes)


def checked(chunks: Iterable[Buffer], crc: int, *, what: str) -> Iterator[Buffer]:
    """Yield the chunks, and raise CorruptError after the last one if their checksum differs from `crc`."""
    seen = 0
    for chunk in chunks:
        seen = crc32(chunk, seen)
        yield chunk
    if seen != crc:
        raise CorruptError(f"{what} has checksum {seen:08x}, not {crc:08x}: it is damaged")


def put_stream(store: Store, key: str, chunks: Iterable[Buffer], size_bytes: int) -> None:
    """Write one object from a stream of chunks. If the stream raises, that error is raised and nothing is written."""
    failure: RaycheckError | None = None

    def parts() -> Iterator[memoryview]:
        nonlocal failure
        try:
            yield from _in_parts(chunks, store.part_bytes(size_bytes))
        except RaycheckError as error:
            failure = error
            raise

    try:
        store.put_parts(key, parts(), size_bytes)
    except RaycheckError:
        if failure is not None:  # the upload failed because its parts could not be read
            raise failure from None
        raise


def _in_parts(chunks: Iterable[Buffer], part_bytes: int) -> Iterator[memoryview]:
    """Yield the chunks as parts of `part_bytes`, the last one shorter, and one empty part for an empty stream.

    Memory is allocated for bytes received, not for bytes announced.
    """
    held: list[memoryview] = []
    size = 0
    for chunk in chunks:
        rest = memoryview(chunk).cast("B")
        while rest:
            if size == part_bytes:
                yield memoryview(b"".join(held))
                held, size = [], 0
            piece = rest[: part_bytes - size]
            held.append(piece)
            size, rest = size + len(piece), rest[len(piece) :]
    yield memoryview(b"".join(held))
