"""Lists the tensors of a checkpoint from its index: form, location, and the parameter of each optimizer moment."""

from collections.abc import Iterable
from dataclasses import dataclass

from raycheck.bucket.format.index import Chunk, Index, Tensor
from raycheck.bucket.format.manifest import Manifest

Box = tuple[tuple[int, ...], tuple[int, ...]]
"""Offsets and sizes of a part of a tensor, in elements per dimension."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorSummary:
    """One tensor of a checkpoint.

    name: its name in stock DCP. entry: its entry of the state. dtype: torch's name without "torch.". shape: the whole
    tensor's, in elements. size_bytes: bytes of its values; replicas count once. boxes: how many boxes it is split into;
    1 for a tensor that is not sharded. ranks: the ranks that wrote it. directories: the checkpoint directories that
    contain it: this checkpoint's own, or an earlier one's by reference. parameter: the parameter of which this is a
    moment, None except for optimizer state.
    """

    name: str
    entry: str
    dtype: str
    shape: tuple[int, ...]
    size_bytes: int
    boxes: int
    ranks: tuple[int, ...]
    directories: tuple[str, ...]
    parameter: str | None = None

    @property
    def is_sharded(self) -> bool:
        """Return whether the tensor is split into several boxes."""
        return self.boxes > 1


def summarize_tensors(manifest: Manifest, index: Index) -> tuple[TensorSummary, ...]:
    """Return all tensors of a checkpoint in index order: parameters first, in their modules' order."""
    directory = {part.name: part.checkpoint for part in manifest.components}
    parameters = _parameters(index.tensors)
    found = []
    for number, tensor in enumerate(index.tensors):
        chunks, boxes = index.chunks_of(number), boxes_of(index, number)
        found.append(
            TensorSummary(
                name=tensor.name,
                entry=str(tensor.path[0]),
                dtype=tensor.dtype,
                shape=tensor.shape,
                size_bytes=sum(chunk.payload_size for chunk in boxes.values()),
                boxes=len(boxes),
                ranks=tuple(sorted({chunk.rank for chunk in chunks})),
                directories=tuple(sorted({directory.get(chunk.component, "?") for chunk in chunks})),
                parameter=parameters.get(tensor.path),
            )
        )
    return tuple(found)


def boxes_of(index: Index, number: int) -> dict[Box, Chunk]:
    """Return one chunk per box of the tensor with this number, from the first rank that wrote it."""
    found: dict[Box, Chunk] = {}
    for chunk in index.chunks_of(number):
        found.setdefault((chunk.offsets, chunk.sizes), chunk)
    return found


def with_moments(tensors: Iterable[TensorSummary]) -> list[tuple[TensorSummary, list[TensorSummary]]]:
    """Return each tensor with its moments among these. A moment whose parameter is among these is not listed
    separately."""
    tensors = list(tensors)
    names = {item.name for item in tensors}
    moments: dict[str, list[TensorSummary]] = {}
    for item in tensors:
        if item.parameter in names:
            moments.setdefault(item.parameter, []).append(item)
    return [(item, moments.get(item.name, [])) for item in tensors if item.parameter not in names]


def _parameters(tensors: tuple[Tensor, ...]) -> dict[tuple[str | int, ...], str]:
    """Return the parameter's name for the path of each tensor of an optimizer's state.

    An optimizer's entry has the paths (entry, "state", the parameter's name in its module, the slot); a module's has
    (entry, the parameter's name). If several modules have such a parameter, the first one's is used.
    """
    owners: dict[object, str] = {}
    for tensor in tensors:
        if len(tensor.path) == 2:
            owners.setdefault(tensor.path[1], tensor.name)
    return {
        tensor.path: owners[tensor.path[2]]
        for tensor in tensors
        if len(tensor.path) >= 4 and tensor.path[1] == "state" and tensor.path[2] in owners
    }
