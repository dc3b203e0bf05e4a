"""Random generators of the script's own are entries of the state: after a restore each draws what it would have drawn."""

import random
from collections.abc import Callable
from typing import Any
from uuid import uuid4

import numpy as np
import pytest
import torch

import raycheck
from raycheck.bucket.format.progress import Progress
from raycheck.bucket.store import Store, open_store
from raycheck.errors import ConfigError, StateMismatchError
from raycheck.state.train_state import TrainState
from tests.support.processes.save_without_ray import Own, agreed, restore_state, save, save_state

Draw = Callable[[Any], list[float]]
KINDS: dict[str, tuple[Callable[[int], Any], Draw]] = {
    "torch": (torch.Generator().manual_seed, lambda made: torch.randn(3, generator=made).tolist()),
    "python": (random.Random, lambda made: [made.gauss(0, 1) for _ in range(3)]),
    "numpy": (np.random.default_rng, lambda made: made.standard_normal(3).tolist()),
    "numpy, Philox": (
        lambda seed: np.random.Generator(np.random.Philox(seed)),
        lambda made: made.integers(1 << 30, size=3).tolist(),
    ),
    "numpy, legacy": (np.random.RandomState, lambda made: [float(made.randn()) for _ in range(3)]),
}


@pytest.fixture
def store() -> Store:
    return open_store(f"memory://{uuid4().hex}")


def make(kind: str, seed: int) -> Any:
    return torch.Generator().manual_seed(seed) if kind == "torch" else KINDS[kind][0](seed)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("wrap", [lambda made: made, raycheck.PerRank, lambda made: {"train": made}])
def test_a_generator_draws_on_as_it_would_have(store: Store, kind: str, wrap: Callable[[Any], Any]):
    one, other, draw = make(kind, 1), make(kind, 2), KINDS[kind][1]
    draw(one)

    checkpoint = save_state(store, {"model": torch.nn.Linear(1, 1), "chance": wrap(one)})
    restore_state(checkpoint, {"model": torch.nn.Linear(1, 1), "chance": wrap(other)})

    assert draw(other) == draw(one)


def test_generators_that_differ_between_ranks_are_refused_by_name_and_kept_by_per_rank(store: Store):
    def states(seeds: tuple[int, int], wrap: Callable[[Any], Any]) -> list[TrainState]:
        made = [torch.Generator().manual_seed(seed) for seed in seeds]
        return [TrainState({"chance": wrap(one)}, rank=rank, world_size=2) for rank, one in enumerate(made)]

    with pytest.raises(ConfigError, match="chance"):
        agreed(states((1, 2), lambda made: made))
    before, after = states((1, 2), raycheck.PerRank), states((3, 4), raycheck.PerRank)
    checkpoint = save(store, [state.stage(Progress()) for state in agreed(before)], progress=Progress())
    for state in after:
        state.apply(checkpoint)

    drawn = [[torch.rand((), generator=state.objects["chance"].value) for state in ranks] for ranks in (before, after)]
    assert drawn[0] == drawn[1]


@pytest.mark.parametrize(
    ("saved", "here"), [("torch", "python"), ("numpy", "numpy, Philox"), ("numpy", "torch"), ("no generator", "torch")]
)
@pytest.mark.parametrize("wrap", [lambda made: made, raycheck.PerRank], ids=["plain", "PerRank"])
def test_the_state_of_another_kind_of_generator_is_refused(
    store: Store, saved: str, here: str, wrap: Callable[[Any], Any]
):
    other = Own({"seed": 1}) if saved == "no generator" else make(saved, 1)
    checkpoint = save_state(store, {"alpha": {"number": 1}, "chance": wrap(other)})
    first = {"number": 2}

    with pytest.raises(StateMismatchError, match=r"not alike: chance: .*random generator of"):
        restore_state(checkpoint, {"alpha": first, "chance": wrap(make(here, 1))})

    assert first == {"number": 2}, "nothing was changed"


def test_a_generator_without_a_state_is_refused():
    with pytest.raises(ConfigError, match="SystemRandom"):
        TrainState({"chance": random.SystemRandom()}, rank=0, world_size=1)


def test_the_owner_of_a_rank_local_value_has_the_methods_of_a_state():
    stateful = Own(1)

    assert raycheck.PerRank({"a": 1}).owner is None
    assert raycheck.PerRank(stateful).owner is stateful
    assert raycheck.PerRank(random.Random(1)).owner.state_dict()["kind"] == "python"
