"""Staging: one copy of this rank's boxes into one reused flat host buffer, which is the shard object itself.

The frames' heads and tails lie in the buffer, so that a part of the upload is a slice of it and nothing is ever
assembled. Training is blocked for the copy only. The buffer may be staged into again only after every request that
was started from it has ended; the caller waits for that.
"""

import io
import pickle
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from itertools import repeat
from typing import Any, cast

import torch

from raycheck.bucket.format.checksum import combined, crc32, sub_block_crcs, sub_block_lengths
from raycheck.bucket.format.index import Leaf
from raycheck.bucket.format.manifest import ShardRecord
from raycheck.shards.transfer.host_buffer import HostBuffer
from raycheck.shards.transfer.local_box import LocalBox, strides_of
from raycheck.shards.transfer.shard import IndexRows, Shard, ShardName, Slot, rows
from raycheck.shards.transfer.stock_torch_names import Places
from raycheck.shards.transfer.torch_record import record_for

ALIGN = 64
SLACK_BYTES = 1024 * 1024
MAX_PICKLES = 1000
Leaves = Mapping[str, tuple[tuple[str | int, ...], object]]

Form = tuple[tuple[torch.dtype, tuple[int, ...], torch.device], ...]
"""What the layout depends on: of each box dtype, sizes, and where it lives."""


class Staged:
    """A staged shard: durable once `parts` has been sent whole. Single use."""

    def __init__(
        self,
        view: memoryview,
        slots: Sequence[Slot],
        *,
        name: ShardName,
        boxes: Sequence[LocalBox],
        leaves: Sequence[Leaf],
        also: Places,
        copied: Sequence[torch.Event],
    ) -> None:
        self.name = name
        self._view = view
        self._slots = slots
        self._pieces = boxes
        self._leaves = leaves
        self._also = also
        self._copied = copied
        self._crcs: list[tuple[int, ...]] = []
        self._shard: Shard | None = None
        self.size_bytes = len(view)
        self.crc32 = 0  # of all bytes before _summed
        self._summed = 0

    def wait(self) -> None:
        """Until all is copied from the devices."""
        for event in self._copied:
            event.synchronize()

    def parts(self, part_bytes: int) -> Iterator[memoryview]:
        """Slices of the buffer, each checksummed and sealed just before it is yielded."""
        self.wait()
        sent = 0
        for slot in self._slots:
            self._seal(slot)
            while sent + part_bytes <= slot.stop:
                yield self._view[sent : sent + part_bytes]
                sent += part_bytes
        self._sum(self.size_bytes)
        for start in range(sent, self.size_bytes, part_bytes):
            yield self._view[start : start + part_bytes]

    def shard(self) -> Shard:
        """What became of it. Only after all parts were taken."""
        if self._shard is None:
            assert len(self._crcs) == len(self._slots), "checksums are known once every part was taken"
            record = ShardRecord(**asdict(self.name), size_bytes=self.size_bytes, crc32=self.crc32)
            tensors, chunks = rows(self.name, self._pieces, self._slots, self._crcs)
            more = [(leaf, place) for leaf in self._leaves for place in self._also.get(leaf.name, ())]
            leaves = (*self._leaves, *(replace(leaf, name=name, path=path) for leaf, (name, path) in more))
            self._shard = Shard(record=record, tensors=tensors, chunks=chunks, leaves=leaves)
        return self._shard

    def _seal(self, slot: Slot) -> None:
        payload = self._view[slot.payload]
        crcs = sub_block_crcs(payload)
        whole = combined(zip(crcs, sub_block_lengths(len(payload)), strict=True))
        self._view[slot.payload.stop : slot.stop] = slot.torch_record.sealed_tail(whole)
        self._crcs.append(tuple(crcs))
        self._sum(slot.payload.start)
        self.crc32 = combined([(whole, len(payload))], self.crc32)  # no byte of a payload is read twice
        self._summed = slot.payload.stop
        self._sum(slot.stop)

    def _sum(self, stop: int) -> None:
        self.crc32 = crc32(self._view[self._summed : stop], self.crc32)
        self._summed = stop


