"""Streams of samples: one order whatever the world size, positions by the stream's own state where that is exact, skipped batches, and which samples made which step."""

import random
from collections.abc import Callable, Iterator
from typing import Any

import datasets
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import IterableDataset, get_worker_info

from raycheck.bucket.format.progress import Progress
from raycheck.bucket.store import Store
from raycheck.data.batches import Batches
from raycheck.data.shared_streams import has_exact_state
from raycheck.data.step_history import MAX_ENTRIES, StepHistory
from raycheck.data.step_samples import samples_of, skip_of
from raycheck.errors import ConfigError, StateMismatchError
from raycheck.state.train_state import TrainState
from tests.support.processes.save_without_ray import agreed, save

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning")


class Plain(IterableDataset[int]):
    """Counts how many samples were read."""

    read = 0

    def __init__(self, length: int = 23) -> None:
        self.length = length
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        for number in range(self.length):
            type(self).read += 1
            yield 100 * self.epoch + number


class Stateful(Plain):
    """Goes on after the sample at which its state was taken."""

    at = 0

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]

    def __iter__(self) -> Iterator[int]:
        start, self.at = self.at, 0
        for number in range(start, self.length):
            type(self).read += 1
            self.at = number + 1
            yield 100 * self.epoch + number
        self.at = 0


def hugging_face(shards: int = 6, length: int = 23, buffer: int = 0) -> Any:
    stream = datasets.Dataset.from_dict({"n": list(range(length))}).to_iterable_dataset(num_shards=shards)
    return stream.shuffle(seed=3, buffer_size=buffer) if buffer else stream


def numbers_in(batch: Any) -> list[int]:
    return (batch["n"] if isinstance(batch, dict) else batch).tolist()


def ranks_of(make: Callable[[], Any], world_size: int, **options: Any) -> list[Batches]:
    return [
        Batches(make(), rank=rank, world_size=world_size, **{"global_batch": 6, **options})
        for rank in range(world_size)
    ]


def taken(ranks: list[Batches], steps: int | None, **options: Any) -> list[list[int]]:
    """The samples of each step, over all ranks, to the end of the epoch."""
    loaders = [batches.loader(**options) for batches in ranks]
    found: list[list[int]] = []
    while steps is None or len(found) < steps:
        shares = [next(loader, None) for loader in loaders]
        if None in [*shares]:
            assert {share is None for share in shares} == {True}, "all ranks end together"
            break
        found.append([number for share in shares for number in numbers_in(share)])
        for batches in ranks:
            batches.end_step()
    return found


def states(ranks: list[Batches]) -> list[dict[str, Any]]:
    return [batches.state_dict() for batches in ranks]


SOURCES = {
    "no state": Plain,
    "state": Stateful,
    "hugging face": hugging_face,
    "hugging face, shuffled": lambda: hugging_face(buffer=5),
}
sources = pytest.mark.parametrize("make", list(SOURCES.values()), ids=list(SOURCES))


@sources
@pytest.mark.parametrize("steps_per_epoch", [None, 7], ids=["finite", "endless"])
@pytest.mark.parametrize("lives", [[(4, 3), (1, 2), (5, 3)], [(2, 7), (6, 0), (3, 5)], [(3, 3), (2, 4)]], ids=str)
def test_any_stops_at_any_world_sizes_give_the_batches_of_a_run_without_stops(
    make: Callable[[], Any], steps_per_epoch: int | None, lives: list[tuple[int, int]]
):
    """lives: (world size, steps), of which the last batch that was fetched is lost."""
    options = {"batches_per_epoch": steps_per_epoch}

    def train(ranks: list[Batches], steps: int) -> list[list[int]]:
        found: list[list[int]] = []
        while len(found) < steps and ranks[0].epoch < 3:
            part = taken(ranks, steps - len(found))
            found += part
            if len(found) < steps:
                for batches in ranks:
                    batches.end_epoch()
        return found

    expected = train(ranks_of(make, 1, **options), 100)
    saved, found = states(ranks_of(make, 1, **options)), []
    for world_size, steps in [*lives, (1, 100)]:
        ranks = ranks_of(make, world_size, **options)
        for batches in ranks:
            batches.load_rank_states(saved)
        found += train(ranks, steps)
        for batches in ranks:
            next(batches.loader(), None)  # fetched, and lost with this life
        saved = states(ranks)

    assert found == expected
    if steps_per_epoch is None:
        assert len(expected) == 9
        assert all(len({n for batch in expected[at : at + 3] for n in batch}) == 18 for at in (0, 3, 6))


