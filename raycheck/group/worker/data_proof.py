"""Proves the data source of a training run on all ranks together, before the first step."""

import time

from raycheck.data.data_stream import DataStream
from raycheck.data.proof_agreement import SourceProof
from raycheck.group.coordinator.messages import RankProof
from raycheck.group.group import Group, ask_until_decided

PROOF_TIMEOUT_S = 600.0
"""How much later than the first rank the last one may have read its samples."""


def prove_together(group: Group, name: str | None, stream: DataStream | None, mine: SourceProof | None) -> None:
    """Compare what the ranks have read, and give the stream what applies to all of them. Every rank calls it once.

    name, stream: the entry of the state that is a stream of data; None when this rank has none. mine: what this rank's
    `prove` has returned. Raises ConfigError on all ranks when the ranks' sources differ, or only some ranks have one.
    """
    agreed = mine
    if group.world_size > 1:
        agreed = ask_until_decided(
            group,
            "compare_data",
            RankProof(group=group.id, rank=group.rank, world_size=group.world_size, stream=name, proof=mine),
            deadline=time.monotonic() + PROOF_TIMEOUT_S,
            what="comparison of the ranks' data",
        )
    if stream is not None and agreed is not None:
        stream.take_proof(agreed)
