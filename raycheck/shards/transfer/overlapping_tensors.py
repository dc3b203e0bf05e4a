"""Live tensors whose elements share memory, with each other or with another tensor's: what expand(), as_strided() and
views make. They are saved element by element, and nothing says that what is restored into them agrees.

So one element of each is written where torch refuses to write them all, and what was read is compared with a second
reading of it when all is written.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from raycheck.errors import StateMismatchError
from raycheck.shards.transfer.local_box import LocalBox
from raycheck.shards.transfer.restore_proof import holds


def writable(piece: LocalBox) -> LocalBox:
    """The part of a piece that stands for all of it: the first along each dimension that expand() has made."""
    local, sizes = piece.local, list(piece.sizes)
    for dim, (size, stride) in enumerate(zip(local.shape, local.stride(), strict=True)):
        if size > 1 and not stride:
            local, sizes[dim] = local.narrow(dim, 0, 1), 1
    return replace(piece, local=local, sizes=tuple(sizes)) if local is not piece.local else piece


def overlapping(pieces: Sequence[LocalBox]) -> list[LocalBox]:
    """Those that may share memory with themselves or another. Rows that only interleave count too: they cost a second
    reading, and nothing else."""
    found = {id(piece): piece for piece in pieces if overlaps_itself(piece.local)}
    ends: dict[torch.device, tuple[int, LocalBox]] = {}
    for piece in sorted(pieces, key=lambda piece: piece.local.data_ptr()):
        start, device = piece.local.data_ptr(), piece.local.device
        end = start + _span(piece.local)
        before = ends.get(device)
        if before is not None and start < before[0]:
            found |= {id(piece): piece, id(before[1]): before[1]}
        if before is None or end > before[0]:
            ends[device] = (end, piece)
    return list(found.values())


def overlaps_itself(tensor: torch.Tensor) -> bool:
    """Whether its elements may share memory, by its strides alone."""
    reach = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1:
            if stride < reach:
                return True
            reach += (size - 1) * stride
    return False


def read_again(pieces: Sequence[LocalBox], read: Callable[[Sequence[LocalBox]], int]) -> int:
    """Compare the pieces, all of them written, with what `read` gives once more. Returns the bytes fetched.

    Raises StateMismatchError, naming them, when memory that they share holds another's value.
    """
    again = [replace(piece, local=torch.empty(piece.sizes, dtype=piece.local.dtype)) for piece in pieces]
    fetched = read(again) if again else 0
    lost = [piece.name for piece, own in zip(pieces, again, strict=True) if not holds(piece.local, own.local)]
    if lost:
        raise StateMismatchError(
            f"{', '.join(lost)}: elements share memory here (expand(), as_strided() or a view) and were saved with "
            "different values. The state is a mixture now; give the tensors memory of their own with clone()"
        )
    return fetched


def _span(tensor: torch.Tensor) -> int:
    """Bytes from its first element to behind its last."""
    reach = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (reach + 1) * tensor.element_size()
