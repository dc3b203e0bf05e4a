"""Decides which rank writes each replicated box. Step 13.

The ranks of a group do this once, before their first save, and send checksums with it: replicas that differ from the
start are a bug in the training script, and end the run before anything is uploaded. Later saves need no such exchange,
since their reports are compared (replica_comparison.py). A box that appears after it (optimizer state of a parameter
that had no gradient) is written by every holder, kept once, and agreed on before the next save. They do it again when
nodes are about to be taken away: what the ranks there write moves to ranks that stay and have it too.

Each of thousands of ranks mostly holds the same boxes as many others. So a rank sends its boxes apart from their
checksums: ranks with equal boxes are a crowd, whose boxes are looked at once.
"""

import json
import zlib
from array import array
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from heapq import heappop, heappush
from typing import Literal, NamedTuple

from raycheck.bucket.assembly.replica_comparison import Cure, Difference, refusal
from raycheck.bucket.assembly.role import is_under
from raycheck.errors import ConfigError

SPREAD_FROM_BYTES = 1 << 20
"""Replicated parameters from this size on are spread over their holders by bytes. Smaller tensors stay with the first
holder, since every tensor that is elsewhere costs each reader one more object to open."""


ByMesh = Literal["", "writer", "spare"]


class HeldBox(NamedTuple):
    """A box of a tensor that other ranks may hold too.

    box: the id of the box, equal on all ranks that hold it. name, dtype, shape: those of the whole tensor. sizes: the
    box's, in elements. may_spread: another holder than the first may write it. crc32: None where it is not compared,
    as replicas may differ by nature (module buffers). is_on_host: it is not on a device. cure: see Cure. by_mesh: a
    mesh of all ranks says that this rank writes it ("writer"), or a mesh leaves it to another rank ("spare"). may_move:
    each save uploads it, so that another rank may do so.
    """

    box: str
    name: str
    dtype: str
    shape: tuple[int, ...]
    sizes: tuple[int, ...]
    size_bytes: int
    may_spread: bool
    is_on_host: bool = True
    cure: Cure = ""
    by_mesh: ByMesh = ""
    may_move: bool = True
    crc32: int | None = None


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
    """Everything on one rank that other ranks may hold too.

    boxes: its boxes without checksums, encoded; equal bytes on ranks that hold equal boxes. checksums: the CRC-32 of
    each, in 64 bits, -1 for None. values: by entry. buffers: checksums of module buffers and extra state, which may
    differ, by name. other_roles: the entries of other roles, which this rank does not have. alone_bytes: how much of
    `train` the rank writes that is not among the boxes, since no other rank has it.
    """

    boxes: bytes
    checksums: bytes
    values: Mapping[str, ValueChecksums]
    buffers: Mapping[str, int] = field(default_factory=dict)
    other_roles: frozenset[str] = frozenset()
    alone_bytes: int = 0

    @classmethod
    def of(cls, held: Sequence[HeldBox], values: Mapping[str, ValueChecksums], *, alone_bytes: int = 0) -> "Holdings":
        rows = [item[:-1] for item in held]
        checksums = array("q", (-1 if item.crc32 is None else item.crc32 for item in held))
        boxes = zlib.compress(json.dumps(rows).encode(), 1)
        return cls(boxes=boxes, checksums=checksums.tobytes(), values=values, alone_bytes=alone_bytes)

    @property
    def held(self) -> list[HeldBox]:
        """Return the boxes, decoded."""
        return self.decoded({})

    def decoded(self, known: "DecodedBoxes") -> list[HeldBox]:
        """Return the boxes, decoded. known: boxes that were decoded before."""
        checksums, held = known.get(self.boxes, (None, []))
        if checksums != self.checksums:
            rows, crcs = json.loads(zlib.decompress(self.boxes)), array("q", self.checksums)
            held = [HeldBox._make((*row, None if crc < 0 else crc)) for row, crc in zip(rows, crcs, strict=True)]
            known.setdefault(self.boxes, (self.checksums, held))
        return held


