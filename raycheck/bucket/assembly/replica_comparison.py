"""Compares, before each commit, what several ranks hold, so that no checkpoint mixes ranks that have drifted apart.

Each rank reports one number for everything that other ranks may hold too, whether it writes it or another rank does.
The names of these things are sent as the plan is: once in full, and then as a hash. The coordinator refuses the save by
the names of what differs. replica_agreement.py decides which rank writes what.
"""

import hashlib
import json
import zlib
from array import array
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Literal, NamedTuple

from raycheck.errors import CorruptError
from raycheck.terminal import first_few

if TYPE_CHECKING:
    from raycheck.bucket.assembly.numbers import Numbers

DIGEST_BYTES = 8
"""The size of the number that a rank reports for one thing."""
MAX_NAMED = 4
"""How many differences, and how many ranks of each, an error names."""
MAX_LISTED = 32
"""How many differences a manifest names."""
BOX_KINDS = ("crc", "sum")
"""The words with which the key of a box begins: its number was computed from checksums of its bytes, or from sums on a
device."""
Cure = Literal["", "RankZero", "RankZero or PerRank"]
"""The wrappers that an entry of the state may be given in, where ranks are meant to hold different things."""
CAUSES = (
    "The replicas have drifted apart: an all-reduce is missing, the ranks draw different random numbers, or each rank "
    "computes the value separately and rounds differently"
)
RANK_ZERO = "If only rank 0 updates {these}, give the entry as raycheck.RankZero(entry) on every rank"
CURES: dict[Cure, str] = {
    "": "",
    "RankZero": RANK_ZERO,
    "RankZero or PerRank": f"{RANK_ZERO}; if each rank has its own, as raycheck.PerRank(entry)",
}
KEEP_FIRST = 'If the first rank\'s can stand for all, SaveSettings(on_drift="keep_first") saves it and logs this'


class Replica(NamedTuple):
    """One thing that several ranks may hold.

    key: equal on all ranks that hold the thing. label: what errors call it. cure: see Cure.
    """

    key: str
    label: str
    cure: Cure


