"""open-instruct's policy, reference, counters and positions in the data are saved as one checkpoint.

What replaces its saving and loading is the code that the guide shows. An undisturbed training with its own checkpoints
shows what has to come out.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import raycheck
from raycheck.bucket.store import open_store
from tests.support.frameworks import rl_frameworks
from tests.support.histories.invariants import assert_invariants

pytestmark = pytest.mark.slow
UPDATED = {"ref_policy_update_freq": 6}
"""The reference changes at step 6. Otherwise it stays the model that training begins with."""
STAGES: dict[int, dict[str, Any]] = {1: UPDATED, 2: UPDATED}
"""What is asked of the trainings at each stage of ZeRO."""


def asked(way: str, folder: object, *, workers: int = 2, **options: Any) -> dict[str, Any]:
    """Return what to ask of `train`. way: open-instruct's "own" checkpoints, or raycheck's."""
    prefix = "file://" if way == "raycheck" else ""
    return {"way": way, "folder": f"{prefix}{folder}", "workers": workers, **options}


def train(*trainings: dict[str, Any]) -> list[dict[str, Any]]:
    rl_frameworks.prepare()
    return rl_frameworks.run("open_instruct_training", *trainings)


def after(step: int, found: dict[str, Any], what: str = "losses") -> dict[int, Any]:
    assert "error" not in found, found
    return {int(number): value for number, value in found[what].items() if int(number) > step}


def weights(place: Path) -> bytes:
    """Return the weights that open-instruct has written at the end of a training."""
    return place.with_name(f"{place.name}-final").joinpath("model.safetensors").read_bytes()


@dataclass(frozen=True)
class Undisturbed:
    """The same training twice, on two workers: with open-instruct's own checkpoints, and with raycheck's.

    options: of both. place: the folder with both, own and run. own, raycheck: what was found.
    """

    options: dict[str, Any]
    place: Path
    own: dict[str, Any]
    raycheck: dict[str, Any]


@pytest.fixture(scope="module")
def undisturbed(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Undisturbed:
    """Train at the stage of ZeRO that is the parameter."""
    place, options = tmp_path_factory.mktemp("undisturbed"), {"stage": request.param, **STAGES[request.param]}
    own, with_raycheck = train(asked("own", place / "own", **options), asked("raycheck", place / "run", **options))
    assert after(0, own) == after(0, with_raycheck)
    return Undisturbed(options, place, own, with_raycheck)


at_zero_2 = pytest.mark.parametrize("undisturbed", [2], indirect=True)


@pytest.mark.parametrize("undisturbed", STAGES, indirect=True)
def test_a_killed_worker_costs_the_steps_after_the_last_save(tmp_path: Path, undisturbed: Undisturbed) -> None:
    run = tmp_path / "run"

    died, again = train(
        asked("raycheck", run, **undisturbed.options, dies_at=8), asked("raycheck", run, **undisturbed.options, seed=7)
    )

    assert (died.get("error"), died["start"], died["died"]) == (None, 0, True)
    assert (again.get("error"), again["start"], again["died"]) == (None, 6, False)
    assert list(after(6, again)) == [7, 8, 9, 10]
    for what in ("losses", "drawn"):
        assert after(6, again, what) == after(6, undisturbed.own, what), what
    assert [item.step for item in raycheck.open_run(f"file://{run}").checkpoints] == [3, 6, 9]
    assert_invariants(open_store(f"file://{run}"))
    assert weights(run) == weights(undisturbed.place / "own")


@at_zero_2
def test_the_training_continues_on_another_number_of_workers(tmp_path: Path, undisturbed: Undisturbed) -> None:
    run = tmp_path / "run"

    died, on_three, on_one = train(
        asked("raycheck", run, **undisturbed.options, dies_at=8),
        asked("raycheck", run, workers=3, **undisturbed.options, dies_at=10, seed=7),
        asked("raycheck", run, workers=1, **undisturbed.options, seed=8),
    )

    assert (died["died"], on_three["start"], on_one["start"]) == (True, 6, 9)
    continued = {**after(6, on_three), **after(9, on_one)}
    assert list(continued) == [7, 8, 9, 10]
    for step, found in continued.items():
        assert found == pytest.approx(after(6, undisturbed.own)[step], rel=2e-2), step
    assert_invariants(open_store(f"file://{run}"))


@at_zero_2
def test_open_instruct_s_own_checkpoints_need_the_same_number_of_workers(undisturbed: Undisturbed) -> None:
    (refused,) = train(asked("own", undisturbed.place / "own", workers=3, **undisturbed.options))

    assert "DP world size of 2" in refused["error"]
    assert not refused["losses"]


def test_deepspeed_refuses_open_instruct_s_own_settings_at_zero_0(tmp_path: Path) -> None:
    (refused,) = train(asked("own", tmp_path / "own", stage=0))

    assert "unsupported mix of model_dtype=torch.bfloat16" in refused["error"]


def test_a_reference_that_changes_is_refused_at_zero_3_before_the_first_step(tmp_path: Path) -> None:
    (refused,) = train(asked("raycheck", tmp_path / "run", **UPDATED, stage=3))

    assert "state['reference']" in refused["error"]
    assert not refused["losses"]


@at_zero_2
def test_the_reference_is_uploaded_only_when_it_has_changed(undisturbed: Undisturbed) -> None:
    run = raycheck.open_run(f"file://{undisturbed.place}/run")

    saved_in = {step: run.at(step).details().components["reference.frozen"] for step in (3, 6, 9)}

    assert saved_in == {3: run.at(3).key, 6: run.at(6).key, 9: run.at(6).key}


@at_zero_2
def test_the_time_and_the_size_of_each_save_are_known(undisturbed: Undisturbed) -> None:
    details = raycheck.open_run(f"file://{undisturbed.place}/run").at(3).details()

    assert after(3, undisturbed.raycheck, "saving")[4] > 0
    assert (details.upload_bytes > 0, details.upload_s > 0, details.blocked_s > 0) == (True, True, True)
