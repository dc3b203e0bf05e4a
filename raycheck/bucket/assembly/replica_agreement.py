"""Decides which rank writes each replicated box, and refuses replicas that differ. Step 13.

The ranks of a group do this once, at their first save. A replica that has drifted is an error that names it: one rank's
bytes never stand in for all silently. Later saves need no such exchange. A box that appears after it (optimizer state
of a parameter that had no gradient) is written by every holder, kept once, and agreed on before the next save.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from raycheck.errors import ConfigError

SPREAD_FROM_BYTES = 1 << 20
"""Replicated parameters from this size on are spread over their holders by bytes. Smaller tensors stay with the first
holder, since every tensor that lies elsewhere costs each reader one more object to open."""


@dataclass(frozen=True, kw_only=True, slots=True)
class HeldBox:
    """Describes a box of a tensor that other ranks may hold too.

    box: the id of the box, equal on all ranks that hold it. name, dtype, shape: those of the whole tensor. sizes: the
    box's, in elements. may_spread: another holder than the first may write it. crc32: None where replicas may differ by
    nature (module buffers).
    """

    box: str
    name: str
    dtype: str
    shape: tuple[int, ...]
    sizes: tuple[int, ...]
    size_bytes: int
    may_spread: bool
    crc32: int | None


@dataclass(frozen=True, kw_only=True, slots=True)
class ValueChecksums:
    """Describes an entry's non-tensor values by their checksums.

    names_crc32: the checksum of the names that this rank holds in the entry. may_differ: ranks may hold different
    names, as those of a pipeline do. crc32: None where values may differ by nature (a module's extra state).
    """

    names_crc32: int
    may_differ: bool
    crc32: int | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Holdings:
    """Lists what one rank holds that other ranks may hold too. values: by entry. buffers: checksums of module buffers
    and extra state, which may differ, by name."""

    held: tuple[HeldBox, ...]
    values: Mapping[str, ValueChecksums]
    buffers: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class Agreement:
    """Holds what the ranks agreed on.

    writers: the rank that writes each box. apart: the entries of which ranks hold different parts, so that each rank
    keeps its own values. differing: names of module buffers and extra state that are not equal on all ranks.
    """

    writers: Mapping[str, int]
    apart: frozenset[str] = frozenset()
    differing: tuple[str, ...] = ()


def agree(ranks: Sequence[Holdings]) -> Agreement:
    """Find the agreement from all ranks' holdings, in order of rank.

    Raises ConfigError, which names a tensor or an entry that differs between ranks and should not.
    """
    holders: dict[str, dict[int, HeldBox]] = {}
    described: dict[str, tuple[int, HeldBox]] = {}
    for rank, holdings in enumerate(ranks):
        for held in holdings.held:
            copies = holders.setdefault(held.box, {})
            copies[rank] = held
            _refuse_other_form(*described.setdefault(held.name, (rank, held)), rank, held)
            _refuse_drift(copies, rank)
    return Agreement(writers=_writers(holders), apart=_apart(ranks), differing=_differing(ranks))


def _differing(ranks: Sequence[Holdings]) -> tuple[str, ...]:
    first: dict[str, int] = {}
    found = {name: None for rank in ranks for name, crc in rank.buffers.items() if first.setdefault(name, crc) != crc}
    return tuple(found)


def _refuse_other_form(first_rank: int, first: HeldBox, rank: int, held: HeldBox) -> None:
    if (first.dtype, first.shape) != (held.dtype, held.shape):
        raise ConfigError(
            f"tensor {held.name} is {first.dtype}{list(first.shape)} on rank {first_rank} and "
            f"{held.dtype}{list(held.shape)} on rank {rank}. Give different tensors different names, or shard them "
            "with DTensor"
        )


def _refuse_drift(copies: Mapping[int, HeldBox], rank: int) -> None:
    first_rank, first = next(iter(copies.items()))
    if (first.sizes, first.crc32) != (copies[rank].sizes, copies[rank].crc32):
        raise ConfigError(
            f"tensor {first.name} is not the same on ranks {first_rank} and {rank}, although it is not sharded between "
            "them. Replicas have drifted apart (another seed, a missing all-reduce), or the value is rank-local: then "
            "wrap its entry in raycheck.PerRank"
        )


def _writers(holders: Mapping[str, Mapping[int, HeldBox]]) -> dict[str, int]:
    writers: dict[str, int] = {}
    load: dict[int, int] = {}
    for box, copies in sorted(holders.items(), key=lambda item: (-_size(item[1].values()), item[0])):
        held = next(iter(copies.values()))
        is_large = held.may_spread and held.size_bytes >= SPREAD_FROM_BYTES
        writer = min(copies, key=lambda rank: (load.get(rank, 0), rank)) if is_large else min(copies)
        writers[box] = writer
        load[writer] = load.get(writer, 0) + held.size_bytes
    return writers


def _size(copies: Iterable[HeldBox]) -> int:
    return max((held.size_bytes for held in copies), default=0)


def _apart(ranks: Sequence[Holdings]) -> frozenset[str]:
    apart = set()
    for name in sorted({name for holdings in ranks for name in holdings.values}):
        found = {rank: holdings.values[name] for rank, holdings in enumerate(ranks) if name in holdings.values}
        first_with: dict[int, int] = {}  # first rank that holds these names
        for rank, values in found.items():
            first = first_with.setdefault(values.names_crc32, rank)
            if found[first].crc32 != values.crc32:
                raise ConfigError(
                    f"state[{name!r}] is not the same on ranks {first} and {rank}. Make it equal on all ranks, or "
                    "wrap it in raycheck.PerRank to keep each rank's own"
                )
        if len(found) < len(ranks) and not all(values.may_differ for values in found.values()):
            absent = min(set(range(len(ranks))) - set(found))
            raise ConfigError(
                f"state[{name!r}] is on rank {min(found)} and not on rank {absent}. Give it to all ranks, or give "
                "each rank's raycheck.PerRank(value)"
            )
        if len(found) < len(ranks) or len(first_with) > 1:
            apart.add(name)
    return frozenset(apart)
