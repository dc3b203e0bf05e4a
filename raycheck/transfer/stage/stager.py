"""Stages this rank's boxes: copies them once into a flat host buffer, which is the shard object itself.

The buffer is reused at each save. It also contains the records' heads and tails, so each part of the upload is a slice
of the buffer, and nothing has to be assembled. Training is blocked only for the copy. The buffer may be staged into
again only after every request that reads from it has ended; the caller waits for that. If there is no memory for the
buffer, the same object can be staged in slices, for which training waits longer (live_slices.py).
"""

import io
import pickle
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from itertools import repeat
from typing import Any, cast

import torch

from raycheck.bucket.format.index import Leaf
from raycheck.transfer.stage.host_buffer import HostBuffer
from raycheck.transfer.stage.live_slices import LiveSlices
from raycheck.transfer.stage.local_box import LocalBox, strides_of
from raycheck.transfer.stage.shard import IndexRows, ShardName, Slot, rows
from raycheck.transfer.stage.staged_shard import BufferedBytes, Staged
from raycheck.transfer.stage.stock_torch_names import Places
from raycheck.transfer.stage.torch_record import record_for

ALIGN = 64
SLACK_BYTES = 1024 * 1024
MAX_PICKLES = 1000
Leaves = Mapping[str, tuple[tuple[str | int, ...], object]]
"""Paths and values of everything that is not a tensor, by name."""

BoxForms = tuple[tuple[torch.dtype, tuple[int, ...], torch.device], ...]
"""What the layout depends on: the dtype, sizes and device of each box."""


