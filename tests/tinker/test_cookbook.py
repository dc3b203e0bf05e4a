"""Recipes of tinker_cookbook, unmodified: killed and resumed, their metrics are line by line those of an undisturbed run."""

import json
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import tinker

from tests.support.frameworks import tinker_cookbook as cookbook
from tests.support.servers.tinker_server import RunningServer, tinker_server, wait_until

pytestmark = pytest.mark.slow
RECIPE_S = 150.0
SL_LOOP = {"recipe": "sl_loop", "batch_size": 4, "max_steps": 9, "save_every": 3, "lora_rank": 4}
CHAT_SL = {
    "recipe": "chat_sl.train",
    "dataset": "no_robots",
    "batch_size": 4,
    "max_steps": 9,
    "save_every": 4,
    "rolling_save_every": 1,
    "eval_every": 0,
    "infrequent_eval_every": 0,
    "lora_rank": 4,
    "max_length": 256,
    "behavior_if_log_dir_exists": "resume",
}
RL_LOOP = {
    "recipe": "rl_loop",
    "loss_fn": "importance_sampling",
    "batch_size": 4,
    "group_size": 16,
    "max_tokens": 48,
    "max_steps": 6,
    "save_every": 2,
    "lora_rank": 4,
    "learning_rate": 1e-2,
}


RL_BASIC = {
    "recipe": "rl_basic",
    "dataset_builder": "tinker_cookbook.recipes.math_rl.math_env:Gsm8kDatasetBuilder",
    "dataset_builder.batch_size": 2,
    "dataset_builder.group_size": 4,
    "dataset_builder.renderer_name": "role_colon",
    "dataset_builder.model_name_for_tokenizer": cookbook.MODEL,
    "max_tokens": 16,
    "max_steps": 6,
    "save_every": 2,
    "lora_rank": 4,
    "learning_rate": 1e-2,
}
SHORT = {"max_steps": 6, "save_every": 2, "lora_rank": 4, "learning_rate": 1e-2}
RESUME = {"behavior_if_log_dir_exists": "resume"}
DISTILLATION = {
    "recipe": "distillation.on_policy_distillation",
    "teacher_model": cookbook.MODEL,
    "group_size": 4,
    "groups_per_batch": 2,
    "max_tokens": 16,
    "eval_every": 0,
    **SHORT,
    **RESUME,
}
SDFT = {
    "recipe": "sdft.train",
    "groups_per_batch": 2,
    "max_tokens": 16,
    "topk": 5,
    "eval_every": 0,
    **SHORT,
    **RESUME,
}
DECISIONS = {
    "recipe": "decisions.forecasting",
    "data_path": cookbook.FORECASTS,
    "split_date": "2026-01-01T00:00:00+00:00",
    "max_validation_questions": 4,
    "renderer_name": "role_colon",
    "batch_size": 4,
    "eval_every": 2,
    **SHORT,
    **RESUME,
}
DPO = {
    "recipe": "preference.dpo.train",
    "batch_size": 4,
    "max_length": 256,
    "max_steps": 8,
    "learning_rate": 1e-2,
    **RESUME,
}


@pytest.fixture(scope="module")
def workplace(tmp_path_factory) -> Path:
    cookbook.prepare()
    folder = tmp_path_factory.mktemp("cookbook")
    cookbook.make_workplace(folder)
    cookbook.make_sums(folder)
    cookbook.make_preferences(folder)
    cookbook.make_prompts(folder)
    cookbook.make_choices(folder)
    cookbook.make_forecasts(folder)
    return folder


@pytest.fixture(scope="module")
def server(workplace: Path) -> Iterator[RunningServer]:
    base = str(workplace / cookbook.MODEL)
    bucket = f"file://{workplace}/bucket"
    with tinker_server(base, bucket, workplace / "s.sqlite", model_name=cookbook.MODEL) as running:
        yield running


@pytest.fixture
def recipes() -> Iterator[list[subprocess.Popen]]:
    started: list[subprocess.Popen] = []
    yield started
    for process in started:
        process.kill()
        process.wait()


def finish(process: subprocess.Popen, folder: Path) -> None:
    assert process.wait(RECIPE_S) == 0, (folder / "recipe.log").read_text()[-4000:]


@pytest.fixture
def start(server, workplace, recipes, monkeypatch) -> Callable[..., subprocess.Popen]:
    """Starts a recipe that logs into a folder. Recipes give no seed, so the server draws one: here always the same."""
    monkeypatch.setattr("raycheck.tinker.service.draw_seed", lambda: 7)

    def start(log: Path, recipe: dict[str, Any]) -> subprocess.Popen:
        recipes.append(cookbook.start_recipe(workplace, server.url, log_path=log, **recipe))
        return recipes[-1]

    return start


def wait_for_steps(process: subprocess.Popen, log: Path, count: int) -> None:
    wait_until(lambda: len(steps_in(log)) >= count or process.poll() is not None, RECIPE_S)


def test_sl_loop_is_killed_and_resumes_with_the_metrics_of_an_undisturbed_run(server, workplace, start) -> None:
    whole, killed = workplace / "sl-whole", workplace / "sl-killed"
    finish(start(whole, SL_LOOP), workplace)

    process = start(killed, SL_LOOP)
    wait_for_steps(process, killed, 5)
    process.kill()
    process.wait()
    before = len(steps_in(killed))
    server.engine.kill()
    finish(start(killed, SL_LOOP), workplace)

    assert 5 <= before < 9
    assert list(steps_in(whole)) == list(range(9))
    assert steps_in(killed) == steps_in(whole)
    assert names_in(killed)[-1] == "final"


