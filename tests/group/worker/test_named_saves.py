"""Tests saves that name their checkpoint.

The coordinator of the Checkpointer is in this process.
"""

from concurrent.futures import ThreadPoolExecutor
from uuid import uuid4

import pytest
import torch

import raycheck
from raycheck.bucket.store import open_store
from raycheck.errors import ConfigError
from tests.support.histories.invariants import assert_invariants
from tests.support.processes.coordinator_in_thread import group_of


def checkpointer(uri: str, **settings: object) -> raycheck.Checkpointer:
    model = torch.nn.Linear(4, 2)
    chosen = raycheck.SaveSettings(every_steps=1, keep_last=1, **settings)
    return raycheck.Checkpointer({"model": model}, chosen, group=group_of(uri, owner=uuid4().hex)[0])


def kept(uri: str) -> list[tuple[int, str | None, bool]]:
    body = assert_invariants(open_store(uri))
    assert body is not None
    return [(entry.step, entry.name, entry.pinned) for entry in body.live]


def test_a_step_that_is_saved_already_is_saved_again_under_a_name_but_only_once() -> None:
    uri = f"memory://{uuid4().hex}"
    with checkpointer(uri) as ckpt:
        ckpt.restore()
        ckpt.end_step({"loss": 1.0})
        for _ in range(2):
            ckpt.save(name="before-rlhf", note={"data": "v3"})
            ckpt.wait()
        ckpt.end_step({"loss": 0.5})

    named = raycheck.open_run(uri).at("before-rlhf")

    assert kept(uri) == [(1, "before-rlhf", False), (2, None, False)]
    assert named.key.endswith("-s2"), "the save of the step's end was the first"
    assert (named._stored.read_manifest().name, named.note()) == ("before-rlhf", {"data": "v3"})


def test_a_restored_checkpoint_that_has_the_name_is_not_saved_again() -> None:
    uri = f"memory://{uuid4().hex}"
    with checkpointer(uri) as ckpt:
        ckpt.restore()
        ckpt.end_step()
        ckpt.save(name="base", expire_after_s=1e6)
    with checkpointer(uri) as ckpt:
        ckpt.restore()
        ckpt.save(name="base", expire_after_s=1e6)
        ckpt.save()

    assert kept(uri) == [(1, "base", False)]


def test_a_name_of_another_step_costs_no_checkpoint_and_is_told(caplog: pytest.LogCaptureFixture) -> None:
    uri = f"memory://{uuid4().hex}"
    with checkpointer(uri) as ckpt:
        ckpt.restore()
        ckpt.end_step()
        ckpt.save(name="base")
        ckpt.end_step()
        ckpt.save(name="base")
        ckpt.wait()
        told = ckpt.save_status.unnamed
        ckpt.end_step()
        ckpt.save(name="base", overwrite=True)
        ckpt.wait()
        assert ckpt.save_status.unnamed == ""

    assert "WITHOUT the name base" in told
    assert [record.levelname for record in caplog.records if "WITHOUT the name" in record.getMessage()] == ["ERROR"]
    assert kept(uri) == [(2, None, True), (3, "base", False)]


def test_a_score_decides_at_the_next_commit_of_a_training_that_goes_on() -> None:
    uri = f"memory://{uuid4().hex}"
    with checkpointer(uri, keep_best={"metric": "mmlu", "mode": "max", "count": 1}) as ckpt:
        ckpt.restore()
        ckpt.end_step({"mmlu": 0.9})
        ckpt.end_step({"mmlu": 0.1})
        ckpt.wait()
        raycheck.open_run(uri).score(2, {"mmlu": 0.95})
        for value in (0.2, 0.3):
            ckpt.end_step({"mmlu": value})
            ckpt.wait()

    assert [step for step, _, _ in kept(uri)] == [2, 4]


def test_ranks_that_give_different_labels_save_nothing() -> None:
    uri = f"memory://{uuid4().hex}"
    ranks = [
        raycheck.Checkpointer({"model": raycheck.PerRank({"a": 1})}, raycheck.SaveSettings(every_steps=5), group=place)
        for place in group_of(uri, world_size=2)
    ]

    def train(rank: int) -> str:
        ranks[rank].restore()
        ranks[rank].end_step()
        ranks[rank].save(name=f"of-rank-{rank}")
        with pytest.raises(raycheck.errors.SaveFailedError) as failed:
            ranks[rank].wait()
        return str(failed.value)

    with ThreadPoolExecutor(2) as pool:
        errors = [future.result(60) for future in [pool.submit(train, rank) for rank in (0, 1)]]

    assert all("expire_after_s and overwrite on every rank" in text for text in errors)
    assert kept(uri) == []


def test_a_name_that_cannot_be_one_is_refused_before_anything_is_saved_also_when_turned_off() -> None:
    with checkpointer(f"memory://{uuid4().hex}", enabled=False) as ckpt:
        ckpt.restore()
        with pytest.raises(ConfigError, match="cannot be a checkpoint's name"):
            ckpt.save(name="latest")
