"""Describes a shard object: where the records of its boxes are in it, and its rows of manifest and index."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from raycheck.bucket.format.index import Chunk, Leaf, Tensor
from raycheck.bucket.format.manifest import ShardRecord
from raycheck.transfer.stage.local_box import LocalBox
from raycheck.transfer.stage.torch_record import TorchRecord

IndexRows = tuple[tuple[Tensor, ...], tuple[Chunk, ...]]
"""Rows of an index. A Chunk (a saved box) refers to its tensor by its position among these tensors."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardName:
    """The identity of a shard in a checkpoint."""

    component: str
    rank: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Shard:
    """A shard's rows in manifest and index. A Chunk refers to its tensor by its position among these tensors."""

    record: ShardRecord
    tensors: tuple[Tensor, ...]
    chunks: tuple[Chunk, ...]
    leaves: tuple[Leaf, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Slot:
    """The place of a box's record in the shard.

    start, stop: of the record, in bytes. payload: the range of the shard that is the box's own bytes.
    """

    start: int
    torch_record: TorchRecord
    payload: slice = field(init=False, compare=False)
    stop: int = field(init=False)

    def __post_init__(self) -> None:
        begin = self.start + len(self.torch_record.head)
        object.__setattr__(self, "payload", slice(begin, begin + self.torch_record.payload_size))
        object.__setattr__(self, "stop", self.start + self.torch_record.record_size)


def rows(
    shard: ShardName, boxes: Sequence[LocalBox], slots: Sequence[Slot], crcs: Iterable[tuple[int, ...]]
) -> IndexRows:
    """Return the tensors of a shard, and the saved boxes in it, first those of `boxes` in their order.

    A tied tensor appears under each of its names, and a tensor of several boxes once.
    """
    found = {box.name: Tensor(name=box.name, dtype=box.dtype, shape=box.shape, path=box.path) for box in boxes}
    number_of = {name: number for number, name in enumerate(found)}
    tensors = list(found.values())
    chunks = [
        Chunk(
            tensor=number_of[box.name],
            component=shard.component,
            rank=shard.rank,
            offsets=box.offsets,
            sizes=box.sizes,
            record_offset=slot.start,
            record_size=slot.torch_record.record_size,
            payload_offset=slot.payload.start,
            payload_size=slot.torch_record.payload_size,
            crcs=own,
        )
        for box, slot, own in zip(boxes, slots, crcs, strict=False)
    ]
    for chunk, box in zip(chunks[:], boxes, strict=False):
        for name, path in box.aliases:
            if name not in number_of:
                number_of[name] = len(tensors)
                tensors.append(replace(tensors[chunk.tensor], name=name, path=path))
            chunks.append(replace(chunk, tensor=number_of[name]))
    return tuple(tensors), tuple(chunks)
