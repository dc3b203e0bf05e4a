"""Finds everything on this rank that other ranks may have too, for the ranks' agreement and for the comparison at each
save.
"""

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

import torch

from raycheck.bucket.assembly.replica_agreement import Agreement, ByMesh, HeldBox, Holdings, ValueChecksums
from raycheck.bucket.assembly.replica_comparison import Replica
from raycheck.bucket.format.checksum import crc32
from raycheck.state.entries.state_entry import GatheredEntry, StateEntry
from raycheck.transfer.replica_digests import SharedBox
from raycheck.transfer.stage.local_box import TRAIN, LocalBox, bytes_of

EntryOf = Mapping[str, StateEntry]
"""Maps a tensor's name to its entry."""


def entry_of(entries: Sequence[StateEntry], gathered: Sequence[GatheredEntry]) -> EntryOf:
    """Return the entry of each tensor."""
    return {name: entry for entry, found in zip(entries, gathered, strict=True) for name in found.tensors}


def checksums_of(
    entries: Sequence[StateEntry],
    gathered: Sequence[GatheredEntry],
    boxes: Sequence[LocalBox],
    *,
    is_compared: bool,
    may_spread: bool,
    with_spares: bool = False,
) -> Holdings:
    """Return this rank's side of the agreement.

    boxes: the boxes of what was gathered from the entries, with tied ones merged. is_compared: include checksums.
    may_spread: False if the first holder of each box has to write it. with_spares: include what a mesh of all ranks
    places, and the copies that it leaves to other ranks.
    """
    owners = entry_of(entries, gathered)
    held = [
        found
        for box in boxes
        if (box.has_bytes and box.has_replicas if with_spares else box.is_held and not box.is_unique)
        for found in _held(box, owners, is_compared)
    ]
    return Holdings.of(
        [found if may_spread else found._replace(may_spread=False) for found in held],
        values={
            entry.name: ValueChecksums(
                names_crc32=crc32_of_json(sorted(entry.names())),
                may_differ=entry.may_differ,
                crc32=crc32_of_json(found.values) if is_compared and entry.compares_values else None,
                cure=entry.cure,
            )
            for entry, found in zip(entries, gathered, strict=True)
            if not entry.is_per_rank
        },
        alone_bytes=sum(box.size_bytes for box in boxes if box.component == TRAIN and _is_alone(box)),
    )


def _is_alone(box: LocalBox) -> bool:
    """Return whether the rank alone holds a box, as far as it knows."""
    return box.is_held and box.is_unique and not box.has_replicas


def shared_boxes(
    owners: EntryOf, boxes: Sequence[LocalBox], written: Collection[str], agreement: Agreement
) -> list[SharedBox]:
    """Return the boxes that are compared at each save. written: the box names of those that this rank writes."""
    found = []
    for box in boxes:
        if not box.has_replicas or 0 in box.sizes:
            continue
        is_by_crc = box.box_name in agreement.by_crc
        kind = "crc" if is_by_crc or box.local.device.type == "cpu" else "sum"
        replicas = [
            Replica(key=f"{kind} {replace(box, name=name).box_name}", label=f"tensor {name}", cure=owners[name].cure)
            for name in _names(box)
            if owners[name].is_compared(name)
        ]
        if replicas:
            found.append(SharedBox.of(box, replicas, is_written=box.box_name in written, is_by_crc=is_by_crc))
    return found


def shared_values(entries: Sequence[StateEntry], gathered: Sequence[GatheredEntry]) -> list[tuple[Replica, object]]:
    """Return the values that are compared at each save, between ranks that have the same names of the entry."""
    return [
        (
            Replica(key=f"{entry.name}: {crc32_of_json(sorted(entry.names()))}", label=label, cure=entry.cure),
            found.values,
        )
        for entry, found in zip(entries, gathered, strict=True)
        if entry.compares_values and not entry.is_per_rank and (label := f"state[{entry.name!r}]")
    ]


def _names(box: LocalBox) -> tuple[str, ...]:
    return (box.name, *(alias for alias, _ in box.aliases))


def _held(box: LocalBox, owners: EntryOf, is_compared: bool) -> list[HeldBox]:
    """Return the box under each of its names, since another rank may have only one of them. Its bytes count once."""
    names = _names(box)
    by_mesh: ByMesh = "spare" if not box.is_first_replica else "writer" if box.is_unique else ""
    compared = {name for name in names if is_compared and not by_mesh and owners[name].is_compared(name)}
    crc = crc32_of_tensor(box.local) if compared else None
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
            is_on_host=box.local.device.type == "cpu",
            cure=owners[name].cure,
            by_mesh=by_mesh,
            may_move=box.component == TRAIN,
        )
        for name in names
    ]


def crc32_of_tensor(tensor: torch.Tensor) -> int:
    """Return the CRC-32 of the tensor's bytes, row by row."""
    flat = bytes_of(tensor.detach().cpu())
    return crc32(memoryview(cast("Any", flat.numpy()))) if flat.numel() else 0


def crc32_of_json(values: Any) -> int:
    """Return the CRC-32 of values that can be written as JSON."""
    return crc32(json.dumps(values, sort_keys=True).encode())
