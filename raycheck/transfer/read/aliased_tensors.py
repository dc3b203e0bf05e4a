"""Restores live tensors whose elements share memory with each other or with another tensor.

expand(), as_strided() and views create such tensors. They are saved element by element, so two saved elements of the
same memory address may differ. Where torch refuses to write all elements of such a tensor, one element per address is
written. After everything is written, these tensors are read a second time and compared.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from raycheck.errors import StateMismatchError
from raycheck.transfer.read.restore_proof import holds
from raycheck.transfer.stage.local_box import LocalBox


def writable(box: LocalBox) -> LocalBox:
    """Return the part of a box that can be written: only the first element along each dimension made by expand()."""
    local, sizes = box.local, list(box.sizes)
    for dim, (size, stride) in enumerate(zip(local.shape, local.stride(), strict=True)):
        if size > 1 and not stride:
            local, sizes[dim] = local.narrow(dim, 0, 1), 1
    return replace(box, local=local, sizes=tuple(sizes)) if local is not box.local else box


def overlapping(boxes: Sequence[LocalBox]) -> list[LocalBox]:
    """Return the boxes that may share memory with themselves or with another box.

    Rows that merely interleave are returned too; this costs a second read and nothing else.
    """
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
    """Return whether the tensor's elements may share memory, judged by its strides alone."""
    if tensor.is_contiguous():
        return False
    reach = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1:
            if stride < reach:
                return True
            reach += (size - 1) * stride
    return False


def read_again(boxes: Sequence[LocalBox], read: Callable[[Sequence[LocalBox]], int]) -> int:
    """Compare the boxes, which have all been written, with a second read. Return the bytes fetched.

    read: fills the boxes it is given, and returns the bytes fetched. Raises StateMismatchError, which names the
    tensors, when memory that they share holds the value of another element.
    """
    again = [replace(box, local=torch.empty(box.sizes, dtype=box.local.dtype)) for box in boxes]
    fetched = read(again) if again else 0
    lost = [box.name for box, own in zip(boxes, again, strict=True) if not holds(box.local, own.local)]
    if lost:
        raise StateMismatchError(
            f"{', '.join(lost)}: elements share memory here (expand(), as_strided() or a view) and were saved with "
            "different values. The state is now partly restored and must not be used; give each tensor its own memory "
            "with clone()"
        )
    return fetched


def _span(tensor: torch.Tensor) -> int:
    """Return the bytes from the tensor's first element to the end of its last."""
    if tensor.is_contiguous():
        return tensor.nbytes
    reach = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (reach + 1) * tensor.element_size()
