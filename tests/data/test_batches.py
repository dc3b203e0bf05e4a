"""The global batch stream: one order whatever the world size, positions that count what was consumed, own randomness."""

import random
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from accelerate import PartialState
from accelerate.data_loader import DataLoaderShard
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, Dataset, get_worker_info

import raycheck
from raycheck.bucket.store import Store
from raycheck.data.batches import Batches
from raycheck.errors import ConfigError, StateMismatchError
from raycheck.group.worker.training_progress import ProgressCounter
from tests.support.processes.save_without_ray import restore_state, save_state

# torch warns of more loader workers than cores
pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning")


def stream(
    length: int = 23, *, batch: int = 5, seed: int = 7, shuffle: bool = True, rank: int = 0, world_size: int = 1
) -> Batches:
    return Batches(range(length), global_batch=batch, seed=seed, shuffle=shuffle, rank=rank, world_size=world_size)


def ranks_of(world_size: int, **options: Any) -> list[Batches]:
    return [stream(rank=rank, world_size=world_size, **options) for rank in range(world_size)]


def taken(ranks: Sequence[Batches], epoch: int, steps: int | None = None) -> list[list[list[int]]]:
    """Step by step, each rank's share; every step is ended, as the Checkpointer does."""
    loaders = [batches.loader(epoch) for batches in ranks]
    found = []
    while steps is None or len(found) < steps:
        shares = [next(loader, None) for loader in loaders]
        if None in shares:
            assert set(map(type, shares)) == {type(None)}, "all ranks end together"
            break
        found.append([share.tolist() for share in shares])
        for batches in ranks:
            batches.end_step()
    return found


def joined(shares: list[list[int]]) -> list[int]:
    return [sample for share in shares for sample in share]


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 5])
def test_the_global_order_does_not_depend_on_the_world_size(world_size: int, shuffle: bool):
    alone = [[joined(shares) for shares in taken([stream(shuffle=shuffle)], epoch)] for epoch in range(2)]

    together = [taken(ranks_of(world_size, shuffle=shuffle), epoch) for epoch in range(2)]

    assert [[joined(shares) for shares in epoch] for epoch in together] == alone
    for shares in (shares for epoch in together for shares in epoch):
        sizes = [len(share) for share in shares]
        assert max(sizes) - min(sizes) <= 1
        assert min(sizes) >= 1


def test_each_epoch_has_an_order_of_its_own_that_the_seed_decides():
    def orders(seed: int) -> list[list[int]]:
        return [joined([joined(shares) for shares in taken([stream(seed=seed)], epoch)]) for epoch in range(3)]

    one, again, other = orders(1), orders(1), orders(2)

    assert one == again
    everything = [*one, *other]
    assert all(a != b for i, a in enumerate(everything) for b in everything[i + 1 :])
    assert all(len(set(order)) == len(order) == 20 for order in everything)


