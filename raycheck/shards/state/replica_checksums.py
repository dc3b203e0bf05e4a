"""What one rank brings to the agreement: every box that others may hold too, and its values, with checksums."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

import torch

from raycheck.bucket.assembly.replica_agreement import HeldBoxes, Holdings, Values
from raycheck.bucket.format.checksum import crc32
from raycheck.shards.entries.state_entry import GatheredEntry, StateEntry
from raycheck.shards.transfer.local_box import LocalBox, as_bytes


def holdings_of(parts: Sequence[StateEntry], gathered: Sequence[GatheredEntry], pieces: Sequence[LocalBox]) -> Holdings:
    """pieces: those of what was gathered from the parts, tied ones drawn together."""
    of = {name: part for part, found in zip(parts, gathered, strict=True) for name in found.tensors}
    return Holdings(
        held=tuple(held for piece in pieces if piece.is_held and not piece.is_unique for held in _held(piece, of)),
        values={
            part.name: Values(
                names_crc32=_crc32_of(sorted(part.names())),
                may_differ=part.may_differ,
                crc32=_crc32_of(found.values) if part.compares_values else None,
            )
            for part, found in zip(parts, gathered, strict=True)
            if not part.is_per_rank
        },
    )


def _held(piece: LocalBox, of: Mapping[str, StateEntry]) -> list[HeldBoxes]:
    """Under each of its names: another rank may hold one of them apart. Its bytes count once."""
    names = (piece.name, *(alias for alias, _ in piece.aliases))
    compared = {name for name in names if of[name].is_compared(name)}
    crc = _crc32(piece.local) if compared else None
    return [
        HeldBoxes(
            box=replace(piece, name=name).box_name,
            name=name,
            dtype=piece.dtype,
            shape=piece.shape,
            sizes=piece.sizes,
            size_bytes=piece.size_bytes if name == piece.name else 0,
            may_spread=piece.may_spread,
            crc32=crc if name in compared else None,
        )
        for name in names
    ]


def _crc32(tensor: torch.Tensor) -> int:
    """Of the tensor's bytes, row by row."""
    flat = as_bytes(tensor.detach().cpu().resolve_conj().resolve_neg().contiguous())
    return crc32(memoryview(cast("Any", flat.numpy()))) if flat.numel() else 0


def _crc32_of(values: Any) -> int:
    return crc32(json.dumps(values, sort_keys=True).encode())
