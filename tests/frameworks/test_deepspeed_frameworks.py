"""DeepSpeed inside Accelerate, transformers' Trainer and Lightning: killed, resumed, and at another size or stage.

The engine is one entry, as in a plain script; the frameworks' own DeepSpeed checkpoints are never written.
"""

from pathlib import Path
from typing import Any

import pytest

import raycheck
from tests.support.frameworks import deepspeed_training
from tests.support.frameworks.deepspeed_frameworks import FRAMEWORKS, STEPS, FrameworkTraining

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module", autouse=True)
def installed() -> None:
    deepspeed_training.prepare()


def steps_and_losses(found: dict[str, Any]) -> dict[int, float]:
    return {int(step): loss for step, loss in found["losses"].items()}


@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_a_killed_training_resumes_as_if_nothing_had_happened(framework: str, stage: int, tmp_path: Path) -> None:
    whole, hurt = (
        {"framework": framework, "stage": stage, "uri": f"file://{tmp_path}/{name}", "folder": f"{tmp_path}/{name}-out"}
        for name in ("whole", "hurt")
    )
    expected = FrameworkTraining(**whole).run()

    FrameworkTraining(**hurt, killed_at=6).be_killed()
    assert raycheck.open_run(hurt["uri"]).head.step == 3
    found = FrameworkTraining(**hurt).run()

    losses = steps_and_losses(expected)
    assert max(losses) == STEPS
    assert steps_and_losses(found) == {step: loss for step, loss in losses.items() if step > 3}
    assert found["digests"] == expected["digests"]
    assert found["written"] == []
    names = {tensor.name for tensor in raycheck.open_run(hurt["uri"]).head.tensors()}
    assert any(name.startswith("engine.model.") for name in names)
    assert any(name.startswith("engine.optimizer.state.") for name in names)


@pytest.mark.parametrize(("world_size", "stage"), [(1, 2), (2, 3)])
@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_another_number_of_ranks_or_stage_trains_on(
    framework: str, world_size: int, stage: int, tmp_path: Path
) -> None:
    whole, hurt = (
        {"framework": framework, "uri": f"file://{tmp_path}/{name}", "folder": f"{tmp_path}/{name}-out"}
        for name in ("whole", "hurt")
    )
    expected = steps_and_losses(FrameworkTraining(**whole).run())
    FrameworkTraining(**hurt, killed_at=6).be_killed()

    found = steps_and_losses(FrameworkTraining(**hurt, world_size=world_size, stage=stage).run())

    assert sorted(found) == list(range(4, STEPS + 1))
    for step in found:
        assert found[step] == pytest.approx(expected[step], abs=2e-2), step
