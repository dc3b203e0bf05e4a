"""Compares what the ranks know of their data sources. The coordinator does this, so the module does not
import torch.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from raycheck.errors import ConfigError
from raycheck.terminal import first_few


@dataclass(frozen=True, kw_only=True, slots=True)
class SourceProof:
    """The known facts about one rank's data source.

    kind: the dataset's class. order: what the order of samples depends on, which must be equal on all ranks. samples:
    the checksum of each compared sample, by number. lasting: the numbers of those that do not depend on random
    augmentation. is_exact: whether a stream resumes exactly where its state was taken; None if that is unknown or does
    not apply. reason: why it does not resume there, or why that is unknown. said: other findings for the user.
    """

    kind: str
    order: Mapping[str, Any]
    samples: Mapping[int, int] = field(default_factory=dict)
    lasting: frozenset[int] = frozenset()
    is_exact: bool | None = None
    reason: str = ""
    said: tuple[str, ...] = ()

    def state(self, known: Sequence[Sequence[int]] = ()) -> list[tuple[int, int]]:
        """Return the part that a checkpoint stores: the number and the checksum of each sample in `lasting`.

        known: what the restored checkpoint stored, some of which this proof may have had no time to read.
        """
        found = {number: crc for number, crc in known if number not in self.lasting}
        found.update({number: self.samples[number] for number in self.lasting})
        return sorted(found.items())

    def differing(self, saved: Sequence[Sequence[int]]) -> list[int]:
        """Return the numbers of the samples that differ from a checkpoint's samples."""
        return [number for number, crc in saved if number in self.lasting and self.samples[number] != crc]


def agreed_data(ranks: Sequence[tuple[str | None, SourceProof | None]]) -> SourceProof | None:
    """Compare what the ranks know about their sources, as `agreed_proof` does, and whether each rank has one.

    ranks: in rank order, the name of the entry that is the rank's data stream, or None if it has none; and its proof.
    """
    names = [name for name, _ in ranks if name is not None]
    if names and len(names) < len(ranks):
        held = [rank for rank, (name, _) in enumerate(ranks) if name is not None]
        missing = [rank for rank, (name, _) in enumerate(ranks) if name is None]
        raise ConfigError(
            f"state[{names[0]!r}] is on ranks {held} and not on ranks {missing}: all ranks share one position in the "
            "data. Put it into the state of every rank"
        )
    return agreed_proof([proof for _, proof in ranks])


def agreed_proof(proofs: Sequence[SourceProof | None]) -> SourceProof | None:
    """Compare what the ranks know about their sources, in rank order. Return what holds for all of them.

    None: for ranks that prove nothing. Raises ConfigError, which names the ranks and what differs between them.
    """
    known = [proof for proof in proofs if proof is not None]
    if not known:
        return None
    if len(known) < len(proofs):
        raise ConfigError("Batches(prove=False) is set on only some of the ranks: use the same value on all ranks")
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
    """Raise ConfigError if another rank's source differs from the first rank's."""
    for name in sorted({*first.order, *other.order}):
        mine, theirs = first.order.get(name), other.order.get(name)
        if mine != theirs:
            cure = _SPLIT_ALREADY if name == "length" else "Use the same value on all ranks"
            raise ConfigError(
                f"Batches of {first.kind}: {name} is {mine!r} on rank 0 and {theirs!r} on rank {rank}. {cure}"
            )
    common = sorted(first.samples.keys() & other.samples.keys())
    if unlike := [number for number in common if first.samples[number] != other.samples[number]]:
        raise ConfigError(
            f"Batches of {first.kind}: {len(unlike)} of {len(common)} compared samples are not the same on "
            f"ranks 0 and {rank} ({shown_numbers(unlike)}). {_SPLIT_ALREADY}; use it for samples that contain "
            "something specific to the machine, such as the path of a cache"
        )


_SPLIT_ALREADY = (
    "Batches share each batch among the ranks: give every rank the whole dataset, without a Subset, shard or "
    "split_dataset_by_node per rank, or samples are left out. If each rank trains on its own data, put its own "
    "torchdata StatefulDataLoader into the state. Batches(prove=False) turns this comparison off"
)


def shown_numbers(numbers: Sequence[int]) -> str:
    return f"sample {first_few(numbers, 4)}"
