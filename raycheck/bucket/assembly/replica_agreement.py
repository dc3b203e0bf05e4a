"""Decides which rank writes each replicated box. Step 13.

The ranks of a group do this once, before their first save, and send checksums with it: replicas that differ from the
start are a bug in the training script, and end the run before anything is uploaded. Later saves need no such exchange,
since their reports are compared (replica_comparison.py). A box that appears after it (optimizer state of a parameter
that had no gradient) is written by every holder, kept once, and agreed on before the next save.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from raycheck.bucket.assembly.replica_comparison import Cure, Difference, refusal
from raycheck.bucket.assembly.role import is_under
from raycheck.errors import ConfigError

SPREAD_FROM_BYTES = 1 << 20
"""Replicated parameters from this size on are spread over their holders by bytes. Smaller tensors stay with the first
holder, since every tensor that is elsewhere costs each reader one more object to open."""


@dataclass(frozen=True, kw_only=True, slots=True)
class HeldBox:
    """A box of a tensor that other ranks may hold too.

    box: the id of the box, equal on all ranks that hold it. name, dtype, shape: those of the whole tensor. sizes: the
    box's, in elements. may_spread: another holder than the first may write it. crc32: None where it is not compared,
    as replicas may differ by nature (module buffers). is_on_host: it is not on a device. cure: see Cure.
    """

    box: str
    name: str
    dtype: str
    shape: tuple[int, ...]
    sizes: tuple[int, ...]
    size_bytes: int
    may_spread: bool
    crc32: int | None
    is_on_host: bool = True
    cure: Cure = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class ValueChecksums:
    """The checksums of an entry's non-tensor values.

    names_crc32: the checksum of the names that this rank holds in the entry. may_differ: ranks may hold different
    names, as in a pipeline. crc32: None where they are not compared, as values may differ by nature (a module's extra
    state). cure: see Cure.
    """

    names_crc32: int
    may_differ: bool
    crc32: int | None
    cure: Cure = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Holdings:
    """Everything on one rank that other ranks may hold too. values: by entry. buffers: checksums of module buffers and
    extra state, which may differ, by name. other_roles: the entries of other roles, which this rank does not have."""

    held: tuple[HeldBox, ...]
    values: Mapping[str, ValueChecksums]
    buffers: Mapping[str, int] = field(default_factory=dict)
    other_roles: frozenset[str] = frozenset()


@dataclass(frozen=True, kw_only=True, slots=True)
class Agreement:
    """The ranks' agreement on who writes what.

    writers: the rank that writes each box. apart: the entries of which ranks hold different parts, so that each rank
    keeps its own values. differing: names of module buffers and extra state that are not equal on all ranks. by_crc:
    the boxes that are on the host of some ranks and on a device of others, which compare them by the CRC-32 of their
    bytes.
    """

    writers: Mapping[str, int]
    apart: frozenset[str] = frozenset()
    differing: tuple[str, ...] = ()
    by_crc: frozenset[str] = frozenset()


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
    by_crc = [box for box, copies in holders.items() if len({held.is_on_host for held in copies.values()}) > 1]
    return Agreement(
        writers=_writers(holders), apart=_apart(ranks), differing=_differing(ranks), by_crc=frozenset(by_crc)
    )


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
        found = Difference(label=f"tensor {first.name}", cure=first.cure, ranks=(first_rank, rank))
        raise ConfigError(refusal([found]))


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
                    refusal([Difference(label=f"state[{name!r}]", cure=values.cure, ranks=(first, rank))])
                )
        absent = [rank for rank, own in enumerate(ranks) if not (rank in found or is_under(name, own.other_roles))]
        if absent and not all(values.may_differ for values in found.values()):
            raise ConfigError(
                f"state[{name!r}] is on rank {min(found)} and not on rank {absent[0]}. Give it to all ranks, or give "
                "each rank's raycheck.PerRank(value)"
            )
        if len(found) < len(ranks) or len(first_with) > 1:
            apart.add(name)
    return frozenset(apart)