class Stager:
    """The stager of one component of one rank.

    It keeps the layout and the buffer as long as the boxes keep their forms.
    """

    def __init__(self, component: str, rank: int, *, is_shared: bool = False) -> None:
        """is_shared: let another process of the node upload from the buffer, if that is possible."""
        self.name = ShardName(component=component, rank=rank)
        self._is_shared = is_shared
        self._forms: BoxForms | None = None
        self._laid_out: Sequence[LocalBox] = ()
        self._buffer: HostBuffer | None = None
        self._staged: Staged | None = None  # the last shard staged in that buffer
        self._view = memoryview(b"")
        self._slots: list[Slot] = []
        self._views: list[torch.Tensor] = []
        self._is_mapped = False
        self._by_device: dict[torch.device, list[int]] = {}
        self._streams: dict[torch.device, torch.Stream] = {}
        self._pickles: dict[bytes, bytes] = {}

    def needed_bytes(self, boxes: Sequence[LocalBox], *, world_size: int) -> int:
        """Return about how many bytes this rank will write of `boxes`.

        A box that other ranks may hold too counts with the share that the agreement will give to each rank.
        """
        shares = [
            (record_for(box.local.dtype, box.sizes).record_size, 1 if box.is_unique else world_size) for box in boxes
        ]
        return _with_slack(sum(size // holders + ALIGN for size, holders in shares))

    @property
    def has_buffer(self) -> bool:
        """Return whether there is a buffer. The next `stage` fills it if it is large enough."""
        return self._buffer is not None

    def prepare(self, boxes: Sequence[LocalBox], *, world_size: int, patience_s: float = 0.0) -> None:
        """Claim the memory that `boxes` need, and have it faulted in while training runs.

        patience_s: see MemoryClaim. Raises ConfigError when the host has too little memory.
        """
        if self._buffer is None:
            size_bytes = self.needed_bytes(boxes, world_size=world_size)
            self._claim(size_bytes, [box.local for box in boxes], patience_s=patience_s).fault_in()

    def stage(
        self,
        boxes: Sequence[LocalBox],
        leaves: Leaves,
        sources: Sequence[torch.Tensor] | None = None,
        also: Places | None = None,
    ) -> Staged:
        """Copy `boxes` and the pickled `leaves` into the buffer; only stock tools read the leaves.

        The copy is enqueued before anything that the caller's device stream does next.

        boxes: if this is the same object as in the last call, only the elements may have changed. sources: the live
        tensors, if the boxes do not hold their memory. also: further names and paths of leaves for stock tools. Raises
        ConfigError when the host has too little memory.
        """
        if self._staged is not None and self._staged.is_apart:
            self.release()
        sources = [box.local for box in boxes] if sources is None else sources
        self._update_layout(boxes, sources)
        stock_leaves, records = self._lay_out_leaves(leaves)
        total = self._end + len(records)
        if self._buffer is None or not self._fits(self._buffer, total):
            self._buffer = self._claim(_with_slack(total), sources)
        if not self._is_mapped:
            self._map()
        copied = self._copy(sources)
        view = self._view[:total]
        view[self._end :] = records
        self._buffer.touched()
        place = self._buffer.place
        self._staged = self._described(
            BufferedBytes(view=view, copied=copied, place=place), boxes, leaves=stock_leaves, also=also
        )
        return self._staged

    def stage_in_slices(
        self,
        boxes: Sequence[LocalBox],
        leaves: Leaves,
        sources: Sequence[torch.Tensor] | None = None,
        also: Places | None = None,
    ) -> Staged:
        """Return the shard that `stage` would return, with its parts read from the live tensors instead of a buffer.

        The tensors must not change until its `slices` are all copied or released by `let_go`. For the arguments see
        `stage`.
        """
        sources = [box.local for box in boxes] if sources is None else sources
        self._update_layout(boxes, sources)
        self.release()
        stock_leaves, records = self._lay_out_leaves(leaves)
        streams = {device: self._side_stream(device) for device in self._by_device if device.type != "cpu"}
        slices = LiveSlices(self._slots, sources, rest=records, streams=streams)
        return self._described(slices, boxes, leaves=stock_leaves, also=also)

    def _described(
        self,
        source: BufferedBytes | LiveSlices,
        boxes: Sequence[LocalBox],
        *,
        leaves: Sequence[Leaf],
        also: Places | None,
    ) -> Staged:
        return Staged(source, self._slots, name=self.name, boxes=boxes, leaves=leaves, also=also or {})

    def _lay_out_leaves(self, leaves: Leaves) -> tuple[list[Leaf], bytes]:
        """Return where each leaf is, and the records of all leaves, which follow those of the tensors."""
        found, there, end = [], dict[bytes, int](), self._end
        for name, (path, value) in leaves.items():
            data = self._record_of_leaf(value)
            if data not in there:  # equal leaves are written once
                there[data] = end
                end += len(data)
            leaf = Leaf(name=name, path=path, record_offset=there[data], record_size=len(data), **asdict(self.name))
            found.append(leaf)
        return found, b"".join(there)

    def _record_of_leaf(self, value: object) -> bytes:
        """Return the record that torch.save writes for a leaf. Records of plain values are cached, since torch.save is
        slow."""
        items = value if type(value) is tuple else (value,)
        if not all(type(item) in (bool, int, float, str, type(None)) for item in items):
            return _pickled(value)
        if len(self._pickles) > MAX_PICKLES:
            self._pickles.clear()
        key = pickle.dumps(value)
        if key not in self._pickles:
            self._pickles[key] = _pickled(value)
        return self._pickles[key]

    def lay_out(self, boxes: Sequence[LocalBox], sources: Sequence[torch.Tensor]) -> IndexRows:
        """Lay these boxes out as `stage` would. Return their rows of the index, without checksums."""
        self._update_layout(boxes, sources)
        return rows(self.name, boxes, self._slots, repeat(()))

    def release(self) -> None:
        """Free the memory. Every request that reads from it must have ended."""
        if self._buffer is not None:
            self._buffer.stop_faulting_in()
        self._buffer, self._staged, self._view, self._views, self._is_mapped = None, None, memoryview(b""), [], False

    @property
    def _end(self) -> int:
        """Return the end of the last tensor record, in bytes."""
        return self._slots[-1].stop if self._slots else 0

    def _update_layout(self, boxes: Sequence[LocalBox], sources: Sequence[torch.Tensor]) -> None:
        if boxes is not self._laid_out or self._forms is None:
            forms = _forms_of(boxes, sources)
            if forms != self._forms:
                self._change_layout(forms)
            self._laid_out = boxes

    def _change_layout(self, forms: BoxForms) -> None:
        self._forms = None  # until the new layout is complete, so that an error does not leave half of it
        if self._is_mapped:
            self.release()
        self._slots, self._by_device = [], {}
        end = 0
        for number, (dtype, sizes, device) in enumerate(forms):
            slot = Slot(start=-(-end // ALIGN) * ALIGN, torch_record=record_for(dtype, sizes))
            self._slots.append(slot)
            self._by_device.setdefault(device, []).append(number)
            end = slot.stop
        self._forms = forms

    def _fits(self, buffer: HostBuffer, total: int) -> bool:
        """Return whether the buffer is large enough, and was not prepared for much more than is staged."""
        most = total + total // 4 + 2 * SLACK_BYTES
        return total <= buffer.size_bytes and (self._is_mapped or buffer.size_bytes <= most)

    def _claim(self, size_bytes: int, sources: Sequence[torch.Tensor], *, patience_s: float = 0.0) -> HostBuffer:
        """Replace the buffer with one of this size. An upload in progress keeps the old one alive until it ends."""
        self.release()
        is_pinned = any(source.device.type != "cpu" for source in sources)
        self._buffer = HostBuffer(size_bytes, pinned=is_pinned, shared=self._is_shared, patience_s=patience_s)
        return self._buffer

    def _map(self) -> None:
        """Write the records' heads into a new buffer, and create a view of it for each box."""
        assert self._buffer is not None, "just claimed"
        assert self._forms is not None, "just laid out"
        self._buffer.stop_faulting_in()
        self._view = memoryview(cast("Any", self._buffer.tensor.numpy()))
        typed: dict[torch.dtype, torch.Tensor] = {}
        views = []
        for slot, (dtype, sizes, _) in zip(self._slots, self._forms, strict=True):
            start = slot.payload.start
            self._view[slot.start : start] = slot.torch_record.head
            flat = typed.get(dtype)
            if flat is None:
                flat = typed[dtype] = self._buffer.tensor.view(dtype)
            views.append(flat.as_strided(sizes, strides_of(sizes), start // dtype.itemsize))
        self._views, self._is_mapped = views, True

    def _copy(self, sources: Sequence[torch.Tensor]) -> list[torch.Event]:
        """Copy the live tensors into the buffer.

        On return, copies from the host are complete; copies from devices are complete when the returned events have
        occurred.
        """
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
        """Copy from a device on a side stream. It starts after the current step, and the next step waits for it.

        So the optimizer's next write cannot overtake the copy, and the host does not wait for it.
        """
        current = torch.accelerator.current_stream(device)
        side = self._side_stream(device)
        copied = torch.Event(device)
        with side:
            for view, source in zip(views, sources, strict=True):
                view.copy_(source, non_blocking=True)
            copied.record(side)
        current.wait_stream(side)
        return copied

    def _side_stream(self, device: torch.device) -> torch.Stream:
        """Return a stream that begins after everything the caller's stream has enqueued."""
        side = self._streams.setdefault(device, torch.Stream(device))
        side.wait_stream(torch.accelerator.current_stream(device))
        return side


def _with_slack(size_bytes: int) -> int:
    """Return a size with room for leaves that grow."""
    return -(-(size_bytes + size_bytes // 64 + SLACK_BYTES) // ALIGN) * ALIGN


def _forms_of(boxes: Sequence[LocalBox], sources: Sequence[torch.Tensor]) -> BoxForms:
    return tuple((box.local.dtype, box.sizes, source.device) for box, source in zip(boxes, sources, strict=True))


def _pickled(value: object) -> bytes:
    """Return the record of a leaf for stock tools.

    A few values that raycheck saves cannot be pickled: a memory format, or a tuple of tensors that are views of each
    other in other dtypes. Stock tools get a string in their place.
    """
    try:
        return _saved(value)
    except Exception as error:  # noqa: BLE001  pickling runs arbitrary code, and records for stock tools must not fail a save
        return _saved(f"{type(value).__qualname__}, which cannot be pickled: {error}")


def _saved(value: object) -> bytes:
    sink = io.BytesIO()
    torch.save(value, sink)
    return sink.getvalue()