@dataclass(frozen=True, kw_only=True, slots=True)
class Difference:
    """A name under which ranks hold different things. ranks: the first holder, and those that differ from it."""

    label: str
    cure: Cure
    ranks: tuple[int, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class RankDigests:
    """The digests that one rank reports. names: `dump_names` of its replicas. digests: DIGEST_BYTES for each, in that
    order."""

    names: bytes
    digests: bytes


def digest_of(numbers: Iterable[int]) -> bytes:
    """Return the number to report for a thing, from the checksums of its parts."""
    return hashlib.blake2b(array("q", numbers).tobytes(), digest_size=DIGEST_BYTES).digest()


def digest_of_values(values: object) -> bytes:
    """Return the number to report for values that can be written as JSON."""
    return hashlib.blake2b(json.dumps(values, sort_keys=True).encode(), digest_size=DIGEST_BYTES).digest()


def dump_names(replicas: Sequence[Replica]) -> bytes:
    """Encode what a rank holds; empty for nothing."""
    return zlib.compress(json.dumps(replicas).encode(), 1) if replicas else b""


def load_names(data: bytes) -> list[Replica]:
    """Decode what a rank holds."""
    rows = json.loads(zlib.decompress(data)) if data else []
    return [Replica(*row) for row in rows]


class DecodedNames:
    """The decoded names of the last comparison. They hardly ever change, and where ranks hold different shards,
    decoding them takes longer than comparing. Several threads may call it."""

    def __init__(self) -> None:
        self._last: dict[bytes, list[Replica]] = {}
        self._are_mixed: tuple[frozenset[bytes], bool] = (frozenset(), False)
        self._numbers: tuple[frozenset[bytes], dict[bytes, Numbers]] = (frozenset(), {})

    def decode(self, names: bytes) -> None:
        """Decode what a rank will report in the next comparison."""
        if names not in self._last:
            self._last[names] = load_names(names)

    def are_of_two_kinds(self, ranks: Sequence[RankDigests]) -> bool:
        """Return whether ranks report the same box by numbers of two kinds, which cannot be compared: one of them has
        moved it to the host since the ranks agreed."""
        encoded, last = frozenset(own.names for own in ranks), self._are_mixed
        if encoded != last[0]:
            keys = {replica.key for replica in chain.from_iterable(self.of(ranks).values())}
            by_crc, by_sum = ({key[len(kind) :] for key in keys if key.startswith(f"{kind} ")} for kind in BOX_KINDS)
            last = self._are_mixed = encoded, not by_crc.isdisjoint(by_sum)
        return last[1]

    def numbers(self, ranks: Sequence[RankDigests]) -> Mapping[bytes, "Numbers"]:
        """Return a number for each replica that these ranks report, equal where the key is, by the encoded names."""
        import numpy as np

        encoded, last = frozenset(own.names for own in ranks), self._numbers
        if encoded != last[0]:
            number_of: dict[str, int] = {}
            found = {
                names: np.array([number_of.setdefault(item.key, len(number_of)) for item in replicas], np.int64)
                for names, replicas in self.of(ranks).items()
            }
            last = self._numbers = encoded, found
        return last[1]

    def of(self, ranks: Sequence[RankDigests]) -> Mapping[bytes, list[Replica]]:
        """Return the names that these ranks report, decoded, by their encoded form."""
        last, encoded = self._last, {own.names for own in ranks}
        found = self._last = {names: last[names] if names in last else load_names(names) for names in encoded}
        return found


def differences(ranks: Sequence[RankDigests], known: DecodedNames | None = None) -> list[Difference]:
    """Find everything that differs between ranks that hold it. ranks: their digests, in order of rank."""
    alike: dict[tuple[bytes, bytes], list[int]] = {}
    for rank, own in enumerate(ranks):
        alike.setdefault((own.names, own.digests), []).append(rank)
    if len(alike) < 2:
        return []
    known = known or DecodedNames()
    decoded = known.of(ranks)
    for (names, digests), same in alike.items():
        if len(digests) != DIGEST_BYTES * len(decoded[names]):
            raise CorruptError(
                f"rank {same[0]} reports {len(digests)} bytes of digests for {len(decoded[names])} replicas"
            )
    found: dict[str, tuple[Replica, dict[bytes, list[int]]]] = {}
    for (names, digests), places in zip(alike, _places_of_differences(alike, known.numbers(ranks)), strict=True):
        same, replicas = alike[names, digests], decoded[names]
        for number in places:
            replica = replicas[number]
            digest = digests[DIGEST_BYTES * number : DIGEST_BYTES * (number + 1)]
            holders = found.setdefault(replica.key, (replica, {}))[1]
            holders.setdefault(digest, []).extend(same)
    return [_difference(replica, list(holders.values())) for replica, holders in found.values() if len(holders) > 1]


def _places_of_differences(
    reported: Collection[tuple[bytes, bytes]], numbers: Mapping[bytes, "Numbers"]
) -> Iterator[list[int]]:
    """Yield, for each pair of names and digests, the places of the replicas of which not all digests are equal."""
    import numpy as np

    own = [numbers[names] for names, _ in reported]
    every = np.concatenate(own)
    digests = np.frombuffer(b"".join(digests for _, digests in reported), np.int64)
    any_digest = np.empty(int(every.max(initial=-1)) + 1, np.int64)
    any_digest[every] = digests
    differ = np.zeros(len(any_digest), bool)
    differ[every[any_digest[every] != digests]] = True
    return (np.flatnonzero(differ[mine]).tolist() for mine in own)


def _difference(replica: Replica, holders: list[list[int]]) -> Difference:
    """Describe a difference. holders: the ranks that hold the same, for each that they hold."""
    first, *others = sorted(map(sorted, holders))
    ranks = (first[0], *sorted(rank for group in others for rank in group))
    return Difference(label=replica.label, cure=replica.cure, ranks=ranks)


def with_copies(
    found: Sequence[Difference],
    copies: Iterable[tuple[str, tuple[int, int]]],
    ranks: Sequence[RankDigests],
    names: DecodedNames | None = None,
) -> list[Difference]:
    """Add tensors of which two ranks wrote the same box with different bytes: a box on the host of one rank and on the
    device of another has no digests to compare. What no rank wants compared may differ, and is not added."""
    known = {item.label for item in found}
    differing = {f"tensor {name}": own for name, own in copies}
    replicas = chain.from_iterable((names or DecodedNames()).of(ranks).values()) if differing else ()
    compared = {item.label: item for item in replicas}
    more = [
        Difference(label=label, cure=compared[label].cure, ranks=own)
        for label, own in differing.items()
        if label in compared and label not in known
    ]
    return [*found, *more]


def described(found: Sequence[Difference]) -> str:
    """Return in words what differs, and on which ranks. found: at least one difference."""
    first, others = found[0], [item.label for item in found[1:]]
    also = f"; neither {'are' if others[1:] else 'is'} {first_few(others, MAX_NAMED)}" if others else ""
    return f"{first.label} is not the same on ranks {_listed(first.ranks)}{also}"


def _listed(ranks: Sequence[int]) -> str:
    head, *rest = (str(rank) for rank in ranks)
    if len(rest) > MAX_NAMED:
        return f"{head}, {first_few(rest, MAX_NAMED)}"
    return f"{', '.join([head, *rest[:-1]])} and {rest[-1]}"


def labels(found: Sequence[Difference]) -> tuple[str, ...]:
    """Return the names of what differs, in the form for a manifest."""
    more = (f"and {len(found) - MAX_LISTED} more",) if len(found) > MAX_LISTED else ()
    return (*(item.label for item in found[:MAX_LISTED]), *more)


def refusal(found: Sequence[Difference]) -> str:
    """Return the text of an error: what differs, possible causes, and what to do. found: at least one difference."""
    by_cure: dict[Cure, list[str]] = {}
    for item in found:
        by_cure.setdefault(item.cure, []).append(item.label)
    cures = [
        CURES[cure].format(these=first_few(names, MAX_NAMED) if len(by_cure) > 1 else "this")
        for cure, names in by_cure.items()
        if CURES[cure]
    ]
    return ". ".join([described(found), CAUSES, *cures, KEEP_FIRST])
