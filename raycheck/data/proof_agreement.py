"""Compares what the ranks know of their data sources. The coordinator does it, which starts without torch."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from raycheck.errors import ConfigError
from raycheck.terminal import first_few


@dataclass(frozen=True, kw_only=True, slots=True)
class SourceProof:
    """Says what is known of one rank's data source.

    kind: the dataset's class. order: what the order of samples depends on, which all ranks must have alike. samples:
    the checksum of each sample that was compared, by number. lasting: the numbers of those that do not depend on random
    augmentation. is_exact: whether a stream goes on exactly where its state was taken; None where nobody could tell, or
    where there is nothing to tell. reason: why it does not, or why nobody could tell. said: what else people may want
    to know.
    """

    kind: str
    order: Mapping[str, Any]
    samples: Mapping[int, int] = field(default_factory=dict)
    lasting: frozenset[int] = frozenset()
    is_exact: bool | None = None
    reason: str = ""
    said: tuple[str, ...] = ()

    def state(self, known: Sequence[Sequence[int]] = ()) -> list[tuple[int, int]]:
        """Returns what a checkpoint keeps: the number and the checksum of each sample that lasts.

        known: what the restored checkpoint kept, some of which this proof may have had no time to read.
        """
        found = {number: crc for number, crc in known if number not in self.lasting}
        found.update({number: self.samples[number] for number in self.lasting})
        return sorted(found.items())

    def differing(self, saved: Sequence[Sequence[int]]) -> list[int]:
        """Returns the numbers of the samples that are other ones than a checkpoint says."""
        return [number for number, crc in saved if number in self.lasting and self.samples[number] != crc]


def agreed_data(ranks: Sequence[tuple[str | None, SourceProof | None]]) -> SourceProof | None:
    """Compare what the ranks know of their sources, as `agreed_proof` does, and whether each rank has one.

    ranks: in order of rank, the name of the entry that is the rank's stream of data, None without one; and its proof.
    """
    names = [name for name, _ in ranks if name is not None]
    if names and len(names) < len(ranks):
        held = [rank for rank, (name, _) in enumerate(ranks) if name is not None]
        missing = [rank for rank, (name, _) in enumerate(ranks) if name is None]
        raise ConfigError(
            f"state[{names[0]!r}] is on ranks {held} and not on ranks {missing}: the position in the data is that of "
            "all ranks. Give it to the state of every rank"
        )
    return agreed_proof([proof for _, proof in ranks])


def agreed_proof(proofs: Sequence[SourceProof | None]) -> SourceProof | None:
    """Compare what the ranks know of their sources, in order of rank. Returns what holds for all of them.

    None: of a rank that proves nothing. Raises ConfigError, which names the ranks and what differs between them.
    """
    known = [proof for proof in proofs if proof is not None]
    if not known:
        return None
    if len(known) < len(proofs):
        raise ConfigError("Batches(prove=False) is on some of the ranks only: give all ranks the same")
    first = known[0]
    for rank, proof in enumerate(known):
        _compare(first, proof, rank)
    common = set(first.samples).intersection(*(proof.samples for proof in known))
    worst = min(known, key=lambda proof: {False: 0, None: 1, True: 2}[proof.is_exact])
    return replace(
        first,
        samples={number: first.samples[number] for number in common},
        lasting=frozenset(common.intersection(*(proof.lasting for proof in known))),
        is_exact=worst.is_exact,
        reason=worst.reason,
    )


def _compare(first: SourceProof, other: SourceProof, rank: int) -> None:
    """Raise ConfigError where another rank's source is not that of the first rank."""
    for name in sorted({*first.order, *other.order}):
        mine, theirs = first.order.get(name), other.order.get(name)
        if mine != theirs:
            cure = _SPLIT_ALREADY if name == "length" else "Give all ranks the same"
            raise ConfigError(
                f"Batches of {first.kind}: {name} is {mine!r} on rank 0 and {theirs!r} on rank {rank}. {cure}"
            )
    common = sorted(first.samples.keys() & other.samples.keys())
    if unlike := [number for number in common if first.samples[number] != other.samples[number]]:
        raise ConfigError(
            f"Batches of {first.kind}: {len(unlike)} of {len(common)} samples that were compared are not the same on "
            f"ranks 0 and {rank} ({shown_numbers(unlike)}). {_SPLIT_ALREADY}, and is for samples that hold what "
            "differs from machine to machine, such as the path of a cache"
        )


_SPLIT_ALREADY = (
    "Batches share each batch among the ranks: give every rank the whole dataset, without a Subset, shard or "
    "split_dataset_by_node of its own, or samples are left out. For ranks that each train on data of their own, give "
    "their own torchdata StatefulDataLoader to the state. Batches(prove=False) compares nothing"
)


def shown_numbers(numbers: Sequence[int]) -> str:
    return f"sample {first_few(numbers, 4)}"
