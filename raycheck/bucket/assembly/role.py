"""Describes a role: the ranks of a group that have the same entries, which no other rank has, as a critic's workers do.

Ranks of other roles neither save these entries nor expect them at a restore. What each rank has for itself (PerRank
values, random state) belongs to a rank of the role: another number of ranks in one role changes nothing for the others.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any, NamedTuple


class RankPlace(NamedTuple):
    """The number of a rank among others, and how many they are."""

    rank: int
    world_size: int


class RandomSource(NamedTuple):
    """Whose random state a rank takes.

    saved: what each rank among which it is chosen saved for itself. rank: the number of one of them. A number that none
    has means a new state, which is equal for equal numbers. apart: a name that means a new state in any case, or "".
    """

    saved: Sequence[Mapping[str, Any]]
    rank: int
    apart: str

    @property
    def states(self) -> tuple[Any, ...]:
        """Return the random state of each rank; nothing if the ranks have none, as in an imported checkpoint."""
        found = tuple(values.get("rng") for values in self.saved)
        return found if any(found) else ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Role:
    """A rank's place among the ranks of its role, and in the group.

    entries: the names, at the top of the state, that only the ranks of this role have; none if all ranks of the group
    have the same. others: the names that only other roles have.
    """

    in_group: RankPlace
    entries: frozenset[str] = frozenset()
    others: frozenset[str] = frozenset()
    in_role: RankPlace | None = None

    @property
    def place(self) -> RankPlace:
        """Return this rank's place among the ranks that have the same entries."""
        return self.in_role or self.in_group

    def place_for(self, entry: str) -> RankPlace:
        """Return this rank's place among the ranks that have this entry."""
        return self.place if is_under(entry, self.entries) else self.in_group

    def saved_by(self, entry: str, saved: Sequence[Mapping[str, Any]]) -> tuple[Sequence[Mapping[str, Any]], RankPlace]:
        """Return what each rank that has this entry saved for itself, and this rank's place among such ranks.

        saved: what each rank of the group saved for itself, by entry.
        """
        own = self._of_role(saved)
        return (own, self.place) if own and is_under(entry, self.entries) else (saved, self.in_group)

    def random_source(self, saved: Sequence[Mapping[str, Any]]) -> RandomSource:
        """Return the rank of this role whose random state this rank takes.

        No two ranks may get the same one. Of the roles here that the saved ranks had together, the first by name takes
        their states, and those of the others are derived from them. So are those of a role that is not in the
        checkpoint.
        """
        own = self._of_role(saved)
        first = min(self.entries, default="")
        others = {name.partition(".")[0] for values in own or saved for name in values} & self.others
        apart = first if others and (not own or min(others) < first) else ""
        return RandomSource(own or saved, (self.place if own else self.in_group).rank, apart)

    def _of_role(self, saved: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
        return [values for values in saved if any(is_under(name, self.entries) for name in values)]


def roles_of(entries: Sequence[Collection[str]]) -> list[Role]:
    """Return the role of each rank. entries: the names at the top of each rank's state.

    Ranks that have some of the same names and not all are of one role, which will be refused for what is missing.
    """
    members: dict[frozenset[str], list[int]] = {}
    for rank, names in enumerate(entries):
        members.setdefault(frozenset(names), []).append(rank)
    places = [RankPlace(rank, len(entries)) for rank in range(len(entries))]
    if len(members) == 1 or any(one & other for one, other in combinations(members, 2)):
        return [Role(in_group=place) for place in places]
    everything = frozenset[str]().union(*members)
    return [
        Role(
            in_group=place,
            entries=names,
            others=everything - names,
            in_role=RankPlace(members[names].index(place.rank), len(members[names])),
        )
        for place, names in zip(places, map(frozenset, entries), strict=True)
    ]


def is_under(entry: str, names: Collection[str]) -> bool:
    """Return whether the entry is one of these at the top of the state, or in one of them."""
    return entry.partition(".")[0] in names
