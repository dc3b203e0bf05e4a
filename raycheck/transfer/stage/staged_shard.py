"""Yields a staged shard in parts, and computes its checksums on the way.

The parts come from a host buffer that holds the whole shard, or from the live tensors while training waits
(live_slices.py). Both give the same bytes except for the tails of the records. A tail depends on the checksum of its
record's payload, so it is written here, into the part that contains it.
"""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass

import torch

from raycheck.bucket.format.checksum import SUB_BLOCK, combined, crc32, sub_block_lengths
from raycheck.bucket.format.index import Leaf
from raycheck.bucket.format.manifest import ShardRecord
from raycheck.transfer.stage.live_slices import LiveSlices
from raycheck.transfer.stage.local_box import LocalBox, without_memory
from raycheck.transfer.stage.shard import Shard, ShardName, Slot, rows
from raycheck.transfer.stage.shared_memory import MemoryPlace, open_memory
from raycheck.transfer.stage.stock_torch_names import Places


@dataclass(frozen=True, kw_only=True, slots=True)
class BufferedBytes:
    """A shard in a host buffer.

    view: its bytes, complete except for the tails of the records once all events in `copied` have occurred. place:
    where another process finds the buffer, which begins with `view`; None if none can.
    """

    view: memoryview
    copied: Sequence[torch.Event] = ()
    place: MemoryPlace | None = None

    @property
    def size_bytes(self) -> int:
        """Return the size of the shard in bytes."""
        return len(self.view)

    def wait(self) -> None:
        """Wait until everything has been copied from the devices."""
        for event in self.copied:
            event.synchronize()

    def part(self, start: int, stop: int) -> memoryview:
        """Return the bytes start..stop of the shard."""
        return self.view[start:stop]


