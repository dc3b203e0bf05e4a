"""Copies a shard from the live tensors slice by slice, if the host has no memory for a copy of all of it.

A slice is copied when the upload asks for its next part, so only the parts in flight are in memory. The tensors must
not change until the last slice is copied: training waits for that. Training also resumes when the upload has failed or
has exceeded its time. After that nothing more is copied, since training changes the tensors: a later slice would belong
to another step, and its checksum would still be valid.
"""

import threading
import time
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from typing import Any, cast

import torch

from raycheck.bucket.store.part_sizes import PART_SIZES, fewest_in_flight
from raycheck.errors import SaveFailedError
from raycheck.transfer.stage.host_buffer import private_pages
from raycheck.transfer.stage.local_box import as_bytes
from raycheck.transfer.stage.shard import Slot

PIECE_BYTES = 1024 * 1024
"""The most that is copied twice at a time: malloc keeps the memory of larger copies to itself."""


def slices_bytes(size_bytes: int) -> int:
    """Return the most host memory, in bytes, that the slices of a shard of this size take.

    This counts the parts in flight, the one being filled, and the same amount again, since some clients copy a part to
    send it.
    """
    return max(
        2 * (fewest_in_flight(sizes.in_flight) + 1) * sizes.part_bytes_of(size_bytes) for sizes in PART_SIZES.values()
    )


class LiveSlices:
    """The parts of one shard, copied from the live tensors until all are copied or `let_go` is called."""

    def __init__(
        self,
        slots: Sequence[Slot],
        sources: Sequence[torch.Tensor],
        *,
        rest: bytes,
        streams: Mapping[torch.device, torch.Stream],
    ) -> None:
        """sources: the live tensor of each slot. rest: the bytes after the last slot. streams: for each accelerator
        among the tensors' devices, a stream that begins after what training has enqueued there."""
        self._slots = slots
        self._starts = [slot.start for slot in slots]
        self._sources = sources
        self._rest = rest
        self._streams = streams
        self._end = slots[-1].stop if slots else 0
        self.size_bytes = self._end + len(rest)
        self._copied_at: float | None = None if slots else time.monotonic()
        self._lock = threading.Lock()  # held while live tensors are read
        self._is_let_go = False
        self._is_over = threading.Event()
        if not slots:
            self._is_over.set()

    @property
    def copied_at(self) -> float:
        """Return when the last tensor was copied, by time.monotonic. Valid only after that."""
        assert self._copied_at is not None, "not all parts were copied"
        return self._copied_at

    def wait(self, deadline: float) -> None:
        """Wait until all tensors are copied or `let_go` is called, at most until `deadline` (of time.monotonic)."""
        self._is_over.wait(max(0.0, deadline - time.monotonic()))

    def let_go(self) -> None:
        """Stop copying, so that the tensors may change. Waits for a slice that is being copied."""
        with self._lock:
            self._is_let_go = self._copied_at is None
            self._sources = ()
            self._is_over.set()

    def part(self, start: int, stop: int) -> memoryview:
        """Return the bytes start..stop of the shard in newly allocated memory, with zeros for the tails of records.

        Raises SaveFailedError if `let_go` was called before all tensors were copied.
        """
        part = _memory(stop - start, pinned=bool(self._streams))
        view = memoryview(cast("Any", part.numpy()))
        with self._lock:
            if self._is_let_go:
                raise SaveFailedError("training resumed before the last slice of this shard was copied")
            for number in range(max(0, bisect_right(self._starts, start) - 1), bisect_right(self._starts, stop)):
                slot = self._slots[number]
                _write(view, start, slot.torch_record.head, at=slot.start)
                low, high = max(start, slot.payload.start), min(stop, slot.payload.stop)
                if low < high:
                    into = part[low - start : high - start]
                    self._copy(into, self._sources[number], low - slot.payload.start)
            for stream in self._streams.values():
                stream.synchronize()
            if self._copied_at is None and stop >= self._end:
                self._copied_at = time.monotonic()
                self._sources = ()
                self._is_over.set()
        _write(view, start, self._rest, at=self._end)
        return view

    def _copy(self, into: torch.Tensor, source: torch.Tensor, start: int) -> None:
        """Copy bytes of a tensor, beginning at byte `start`. A copy from a device is complete once its stream is."""
        stream = self._streams.get(source.device)
        with torch.no_grad(), nullcontext() if stream is None else stream:
            at = 0
            for piece in pieces_of(source, start, start + into.numel()):
                into[at : at + piece.numel()].copy_(piece, non_blocking=True)
                at += piece.numel()


def pieces_of(tensor: torch.Tensor, start: int, stop: int) -> Iterator[torch.Tensor]:
    """Yield the bytes start..stop of a tensor's elements in order, as flat uint8 tensors.

    Elements that are not in that order in memory are copied, at most PIECE_BYTES at a time.
    """
    if tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg():
        yield as_bytes(tensor)[start:stop]
        return
    if tensor.dim() == 0:
        yield as_bytes(tensor.resolve_conj().resolve_neg())[start:stop]
        return
    row_bytes = tensor[0].numel() * tensor.element_size()
    at = start
    while at < stop:
        row, offset = divmod(at, row_bytes)
        whole = min(stop - at, PIECE_BYTES) // row_bytes if not offset else 0
        if whole:
            yield as_bytes(tensor[row : row + whole].clone(memory_format=torch.contiguous_format))
            at += whole * row_bytes
        else:
            end = min(stop, (row + 1) * row_bytes)
            yield from pieces_of(tensor[row], offset, offset + end - at)
            at = end


def _memory(size_bytes: int, *, pinned: bool) -> torch.Tensor:
    """Return zeroed memory. If it is not page-locked, the system gets it back when the last view of it is gone.

    malloc would keep freed memory, and torch keeps page-locked memory for the next part.
    """
    if pinned:
        return torch.zeros(size_bytes, dtype=torch.uint8, pin_memory=True)
    return torch.frombuffer(private_pages(size_bytes), dtype=torch.uint8)


def _write(view: memoryview, start: int, data: bytes, *, at: int) -> None:
    """Write into `view` the part of `data` that belongs there.

    `data` begins at `at` in the shard, and `view` is the part of the shard that begins at `start`.
    """
    low, high = max(start, at), min(start + len(view), at + len(data))
    if low < high:
        view[low - start : high - start] = data[low - at : high - at]
