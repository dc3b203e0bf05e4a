"""Proves the data source of a training on all ranks together, before the first step."""

import time

from raycheck.errors import RaycheckError, StoreError
from raycheck.train.coordinator.messages import RankProof
from raycheck.train.data.data_stream import DataStream
from raycheck.train.data.proof_agreement import SourceProof, agreed_proof
from raycheck.train.group import Group, ask_until_decided

PROOF_TIMEOUT_S = 600.0
"""How much later than the first rank the last one may have read its samples."""


def prove_together(group: Group, stream: DataStream, mine: SourceProof | None) -> None:
    """Compare what the ranks have read, and give the stream what holds for all of them. Every rank calls it.

    mine: what this rank's `prove` has returned. Raises ConfigError on all ranks when the ranks' sources differ.
    """
    agreed = agreed_proof([mine])
    if group.world_size > 1:
        agreed = _agreed(group, mine)
    if agreed is not None:
        stream.take_proof(agreed)


def _agreed(group: Group, mine: SourceProof | None) -> SourceProof | None:
    what = "comparison of the ranks' data"

    def late(missing: str) -> RaycheckError:
        return StoreError(f"rank {group.rank}: {what}: {missing} within {PROOF_TIMEOUT_S:.0f} s")

    found: list[SourceProof | None] = ask_until_decided(
        group,
        "compare_data",
        RankProof(group=group.id, rank=group.rank, world_size=group.world_size, proof=mine),
        deadline=time.monotonic() + PROOF_TIMEOUT_S,
        what=what,
        late=late,
    )
    return found[0]