class Staged:
    """A staged shard, which is durable once all its `parts` have been sent. Single use.

    slices: the live tensors that the parts are copied from, or None if everything is copied into a buffer. place: where
    another process finds that buffer; None if none can.
    """

    def __init__(
        self,
        source: BufferedBytes | LiveSlices,
        slots: Sequence[Slot],
        *,
        name: ShardName,
        boxes: Sequence[LocalBox],
        leaves: Sequence[Leaf],
        also: Places,
    ) -> None:
        self.name = name
        self.is_apart = False
        self.slices = source if isinstance(source, LiveSlices) else None
        self.place = source.place if isinstance(source, BufferedBytes) else None
        self._source = source
        self._slots = slots
        self._boxes = boxes
        self._leaves = leaves
        self._also = also
        self._shard: Shard | None = None
        self.size_bytes = source.size_bytes
        self.crc32 = 0  # of all bytes yielded so far, up to the end of the last complete payload
        self._crcs: list[tuple[int, ...]] = []  # of the sub-blocks of each yielded record
        self._own: list[int] = []  # of the sub-blocks of the next record; the last one may be incomplete
        self._tail = bytearray()  # of that record, once its payload has been yielded

    def wait(self) -> None:
        """Wait until everything has been copied from the devices into the buffer, if there is one."""
        if isinstance(self._source, BufferedBytes):
            self._source.wait()

    def to_share(self) -> "SharedShard | None":
        """Return a description with which another process of the node can upload this shard, or None if none can.

        Call it after `wait`.
        """
        if self.place is None:
            return None
        boxes = [without_memory(box) for box in self._boxes]
        return SharedShard(
            place=self.place,
            size_bytes=self.size_bytes,
            name=self.name,
            slots=tuple(self._slots),
            boxes=tuple(boxes),
            leaves=tuple(self._leaves),
            also=self._also,
        )

    def uploaded_elsewhere(self, shard: Shard) -> None:
        """Use the rows that another process computed while it uploaded this shard."""
        self._shard = shard

    def keep_buffer_apart(self) -> None:
        """Stage the next save into another buffer, since this one may still be read."""
        self.is_apart = True

    def parts(self, part_bytes: int) -> Iterator[memoryview]:
        """Yield the shard's bytes. All checksums are known before the last part is yielded.

        If the parts come from live tensors, raises SaveFailedError once these were released by `let_go`.
        """
        self.wait()
        for start in range(0, self.size_bytes, part_bytes):
            yield self._sealed_part(start, min(start + part_bytes, self.size_bytes))

    def seal(self) -> memoryview:
        """Compute all checksums, and return the shard's bytes as they would be uploaded."""
        return next(self.parts(max(1, self.size_bytes)), memoryview(b""))

    def shard(self) -> Shard:
        """Return the rows of manifest and index for this shard. Call it only after all parts were taken."""
        if self._shard is None:
            assert len(self._crcs) == len(self._slots), "checksums are known once all parts were taken"
            record = ShardRecord(**asdict(self.name), size_bytes=self.size_bytes, crc32=self.crc32)
            tensors, chunks = rows(self.name, self._boxes, self._slots, self._crcs)
            leaves = (*self._leaves, *self._leaves_elsewhere())
            self._shard = Shard(record=record, tensors=tensors, chunks=chunks, leaves=leaves)
        return self._shard

    def _leaves_elsewhere(self) -> Iterator[Leaf]:
        """Yield the leaves under their further names, of which each parameter of an optimizer has several."""
        for leaf in self._leaves:
            component, rank, start, size = leaf.component, leaf.rank, leaf.record_offset, leaf.record_size
            for name, path in self._also.get(leaf.name, ()):
                yield Leaf(name=name, path=path, component=component, rank=rank, record_offset=start, record_size=size)

    def _sealed_part(self, start: int, stop: int) -> memoryview:
        """Return the bytes start..stop, which follow those of the last call, including the tails of records."""
        part = self._source.part(start, stop)
        at = start
        while at < stop:
            number = len(self._crcs)
            if number == len(self._slots):  # after the last tensor record
                self.crc32 = crc32(part[at - start :], self.crc32)
                break
            slot = self._slots[number]
            payload = slot.payload
            if at < payload.start:
                end = min(stop, payload.start)
                self.crc32 = crc32(part[at - start : end - start], self.crc32)
            elif at < payload.stop:
                done = (at - payload.start) % SUB_BLOCK
                end = min(stop, payload.stop, at - done + SUB_BLOCK)
                self._own.append(crc32(part[at - start : end - start], self._own.pop() if done else 0))
            else:
                end = min(stop, slot.stop)
                if at == payload.stop:
                    self._end_payload(slot)
                part[at - start : end - start] = self._tail[at - payload.stop : end - payload.stop]
                self.crc32 = crc32(part[at - start : end - start], self.crc32)
                if end == slot.stop:
                    self._crcs.append(tuple(self._own))
                    self._own = []
            at = end
        return part

    def _end_payload(self, slot: Slot) -> None:
        """Compute a record's tail, and include its payload in the shard's checksum without reading it twice."""
        size = slot.torch_record.payload_size
        is_one = len(self._own) == 1
        whole = self._own[0] if is_one else combined(zip(self._own, sub_block_lengths(size), strict=True))
        self._tail = slot.torch_record.sealed_tail(whole)
        self.crc32 = combined([(whole, size)], self.crc32)


@dataclass(frozen=True, kw_only=True, slots=True)
class SharedShard:
    """A description of a staged shard, in plain values, for another process of the node. boxes: without their memory.

    place: the buffer; the shard is its first `size_bytes` bytes. The other fields: see Staged.
    """

    place: MemoryPlace
    size_bytes: int
    name: ShardName
    slots: tuple[Slot, ...]
    boxes: tuple[LocalBox, ...]
    leaves: tuple[Leaf, ...]
    also: Places

    def open(self) -> Staged:
        """Return the shard in this process. Raises OSError when this process cannot reach its memory."""
        memory, place = open_memory(self.place)
        return Staged(
            BufferedBytes(view=memory[: self.size_bytes], place=place),
            self.slots,
            name=self.name,
            boxes=self.boxes,
            leaves=self.leaves,
            also=self.also,
        )
