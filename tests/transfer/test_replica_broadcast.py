"""Replicas are read once by the group, whatever is in them, and a rank that cannot read its share stops them all."""

import pytest
import torch

from raycheck.bucket.format import object_keys
from raycheck.bucket.reading import Checkpoint
from raycheck.bucket.store import Store
from raycheck.state.train_state import Progress, TrainState
from raycheck.transfer.stage.local_box import TRAIN
from tests.support.processes.gloo_ranks import Ranks
from tests.support.processes.save_without_ray import save
from tests.support.samples import replicated_modules

NOTHING_SKIPPED = ((), (), ())


@pytest.fixture
def checkpoint(files: Store) -> Checkpoint:
    state = TrainState(replicated_modules.build(seed=1), rank=0, world_size=1)
    return save(files, [state.stage(Progress(step=3))], progress=Progress(step=3))


def assert_loaded(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name


def test_three_ranks_fetch_the_bytes_of_one(ranks: Ranks, checkpoint: Checkpoint) -> None:
    expected = replicated_modules.tensors_of(replicated_modules.build(seed=1))
    needed = sum(tensor.nbytes for tensor in expected.values())

    loaded = ranks.run(replicated_modules.load, 3, checkpoint.store.uri, checkpoint.entry, NOTHING_SKIPPED)

    for tensors, _ in loaded:
        assert_loaded(tensors, expected)
    assert sum(fetched for _, fetched in loaded) <= 1.05 * needed
    assert max(fetched for _, fetched in loaded) <= 0.55 * needed, "two tensors are half of the bytes each"


def test_what_not_all_ranks_want_is_read_by_those_that_do(ranks: Ranks, checkpoint: Checkpoint) -> None:
    expected, own = (replicated_modules.tensors_of(replicated_modules.build(seed=seed)) for seed in (1, 2))
    skip = ((), ("model.large",), ())

    loaded = ranks.run(replicated_modules.load, 3, checkpoint.store.uri, checkpoint.entry, skip)

    large = {name: tensor for name, tensor in own.items() if name.startswith("large.")}
    for (tensors, _), skipped in zip(loaded, skip, strict=True):
        assert_loaded(tensors, expected | (large if skipped else {}))


def test_a_rank_that_cannot_read_its_share_stops_them_all(ranks: Ranks, checkpoint: Checkpoint) -> None:
    key = object_keys.shard_key(checkpoint.entry.key, TRAIN, 0)
    data = bytearray(checkpoint.store.get(key).data)
    data[len(data) // 4] ^= 1
    checkpoint.store.put(key, data)

    told = ranks.run(replicated_modules.load, 3, checkpoint.store.uri, checkpoint.entry, NOTHING_SKIPPED)

    assert len(set(told)) == 1
    assert told[0].startswith("DamagedError: shard of rank 0, component train: tensor "), told[0]


def test_a_rank_that_refuses_the_checkpoint_stops_them_all(ranks: Ranks, checkpoint: Checkpoint) -> None:
    told = ranks.run(replicated_modules.load, 3, checkpoint.store.uri, checkpoint.entry, ((), ("nothing.such",), ()))

    assert told[1].startswith("ConfigError: restore: there is no 'nothing.such'"), told[1]
    assert told[0] == told[2] == told[1].replace("ConfigError: ", "ConfigError: rank 1: ", 1)