@settings(max_examples=4 * settings().max_examples // 5, deadline=None)
@given(
    lives=st.lists(st.tuples(st.integers(1, 5), st.integers(0, 6), st.integers(0, 3)), max_size=7),
    length=st.integers(5, 40),
    seed=st.integers(0, 2**40),
)
def test_any_stops_at_any_world_sizes_consume_each_position_once_in_order(
    lives: list[tuple[int, int, int]], length: int, seed: int
):
    """lives: (world size, steps ended, batches fetched beyond them and lost with the life)."""
    options = {"length": length, "seed": seed}
    expected = [sample for epoch in range(3) for shares in taken([stream(**options)], epoch) for sample in shares[0]]
    consumed: list[int] = []
    state = stream(**options).state_dict()

    for world_size, steps, lost in [*lives, (1, 3 * length, 0)]:
        ranks = ranks_of(world_size, **options)
        for batches in ranks:
            batches.load_state_dict(state)
        left = steps
        for epoch in range(ranks[0].epoch, 3):
            shares = taken(ranks, epoch, left)
            consumed += [sample for step in shares for sample in joined(step)]
            left -= len(shares)
            if left == 0:
                break
        for batches in ranks:
            loader = batches.loader(batches.epoch)
            for _ in range(lost):
                next(loader, None)
        states = [batches.state_dict() for batches in ranks]
        assert all(other == states[0] for other in states)
        state = states[0]

    assert consumed == expected
    assert ranks[0].samples == 3 * (length // 5) * 5


def test_a_position_survives_in_a_checkpoint(store: Store):
    one, two = stream(), stream()
    before = taken([one], 0, 2)

    restore_state(save_state(store, {"data": one}), {"data": two})

    assert before + taken([two], 0) == taken([stream()], 0)
    assert taken([two], 1) == taken([stream()], 1)


def test_an_epoch_that_was_consumed_whole_yields_nothing_more_after_a_restore():
    one, two = stream(), stream()
    taken([one], 0)

    two.load_state_dict(one.state_dict())

    assert (two.epoch, two.samples) == (0, 20)
    assert taken([two], 0) == []
    assert taken([two], 1) == taken([stream()], 1)


def test_the_position_counts_what_was_consumed_and_not_what_was_fetched_ahead():
    batches = stream(40)
    loader = batches.loader(0, num_workers=2, prefetch_factor=3)

    next(loader)
    fetched = batches.state_dict()["consumed"]
    batches.end_step()
    consumed = batches.state_dict()["consumed"]
    next(loader)
    next(loader)
    batches.end_step()  # two batches in one step: gradient accumulation

    assert (fetched, consumed, batches.state_dict()["consumed"], batches.samples) == (0, 5, 15, 15)


def test_a_step_that_did_not_end_is_repeated_by_the_next_loader():
    batches = stream()
    loader = batches.loader(0)
    next(loader)
    batches.end_step()
    unfinished = next(loader).tolist()

    again = next(batches.loader(0)).tolist()

    assert again == unfinished


def global_states() -> tuple[Any, ...]:
    name, keys, *rest = np.random.get_state()  # noqa: NPY002  the global generator is the one to leave alone
    return random.getstate(), (name, keys.tolist(), *rest), torch.get_rng_state().tolist()


@pytest.mark.parametrize("workers", [0, 2])
def test_no_global_random_state_is_touched(workers: int):
    random.gauss(0, 1)
    before = global_states()

    batches = stream()
    for epoch in range(2):
        for _ in batches.loader(epoch, num_workers=workers):
            batches.end_step()

    assert global_states() == before


class Augmented(Dataset[list[float]]):
    """Gives each sample with a draw from every global generator, as random augmentation does."""

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> list[float]:
        assert get_worker_info() is not None
        return [index, random.random(), float(np.random.rand()), float(torch.rand(()))]  # noqa: NPY002


def augmented(rank: int = 0, world_size: int = 1) -> Batches:
    return Batches(Augmented(), global_batch=4, seed=3, rank=rank, world_size=world_size)


def rows(loader: Iterator[list[torch.Tensor]], steps: int, batches: Batches) -> list[list[float]]:
    found: list[list[float]] = []
    for _ in range(steps):
        found += torch.stack(next(loader), dim=1).tolist()
        batches.end_step()
    return found


def test_augmentation_in_loader_workers_is_the_same_after_a_restore_in_mid_epoch():
    whole, first, second = augmented(), augmented(), augmented()
    expected = rows(whole.loader(1, num_workers=2), 6, whole)

    before = rows(first.loader(1, num_workers=1), 2, first)
    second.load_state_dict(first.state_dict())
    torch.manual_seed(99)
    random.seed(99)
    after = rows(second.loader(1, num_workers=2), 4, second)

    assert before + after == expected
    assert len({tuple(row[1:]) for row in expected}) == 24


def test_augmentation_in_loader_workers_does_not_depend_on_the_world_size():
    alone = augmented()
    expected = rows(alone.loader(0, num_workers=2), 2, alone)

    ranks = [augmented(rank, 2) for rank in range(2)]
    shares = [rows(batches.loader(0, num_workers=1), 2, batches) for batches in ranks]

    assert sorted(shares[0] + shares[1]) == sorted(expected)


def test_augmentation_differs_between_epochs_and_seeds():
    def drawn(seed: int, epoch: int) -> set[float]:
        batches = Batches(Augmented(), global_batch=4, seed=seed, rank=0, world_size=1)
        return {value for row in rows(batches.loader(epoch, num_workers=1), 6, batches) for value in row[1:]}

    one, other_epoch, other_seed = drawn(3, 0), drawn(3, 1), drawn(4, 0)

    assert not one & other_epoch
    assert not one & other_seed


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"seed": 8}, "seed: saved 7, here 8"),
        ({"batch": 4}, "global_batch: saved 5, here 4"),
        ({"length": 24}, "length: saved 23, here 24"),
        ({"shuffle": False}, "shuffle: saved True, here False"),
        ({"seed": 1, "length": 22}, "seed: saved 7, here 1; length: saved 23, here 22"),
    ],
)
def test_another_order_than_the_saved_one_is_refused(change: dict[str, Any], message: str):
    one, other = stream(), stream(**change)
    taken([one], 0, 2)

    with pytest.raises(StateMismatchError, match=message):
        other.load_state_dict(one.state_dict())

    assert other.samples == 0


