"""Computes a short digest of a tensor on its own device, to tell whether it was written to since the last digest.

torch's version counters are not enough: a write through `.data` does not count.
"""

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any, cast

import torch

from raycheck.bucket.format.checksum import sub_block_crcs
from raycheck.shards.transfer.local_box import as_bytes

Digest = tuple[int, ...]
_WORDS = 1 << 20
"""The number of 32-bit words in one sum."""


def digests(tensors: Sequence[torch.Tensor]) -> list[Digest]:
    """Returns one digest per tensor; digests of equal bytes are equal.

    In host memory it is the CRC-32 of each 4 MiB. On an accelerator it is a weighted sum of each 4 MiB, computed there
    after everything that was enqueued so far; the host waits once for all sums.
    """
    found: list[Digest | None] = [None] * len(tensors)
    there: dict[torch.device, list[tuple[int, torch.Tensor]]] = {}
    for number, tensor in enumerate(tensors):
        plain = as_bytes(tensor.detach().resolve_conj().resolve_neg().contiguous())
        if not plain.numel():
            found[number] = ()
        elif plain.device.type == "cpu":
            found[number] = tuple(sub_block_crcs(memoryview(cast("Any", plain.numpy()))))
        else:
            there.setdefault(plain.device, []).append((number, weighted_sums(plain)))
    for sums in there.values():
        values = iter(torch.cat([own for _, own in sums]).tolist())
        for number, own in sums:
            found[number] = tuple(next(values) for _ in range(own.numel()))
    return [digest for digest in found if digest is not None]


def are_equal(known: Mapping[str, Digest], found: Mapping[str, Digest]) -> bool:
    """Returns whether all tensors in `found` are known, by name, with the same digest.

    Tensors without elements need not be known: a restore does not read them.
    """
    return all(known.get(name, ()) == digest for name, digest in found.items())


def weighted_sums(plain: torch.Tensor) -> torch.Tensor:
    """Returns the weighted sum of each 4 MiB of a flat tensor, modulo 2^64.

    Weights are odd and have 64 bits. So a change of one word always changes the sum, and a change of the top bits of
    many words is still weighted by the lower half of the weights.
    """
    data = plain.view(torch.uint8)
    if data.storage_offset() % 4:
        data = data.clone()
    weights = _weights(data.device)
    whole = data.numel() // 4 * 4
    blocks = [*torch.split(data[:whole].view(torch.int32), _WORDS), data[whole:]]
    return torch.stack([(block.to(torch.int64) * weights[: block.numel()]).sum() for block in blocks])


@cache
def _weights(device: torch.device) -> torch.Tensor:
    chance = torch.Generator().manual_seed(0)
    bounds = torch.iinfo(torch.int64)
    return (torch.randint(bounds.min, bounds.max, (_WORDS,), generator=chance) | 1).to(device)
