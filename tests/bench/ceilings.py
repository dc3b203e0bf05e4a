"""What the machine and the store give at best: the raw client that everything else is divided by.

obstore is the fastest client there is for Python. It sends one flat buffer in parallel parts, and reads it back in a
window of ranges, copied outside the GIL into memory that is warm. Two shapes of each; the faster one is the ceiling.
"""

import ctypes
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from time import perf_counter

import numpy as np
import obstore
import torch

from tests.bench.place import new_folder, raw_client
from tests.bench.sampling import Measured

PART_BYTES = 16 * 1024 * 1024
WINDOW = 8
STREAMS = 4
STREAM_CHUNK_BYTES = 1024 * 1024
KEY = "raw"


class Raw:
    """One object of `size_bytes` of random data, written and read by obstore."""

    def __init__(self, uri: str, size_bytes: int) -> None:
        self._client = raw_client(new_folder(uri))
        self._source = torch.empty(-(-size_bytes // 8), dtype=torch.int64).random_().view(torch.uint8)[:size_bytes]
        self._target = torch.zeros(size_bytes, dtype=torch.uint8)
        self._size = size_bytes

    def shapes(self, settle: Callable[[], None]) -> dict[str, Callable[[], Measured]]:
        """Sides of a comparison: save and load in seconds."""
        return {
            "raw, 16 MiB x 8": lambda: self._turn(settle, PART_BYTES, WINDOW, self._get_window),
            "raw, 64 MiB x 4": lambda: self._turn(settle, 4 * PART_BYTES, STREAMS, self._get_streams),
        }

    def _turn(
        self, settle: Callable[[], None], part_bytes: int, in_flight: int, get: Callable[[], None]
    ) -> dict[str, float]:
        self._target.zero_()
        settle()
        began = perf_counter()
        self.put(part_bytes, in_flight)
        saved_s = perf_counter() - began
        settle()
        began = perf_counter()
        get()
        loaded_s = perf_counter() - began
        assert torch.equal(self._source, self._target), "the raw client read other bytes than it wrote"
        obstore.delete(self._client, KEY)
        return {"save": saved_s, "load": loaded_s}

    def put(self, part_bytes: int = PART_BYTES, in_flight: int = WINDOW) -> None:
        view = memoryview(self._source.numpy())
        obstore.put(self._client, KEY, view, chunk_size=part_bytes, max_concurrency=in_flight)

    def _get_window(self) -> None:
        def fetch(start: int) -> None:
            stop = min(start + PART_BYTES, self._size)
            data = obstore.get_range(self._client, KEY, start=start, end=stop)
            self._copy(start, data)

        with ThreadPoolExecutor(WINDOW) as pool:
            list(pool.map(fetch, range(0, self._size, PART_BYTES)))

    def _get_streams(self) -> None:
        def fetch(start: int) -> None:
            at, stop = start, min(start + part, self._size)
            answer = obstore.get(self._client, KEY, options={"range": (start, stop)})
            for data in answer.stream(min_chunk_size=STREAM_CHUNK_BYTES):
                at = self._copy(at, data)

        part = max(1, min(4 * PART_BYTES, -(-self._size // STREAMS)))
        with ThreadPoolExecutor(STREAMS) as pool:
            list(pool.map(fetch, range(0, self._size, part)))

    def _copy(self, start: int, data: obstore.Bytes) -> int:
        """Outside the GIL. Returns where the next piece goes."""
        piece = np.frombuffer(data, dtype=np.uint8)
        assert start + len(piece) <= self._size, "the store sent more than was asked for"
        ctypes.memmove(self._target.data_ptr() + start, piece.ctypes.data, len(piece))
        return start + len(piece)


def copied_one_by_one(tensors: list[torch.Tensor]) -> Iterator[float]:
    """Seconds to copy `tensors`, each into a buffer of its own that is warm; as often as asked."""
    buffers = [torch.zeros_like(tensor) for tensor in tensors]
    while True:
        began = perf_counter()
        for buffer, tensor in zip(buffers, tensors, strict=True):
            buffer.copy_(tensor)
        yield perf_counter() - began