@pytest.mark.parametrize(
    "option",
    [
        {"batch_size": 2},
        {"shuffle": True},
        {"sampler": [1]},
        {"batch_sampler": [[1]]},
        {"drop_last": True},
        {"generator": None},
    ],
    ids=lambda option: next(iter(option)),
)
def test_loader_options_that_would_change_the_order_are_refused(option: dict[str, Any]):
    with pytest.raises(ConfigError, match=rf"loader\({next(iter(option))}="):
        stream().loader(0, **option)


def test_loader_options_that_do_not_change_the_order_go_to_torch():
    batches = stream()

    found = list(batches.loader(0, num_workers=1, collate_fn=tuple, persistent_workers=False))

    assert found == [tuple(shares[0]) for shares in taken([stream()], 0)]


def test_an_epoch_behind_the_position_is_refused():
    batches = stream()
    taken([batches], 2, 1)

    with pytest.raises(ConfigError, match=r"at epoch 2 and only goes forward"):
        batches.loader(1)

    assert batches.samples == 5, "epochs that were skipped were not consumed"


@pytest.mark.parametrize(("batch", "world_size"), [(24, 1), (0, 1), (3, 4)])
def test_a_batch_that_leaves_a_rank_without_samples_is_refused(batch: int, world_size: int):
    with pytest.raises(ConfigError, match=rf"global_batch={batch}"):
        stream(batch=batch, world_size=world_size)


def test_in_the_middle_of_an_epoch_what_runs_before_the_first_batch_runs_once_and_just_before_the_fetch():
    events: list[Any] = []

    class Telling(Dataset[int]):
        def __len__(self) -> int:
            return 6

        def __getitem__(self, index: int) -> int:
            events.append(f"fetched {index}")
            return index

    batches = Batches(Telling(), global_batch=3, shuffle=False, rank=0, world_size=1)
    batches.load_state_dict({**batches.state_dict(), "consumed": 3})
    batches.before_first_batch(lambda: events.append("called"))

    loader = batches.loader(0)
    events.append("loader made")
    for epoch in range(2):
        for batch in loader if epoch == 0 else batches.loader(epoch):
            events.append(batch.tolist())
            batches.end_step()

    halves = ["fetched 0", "fetched 1", "fetched 2", [0, 1, 2]], ["fetched 3", "fetched 4", "fetched 5", [3, 4, 5]]
    assert events == ["loader made", "called", *halves[1], *halves[0], *halves[1]]


