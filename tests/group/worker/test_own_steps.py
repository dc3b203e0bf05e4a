"""Tests scripts that count their own steps, and call save(step=N) instead of end_step."""

import pytest
import torch

import raycheck
from raycheck.bucket.store import open_store
from raycheck.errors import ConfigError, SaveFailedError
from raycheck.group.worker.save_handle import SaveHandle
from tests.support.histories.invariants import assert_invariants
from tests.support.processes.background_call import on_all
from tests.support.processes.coordinator_in_thread import again, group_of
from tests.support.processes.replicated_rank import Holder


class Counting(Holder):
    """Counts its own steps."""

    def save_at(self, step: int) -> SaveHandle:
        self.train_alone()
        return self.ckpt.save({"loss": 1.0 / (1 + step)}, step=step)

    def train_alone(self) -> None:
        with torch.no_grad():
            self.model.bias += 1.0


def test_saves_have_the_scripts_steps_and_a_restart_continues_there(uri: str) -> None:
    places = group_of(uri)
    first = Counting(places[0])
    first.restore()
    for step in (10, 25):
        first.save_at(step).result()
    first.close()
    second = Counting(again(places)[0])
    at = second.restore()
    known = second.ckpt.save(step=at.step).result()
    second.save_at(40)
    second.close()

    body = assert_invariants(open_store(uri))
    manifests = [raycheck.open_run(uri).at(str(step))._stored.read_manifest() for step in (10, 25, 40)]
    assert at.step == 25
    assert known.key == at.checkpoint, "it is saved already"
    assert [(entry.step, dict(entry.metrics)) for entry in body.live] == [
        (step, {"loss": pytest.approx(1.0 / (1 + step))}) for step in (10, 25, 40)
    ]
    assert 0 < manifests[0].trained_s < manifests[1].trained_s < manifests[2].trained_s
    assert body.is_finished


def test_all_ranks_count_alike_or_the_save_fails(uri: str) -> None:
    pair = [Counting(place) for place in group_of(uri, world_size=2)]
    on_all(pair, "restore")
    first = on_all(pair, "save_at", 5)
    assert [handle.result().key for handle in first] == ["step-000000005-a1-s1"] * 2

    handles = [rank.save_at(step) for rank, step in zip(pair, (6, 7), strict=True)]

    for handle in handles:
        with pytest.raises(SaveFailedError):
            handle.result()
    assert [entry.step for entry in assert_invariants(open_store(uri)).live] == [5]


def test_both_ways_of_counting_do_not_mix(uri: str) -> None:
    (place,) = group_of(uri)
    rank = Counting(place)
    with pytest.raises(ConfigError, match="call restore"):
        rank.ckpt.save(step=1)
    rank.restore()
    rank.train(2)

    with pytest.raises(ConfigError, match=r"save\(step=3\): end_step has counted 2 steps"):
        rank.ckpt.save(step=3)
    with pytest.raises(ConfigError, match=r"save\(step=1\): the training is at step 2 already"):
        rank.ckpt.save(step=1)

    assert rank.ckpt.save(step=2).result().step == 2
    rank.close()


def test_a_newer_attempt_ends_a_script_that_counts_its_own_steps(uri: str) -> None:
    places = group_of(uri)
    old = Counting(places[0])
    old.restore()
    old.ckpt._watch.over = raycheck.errors.SupersededError("a newer attempt runs")

    with pytest.raises(raycheck.errors.SupersededError):
        old.save_at(1)


def test_a_script_that_is_turned_off_counts_all_the_same() -> None:
    ckpt = raycheck.Checkpointer({"model": torch.nn.Linear(1, 1)}, raycheck.SaveSettings(enabled=False))
    ckpt.restore()

    assert ckpt.save(step=4).result().step == 4
    with pytest.raises(ConfigError, match="steps never go back"):
        ckpt.save(step=3)
