"""A save on a bad network commits or fails, and a restore is right or an error; nothing is in between."""

from collections.abc import Iterator
from contextlib import suppress
from types import SimpleNamespace
from uuid import uuid4

import pytest
import torch

from raycheck.bucket.assembly.plan_cache import PlanCache
from raycheck.bucket.format import object_keys
from raycheck.bucket.format.progress import Progress
from raycheck.bucket.protocol import claim as claims
from raycheck.bucket.protocol.resume import AUTO
from raycheck.bucket.protocol.swap import Register
from raycheck.bucket.reading import Checkpoint, read_latest
from raycheck.bucket.store import Store, open_store, retry
from raycheck.bucket.store.address import join_uri
from raycheck.bucket.store.part_sizes import PART_SIZES, PartSizes
from raycheck.errors import RaycheckError, SaveFailedError, StoreError
from raycheck.state.train_state import TrainState
from tests.support.histories.invariants import assert_invariants
from tests.support.processes.save_without_ray import ME, conclude, upload
from tests.support.servers.http_fault_proxy import FaultProxy, fault_proxy
from tests.support.servers.s3_engines import by_s3fs_alone

SAVES = 5
SHAPE = (1024, 1500)  # 6 MB: two parts


@pytest.fixture
def wire(s3: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultProxy]:
    monkeypatch.setitem(PART_SIZES, "s3", PartSizes(part_bytes=5 * 1024 * 1024, in_flight=2))
    monkeypatch.setattr(retry, "CHANCE", SimpleNamespace(uniform=lambda *_: 0.0))  # no pauses between attempts
    with fault_proxy(s3) as proxy:
        yield proxy


class Trainer:
    """Plays one rank and its coordinator, which share a store; the model holds the number of the step everywhere."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.register = Register(store)
        self.weights = torch.zeros(SHAPE)
        self.state = TrainState({"own": {"weights": self.weights}}, rank=0, world_size=1)
        self.acknowledged: list[str] = []
        self.failed = 0
        self._plans = PlanCache()
        claimed = claims.claim(self.register, ME, group="g", world_size=1, resume=AUTO, run_id="run")
        self._attempt = claimed.attempt.number

    def save(self, number: int) -> None:
        self.weights.fill_(number)
        progress = Progress(step=number)
        name = str(object_keys.CheckpointName(step=number, attempt=self._attempt, save=number))
        try:
            staged = self.state.stage(progress)
            done = upload(self.store, staged, name=name)
            conclude(self.register, name, [done], progress=progress, plans=self._plans, keep_last=None)
        except (StoreError, SaveFailedError):
            self.failed += 1
            return
        self.acknowledged.append(name)


@pytest.mark.parametrize("engine", [pytest.param("obstore", marks=pytest.mark.slow), "s3fs"])
@pytest.mark.parametrize(
    ("share", "least"), [(0.2, SAVES - 1), pytest.param(0.5, 1, marks=pytest.mark.slow)], ids=["a fifth", "half"]
)
def test_with_many_requests_failing_each_save_commits_or_fails_and_each_restore_is_right_or_an_error(
    s3: str, wire: FaultProxy, engine: str, share: float, least: int
) -> None:
    name = uuid4().hex
    store = open_store(join_uri(wire.uri, name))
    trainer = Trainer(store if engine == "obstore" else by_s3fs_alone(store))

    wire.chaos(share, seed=7)
    for number in range(1, SAVES + 1):
        trainer.save(number)
    restored = 0
    for _ in range(4):
        with suppress(StoreError):
            restored += restores(trainer.store)
    wire.chaos(0, seed=7)

    body = assert_invariants(open_store(join_uri(s3, name)))
    assert len(trainer.acknowledged) + trainer.failed == SAVES
    assert len(trainer.acknowledged) >= least
    assert set(trainer.acknowledged) <= {entry.key for entry in body.live}
    assert restores(open_store(join_uri(s3, name)))
    assert restored >= 2 * (share < 0.5)


def restores(store: Store) -> bool:
    """Returns whether the head has the values of its step, all of them; anything else but an error is a silent wrong."""
    body = read_latest(store)
    live = {"weights": torch.full(SHAPE, -1.0)}
    entry = body.entry(body.head)
    TrainState({"own": live}, rank=0, world_size=1).apply(Checkpoint(store, entry))
    assert torch.equal(live["weights"], torch.full(SHAPE, float(entry.step)))
    return True


@pytest.mark.parametrize("engine", ["obstore", "s3fs"])
def test_a_store_that_is_away_for_a_while_fails_what_it_must_and_is_used_again(
    s3: str, wire: FaultProxy, engine: str
) -> None:
    name = uuid4().hex
    store = open_store(join_uri(wire.uri, name))
    trainer = Trainer(store if engine == "obstore" else by_s3fs_alone(store))
    trainer.save(1)

    wire.chaos(1, seed=1)
    trainer.save(2)
    with pytest.raises(RaycheckError):
        restores(trainer.store)
    wire.chaos(0, seed=1)
    trainer.save(3)

    assert [entry.step for entry in assert_invariants(open_store(join_uri(s3, name))).live] == [1, 3]
    assert trainer.failed == 1
