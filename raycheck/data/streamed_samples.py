"""Makes batches of a dataset that is a stream: samples arrive in its own order, from where the last step left it."""

from collections.abc import Iterable, Mapping, Sequence
from itertools import count
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset

from raycheck.data.batch_source import BatchSource, RankShare
from raycheck.data.epoch_order import Skips, is_left_out
from raycheck.data.proof_agreement import SourceProof
from raycheck.data.shared_streams import (
    Positions,
    ShareOfStreams,
    StreamState,
    has_state,
    plan_streams,
    stream_loader,
)
from raycheck.data.source_proof import stream_proof
from raycheck.errors import StateMismatchError


def is_stream(dataset: object) -> bool:
    """Return whether a dataset is an IterableDataset, torch's or Hugging Face's."""
    return isinstance(dataset, IterableDataset) or any(
        kind.__name__ == "IterableDataset" and kind.__module__.startswith("datasets.") for kind in type(dataset).__mro__
    )


class StreamedSamples(BatchSource):
    """A source of batches of an IterableDataset.

    batches_per_epoch: None if an epoch ends with the data; see Batches.
    """

    samples: int | None = None
    compared = ("length", "batches_per_epoch", "streams")

    def __init__(self, dataset: Any, share: RankShare, *, seed: int, batches_per_epoch: int | None) -> None:
        self._dataset = dataset
        self._seed = seed
        self.batches_per_epoch = batches_per_epoch
        self._plan = plan_streams(
            dataset,
            global_batch=share.global_batch,
            rank=share.rank,
            world_size=share.world_size,
            is_endless=batches_per_epoch is not None,
            seed=seed,
        )
        self.streams = self._plan.streams
        self._states: dict[int, StreamState] = {}  # up to the end of the last step
        self._fetched = Positions()
        self._given: list[StreamState] = []
        self._saved_workers: bool | None = None  # whether a worker read the restored stream
        self._has_worker = False
        self._is_exact: bool | None = None

    def prove(self, order: Mapping[str, Any]) -> SourceProof:
        depends = {"batches_per_epoch": self.batches_per_epoch, "streams": self.streams}
        return stream_proof(self._dataset, self._plan, {**order, **depends}, has_state=has_state(self._dataset))

    def take_proof(self, proof: SourceProof) -> None:
        self._is_exact = proof.is_exact

    def open(
        self, epoch: int, first: int, skips: Skips, options: Mapping[str, Any], *, is_mid_epoch: bool
    ) -> tuple[Iterable[int], "DataLoader[Any]"]:
        self._has_worker = bool(options.get("num_workers"))
        if self._saved_workers not in (None, self._has_worker):
            raise StateMismatchError(
                "Batches.loader(num_workers=...): a stream may come in another order in a loader worker than without "
                f"one. The checkpoint's was read {'in' if self._saved_workers else 'without'} one: do so again"
            )
        self._fetched = Positions()
        share = ShareOfStreams(
            self._dataset,
            self._plan,
            self._states if self._plan.is_endless or is_mid_epoch else {},
            first=first,
            last=self.batches_per_epoch,
            left_out={batch for at, low, high in skips if at == epoch for batch in range(low, high)}.__contains__,
            turn=0 if self._plan.is_endless else epoch,
            is_exact=self._is_exact,
        )
        generator = torch.Generator().manual_seed(self._seed)
        loader = stream_loader(share, self._fetched, {**options, "generator": generator})
        return (batch for batch in count(first) if not is_left_out(skips, epoch, batch)), loader

    def take(self) -> None:
        self._given = self._fetched.waiting.popleft()

    def end_step(self) -> None:
        self._states.update({state.number: state for state in self._given})

    def state(self) -> dict[str, Any]:
        return {
            "length": None,
            "batches_per_epoch": self.batches_per_epoch,
            "streams": self.streams,
            "sources": [state.as_dict() for number in self._plan.mine() if (state := self._states.get(number))],
            "has_worker": self._has_worker,
        }

    def differences(self, states: Sequence[Mapping[str, Any]]) -> list[str]:
        there = {source["number"] for state in states for source in state.get("sources", ())}
        if not there or there == {*range(self.streams)}:
            return []
        return [f"positions of the shards {sorted(there)} were saved, of {self.streams}"]

    def load(self, states: Sequence[Mapping[str, Any]]) -> None:
        sources = [StreamState(**source) for one in states for source in one["sources"]]
        self._states = {source.number: source for source in sources}
        self._given = []
        self._saved_workers = bool(states[0]["has_worker"]) if sources else None