DecodedBoxes = dict[bytes, tuple[bytes, list[HeldBox]]]
"""Boxes by their encoded form, with the checksums of the first rank that has them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Agreement:
    """The ranks' agreement on who writes what, as one of them is told it.

    writers: the rank that writes each box that this rank holds. apart: the entries of which ranks hold different parts,
    so that each rank keeps its own values. differing: names of module buffers and extra state that are not equal on all
    ranks. by_crc: this rank's boxes that some ranks have in host memory and others on a device; they are compared
    by the CRC-32 of their bytes. alone_bytes: how much of `train` no other rank may write, on the rank with the most;
    None without an agreement.
    """

    writers: Mapping[str, int]
    apart: frozenset[str] = frozenset()
    differing: tuple[str, ...] = ()
    by_crc: frozenset[str] = frozenset()
    alone_bytes: int | None = None


@dataclass(slots=True)
class _Crowd:
    """Ranks that hold equal boxes with equal checksums, in order.

    queue: a heap of the ranks by how many bytes they write, once that matters. It may have outdated items.
    """

    ranks: list[int]
    boxes: list[HeldBox]
    checksums: bytes
    queue: list[tuple[int, int]] | None = None

    def least_loaded(self, load: Mapping[int, int]) -> tuple[int, int]:
        """Return how many bytes the least loaded rank writes, and that rank: the first one of several."""
        if self.queue is None:
            self.queue = sorted((load.get(rank, 0), rank) for rank in self.ranks)
        while load.get(self.queue[0][1], 0) != self.queue[0][0]:
            heappop(self.queue)
        return self.queue[0]

    def add_load(self, rank: int, size_bytes: int, load: dict[int, int]) -> None:
        """Count what a rank writes. One of this crowd is counted here only."""
        load[rank] = load.get(rank, 0) + size_bytes
        if self.queue is not None:
            heappush(self.queue, (load[rank], rank))


def agree(
    ranks: Sequence[Holdings], known: DecodedBoxes | None = None, *, leaving: Collection[int] = ()
) -> list[Agreement]:
    """Find what each rank is told, from all ranks' holdings, in order of rank.

    known: what was decoded before. leaving: the ranks that are about to be taken away. What another rank may write is
    not theirs to write.

    Raises ConfigError, which names a tensor or an entry that differs between ranks and should not.
    """
    crowds: dict[bytes, _Crowd] = {}
    holders = _Holders()
    for rank, holdings in enumerate(ranks):
        crowd = crowds.get(holdings.boxes)
        if crowd is not None and crowd.checksums == holdings.checksums:
            crowd.ranks.append(rank)
            continue
        boxes = holdings.decoded(known if known is not None else {})
        mine = crowds[holdings.boxes] = _Crowd(ranks=[rank], boxes=boxes, checksums=holdings.checksums)
        holders.add(mine)
        assert crowd is None, "equal boxes with other checksums have been refused"
    writers = holders.writers(leaving)
    apart, differing = _apart(ranks), _differing(ranks)
    alone = holders.alone_bytes()
    alone_bytes = max(holdings.alone_bytes + alone.get(rank, 0) for rank, holdings in enumerate(ranks))
    told = {
        boxes: Agreement(
            writers={held.box: writers[held.box] for held in crowd.boxes if held.box in writers},
            apart=apart,
            differing=differing,
            by_crc=frozenset(held.box for held in crowd.boxes if held.box in holders.by_crc),
            alone_bytes=alone_bytes,
        )
        for boxes, crowd in crowds.items()
    }
    return [told[holdings.boxes] for holdings in ranks]


class _Holders:
    """The crowds that hold each box: nearly always one. They are added in order of their first ranks.

    by_crc: see Agreement.
    """

    def __init__(self) -> None:
        self.by_crc: set[str] = set()
        self._tensors: dict[str, tuple[int, HeldBox]] = {}
        self._first: dict[str, HeldBox] = {}
        self._crowds: dict[str, _Crowd] = {}
        self._more: dict[str, list[tuple[_Crowd, HeldBox]]] = {}
        self._spare: dict[str, list[_Crowd]] = {}

    def add(self, crowd: _Crowd) -> None:
        """Add a crowd. Raises ConfigError, which names a tensor that its first rank holds otherwise than the others."""
        rank = crowd.ranks[0]
        for held in crowd.boxes:
            if held.name not in self._tensors:
                self._tensors[held.name] = rank, held
            _refuse_other_form(*self._tensors[held.name], rank, held)
            if held.by_mesh == "spare":
                self._spare.setdefault(held.box, []).append(crowd)
                continue
            first = self._first.setdefault(held.box, held)
            if first is held:
                self._crowds[held.box] = crowd
            else:
                self._refuse_drift(first, rank, held)
                self._more.setdefault(held.box, []).append((crowd, held))
                if first.is_on_host != held.is_on_host:
                    self.by_crc.add(held.box)

    def _refuse_drift(self, first: HeldBox, rank: int, held: HeldBox) -> None:
        if (first.sizes, first.crc32) != (held.sizes, held.crc32):
            ranks = (self._crowds[first.box].ranks[0], rank)
            raise ConfigError(refusal([Difference(label=f"tensor {first.name}", cure=first.cure, ranks=ranks)]))

    def alone_bytes(self) -> dict[int, int]:
        """Return how much of the boxes each rank has to write since no other one may, by rank."""
        found: dict[int, int] = {}
        for box, held in self._first.items():
            ranks = self._crowds[box].ranks
            has_copies = len(ranks) > 1 or box in self._more or box in self._spare or held.by_mesh == "writer"
            if held.may_move and not (has_copies and held.may_spread):
                found[ranks[0]] = found.get(ranks[0], 0) + held.size_bytes
        return found

    def writers(self, leaving: Collection[int]) -> dict[str, int]:
        """Return the writer of each box: its first holder, or where a large box may be spread, the least loaded one."""
        writers = {box: crowd.ranks[0] for box, crowd in self._crowds.items()}
        load: dict[int, int] = {}
        if any(held.may_spread and held.size_bytes >= SPREAD_FROM_BYTES for held in self._first.values()):
            self._spread(writers, load)
        if leaving:
            self._move_from(frozenset(leaving), writers, load)
        return writers

    def _spread(self, writers: dict[str, int], load: dict[int, int]) -> None:
        """Spread large boxes over their holders. load: how many bytes of large boxes each rank writes."""
        sizes = {box: held.size_bytes for box, held in self._first.items()}
        for box, copies in self._more.items():
            sizes[box] = max(sizes[box], *(held.size_bytes for _, held in copies))
        placed = {box for box, held in self._first.items() if held.by_mesh}
        large = [box for box, size in sizes.items() if size >= SPREAD_FROM_BYTES and box not in placed]
        for box in sorted(large, key=lambda box: (-sizes[box], box)):
            held, crowd, writer = self._first[box], self._crowds[box], writers[box]
            if held.may_spread and held.size_bytes >= SPREAD_FROM_BYTES:
                crowds = [crowd, *(other for other, _ in self._more.get(box, ()))]
                crowd = min(crowds, key=lambda crowd: crowd.least_loaded(load))
                _, writer = crowd.least_loaded(load)
            writers[box] = writer
            crowd.add_load(writer, held.size_bytes, load)

    def _move_from(self, leaving: frozenset[int], writers: dict[str, int], load: dict[int, int]) -> None:
        """Have ranks that stay write what leaving ranks would write: of a large box the least loaded of those that have
        it, of a small one the first. Further names of a box are not written."""
        staying: dict[int, _Crowd] = {}  # by the first rank of the crowd of which they are a part
        for box, held in self._first.items():
            if writers[box] not in leaving or not (held.may_spread and held.may_move and held.size_bytes):
                continue
            able = []
            for crowd in (self._crowds[box], *(more for more, _ in self._more.get(box, ())), *self._spare.get(box, ())):
                if (first := crowd.ranks[0]) not in staying:
                    ranks = [rank for rank in crowd.ranks if rank not in leaving]
                    staying[first] = replace(crowd, ranks=ranks, queue=None)
                able += [staying[first]] if staying[first].ranks else []
            if able and held.size_bytes < SPREAD_FROM_BYTES:
                writers[box] = min(crowd.ranks[0] for crowd in able)
            elif able:
                crowd = min(able, key=lambda crowd: crowd.least_loaded(load))
                _, writers[box] = crowd.least_loaded(load)
                crowd.add_load(writers[box], held.size_bytes, load)


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
