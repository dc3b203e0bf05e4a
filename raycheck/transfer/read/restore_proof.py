"""Proves that a restore did what it reports.

Bytes are counted where they are copied, and compared with the size of each live tensor. Afterwards the live objects are
asked for their tensors once more. This is needed because many things accept a copy silently and keep nothing: meta
tensors, hooks that make tensors anew, a load_state_dict that forgets. None of them may end in a report of "restored".
"""

from collections.abc import Iterable

import torch

from raycheck.errors import ConfigError
from raycheck.transfer.stage.gather_cache import local_of
from raycheck.transfer.stage.local_box import LocalBox, bytes_of


class WrittenBytes:
    """Counts the bytes that were written into each box.

    The boxes must live as long as the counter, which tells them apart by their id.
    """

    def __init__(self) -> None:
        self._bytes: dict[int, int] = {}

    def add_all(self, counts: Iterable[tuple[LocalBox, int]]) -> None:
        """Add these bytes to the counts of their boxes."""
        for box, size_bytes in counts:
            self._bytes[id(box)] = self._bytes.get(id(box), 0) + size_bytes

    def check(self, boxes: Iterable[LocalBox]) -> None:
        """Raise ConfigError, which names the tensor, when a box was not written exactly once from end to end."""
        for box in boxes:
            found = self._bytes.get(id(box), 0)
            if found != box.size_bytes:
                raise not_restored(
                    box.name, f"{found} of its {box.size_bytes} bytes on {box.local.device} were written"
                )


def not_restored(name: str, why: str) -> ConfigError:
    """Returns the error for a tensor that did not get its value."""
    return ConfigError(f"{name} was not restored: {why}. The state is a mixture now and must not be trained on")


def written_bytes(target: torch.Tensor) -> int:
    """Returns how many bytes a copy into `target` has written: none where it has no memory."""
    return target.nbytes if has_memory(target) else 0


def has_memory(tensor: torch.Tensor) -> bool:
    """Returns whether a tensor, which wraps no others, has bytes of its own. One without elements needs none."""
    return not tensor.is_meta and (not tensor.numel() or tensor.data_ptr() != 0)


def holds(live: torch.Tensor, read: torch.Tensor) -> bool:
    """Returns whether a live tensor is the memory that was read into, or has equal bytes."""
    live, read = local_of(live.detach()), local_of(read.detach())
    if (live.shape, live.dtype) != (read.shape, read.dtype) or not has_memory(live):
        return False
    is_same = (live.data_ptr(), live.stride(), live.device) == (read.data_ptr(), read.stride(), read.device)
    return is_same or torch.equal(bytes_of(live.cpu()), bytes_of(read.cpu()))
