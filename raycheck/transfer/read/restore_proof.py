"""Proves that a restore did what it reports.

Bytes are counted where they are copied, and compared with the size of each live tensor. Afterwards the live objects are
asked for their tensors once more. This is needed because many objects accept a copy silently and discard it: meta
tensors, hooks that create tensors on every access, a load_state_dict that ignores its argument. None of them may be
reported as "restored".
"""

from collections.abc import Iterable

import torch

from raycheck.errors import ConfigError
from raycheck.transfer.stage.gather_cache import local_of
from raycheck.transfer.stage.local_box import LocalBox, bytes_of


class WrittenBytes:
    """The number of bytes that were written into each box.

    The boxes must live as long as this object, which identifies them by id().
    """

    def __init__(self) -> None:
        self._bytes: dict[int, int] = {}

    def add_all(self, counts: Iterable[tuple[LocalBox, int]]) -> None:
        """Add these bytes to the counts of their boxes."""
        for box, size_bytes in counts:
            self._bytes[id(box)] = self._bytes.get(id(box), 0) + size_bytes

    def check(self, boxes: Iterable[LocalBox]) -> None:
        """Raise ConfigError, which names the tensor, when a box was not written completely and exactly once."""
        for box in boxes:
            found = self._bytes.get(id(box), 0)
            if found != box.size_bytes:
                raise not_restored(
                    box.name, f"{found} of its {box.size_bytes} bytes on {box.local.device} were written"
                )


def not_restored(name: str, why: str) -> ConfigError:
    """Return the error for a tensor that did not get its value."""
    return ConfigError(f"{name} was not restored: {why}. The state is now partly restored; do not train on it")


def written_bytes(target: torch.Tensor) -> int:
    """Return how many bytes a copy into `target` has written: 0 if it has no memory."""
    return target.nbytes if has_memory(target) else 0


def has_memory(tensor: torch.Tensor) -> bool:
    """Return whether a tensor that wraps no others has memory. A tensor without elements needs none."""
    return not tensor.is_meta and (not tensor.numel() or tensor.data_ptr() != 0)


def holds(live: torch.Tensor, read: torch.Tensor) -> bool:
    """Return whether a live tensor shares the memory of `read`, or has equal bytes."""
    live, read = local_of(live.detach()), local_of(read.detach())
    if (live.shape, live.dtype) != (read.shape, read.dtype) or not has_memory(live):
        return False
    return shares_memory(live, read) or torch.equal(bytes_of(live.cpu()), bytes_of(read.cpu()))


def shares_memory(live: torch.Tensor, read: torch.Tensor) -> bool:
    """Return whether two tensors are the same elements of the same memory."""
    live, read = local_of(live.detach()), local_of(read.detach())
    return all(getattr(live, name) == getattr(read, name) for name in ("shape", "dtype", "device")) and (
        live.data_ptr(),
        live.stride(),
    ) == (read.data_ptr(), read.stride())
