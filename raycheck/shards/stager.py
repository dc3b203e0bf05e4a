"""Staging: one copy of this rank's pieces into one reused flat host buffer, which is the shard object itself.

The frames' heads and tails lie in the buffer, so that a part of the upload is a slice of it and nothing is ever
assembled. Training is blocked for the copy only. The buffer may be staged into again only after every request that
was started from it has ended; the caller waits for that.
"""

import io
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import torch

from raycheck.bucket.checksum import combined, crc32, sub_block_crcs, sub_block_lengths
from raycheck.bucket.index import Chunk, Index, Leaf, Tensor, index_of
from raycheck.shards.frame import Frame, frame_for
from raycheck.shards.pieces import Piece, Place

ALIGN = 64
Leaves = Mapping[str, tuple[tuple[str | int, ...], object]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Slot:
    """Where a piece's record lies in the buffer, in bytes."""

    start: int
    frame: Frame

    @property
    def payload(self) -> slice:
        begin = self.start + len(self.frame.head)
        return slice(begin, begin + self.frame.payload_size)

    @property
    def stop(self) -> int:
        return self.start + self.frame.record_size


class Staged:
    """A staged shard: durable once `parts` has been sent whole. Single use."""

    def __init__(
        self,
        view: memoryview,
        slots: Sequence[Slot],
        *,
        tensors: Sequence[Tensor],
        chunks: Sequence[Chunk],
        leaves: Sequence[Leaf],
        aliases: Sequence[tuple[int, Place]],
        copied: Sequence[torch.Event],
    ) -> None:
        self._view = view
        self._slots = slots
        self._tensors = tensors
        self._chunks = chunks
        self._leaves = leaves
        self._values: Mapping[str, object] = {}
        self._rank_values: Mapping[str, object] = {}
        self._aliases = aliases
        self._copied = copied
        self._crcs: list[tuple[int, ...]] = []
        self.size_bytes = len(view)
        self.crc32 = 0

    def parts(self, part_bytes: int) -> Iterator[memoryview]:
        """Slices of the buffer, each checksummed and sealed just before it is yielded."""
        for event in self._copied:
            event.synchronize()
        sent = 0
        for slot in self._slots:
            self._seal(slot)
            while sent + part_bytes <= slot.stop:
                yield self._next(sent, part_bytes)
                sent += part_bytes
        while sent < self.size_bytes:
            part = min(part_bytes, self.size_bytes - sent)
            yield self._next(sent, part)
            sent += part

    def add(self, values: Mapping[str, object], rank_values: Mapping[str, object]) -> None:
        """What goes into the index beside the shard."""
        self._values = values
        self._rank_values = rank_values

    def section(self) -> Index:
        """This rank's part of the index. Only after all parts were taken."""
        assert len(self._crcs) == len(self._slots), "checksums are known once every part was taken"
        chunks = [replace(chunk, crcs=crcs) for chunk, crcs in zip(self._chunks, self._crcs, strict=True)]
        tensors = list(self._tensors)
        for number, (name, path) in self._aliases:  # a tied tensor: another name of the same bytes
            chunks.append(replace(chunks[number], tensor=len(tensors)))
            tensors.append(replace(tensors[number], name=name, path=path))
        return index_of(tensors, chunks, leaves=self._leaves, values=self._values, rank_values=[self._rank_values])

    def _seal(self, slot: Slot) -> None:
        payload = self._view[slot.payload]
        crcs = sub_block_crcs(payload)
        whole = combined(zip(crcs, sub_block_lengths(len(payload)), strict=True))
        self._view[slot.payload.stop : slot.stop] = slot.frame.sealed_tail(whole)
        self._crcs.append(tuple(crcs))

    def _next(self, start: int, count: int) -> memoryview:
        part = self._view[start : start + count]
        self.crc32 = crc32(part, self.crc32)
        return part


class Stager:
    """The buffer of one component on one rank. Layout and views are kept while the pieces keep their form."""

    def __init__(self, component: str, rank: int) -> None:
        self._component = component
        self._rank = rank
        self._form: tuple[object, ...] | None = None
        self._buffer = torch.empty(0, dtype=torch.uint8)
        self._slots: list[Slot] = []
        self._views: list[torch.Tensor] = []
        self._streams: dict[torch.device, torch.Stream] = {}

    def stage(self, pieces: Sequence[Piece], sources: Sequence[torch.Tensor], leaves: Leaves) -> Staged:
        """Copy `sources`, the live tensors of `pieces`, and the pickled `leaves` (for stock tools only) into the
        buffer. The copy is enqueued in order before anything the caller's device stream does next."""
        records = [(name, path, _pickled(value)) for name, (path, value) in leaves.items()]
        form = tuple(
            (p.name, p.local.dtype, p.sizes, source.device.type) for p, source in zip(pieces, sources, strict=True)
        )
        tensors_end = self._lay_out(form, pieces)
        total = tensors_end + sum(len(data) for _, _, data in records)
        if form != self._form or total > self._buffer.numel():
            self._allocate(pieces, total, pin=any(source.device.type != "cpu" for source in sources))
            self._form = form
        copied = self._copy(sources)
        view = _view(self._buffer)[:total]
        stock_leaves = []
        at = tensors_end
        for name, path, data in records:
            view[at : at + len(data)] = data
            leaf = Leaf(
                name=name,
                path=path,
                component=self._component,
                rank=self._rank,
                record_offset=at,
                record_size=len(data),
            )
            stock_leaves.append(leaf)
            at += len(data)
        chunks = [self._chunk(i, piece, slot) for i, (piece, slot) in enumerate(zip(pieces, self._slots, strict=True))]
        tensors = [Tensor(name=p.name, dtype=p.dtype, shape=p.shape, path=p.path) for p in pieces]
        aliases = [(number, place) for number, piece in enumerate(pieces) for place in piece.aliases]
        return Staged(
            view,
            self._slots,
            tensors=tensors,
            chunks=chunks,
            leaves=stock_leaves,
            aliases=aliases,
            copied=copied,
        )

    def _lay_out(self, form: tuple[object, ...], pieces: Sequence[Piece]) -> int:
        if form != self._form:
            self._form = None  # until all of the new form stands: a stage that raises must not leave half of it
            self._slots = []
            end = 0
            for piece in pieces:
                slot = Slot(start=-(-end // ALIGN) * ALIGN, frame=frame_for(piece.local.dtype, piece.sizes))
                self._slots.append(slot)
                end = slot.stop
        return self._slots[-1].stop if self._slots else 0

    def _allocate(self, pieces: Sequence[Piece], total: int, *, pin: bool) -> None:
        """A zeroed buffer with some slack for leaves that grow, heads written, one view per piece."""
        self._buffer = torch.zeros(total + total // 64 + 4096, dtype=torch.uint8, pin_memory=pin)
        view = _view(self._buffer)
        self._views = []
        for piece, slot in zip(pieces, self._slots, strict=True):
            view[slot.start : slot.payload.start] = slot.frame.head
            self._views.append(self._buffer[slot.payload].view(piece.local.dtype).view(piece.sizes))

    def _copy(self, sources: Sequence[torch.Tensor]) -> list[torch.Event]:
        """Copies from the host are done when it returns; those from devices when their events have come."""
        pairs = list(zip(self._views, sources, strict=True))
        on_host = [(view, source) for view, source in pairs if source.device.type == "cpu"]
        devices = sorted({source.device for _, source in pairs if source.device.type != "cpu"}, key=str)
        with torch.no_grad():
            if on_host:
                torch._foreach_copy_([view for view, _ in on_host], [source for _, source in on_host])
            return [self._copy_from(device, pairs) for device in devices]

    def _copy_from(self, device: torch.device, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> torch.Event:
        """On a side stream that starts after the step and that the next step waits for: the optimizer's next write
        cannot overtake the copy, and the host does not wait for it."""
        current = torch.accelerator.current_stream(device)
        side = self._streams.setdefault(device, torch.Stream(device))
        side.wait_stream(current)
        copied = torch.Event(device)
        with side:
            for view, source in pairs:
                if source.device == device:
                    view.copy_(source, non_blocking=True)
            copied.record(side)
        current.wait_stream(side)
        return copied

    def _chunk(self, number: int, piece: Piece, slot: Slot) -> Chunk:
        return Chunk(
            tensor=number,
            component=self._component,
            rank=self._rank,
            offsets=piece.offsets,
            sizes=piece.sizes,
            record_offset=slot.start,
            record_size=slot.frame.record_size,
            payload_offset=slot.payload.start,
            payload_size=slot.frame.payload_size,
            crcs=(),
        )


def _view(buffer: torch.Tensor) -> memoryview:
    return memoryview(cast("Any", buffer.numpy()))


def _pickled(value: object) -> bytes:
    sink = io.BytesIO()
    torch.save(value, sink)
    return sink.getvalue()