def test_chat_sl_with_rolling_saves_does_not_notice_that_the_engine_dies(server, workplace, start) -> None:
    whole, hurt = workplace / "chat-whole", workplace / "chat-hurt"
    finish(start(whole, CHAT_SL), workplace)

    process = start(hurt, CHAT_SL)
    for count in (2, 5):
        wait_for_steps(process, hurt, count)
        server.engine.kill()
    finish(process, workplace)

    assert list(steps_in(whole)) == list(range(9))
    assert steps_in(hurt) == steps_in(whole)


def test_chat_sl_is_killed_and_resumes_and_its_rolling_checkpoints_go(server, workplace, start) -> None:
    """The recipe submits a batch before it saves the state that it calls by that batch's number, so that its own resume
    trains this batch twice, whatever the server. So the steps after it differ from those of an undisturbed run."""
    log = workplace / "chat-killed"
    process = start(log, CHAT_SL)
    wait_for_steps(process, log, 5)
    process.kill()
    process.wait()
    before = steps_in(log)

    finish(start(log, CHAT_SL), workplace)

    after = steps_in(log)
    assert list(after) == list(range(9))
    assert {step: after[step] for step in range(4)} == {step: before[step] for step in range(4)}
    rest = tinker.RestClient(base_url=server.url, api_key="tml-for-tests-only")
    runs = {path.split("/")[2] for path in state_paths_in(log)}
    kept = [item.checkpoint_id for run in runs for item in rest.list_checkpoints(run).result().checkpoints]
    assert {"weights/final", "sampler_weights/final", "weights/000008"} <= set(kept)
    assert not {"weights/000006", "weights/000007"} & set(kept)


def test_rl_loop_is_killed_and_resumes_while_the_engine_dies(server, workplace, start, monkeypatch) -> None:
    """It gives no seed for what it samples. With one that follows from the prompt its metrics are those of an
    undisturbed run, line by line."""
    monkeypatch.setattr("raycheck.tinker.sampling.draw_seed", lambda: 11)
    whole, killed = workplace / "rl-whole", workplace / "rl-killed"
    finish(start(whole, RL_LOOP), workplace)

    process = start(killed, RL_LOOP)
    wait_for_steps(process, killed, 3)
    process.kill()
    process.wait()
    before = len(steps_in(killed))
    server.engine.kill()
    finish(start(killed, RL_LOOP), workplace)

    assert 3 <= before < 6
    assert list(steps_in(whole)) == list(range(6))
    assert any(line["reward/total"] for line in steps_in(whole).values()), "something was learned from"
    assert steps_in(killed) == steps_in(whole)


@pytest.mark.parametrize("recipe", [RL_BASIC, DISTILLATION, SDFT, DECISIONS], ids=lambda recipe: recipe["recipe"])
def test_a_recipe_is_killed_and_resumes_while_the_engine_dies(server, workplace, start, monkeypatch, recipe) -> None:
    monkeypatch.setattr("raycheck.tinker.sampling.draw_seed", lambda: 11)
    whole, killed = (workplace / f"{recipe['recipe']}-{name}" for name in ("whole", "killed"))
    finish(start(whole, recipe), workplace)

    process = start(killed, recipe)
    wait_until(lambda: bool(names_in(killed)) or process.poll() is not None, RECIPE_S)
    wait_for_steps(process, killed, 3)  # some recipes save a step before they log it
    process.kill()
    process.wait()
    before = names_in(killed)
    server.engine.kill()
    finish(start(killed, recipe), workplace)

    assert before
    assert "final" not in before
    assert set(steps_in(whole)) >= set(range(1, recipe["max_steps"]))
    assert steps_in(killed) == steps_in(whole)
    assert names_in(killed)[-1] == "final"


def test_dpo_does_not_notice_that_the_engine_dies(server, workplace, start) -> None:
    """When it is killed itself, it takes the weights that it resumes from as its reference, whatever the server."""
    whole, hurt = workplace / "dpo-whole", workplace / "dpo-hurt"
    finish(start(whole, DPO), workplace)

    process = start(hurt, DPO)
    for count in (2, 5):
        wait_for_steps(process, hurt, count)
        server.engine.kill()
    finish(process, workplace)

    assert list(steps_in(whole)) == list(range(8))
    assert steps_in(hurt) == steps_in(whole)


def names_in(log: Path) -> list[str]:
    file = log / "checkpoints.jsonl"
    return [json.loads(line)["name"] for line in file.read_text().splitlines()] if file.exists() else []


def state_paths_in(log: Path) -> list[str]:
    return [json.loads(line)["state_path"] for line in (log / "checkpoints.jsonl").read_text().splitlines()]


def steps_in(folder: Path) -> dict[int, dict[str, Any]]:
    """The last metrics of each step, of all its lines: a resume repeats some."""
    found: dict[int, dict[str, Any]] = {}
    for line in cookbook.metrics_in(folder):
        if "step" in line:
            found.setdefault(line["step"], {}).update(line)
    return dict(sorted(found.items()))
