"""Refers to a component that is already in the bucket, and compares the live tensors with it.

Usually it was saved in the boxes that the ranks write, and each rank refers to its own shard. A base's or a restored
component may have been saved in other boxes: then all ranks refer to it or none does, and rank 0 puts its rows into the
index. In both cases, a rank whose own part has changed shows this by not referring to it.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from raycheck.bucket.assembly.save_report import Reference
from raycheck.bucket.format.index import Index, Tensor
from raycheck.bucket.format.manifest import Component
from raycheck.bucket.format.object_keys import component_prefix
from raycheck.bucket.protocol.sharing.base_run import WantedTensor, numbers_in
from raycheck.bucket.store import Store
from raycheck.transfer.read.reader import read_into
from raycheck.transfer.stage.local_box import LocalBox, Place, as_bytes
from raycheck.transfer.stage.shard import IndexRows, Shard
from raycheck.transfer.tensor_digest import Digest, are_equal, digests

PIECE_BYTES = 64 * 1024 * 1024
"""The memory that a comparison takes, or one row of a tensor, where that is more."""
Forms = frozenset[tuple[str, str, tuple[int, ...]]]
"""Name, dtype and shape of tensors."""


NO_ROWS: IndexRows = ((), ())


@dataclass(frozen=True, kw_only=True, slots=True)
class ReferredComponent:
    """A component in the bucket, and this rank's part of it at that time.

    reference: its entry in the report. digests: those of this rank's boxes, by name, when their contents were the
    component's. If it was saved in this rank's boxes: shard: this rank's own; boxes: those in this shard, as they were
    passed to the last save. If it was saved in other boxes: rows: its rows in the index; forms: the shapes of this
    rank's part.
    """

    reference: Reference
    digests: Mapping[str, Digest]
    shard: Shard | None = None
    boxes: Sequence[LocalBox] = ()
    rows: IndexRows = NO_ROWS
    forms: Forms = frozenset()

    @classmethod
    def of(
        cls,
        record: Component,
        index: Index,
        boxes: Sequence[LocalBox],
        found: Mapping[str, Digest],
    ) -> "ReferredComponent":
        """Make one from a component of another run, under this rank's own names. boxes: this rank's boxes of the
        component."""
        numbers = numbers_in(index, record.name)
        renamed = {
            name: (number, replace(index.tensors[number], name=name, path=path))
            for box in boxes
            for number in [_number(numbers, box)]
            for name, path in places_of(box)
        }
        return cls._whole(record, index, list(renamed.values()), forms_of(boxes), found)

    @classmethod
    def restored(
        cls, record: Component, index: Index, forms: Forms, found: Mapping[str, Digest]
    ) -> "ReferredComponent | None":
        """Make one from a component of a restored checkpoint. Return None unless this rank has exactly its tensors."""
        tensors = [(number, index.tensors[number]) for number in sorted(numbers_in(index, record.name).values())]
        if forms != {(tensor.name, tensor.dtype, tensor.shape) for _, tensor in tensors}:
            return None
        return cls._whole(record, index, tensors, forms, found)

    @classmethod
    def _whole(
        cls,
        record: Component,
        index: Index,
        tensors: Sequence[tuple[int, Tensor]],
        forms: Forms,
        found: Mapping[str, Digest],
    ) -> "ReferredComponent":
        """tensors: each with its number in the index."""
        chunks = (replace(chunk, tensor=new) for new, (old, _) in enumerate(tensors) for chunk in index.chunks_of(old))
        reference = Reference(name=record.name, checkpoint=record.checkpoint, record=record)
        rows = tuple(tensor for _, tensor in tensors), tuple(chunks)
        return cls(reference=reference, digests=found, rows=rows, forms=forms)

    def has_layout(self, rows: IndexRows) -> bool:
        """Return whether this rank's own shard has exactly these rows, apart from the checksums."""
        if self.shard is None:
            return False
        tensors, chunks = rows
        return tensors == self.shard.tensors and chunks == tuple(replace(c, crcs=()) for c in self.shard.chunks)

    def has(self, boxes: Sequence[LocalBox], found: Mapping[str, Digest]) -> bool:
        """Return whether the component has the live contents of these boxes of this rank. found: their digests."""
        return len(found) == len(boxes) and are_equal(self.digests, found)

    def at(self, checkpoint: str) -> "ReferredComponent":
        """Return the same component as part of the directory of this checkpoint."""
        return replace(self, reference=replace(self.reference, checkpoint=checkpoint))