def test_at_the_beginning_of_an_epoch_the_draws_of_the_script_stand():
    """A draw per epoch before the loader: in every run it comes between the end of an epoch and the next batch."""

    def train(batches: Batches, epochs: range) -> list[float]:
        drawn = []
        for epoch in epochs:
            drawn.append(random.random())
            for _ in batches.loader(epoch):
                drawn.append(random.random())
                batches.end_step()
            batches.end_epoch()
        return drawn

    random.seed(1)
    whole = train(stream(), range(2))
    random.seed(1)
    first, second = stream(), stream()
    before = train(first, range(1))
    saved = first.state_dict(), random.getstate()

    second.load_state_dict(saved[0])
    random.setstate(saved[1])
    second.before_first_batch(lambda: random.setstate(saved[1]))

    assert before + train(second, range(1, 2)) == whole


# --- loaders that frameworks make early, two of them, and those left half-way ---


def at_step(steps: int, *, epoch: int = 0) -> dict[str, Any]:
    batches = stream()
    taken([batches], epoch, steps)
    return batches.state_dict()


def of_epoch(epoch: int) -> list[list[int]]:
    return [joined(shares) for shares in taken([stream()], epoch)]


@pytest.mark.parametrize("epoch", [0, None], ids=["loader(0)", "loader()"])
@pytest.mark.parametrize("is_iter", [False, True], ids=["the loader", "iter of it"])
def test_a_loader_made_before_a_restore_goes_on_where_the_restore_went(epoch: int | None, is_iter: bool):
    batches = stream()
    loader = batches.loader(epoch)
    early = iter(loader) if is_iter else loader

    batches.load_state_dict(at_step(2))

    assert len(loader) == 2
    assert [share.tolist() for share in early] == of_epoch(0)[2:]


@pytest.mark.parametrize("workers", [0, 2])
def test_an_iterator_begun_before_a_restore_is_refused_and_iterated_anew_it_follows(workers: int):
    batches = stream()
    loader = batches.loader(0, num_workers=workers)
    early = iter(loader)
    next(early)
    batches.end_step()

    batches.load_state_dict(at_step(2))

    with pytest.raises(ConfigError, match=r"started before a restore; .*epoch 0, batch 2.*Start the iteration again"):
        next(early)
    batches.end_step()
    assert batches.epoch_step == 2, "a refused loader counts nothing"
    assert [share.tolist() for share in loader] == of_epoch(0)[2:]


def test_a_loader_of_an_epoch_that_a_restore_has_left_behind_is_refused():
    batches = stream()
    loader = batches.loader(0)

    batches.load_state_dict(at_step(1, epoch=2))

    with pytest.raises(ConfigError, match=r"at epoch 2 and only goes forward.*loader\(\) without an epoch"):
        next(iter(loader))
    assert [share.tolist() for share in batches.loader()] == of_epoch(2)[1:]


def test_after_end_epoch_a_loader_in_use_is_refused_and_one_without_an_epoch_gives_the_next_one():
    batches = stream()
    named, following = batches.loader(0), batches.loader()
    next(named)
    batches.end_step()

    batches.end_epoch()

    for use in (lambda: next(named), lambda: next(iter(named))):
        with pytest.raises(ConfigError, match=r"started before end_epoch|only goes forward"):
            use()
    assert [share.tolist() for share in following] == of_epoch(1)
    assert batches.epoch == 1


def test_of_two_loaders_at_once_the_first_is_refused_and_the_second_counts_right():
    batches = stream()
    one, two = batches.loader(0), batches.loader(0)

    next(one)
    first_of_two = next(two).tolist()
    with pytest.raises(ConfigError, match="started before another loader of these Batches was started"):
        next(one)
    batches.end_step()

    assert first_of_two == of_epoch(0)[0]
    assert batches.epoch_step == 1


def test_one_loader_object_is_iterated_epoch_by_epoch():
    batches = stream()
    loader = batches.loader()
    found = []

    for _ in range(3):
        assert len(loader) == 4
        for share in loader:
            found.append(share.tolist())
            batches.end_step()

    assert found == [*of_epoch(0), *of_epoch(1), *of_epoch(2)]
    assert (batches.epoch, batches.samples) == (2, 60)


