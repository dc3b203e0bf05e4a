"""Computes what one rank brings to the ranks' agreement: every box that others may hold too, and its values, with
checksums."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

import torch

from raycheck.bucket.assembly.replica_agreement import HeldBox, Holdings, ValueChecksums
from raycheck.bucket.format.checksum import crc32
from raycheck.shards.entries.state_entry import GatheredEntry, StateEntry
from raycheck.shards.transfer.local_box import LocalBox, as_bytes


def checksums_of(
    entries: Sequence[StateEntry], gathered: Sequence[GatheredEntry], boxes: Sequence[LocalBox]
) -> Holdings:
    """Returns this rank's side of the agreement. boxes: those of what was gathered from the entries, tied ones as
    one."""
    entry_of = {name: entry for entry, found in zip(entries, gathered, strict=True) for name in found.tensors}
    return Holdings(
        held=tuple(held for box in boxes if box.is_held and not box.is_unique for held in _held(box, entry_of)),
        values={
            entry.name: ValueChecksums(
                names_crc32=_crc32_of_json(sorted(entry.names())),
                may_differ=entry.may_differ,
                crc32=_crc32_of_json(found.values) if entry.compares_values else None,
            )
            for entry, found in zip(entries, gathered, strict=True)
            if not entry.is_per_rank
        },
    )


def _held(box: LocalBox, entry_of: Mapping[str, StateEntry]) -> list[HeldBox]:
    """Returns the box under each of its names, since another rank may hold one of them apart. Its bytes count once."""
    names = (box.name, *(alias for alias, _ in box.aliases))
    compared = {name for name in names if entry_of[name].is_compared(name)}
    crc = _crc32_of_tensor(box.local) if compared else None
    return [
        HeldBox(
            box=replace(box, name=name).box_name,
            name=name,
            dtype=box.dtype,
            shape=box.shape,
            sizes=box.sizes,
            size_bytes=box.size_bytes if name == box.name else 0,
            may_spread=box.may_spread,
            crc32=crc if name in compared else None,
        )
        for name in names
    ]


def _crc32_of_tensor(tensor: torch.Tensor) -> int:
    """Returns the CRC-32 of the tensor's bytes, row by row."""
    flat = as_bytes(tensor.detach().cpu().resolve_conj().resolve_neg().contiguous())
    return crc32(memoryview(cast("Any", flat.numpy()))) if flat.numel() else 0


def _crc32_of_json(values: Any) -> int:
    return crc32(json.dumps(values, sort_keys=True).encode())