def test_ranks_share_the_shards_of_an_endless_stream_and_no_row_is_read_for_another_rank():
    ranks = ranks_of(lambda: hugging_face(6, 24), 3, batches_per_epoch=4)

    steps = taken(ranks, 4)

    assert [batches.state_dict()["streams"] for batches in ranks] == [6, 6, 6]
    assert sorted(number for step in steps for number in step) == list(range(24))
    mine = [{source["number"] for source in batches.state_dict()["sources"]} for batches in ranks]
    assert mine == [{0, 1}, {2, 3}, {4, 5}]


def test_a_restore_reads_nothing_again_where_the_streams_state_is_exact():
    one, two, three, four = (
        Batches(kind(1000), global_batch=10, rank=0, world_size=1) for kind in (Stateful, Stateful, Plain, Plain)
    )
    taken([one], 50)
    taken([three], 50)
    Stateful.read = Plain.read = 0

    two.load_state_dict(one.state_dict())
    four.load_state_dict(three.state_dict())
    after = taken([two], 1), taken([four], 1)

    assert after[0] == after[1] == [list(range(500, 510))]
    assert Stateful.read == 10
    assert Plain.read == 510


def test_positions_of_shards_survive_in_a_checkpoint_at_another_world_size(store: Store):
    def of(world_size: int) -> tuple[list[Batches], list[TrainState]]:
        ranks = ranks_of(lambda: hugging_face(6, 60), world_size, batches_per_epoch=10)
        group = [
            TrainState({"data": batches, "weight": torch.ones(1)}, rank=rank, world_size=world_size)
            for rank, batches in enumerate(ranks)
        ]
        return ranks, list(agreed(group))

    ranks, group = of(3)
    before = taken(ranks, 4)
    checkpoint = save(store, [state.stage(Progress(step=4)) for state in group])
    ranks, group = of(2)
    for state in group:
        state.apply(checkpoint)

    assert before + taken(ranks, None) == taken(ranks_of(lambda: hugging_face(6, 60), 1, batches_per_epoch=10), None)


@sources
def test_a_loader_worker_gives_one_order_too_and_its_read_ahead_does_not_count(make: Callable[[], Any]):
    options = {"num_workers": 1, "prefetch_factor": 3}
    expected = taken(ranks_of(make, 1), None, **options)
    (one,), (two,) = ranks_of(make, 1), ranks_of(make, 1)

    before = taken([one], 1, **options)
    two.load_state_dict(one.state_dict())
    after = taken([two], None, **options)

    assert len(expected) == 3
    assert before + after == expected


class Drawing(IterableDataset[float]):
    def __iter__(self) -> Iterator[float]:
        for _ in range(12):
            assert get_worker_info() is not None
            yield random.random()


def test_random_draws_in_a_worker_depend_on_the_position_alone():
    def draws(world_size: int, at: list[dict[str, Any]] | None = None) -> tuple[list[float], list[dict[str, Any]]]:
        ranks = ranks_of(Drawing, world_size, global_batch=4)
        for batches in ranks if at else ():
            batches.load_rank_states(at)
        loaders = [batches.loader(num_workers=1) for batches in ranks]
        found = [number for loader in loaders for number in next(loader).tolist()]
        for batches in ranks:
            batches.end_step()
        return found, states(ranks)

    first, at = draws(1)
    again, at_two = draws(2)

    assert first == again
    assert draws(2, at)[0] == draws(1, at_two)[0]


