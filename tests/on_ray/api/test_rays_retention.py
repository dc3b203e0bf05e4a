"""Ray's CheckpointConfig decides what stays in the bucket when SaveSettings say nothing of it."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from ray.train import CheckpointConfig

import raycheck
from raycheck.bucket.store import open_store
from raycheck.errors import ConfigError
from raycheck.on_ray.api import train_context
from raycheck.settings import KeepBest, Retention, SaveSettings
from tests.support.histories.invariants import assert_invariants
from tests.support.processes.coordinator_in_thread import group_of

BEST: KeepBest = {"metric": "loss", "mode": "min", "count": 2}
SOURCE = "CheckpointConfig(num_to_keep=2)"


@pytest.mark.parametrize(
    ("config", "rule"),
    [
        (CheckpointConfig(), None),
        (None, None),
        (CheckpointConfig(checkpoint_score_attribute="loss"), None),
        (CheckpointConfig(num_to_keep=2), Retention(keep_last=2)),
        (
            CheckpointConfig(num_to_keep=3, checkpoint_score_attribute="acc"),
            Retention(keep_best={"metric": "acc", "mode": "max", "count": 3}),
        ),
        (
            CheckpointConfig(num_to_keep=1, checkpoint_score_attribute="loss", checkpoint_score_order="min"),
            Retention(keep_best={"metric": "loss", "mode": "min", "count": 1}),
        ),
    ],
)
def test_rays_words_are_translated(
    config: CheckpointConfig | None, rule: Retention | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(train_context, "run_config", lambda: SimpleNamespace(checkpoint_config=config))

    assert train_context.retention_asked_for() == rule


def test_without_a_word_in_either_place_the_newest_ten_stay() -> None:
    assert SaveSettings().retention == Retention(keep_last=10, rolling_keep_last=1)
    assert SaveSettings(keep_last=None).retention == Retention(rolling_keep_last=1)
    assert SaveSettings(keep_last=10).chosen == ("keep_last=10",)


def test_other_rules_of_the_settings_are_joined_with_rays() -> None:
    settings = SaveSettings(keep_every_steps=100, expire_after_s=60.0).keeping(Retention(keep_last=2), SOURCE)

    assert settings.retention == Retention(keep_last=2, keep_every_steps=100, expire_after_s=60.0, rolling_keep_last=1)


def test_the_same_word_in_both_places_is_no_contradiction() -> None:
    best = Retention(keep_best={"metric": "loss", "mode": "min", "count": 2})

    assert SaveSettings(keep_last=2).keeping(Retention(keep_last=2), SOURCE).retention.keep_last == 2
    assert SaveSettings(keep_best=BEST).keeping(best, SOURCE).retention == replace(best, rolling_keep_last=1)


@pytest.mark.parametrize("said", [{"keep_last": 10}, {"keep_last": 3}, {"keep_last": None}, {"keep_best": BEST}])
def test_a_contradiction_is_refused_by_name(said: dict) -> None:
    (name,) = said

    with pytest.raises(ConfigError, match=rf"num_to_keep=2\) and SaveSettings\({name}=.* contradict"):
        SaveSettings(**said).keeping(Retention(keep_last=2), SOURCE)


def train(uri: str, rule: Retention, **settings: object) -> list[int]:
    group = replace(group_of(uri)[0], retention=rule)
    chosen = SaveSettings(every_steps=1, **settings)
    with raycheck.Checkpointer({"model": torch.nn.Linear(2, 1)}, chosen, group=group) as ckpt:
        ckpt.restore()
        for loss in (3.0, 1.0, 2.0, 4.0):
            ckpt.end_step({"loss": loss})
    return [entry.step for entry in assert_invariants(open_store(uri)).live]


def test_a_checkpointer_obeys_the_rule_of_its_group(uri: str) -> None:
    assert train(uri, Retention(keep_last=2)) == [3, 4]


def test_a_checkpointer_obeys_a_score_and_keeps_the_head(uri: str) -> None:
    assert train(uri, Retention(keep_best={"metric": "loss", "mode": "min", "count": 2})) == [2, 3, 4]


def test_a_checkpointer_refuses_a_contradiction_before_it_claims_the_run(uri: str) -> None:
    with pytest.raises(ConfigError, match=r"SaveSettings\(keep_last=3\)"):
        train(uri, Retention(keep_last=2), keep_last=3)

    assert assert_invariants(open_store(uri)) is None
