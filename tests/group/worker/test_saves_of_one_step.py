"""Tests that several saves of one step count once for retention, unless somebody wants the earlier one itself."""

from collections.abc import Callable
from uuid import uuid4

import pytest
import torch

import raycheck
from raycheck.bucket.format.latest import Entry
from raycheck.bucket.protocol import commit as protocol
from raycheck.bucket.protocol.pin_and_evict import pin
from raycheck.bucket.store import open_store
from tests.support.histories.invariants import assert_invariants
from tests.support.processes.coordinator_in_thread import group_of
from tests.support.samples.sample_checkpoints import Driver


def saved(
    uri: str, at_the_end: Callable[[raycheck.Checkpointer], None] | None = None, **settings: object
) -> list[Entry]:
    """Train three steps that are all saved, then do `at_the_end`, and return what is kept."""
    chosen = raycheck.SaveSettings(**{"every_steps": 1, "keep_last": 3, **settings})
    state = {"model": torch.nn.Linear(4, 2)}
    with raycheck.Checkpointer(state, chosen, group=group_of(uri, owner=uuid4().hex)[0]) as ckpt:
        ckpt.restore()
        for step in range(3):
            ckpt.end_step({"loss": 1.0 / (1 + step)})
            ckpt.wait()
        if at_the_end is not None:
            at_the_end(ckpt)
    body = assert_invariants(open_store(uri))
    assert body is not None
    assert body.is_finished
    return list(body.live)


def names(entries: list[Entry]) -> list[str]:
    return [entry.key.partition("-a1-")[2] for entry in entries]


@pytest.mark.parametrize("settings", [{}, {"every_epochs": 1}], ids=["at the end", "at the epoch's end"])
def test_an_epochs_end_after_the_save_of_its_last_step_takes_that_saves_place(settings: dict[str, object]) -> None:
    uri = f"memory://{uuid4().hex}"
    kept = saved(uri, lambda ckpt: ckpt.end_epoch(), **settings)

    assert names(kept) == ["s1", "s2", "s4"]
    assert raycheck.open_run(uri).at("3").details().epoch == 1
    assert kept[-1].metrics == {"loss": pytest.approx(1 / 3)}


def test_a_save_after_a_failed_one_takes_the_place_that_the_failed_one_was_to_take(monkeypatch) -> None:
    commit = protocol.commit

    def fails(*_: object, **__: object) -> bool:
        monkeypatch.setattr(protocol, "commit", commit)
        raise raycheck.errors.StoreError("the store is away")

    def end(ckpt: raycheck.Checkpointer) -> None:
        monkeypatch.setattr(protocol, "commit", fails)
        ckpt.end_epoch()
        ckpt.save()
        with pytest.raises(raycheck.errors.SaveFailedError):
            ckpt.wait()

    assert names(saved(f"memory://{uuid4().hex}", end)) == ["s1", "s2", "s5"]


def test_a_run_without_epochs_saves_its_last_step_once() -> None:
    assert names(saved(f"memory://{uuid4().hex}")) == ["s1", "s2", "s3"]


def test_the_best_are_counted_by_step_too() -> None:
    best = {"keep_last": None, "keep_best": {"metric": "loss", "mode": "min", "count": 2}}

    assert names(saved(f"memory://{uuid4().hex}", lambda ckpt: ckpt.end_epoch(), **best)) == ["s2", "s4"]


def test_a_save_with_a_name_takes_the_place_of_the_one_without_but_not_the_other_way() -> None:
    def end(ckpt: raycheck.Checkpointer) -> None:
        ckpt.save(name="base")
        ckpt.wait()
        ckpt.end_epoch()

    kept = saved(f"memory://{uuid4().hex}", end)

    assert [(entry.step, entry.name) for entry in kept] == [(2, None), (3, "base"), (3, None)]


def test_a_rolling_save_gives_way_to_the_last_one() -> None:
    kept = saved(f"memory://{uuid4().hex}", every_steps=None, rolling_every_steps=1)

    assert [(entry.step, entry.rolling) for entry in kept] == [(3, False)]


def test_a_save_that_expires_takes_nobodys_place() -> None:
    kept = saved(f"memory://{uuid4().hex}", lambda ckpt: ckpt.save(expire_after_s=1e6, note={"a": 1}), keep_last=4)

    assert names(kept) == ["s1", "s2", "s3", "s4"]


def test_what_is_pinned_or_has_a_score_stays_beside_a_later_save_of_its_step() -> None:
    for act in (
        lambda run, key: pin(run.register, key),
        lambda run, key: raycheck.open_run(run.store.uri).score(key, {"mmlu": 0.5}),
    ):
        driver = Driver(open_store(f"memory://{uuid4().hex}"))
        driver.claim("g")
        first = driver.save(1, 1, step=5)
        act(driver, first.key)
        driver.save(1, 2, step=5, replaces=first.key)

        assert names(list(driver.look().live)) == ["s1", "s2"]


def test_only_a_save_of_the_same_step_is_replaced_and_only_by_one_that_says_as_much() -> None:
    driver = Driver(open_store(f"memory://{uuid4().hex}"))
    driver.claim("g")
    first = driver.save(1, 1, step=5)
    driver.save(1, 2, step=6, replaces=first.key)
    driver.save(1, 3, step=6, rolling=True, replaces="step-000000006-a1-s2")
    driver.save(1, 4, step=6, replaces="step-000000006-a1-s9")
    assert names(list(driver.look().live)) == ["s1", "s2", "s3", "s4"]

    last = driver.save(1, 5, step=6, replaces="step-000000006-a1-s4")

    body = assert_invariants(driver.store)
    assert body is not None
    assert names(list(body.live)) == ["s1", "s2", "s3", "s5"]
    assert body.head == last.key
    assert [item.key for item in body.evicted] == ["step-000000006-a1-s4"]