def test_a_loader_that_has_given_its_epoch_says_so_when_it_is_iterated_again():
    batches = stream()
    loader = batches.loader(0)
    list(loader)

    with pytest.raises(ConfigError, match=r"yielded all of epoch 0; use loader\(1\)"):
        list(loader)


def test_an_epoch_left_half_way_counts_what_was_consumed_of_it():
    batches = stream()
    for number, _ in enumerate(batches.loader(0)):
        batches.end_step()
        if number == 1:
            break
    batches.end_epoch()
    other = stream()
    other.load_state_dict(batches.state_dict())

    taken([other], 1, 1)

    assert (other.epoch, other.samples) == (1, 15)


def test_a_position_saved_without_a_count_of_samples_counts_whole_epochs():
    batches = stream()
    old = {name: value for name, value in at_step(1, epoch=2).items() if name != "samples"}

    batches.load_state_dict(old)

    assert batches.samples == 45


# --- look-ahead ---


def one_ahead(loader: Any) -> Iterator[Any]:
    """Fetch one batch ahead, as Accelerate's DataLoaderShard does to know the last batch when it gives it."""
    source = iter(loader)
    batch = next(source)
    for following in source:
        yield batch
        batch = following
    yield batch


def test_a_look_ahead_inside_the_loader_loses_no_batch_over_a_restore():
    batches, other = stream(40), stream(40)
    found = []
    for share in batches.loader(0, through=one_ahead):
        found.append(share.tolist())
        batches.end_step()
        if len(found) == 3:
            break

    other.load_state_dict(batches.state_dict())
    found += [share.tolist() for share in other.loader(0, through=one_ahead)]

    assert found == [joined(shares) for shares in taken([stream(40)], 0)]


def test_a_look_ahead_around_the_loader_is_warned_of(caplog: pytest.LogCaptureFixture):
    batches = stream(40)

    for _ in one_ahead(batches.loader(0)):
        batches.end_step()

    (record,) = caplog.records
    assert "2 batches for its first step and 1 for each later one" in record.message
    assert "through=" in record.message


@pytest.mark.parametrize("per_step", [1, 2, 3])
def test_gradient_accumulation_is_no_look_ahead(per_step: int, caplog: pytest.LogCaptureFixture):
    batches = stream(60)

    for number, _ in enumerate(batches.loader(0), start=1):
        if number % per_step == 0:
            batches.end_step()

    assert not caplog.records


def test_accelerates_own_loader_goes_inside():
    """The object itself: it fetches one batch ahead."""
    PartialState(cpu=True)
    batches, other = stream(40), stream(40)

    def shard(loader: Any) -> Any:
        return DataLoaderShard(loader.dataset, batch_sampler=loader.batch_sampler, generator=loader.generator)

    found = []
    for share in batches.loader(0, through=shard):
        found.append(share.tolist())
        batches.end_step()
        if len(found) == 3:
            break
    other.load_state_dict(batches.state_dict())

    assert found + [share.tolist() for share in other.loader(0, through=shard)] == [
        joined(shares) for shares in taken([stream(40)], 0)
    ]


# --- generators of a dataset's own ---


class OwnGenerators(Dataset[list[float]]):
    """Keeps generators of its own as augmentation libraries do: in the dataset, and in what it applies."""

    def __init__(self) -> None:
        self.chance = np.random.default_rng(0)
        self.transforms = [{"flip": random.Random(0)}, {"crop": torch.Generator().manual_seed(0)}]
        self.old = np.random.RandomState(0)

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> list[float]:
        return [
            index,
            float(self.chance.random()),
            self.transforms[0]["flip"].random(),
            float(torch.rand((), generator=self.transforms[1]["crop"])),
            float(self.old.rand()),
        ]


def own_generators() -> Batches:
    return Batches(OwnGenerators(), global_batch=4, seed=3, rank=0, world_size=1)