def places_of(box: LocalBox) -> tuple[Place, ...]:
    """Return all names and paths of a box."""
    return ((box.name, box.path), *box.aliases)


def forms_of(boxes: Sequence[LocalBox]) -> Forms:
    """Return the names, dtypes and shapes of the tensors of these boxes."""
    return frozenset((name, box.dtype, box.shape) for box in boxes for name, _ in places_of(box))


def wanted_of(boxes: Sequence[LocalBox]) -> tuple[WantedTensor, ...]:
    """Return the tensors that a base must have for these boxes. Ranks with parts of the same tensors get equal
    results."""
    found = (
        WantedTensor(names=tuple(name for name, _ in places_of(box)), dtype=box.dtype, shape=box.shape) for box in boxes
    )
    return tuple(sorted(set(found), key=lambda tensor: tensor.names))


def digests_of(boxes: Sequence[LocalBox]) -> dict[str, Digest]:
    """Return one digest per box, by the box's name."""
    return dict(zip((box.box_name for box in boxes), digests([box.local for box in boxes]), strict=True))


def _number(numbers: Mapping[str, int], box: LocalBox) -> int:
    return next(numbers[name] for name, _ in places_of(box) if name in numbers)


def difference(store: Store, record: Component, index: Index, boxes: Sequence[LocalBox]) -> str:
    """Return the name of a box whose bytes differ from the component's, "" if all are bit for bit equal.

    Every byte is read and verified as in a restore, at most about PIECE_BYTES at a time. record, index: the
    component's. store: reads its directory. Raises the errors of `read_into`.
    """
    numbers = numbers_in(index, record.name)
    prefixes = {record.name: component_prefix(record.checkpoint, record.name)}
    for group in _groups(boxes):
        targets = [
            replace(
                piece,
                name=index.tensors[_number(numbers, piece)].name,
                local=torch.empty(piece.sizes, dtype=piece.local.dtype),
            )
            for piece in group
        ]
        read_into(store, prefixes, index, targets)
        for piece, target in zip(group, targets, strict=True):
            live = piece.local.detach().resolve_conj().resolve_neg().contiguous().cpu()
            if not torch.equal(as_bytes(live), as_bytes(target.local)):
                return piece.name
    return ""


def _groups(boxes: Sequence[LocalBox]) -> Iterator[list[LocalBox]]:
    group: list[LocalBox] = []
    size_bytes = 0
    for box in boxes:
        for piece in _pieces(box):
            if group and size_bytes + piece.size_bytes > PIECE_BYTES:
                yield group
                group, size_bytes = [], 0
            group.append(piece)
            size_bytes += piece.size_bytes
    if group:
        yield group


def _pieces(box: LocalBox) -> Iterator[LocalBox]:
    """Yield the box in pieces of whole rows, none without elements."""
    if not box.local.numel():
        return
    if not box.sizes:
        yield box
        return
    rows = max(1, PIECE_BYTES * box.sizes[0] // max(1, box.size_bytes))
    for start in range(0, box.sizes[0], rows):
        count = min(rows, box.sizes[0] - start)
        yield replace(
            box,
            local=box.local.narrow(0, start, count),
            offsets=(box.offsets[0] + start, *box.offsets[1:]),
            sizes=(count, *box.sizes[1:]),
        )
