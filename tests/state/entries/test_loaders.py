"""torchdata's StatefulDataLoader goes on at each rank's position; a loader that cannot report its position is refused."""

from typing import Any
from uuid import uuid4

import pytest
import ray.data
import torch
from torch.utils.data import DataLoader
from torchdata.stateful_dataloader import StatefulDataLoader

from raycheck.bucket.format.progress import Progress
from raycheck.bucket.store import Store, open_store
from raycheck.errors import ConfigError, StateMismatchError
from raycheck.state.restore_selection import Selection
from raycheck.state.train_state import TrainState
from tests.support.processes.save_without_ray import agreed, save

pytestmark = [
    pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning"),
    pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning"),
]


@pytest.fixture
def store() -> Store:
    """Returns one store: loaders are saved as any other entry is, so one kind of store is enough."""
    return open_store(f"memory://{uuid4().hex}")


def loader(rank: int, world_size: int, *, workers: int = 0) -> Any:
    """Makes this rank's loader, shuffled by a generator of its own so that nothing draws from the global random state."""
    share = list(range(rank, 48, world_size))
    return StatefulDataLoader(
        share, batch_size=2, shuffle=True, num_workers=workers, generator=torch.Generator().manual_seed(rank)
    )


def samples(iterator: Any, batches: int | None = None) -> list[int]:
    found: list[int] = []
    for number, batch in enumerate(iterator, start=1):
        found += batch.tolist()
        if number == batches:
            break
    return found


def states(loaders: list[Any]) -> list[TrainState]:
    return [
        TrainState({"model": torch.nn.Linear(2, 2), "loader": one}, rank=rank, world_size=len(loaders))
        for rank, one in enumerate(loaders)
    ]


def saved_in_mid_epoch(store: Store, *, workers: int = 0) -> tuple[Any, list[list[int]]]:
    """Returns a checkpoint of two ranks after 5 of 12 batches, and the samples that each rank got after it."""
    torch.manual_seed(0)
    loaders = [loader(rank, 2, workers=workers) for rank in range(2)]
    running = [iter(one) for one in loaders]
    for one in running:
        samples(one, 5)
    ranks = states(loaders)
    for rank in ranks[1:]:
        rank.objects["model"].load_state_dict(ranks[0].objects["model"].state_dict())
    progress = Progress(step=5)
    checkpoint = save(store, [state.stage(progress) for state in agreed(ranks)], progress=progress)
    return checkpoint, [samples(one) for one in running]


@pytest.mark.parametrize("workers", [0, 2])
def test_each_rank_goes_on_with_the_samples_it_had_not_seen(store: Store, workers: int) -> None:
    checkpoint, rest = saved_in_mid_epoch(store, workers=workers)
    loaders = [loader(rank, 2, workers=workers) for rank in range(2)]

    for state in states(loaders):
        state.apply(checkpoint)

    assert [samples(one) for one in loaders] == rest
    assert all(len(own) == 14 for own in rest)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("taken", [0, 3])
def test_an_iterator_begun_before_the_restore_is_refused(store: Store, workers: int, taken: int) -> None:
    checkpoint, rest = saved_in_mid_epoch(store, workers=workers)
    loaders = [loader(rank, 2, workers=workers) for rank in range(2)]
    early = iter(loaders[0])
    if taken:
        samples(early, taken)

    for state in states(loaders):
        state.apply(checkpoint)

    with pytest.raises(ConfigError, match=r"state\['loader'\]: this iterator was started before restore\(\)"):
        next(early)
    assert samples(loaders[0]) == rest[0]


def test_another_number_of_ranks_is_refused_and_changes_nothing(store: Store) -> None:
    checkpoint, _ = saved_in_mid_epoch(store)
    (state,) = states([loader(0, 1)])

    with pytest.raises(StateMismatchError, match=r"loader: the positions of 2 loaders.*1 ranks now.*skip=\['loader'\]"):
        state.apply(checkpoint)

    assert len(samples(state.objects["loader"])) == 48


def test_with_the_loader_skipped_the_rest_is_restored_at_another_world_size(store: Store) -> None:
    checkpoint, _ = saved_in_mid_epoch(store)
    (state,) = states([loader(0, 1)])

    done = state.apply(checkpoint, Selection.of(None, ["loader"]))

    assert done.progress.step == 5
    assert "loader" in done.report.skipped


class Shard(ray.data.DataIterator):
    """Looks like what ray.train.get_dataset_shard returns, without a Ray behind it."""


Shard.__abstractmethods__ = frozenset()


@pytest.mark.parametrize(
    ("make", "advice"), [(lambda: DataLoader([1, 2]), "Batches"), (Shard, "RayData")], ids=["torch", "ray"]
)
def test_what_cannot_say_where_it_stands_is_refused_with_advice(make: Any, advice: str) -> None:
    with pytest.raises(ConfigError, match=rf"state\['data'\].*cannot report its position.*raycheck\.{advice}"):
        TrainState({"data": make()}, rank=0, world_size=1)
