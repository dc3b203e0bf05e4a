"""What a tensor holds, as a few numbers, computed where it lies: to tell whether it was written to since.

Never judged by torch's version counters, which a write through `.data` passes by.
"""

from collections.abc import Sequence
from functools import cache
from typing import Any, cast

import torch

from raycheck.bucket.checksum import sub_block_crcs

Digest = tuple[int, ...]
_WORDS = 1 << 20
"""64-bit words under one sum."""


def digests(tensors: Sequence[torch.Tensor]) -> list[Digest]:
    """One per tensor, equal for equal bytes. Of host memory the CRC-32 of each 4 MiB; of an accelerator's the weighted
    sum of each 8 MiB, computed there, after what was enqueued so far; the host waits once for all of them."""
    found: list[Digest | None] = [None] * len(tensors)
    there: dict[torch.device, list[tuple[int, torch.Tensor]]] = {}
    for number, tensor in enumerate(tensors):
        plain = tensor.detach().resolve_conj().resolve_neg().contiguous().view(-1)
        if not plain.numel():
            found[number] = ()
        elif plain.device.type == "cpu":
            found[number] = tuple(sub_block_crcs(memoryview(cast("Any", plain.view(torch.uint8).numpy()))))
        else:
            there.setdefault(plain.device, []).append((number, weighted_sums(plain)))
    for sums in there.values():
        values = iter(torch.cat([own for _, own in sums]).tolist())
        for number, own in sums:
            found[number] = tuple(next(values) for _ in range(own.numel()))
    return [digest for digest in found if digest is not None]


def weighted_sums(plain: torch.Tensor) -> torch.Tensor:
    """Of a flat tensor, modulo 2^64. Weights are odd, so that a change of one word always shows."""
    data = plain.view(torch.uint8)
    if data.numel() % 8 or data.storage_offset() % 8:
        data = torch.cat([data, data.new_zeros(-data.numel() % 8)])
    weights = _weights(data.device)
    blocks = torch.split(data.view(torch.int64), _WORDS)
    return torch.stack([(words * weights[: words.numel()]).sum() for words in blocks])


@cache
def _weights(device: torch.device) -> torch.Tensor:
    chance = torch.Generator().manual_seed(0)
    bounds = torch.iinfo(torch.int64)
    return (torch.randint(bounds.min, bounds.max, (_WORDS,), generator=chance) | 1).to(device)