class Stager:
    """The buffer of one component on one rank. Layout and views are kept while the boxes keep their form."""

    def __init__(self, component: str, rank: int) -> None:
        self._name = ShardName(component=component, rank=rank)
        self._form: Form | None = None
        self._planned: Sequence[LocalBox] = ()
        self._buffer: HostBuffer | None = None
        self._view = memoryview(b"")
        self._slots: list[Slot] = []
        self._views: list[torch.Tensor] = []
        self._is_dressed = False
        self._by_device: dict[torch.device, list[int]] = {}
        self._streams: dict[torch.device, torch.Stream] = {}
        self._pickles: dict[bytes, bytes] = {}

    def wanted(self, boxes: Sequence[LocalBox], *, world_size: int) -> int:
        """Bytes that this rank's part of `boxes` will take. What other ranks may hold as well counts by the share that
        an agreement will give to each."""
        shares = [(record_for(p.local.dtype, p.sizes).record_size, 1 if p.is_unique else world_size) for p in boxes]
        return _with_slack(sum(size // holders + ALIGN for size, holders in shares))

    def prepare(self, boxes: Sequence[LocalBox], *, world_size: int) -> None:
        """Claim the memory for this rank's part of `boxes`, and have it faulted in behind the training. Raises
        ConfigError."""
        if self._buffer is None:
            self._claim(self.wanted(boxes, world_size=world_size), [p.local for p in boxes]).fault_in()

    def stage(
        self,
        boxes: Sequence[LocalBox],
        leaves: Leaves,
        sources: Sequence[torch.Tensor] | None = None,
        also: Places | None = None,
    ) -> Staged:
        """Copy `boxes` and the pickled `leaves` (for stock tools only) into the buffer. The copy is enqueued in
        order before anything the caller's device stream does next. sources: the live tensors of boxes without memory;
        the very list of the last time says that nothing but their elements changed. also: further places under which
        stock tools find a leaf. Raises ConfigError when memory is
        too small."""
        records = [(name, path, self._pickled(value)) for name, (path, value) in leaves.items()]
        sources = [box.local for box in boxes] if sources is None else sources
        self._plan(boxes, sources)
        tensors_end = self._end
        total = tensors_end + sum(len(data) for data in {data for _, _, data in records})
        if self._buffer is None or not self._suits(self._buffer, total):
            self._claim(_with_slack(total), sources)
        if not self._is_dressed:
            self._dress()
        copied = self._copy(sources)
        view = self._view[:total]
        stock_leaves = []
        at, there = tensors_end, dict[bytes, int]()  # equal leaves lie at one place
        for name, path, data in records:
            if data not in there:
                view[at : at + len(data)] = data
                there[data] = at
                at += len(data)
            leaf = Leaf(name=name, path=path, record_offset=there[data], record_size=len(data), **asdict(self._name))
            stock_leaves.append(leaf)
        return Staged(
            view, self._slots, name=self._name, boxes=boxes, leaves=stock_leaves, also=also or {}, copied=copied
        )

    def _pickled(self, value: object) -> bytes:
        """What torch.save makes of it: slow, so that a plain value that was there at the last save is looked up."""
        items = value if type(value) is tuple else (value,)
        if not all(type(item) in (bool, int, float, str, type(None)) for item in items):
            return _pickled(value)
        if len(self._pickles) > MAX_PICKLES:
            self._pickles.clear()
        key = pickle.dumps(value)
        if key not in self._pickles:
            self._pickles[key] = _pickled(value)
        return self._pickles[key]

    def rows(self, boxes: Sequence[LocalBox], sources: Sequence[torch.Tensor]) -> IndexRows:
        """Where these boxes would lie; checksums are not known."""
        self._plan(boxes, sources)
        return rows(self._name, boxes, self._slots, repeat(()))

    def release(self) -> None:
        """Give the memory back. Every request that reads it must have ended."""
        if self._buffer is not None:
            self._buffer.ready()
        self._buffer, self._view, self._views, self._is_dressed = None, memoryview(b""), [], False

    @property
    def _end(self) -> int:
        return self._slots[-1].stop if self._slots else 0

    def _plan(self, boxes: Sequence[LocalBox], sources: Sequence[torch.Tensor]) -> None:
        if boxes is not self._planned or self._form is None:
            form = _form(boxes, sources)
            if form != self._form:
                self._lay_out(form)
            self._planned = boxes

    def _lay_out(self, form: Form) -> None:
        self._form = None  # until all of the new form stands: a stage that raises must not leave half of it
        if self._is_dressed:
            self.release()
        self._slots, self._by_device = [], {}
        end = 0
        for number, (dtype, sizes, device) in enumerate(form):
            slot = Slot(start=-(-end // ALIGN) * ALIGN, torch_record=record_for(dtype, sizes))
            self._slots.append(slot)
            self._by_device.setdefault(device, []).append(number)
            end = slot.stop
        self._form = form

    def _suits(self, buffer: HostBuffer, total: int) -> bool:
        """Whether it is large enough, and was not prepared for much more than there is."""
        most = total + total // 4 + 2 * SLACK_BYTES
        return total <= buffer.size_bytes and (self._is_dressed or buffer.size_bytes <= most)

    def _claim(self, size_bytes: int, sources: Sequence[torch.Tensor]) -> HostBuffer:
        """An upload under way keeps the buffer before it a while longer."""
        self.release()
        self._buffer = HostBuffer(size_bytes, pinned=any(source.device.type != "cpu" for source in sources))
        return self._buffer

    def _dress(self) -> None:
        """Heads written, and one view per box."""
        assert self._buffer is not None, "just claimed"
        assert self._form is not None, "just laid out"
        self._buffer.ready()
        self._view = memoryview(cast("Any", self._buffer.tensor.numpy()))
        typed: dict[torch.dtype, torch.Tensor] = {}
        views = []
        for slot, (dtype, sizes, _) in zip(self._slots, self._form, strict=True):
            start = slot.payload.start
            self._view[slot.start : start] = slot.torch_record.head
            flat = typed.get(dtype)
            if flat is None:
                flat = typed[dtype] = self._buffer.tensor.view(dtype)
            views.append(flat.as_strided(sizes, strides_of(sizes), start // dtype.itemsize))
        self._views, self._is_dressed = views, True

    def _copy(self, sources: Sequence[torch.Tensor]) -> list[torch.Event]:
        """Copies from the host are done when it returns; those from devices when their events have come."""
        events = []
        with torch.no_grad():
            for device, numbers in self._by_device.items():
                views, tensors = [self._views[i] for i in numbers], [sources[i] for i in numbers]
                if device.type == "cpu":
                    torch._foreach_copy_(views, tensors)
                else:
                    events.append(self._copy_from(device, views, tensors))
        return events

    def _copy_from(
        self, device: torch.device, views: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]
    ) -> torch.Event:
        """On a side stream that starts after the step and that the next step waits for: the optimizer's next write
        cannot overtake the copy, and the host does not wait for it."""
        current = torch.accelerator.current_stream(device)
        side = self._streams.setdefault(device, torch.Stream(device))
        side.wait_stream(current)
        copied = torch.Event(device)
        with side:
            for view, source in zip(views, sources, strict=True):
                view.copy_(source, non_blocking=True)
            copied.record(side)
        current.wait_stream(side)
        return copied


def _with_slack(size_bytes: int) -> int:
    """For leaves that grow."""
    return -(-(size_bytes + size_bytes // 64 + SLACK_BYTES) // ALIGN) * ALIGN


def _form(boxes: Sequence[LocalBox], sources: Sequence[torch.Tensor]) -> Form:
    return tuple((p.local.dtype, p.sizes, source.device) for p, source in zip(boxes, sources, strict=True))


def _pickled(value: object) -> bytes:
    """The leaf's record. A few values that raycheck keeps cannot be pickled (a memory format, a tuple of tensors that
    are views of each other in other dtypes): stock tools get a text in the place of these."""
    try:
        return _saved(value)
    except Exception as error:  # noqa: BLE001  a pickle runs any code, and stock tools' part must not cost the save
        return _saved(f"{type(value).__qualname__}, which cannot be pickled: {error}")


def _saved(value: object) -> bytes:
    sink = io.BytesIO()
    torch.save(value, sink)
    return sink.getvalue()
