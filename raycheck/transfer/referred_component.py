"""Refers to a component that lies in the bucket whole, in whatever boxes: that of a base, or a restored one.

All ranks refer to it or none does: its boxes are not those of the ranks. Rank 0 puts its rows into the index. A rank
that finds its own part changed says so by not referring to it.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from raycheck.bucket.format.index import Chunk, Index, Tensor
from raycheck.bucket.format.manifest import Component
from raycheck.bucket.format.object_keys import component_prefix
from raycheck.bucket.protocol.sharing.base_run import WantedTensor, numbers_in
from raycheck.bucket.store import Store
from raycheck.transfer.read.reader import read_into
from raycheck.transfer.stage.local_box import LocalBox, Place, as_bytes
from raycheck.transfer.tensor_digest import Digest, are_equal, digests

PIECE_BYTES = 64 * 1024 * 1024
"""The memory that a comparison takes, or one row of a tensor, where that is more."""
Forms = frozenset[tuple[str, str, tuple[int, ...]]]
"""Name, dtype and shape of tensors."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ReferredComponent:
    """Describes a component that is referred to, not uploaded.

    record: its record in the manifest. tensors, chunks: its rows of the index; a chunk refers to its tensor by the
    number among these. forms: what this rank has of it. digests: those of this rank's boxes, by name, when they were
    known to hold what the component holds.
    """

    record: Component
    tensors: tuple[Tensor, ...]
    chunks: tuple[Chunk, ...]
    forms: Forms
    digests: Mapping[str, Digest]

    @classmethod
    def of(
        cls,
        record: Component,
        index: Index,
        boxes: Sequence[LocalBox],
        found: Mapping[str, Digest],
    ) -> "ReferredComponent":
        """Take a component of another run, under this rank's own names. boxes: all of its component, of one rank."""
        numbers = numbers_in(index, record.name)
        tensors: list[Tensor] = []
        chunks: list[Chunk] = []
        for box in boxes:
            number = _number(numbers, box)
            for name, path in places_of(box):
                chunks += (replace(chunk, tensor=len(tensors)) for chunk in index.chunks_of(number))
                tensors.append(replace(index.tensors[number], name=name, path=path))
        return cls(record=record, tensors=tuple(tensors), chunks=tuple(chunks), forms=forms_of(boxes), digests=found)

    @classmethod
    def restored(
        cls, record: Component, index: Index, forms: Forms, found: Mapping[str, Digest]
    ) -> "ReferredComponent | None":
        """Take a component of a checkpoint that was restored. Returns None unless this rank has exactly its tensors."""
        numbers = sorted(numbers_in(index, record.name).values())
        tensors = tuple(index.tensors[number] for number in numbers)
        if forms != {(tensor.name, tensor.dtype, tensor.shape) for tensor in tensors}:
            return None
        chunks = (replace(chunk, tensor=new) for new, number in enumerate(numbers) for chunk in index.chunks_of(number))
        return cls(record=record, tensors=tensors, chunks=tuple(chunks), forms=forms, digests=found)

    def is_unchanged(self, forms: Forms, found: Mapping[str, Digest], num_boxes: int) -> bool:
        """Return whether this rank still has what the component holds. found: the digests of its `num_boxes` boxes."""
        return forms == self.forms and len(found) == num_boxes and are_equal(self.digests, found)


def places_of(box: LocalBox) -> tuple[Place, ...]:
    """Return all names and paths of a box."""
    return ((box.name, box.path), *box.aliases)


def forms_of(boxes: Sequence[LocalBox]) -> Forms:
    """Return what these boxes are boxes of."""
    return frozenset((name, box.dtype, box.shape) for box in boxes for name, _ in places_of(box))


def wanted_of(boxes: Sequence[LocalBox]) -> tuple[WantedTensor, ...]:
    """Return what a base must have for these boxes. It is equal on all ranks that hold parts of the same tensors."""
    found = (
        WantedTensor(names=tuple(name for name, _ in places_of(box)), dtype=box.dtype, shape=box.shape) for box in boxes
    )
    return tuple(sorted(found, key=lambda tensor: tensor.names))


def digests_of(boxes: Sequence[LocalBox]) -> dict[str, Digest]:
    """Return one digest per box, by the box's name."""
    return dict(zip((box.name for box in boxes), digests([box.local for box in boxes]), strict=True))


def _number(numbers: Mapping[str, int], box: LocalBox) -> int:
    return next(numbers[name] for name, _ in places_of(box) if name in numbers)


def difference(store: Store, record: Component, index: Index, boxes: Sequence[LocalBox]) -> str:
    """Return the name of a box whose bytes are not those of the component, "" when all are equal, bit for bit.

    Every byte is read and verified as in a restore, at most about PIECE_BYTES at a time. record, index: of the
    component, whose directory `store` reads. Raises what `read_into` raises.
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