class Unordered(IterableDataset[int]):
    """Shuffles without a seed, as hugging face's shuffle() does."""

    def __iter__(self) -> Iterator[int]:
        order = list(range(1000))
        random.SystemRandom().shuffle(order)
        return iter(order)


def test_a_stream_that_comes_in_another_order_is_refused():
    one, two = (Batches(Unordered(), global_batch=4, rank=0, world_size=1) for _ in range(2))
    taken([one], 2)
    two.load_state_dict(one.state_dict())

    with pytest.raises(StateMismatchError, match=r"begins with another sample.*shuffle\(seed=...\)"):
        next(two.loader())


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: Batches(Plain(), global_batch=2, rank=0, world_size=1).loader(num_workers=2).__next__(), "one worker"),
        (
            lambda: Batches(range(9), global_batch=2, rank=0, world_size=1, batches_per_epoch=3),
            "only for an IterableDataset",
        ),
        (lambda: Batches(Plain(), global_batch=2, rank=0, world_size=1, batches_per_epoch=0), "at least 1"),
        (lambda: Batches(Plain(), global_batch=2, rank=0, world_size=3), "world size"),
        (lambda: Batches(Plain(), global_batch=2, rank=0, world_size=1).batches_per_epoch, "is unknown"),
        (
            lambda: next(Batches(Plain(0), global_batch=2, rank=0, world_size=1, batches_per_epoch=3).loader()),
            "no samples",
        ),
        (lambda: Batches(range(9), global_batch=2, rank=0, world_size=1, skip=[(0, 2)]), "first batch"),
        (lambda: Batches(range(9), global_batch=2, rank=0, world_size=1, skip=[(0, 2, 2)]), "counted from 0"),
        (lambda: Batches(range(9), global_batch=2, rank=0, world_size=1, skip=[(0, 1.5, 2)]), "first batch"),
    ],
)
def test_what_a_stream_cannot_do_is_refused(call: Callable[[], Any], message: str):
    with pytest.raises(ConfigError, match=message):
        call()


def test_a_stream_that_does_not_say_its_length_has_loaders_without_one():
    with pytest.raises(TypeError, match="batches_per_epoch"):
        len(Batches(Plain(), global_batch=2, rank=0, world_size=1).loader())
    assert len(Batches(Plain(), global_batch=2, rank=0, world_size=1, batches_per_epoch=5).loader()) == 5


def test_a_worker_for_a_stream_that_was_read_without_one_is_refused():
    one, two = (Batches(Plain(), global_batch=2, rank=0, world_size=1) for _ in range(2))
    taken([one], 2)
    two.load_state_dict(one.state_dict())

    with pytest.raises(StateMismatchError, match="read without one"):
        next(two.loader(num_workers=1))


def test_only_a_shuffle_buffer_makes_hugging_faces_state_inexact():
    assert has_exact_state(hugging_face())
    assert has_exact_state(hugging_face().repeat(2))
    assert not has_exact_state(hugging_face(buffer=5))
    assert not has_exact_state(hugging_face(buffer=5).map(lambda row: row))
    assert not has_exact_state(datasets.interleave_datasets([hugging_face(), hugging_face(buffer=5)]))
    assert not has_exact_state(Plain())


# --- skipped batches ---


@pytest.mark.parametrize("make", [lambda: range(60), Stateful, Plain, lambda: hugging_face(6, 60)])
@pytest.mark.parametrize("saved_at", [0, 2, 5])
def test_skipped_batches_are_left_out_and_all_others_stay_what_they_were(make: Callable[[], Any], saved_at: int):
    def source() -> Any:
        found = make()
        if isinstance(found, Plain):
            found.length = 60
        return found

    whole = taken(ranks_of(source, 2), None)
    first = ranks_of(source, 2)
    before = taken(first, saved_at)
    second = ranks_of(source, 3, skip=[(0, 3, 6), (1, 0, 2)])
    for batches in second:
        batches.load_rank_states(states(first))

    after = taken(second, None)

    left = [batch for number, batch in enumerate(whole) if number not in range(3, 6)]
    assert before + after == (left if saved_at < 3 else [*whole[:saved_at], *whole[6:]])
    assert second[0].samples == 6 * len(before + after)


