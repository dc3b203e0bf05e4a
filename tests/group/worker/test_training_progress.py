"""Tests that a training counts all of its progress, and that a restore continues the counts."""

import pytest

import raycheck
from raycheck.bucket.format.progress import Progress
from raycheck.group.worker.training_progress import ProgressCounter


def batches() -> raycheck.Batches:
    return raycheck.Batches(range(10), global_batch=3, rank=0, world_size=1)


def test_steps_tokens_and_episodes_add_up_and_an_epoch_begins_anew():
    position = ProgressCounter([])

    for _ in range(3):
        position.end_step(tokens=100, episodes=8)
    position.end_epoch()
    position.end_step(tokens=50, episodes=0)

    assert position.progress == Progress(step=4, epoch=1, epoch_step=1, tokens=350, episodes=24)


def test_batches_know_their_place_better():
    data = batches()
    position = ProgressCounter([object(), data])

    for _ in data.loader(0):
        position.end_step(tokens=1, episodes=0)

    assert position.progress == Progress(step=3, epoch=0, epoch_step=3, samples=9, tokens=3)

    position.end_epoch()

    assert position.progress == Progress(step=3, epoch=1, epoch_step=0, samples=9, tokens=3)
    assert len(list(data.loader(1))) == data.batches_per_epoch


def test_a_restore_goes_on_counting():
    position = ProgressCounter([])
    position.go_to(Progress(step=7, epoch=2, epoch_step=1, tokens=70, episodes=9))

    position.end_step(tokens=10, episodes=1)

    assert position.progress == Progress(step=8, epoch=2, epoch_step=2, tokens=80, episodes=10)


def test_an_iterator_begun_before_the_start_is_refused_in_a_fresh_run_too():
    data = batches()
    position = ProgressCounter([data])
    early, later = data.loader(0), data.loader(0)
    next(early)

    position.start_at(Progress())

    with pytest.raises(raycheck.errors.ConfigError, match="started before a restore"):
        next(early)
    position.end_step(tokens=0, episodes=0)
    assert position.progress.samples == 0
    assert len(list(later)) == data.batches_per_epoch


def test_two_streams_have_no_one_position():
    with pytest.raises(raycheck.errors.ConfigError, match="two streams of data"):
        ProgressCounter([batches(), batches()])


@pytest.mark.parametrize("counts", [{"tokens": -1}, {"tokens": 1.5}, {"episodes": True}])
def test_what_is_no_count_is_refused(counts: dict):
    with pytest.raises(raycheck.errors.ConfigError, match=f"end_step.{next(iter(counts))}="):
        ProgressCounter([]).end_step(**{"tokens": 0, "episodes": 0, **counts})


def test_a_checkpoint_from_before_these_counts_has_none_of_them():
    assert Progress.of({"step": 3, "epoch": 1, "samples": 24}) == Progress(step=3, epoch=1, samples=24)


def test_a_script_may_count_its_own_steps_with_gaps():
    position = ProgressCounter([])
    position.start_at(Progress(step=7, epoch=1, epoch_step=2))

    assert position.count_to(7) == 0
    assert position.count_to(10) == 3
    assert position.progress == Progress(step=10, epoch=1, epoch_step=5)


@pytest.mark.parametrize("step", [-1, 2.0, "4", None, True])
def test_a_step_is_a_whole_number(step):
    with pytest.raises(raycheck.errors.ConfigError, match=r"save\(step=.*whole number"):
        ProgressCounter([]).count_to(step)


def test_a_step_that_contradicts_the_count_is_refused_and_counts_nothing():
    position, with_data = ProgressCounter([]), ProgressCounter([batches()])
    position.end_step(tokens=0, episodes=0)

    for counter, step, text in (
        (position, 0, "at step 1 already"),
        (position, 2, "end_step has counted 1 steps"),
        (with_data, 1, "Batches in the state counts samples"),
    ):
        before = counter.progress
        with pytest.raises(raycheck.errors.ConfigError, match=text):
            counter.count_to(step)
        assert counter.progress == before
    assert position.count_to(1) == 0, "it says the same"


def test_after_a_restore_a_script_may_count_again():
    position = ProgressCounter([])
    position.end_step(tokens=0, episodes=0)

    position.start_at(Progress(step=1))

    assert position.count_to(3) == 2