def test_generators_of_a_dataset_go_on_in_loader_workers_after_a_restore():
    whole, first, second = own_generators(), own_generators(), own_generators()
    expected = rows(whole.loader(1, num_workers=2), 6, whole)

    before = rows(first.loader(1, num_workers=1), 2, first)
    second.load_state_dict(first.state_dict())
    after = rows(second.loader(1, num_workers=2), 4, second)

    assert before + after == expected
    assert all(len(set(column)) == 24 for column in zip(*expected, strict=True))


def test_generators_of_a_dataset_in_the_training_process_are_named_unless_the_state_has_them(
    caplog: pytest.LogCaptureFixture,
):
    warned, kept = own_generators(), own_generators()
    dataset: Any = kept._dataset
    ProgressCounter([kept, dataset.chance, raycheck.PerRank(dataset.old), *dataset.transforms[0].values()])

    for batches in (warned, kept):
        next(batches.loader(0))

    named = [record.message.split(" is the dataset's own random generator")[0] for record in caplog.records]
    assert named == [
        "dataset.chance",
        "dataset.transforms[0]['flip']",
        "dataset.transforms[1]['crop']",
        "dataset.old",
        "dataset.transforms[1]['crop']",
    ]


# --- what is no dataset ---


class Unknown(Dataset[int]):
    def __getitem__(self, index: int) -> int:
        return index

    def __len__(self) -> int:
        raise NotImplementedError("a stream")


@pytest.mark.parametrize(
    "dataset",
    [iter(range(10)), {1, 2, 3}, DataLoader([1, 2]), Unknown(), 7],
    ids=["iterator", "set", "DataLoader", "no length", "number"],
)
def test_what_cannot_be_asked_for_one_sample_is_refused_with_advice(dataset: Any):
    with pytest.raises(ConfigError, match=r"map-style.*StatefulDataLoader"):
        Batches(dataset, global_batch=1, rank=0, world_size=1)


@pytest.mark.parametrize("option", [{"global_batch": 2.5}, {"global_batch": 2, "seed": None}, {"global_batch": True}])
def test_what_is_no_whole_number_is_refused_by_name(option: dict[str, Any]):
    with pytest.raises(ConfigError, match=f"{next(reversed(option))}="):
        Batches(range(10), rank=0, world_size=1, **option)


def by_epoch(epoch: int) -> list[int]:
    return [(index * 3 + epoch) % 8 for index in range(12)]  # an index may come twice


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_an_order_of_ones_own_is_given_out_and_goes_on_after_a_restart(world_size: int):
    def ranks() -> list[Batches]:
        return [
            Batches(range(8), global_batch=4, order=by_epoch, rank=rank, world_size=world_size)
            for rank in range(world_size)
        ]

    first, again = ranks(), ranks()
    assert first[0].batches_per_epoch == 3
    for epoch in range(2):
        assert joined([joined(shares) for shares in taken(ranks(), epoch)]) == by_epoch(epoch)
    taken(first, 1, steps=1)

    for batches in again:
        batches.load_state_dict(first[0].state_dict())

    assert joined([joined(shares) for shares in taken(again, 1)]) == by_epoch(1)[4:]


def test_another_order_is_told_apart_and_a_wrong_one_is_refused():
    saved = Batches(range(8), global_batch=4, order=by_epoch, rank=0, world_size=1).state_dict()

    with pytest.raises(StateMismatchError, match="order: saved"):
        stream(12, batch=4, seed=0).load_state_dict(saved)
    with pytest.raises(ConfigError, match="indices from 0 to 9, and the dataset has 8 samples"):
        Batches(range(8), global_batch=4, order=lambda epoch: [0, 9, 1, 2], rank=0, world_size=1)
    grows = Batches(range(8), global_batch=2, order=lambda epoch: [0] * (4 + epoch), rank=0, world_size=1)
    with pytest.raises(ConfigError, match="epochs of 4 and 5 samples"):
        next(iter(grows.loader(1)))