def test_the_length_of_a_loader_leaves_out_what_is_skipped():
    batches = Batches(range(60), global_batch=6, rank=0, world_size=1, skip=[(0, 8, 12)])

    assert (len(batches.loader()), batches.batches_per_epoch) == (8, 10)
    assert len(taken([batches], None)) == 8
    batches.end_epoch()
    assert len(batches.loader()) == 10


# --- which samples made which step ---


@settings(max_examples=3 * settings().max_examples // 5, deadline=None)
@given(
    lives=st.lists(st.tuples(st.integers(1, 4), st.lists(st.integers(0, 3), max_size=6), st.booleans()), max_size=4),
    skip=st.lists(st.tuples(st.integers(0, 2), st.integers(0, 5), st.integers(1, 3)), max_size=2),
)
def test_the_checkpoint_says_which_samples_made_each_step(
    lives: list[tuple[int, list[int], bool]], skip: list[tuple[int, int, int]]
):
    """lives: (world size, batches that each of its steps takes, whether the epoch is left then)."""
    skips = [(epoch, first, first + more) for epoch, first, more in skip]
    saved = ranks_of(lambda: range(40), 1)[0].state_dict()
    trained: list[list[int]] = []
    for world_size, steps, is_left in lives:
        ranks = ranks_of(lambda: range(40), world_size, skip=skips)
        for batches in ranks:
            batches.load_state_dict(saved)
        loaders = [batches.loader() for batches in ranks]
        for count in steps:
            step: list[int] = []
            for _ in range(count):
                shares = [next(loader, None) for loader in loaders]
                step += [number for share in shares if share is not None for number in share.tolist()]
            trained.append(step)
            for batches in ranks:
                batches.end_step()
        for batches in ranks if is_left else ():
            batches.end_epoch()
        saved = ranks[0].state_dict()

    found = samples_of(saved, 1, len(trained) + 1, step=len(trained)) if trained else []

    told: dict[int, list[int]] = {}
    for item in found:
        told.setdefault(item.step, []).extend(item.indices)
    assert {number: step for number, step in enumerate(trained, start=1) if step} == told


def test_skip_is_what_leaves_the_batches_of_these_steps_out():
    (one,) = ranks_of(lambda: range(40), 1)
    whole = taken([one], None)
    one.end_epoch()
    whole += taken([one], 2)

    skip = skip_of(samples_of(one.state_dict(), 5, 9, step=8))

    assert skip == [(0, 4, 6), (1, 0, 2)]
    (two,) = ranks_of(lambda: range(40), 1, skip=skip)
    assert taken([two], None) == whole[:4]
    two.end_epoch()
    assert taken([two], 1) != whole[6:7]


def test_a_history_without_any_pattern_stays_small_and_forgets_the_oldest_steps():
    history = StepHistory()
    for step in range(25_000):
        history.end_step(0, [3 * step])

    assert len(history.entries) <= MAX_ENTRIES
    assert 10_000 < history.known_from < 20_000
    state = Batches(range(40), global_batch=4, rank=0, world_size=1).state_dict() | {"history": history.state()}
    with pytest.raises(ConfigError, match=f"steps {history.known_from + 1}:25001"):
        samples_of(state, 1, 11, step=25_000)


@pytest.mark.parametrize("is_plain", [True, False])
def test_a_checkpoint_of_an_earlier_raycheck_tells_it_when_each_step_took_one_batch(is_plain: bool):
    (one,) = ranks_of(lambda: range(40), 1)
    whole = taken([one], 5)
    state = {name: value for name, value in one.state_dict().items() if name != "history"}

    if is_plain:
        assert [list(item.indices) for item in samples_of(state, 3, 6, step=5)] == whole[2:]
    else:
        with pytest.raises(ConfigError, match="earlier raycheck"):
            samples_of(state, 3, 6, step=6)
