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


def writable(box: LocalBox) -> LocalBox:
    """The part of a box that stands for all of it: the first along each dimension that expand() has made."""
    local, sizes = box.local, list(box.sizes)
    for dim, (size, stride) in enumerate(zip(local.shape, local.stride(), strict=True)):
        if size > 1 and not stride:
            local, sizes[dim] = local.narrow(dim, 0, 1), 1
    return replace(box, local=local, sizes=tuple(sizes)) if local is not box.local else box


def overlapping(boxes: Sequence[LocalBox]) -> list[LocalBox]:
    """Those that may share memory with themselves or another. Rows that only interleave count too: they cost a second
    reading, and nothing else."""
    found = {id(box): box for box in boxes if overlaps_itself(box.local)}
    ends: dict[torch.device, tuple[int, LocalBox]] = {}
    for box in sorted(boxes, key=lambda box: box.local.data_ptr()):
        start, device = box.local.data_ptr(), box.local.device
        end = start + _span(box.local)
        before = ends.get(device)
        if before is not None and start < before[0]:
            found |= {id(box): box, id(before[1]): before[1]}
        if before is None or end > before[0]:
            ends[device] = (end, box)
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


def read_again(boxes: Sequence[LocalBox], read: Callable[[Sequence[LocalBox]], int]) -> int:
    """Compare the boxes, all of them written, with what `read` gives once more. Returns the bytes fetched.

    Raises StateMismatchError, naming them, when memory that they share holds another's value.
    """
    again = [replace(box, local=torch.empty(box.sizes, dtype=box.local.dtype)) for box in boxes]
    fetched = read(again) if again else 0
    lost = [box.name for box, own in zip(boxes, again, strict=True) if not holds(box.local, own.local)]
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
