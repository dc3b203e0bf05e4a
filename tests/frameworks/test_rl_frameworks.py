"""Policy and critic of RL frameworks, in the frameworks' own actor groups, are saved as one checkpoint.

What replaces the framework's saving and loading is the code that the guide shows.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

import raycheck
from raycheck.bucket.store import open_store
from tests.support.frameworks import rl_frameworks
from tests.support.histories.invariants import assert_invariants

pytestmark = pytest.mark.slow
UNTIL = 10


@dataclass(frozen=True, kw_only=True)
class Framework:
    """A framework's training.

    policy: what it calls that model. refuses: what its own checkpoints say at another number of workers. tolerance: how
    much losses may differ there, where another split rounds differently. equal: what is equal after a resume. kept: the
    steps that are kept of a whole training. options: of all trainings that are killed or resumed. before, elsewhere: of
    those with raycheck before and after the numbers of workers change.
    """

    name: str
    policy: str
    refuses: str
    tolerance: float = 1e-5
    equal: tuple[str, ...] = ("losses", "drawn")
    kept: tuple[int, ...] = (6, 9, 10)
    options: dict[str, Any] = field(default_factory=dict)
    before: dict[str, Any] = field(default_factory=dict)
    elsewhere: dict[str, Any] = field(default_factory=dict)

    def asked(self, way: str, folder: str, *, policies: int = 2, critics: int = 1, **options: Any) -> dict[str, Any]:
        """Return what to ask of `train`. way: "own" checkpoints, or raycheck's."""
        return {"way": way, "folder": folder, "sizes": {self.policy: policies, "critic": critics}, **options}

    def train(self, *asked: dict[str, Any]) -> list[dict[str, Any]]:
        rl_frameworks.prepare()
        return rl_frameworks.run(f"{self.name.lower()}_training", *({"until": UNTIL, **each} for each in asked))


VERL = Framework(
    name="verl",
    policy="actor",
    refuses="model_world_size_1_rank_0.pt",
    equal=("losses", "drawn", "weights"),
)
OPENRLHF = Framework(
    name="OpenRLHF",
    policy="actor",
    refuses="DP world size of 2",
    tolerance=2e-2,
    equal=("losses", "drawn", "ema"),
    kept=(6, 8, 9, 10),  # the best evaluation, and the last three of those by the interval or for an evaluation
    options={"has_ema": True},
    before={"sleeps": True},
    elsewhere={"sleeps": True, "stage": 3},
)
SKYRL = Framework(
    name="SkyRL",
    policy="policy",
    refuses="Model checkpoint not found",
    equal=("losses", "drawn", "weights"),
)
each_framework = pytest.mark.parametrize("framework", [VERL, OPENRLHF, SKYRL], ids=lambda framework: framework.name)


def after(step: int, found: dict[str, Any], what: str = "losses") -> dict[str, Any]:
    assert "error" not in found, found
    return {number: value for number, value in found[what].items() if int(number) > step}


@each_framework
def test_a_killed_worker_costs_the_steps_after_the_last_save(framework: Framework, tmp_path: Path) -> None:
    uri = f"file://{tmp_path}/run"

    undisturbed, died, again = framework.train(
        framework.asked("own", str(tmp_path / "own"), **framework.options),
        framework.asked("raycheck", uri, dies_at=8, **framework.options),
        framework.asked("raycheck", uri, seed=7, **framework.options),
    )

    assert (died.get("error"), died["start"], died["died"]) == (None, 0, True)
    assert (again.get("error"), again["start"], again["died"]) == (None, 6, False)
    for what in framework.equal:
        assert after(6, again, what) == after(6, undisturbed, what), what
    assert tuple(item.step for item in raycheck.open_run(uri).checkpoints) == framework.kept
    assert_invariants(open_store(uri))


@each_framework
def test_each_group_may_have_another_number_of_workers_where_the_framework_needs_the_same(
    framework: Framework, tmp_path: Path
) -> None:
    uri, own = f"file://{tmp_path}/run", str(tmp_path / "own")

    undisturbed, _, changed, refused = framework.train(
        framework.asked("own", own),
        framework.asked("raycheck", uri, until=6, **framework.before),
        framework.asked("raycheck", uri, policies=1, critics=2, seed=7, **framework.elsewhere),
        framework.asked("own", own, policies=1, until=12),
    )

    assert (changed.get("error"), changed["start"]) == (None, 6)
    for step, losses in after(6, changed).items():
        assert losses == pytest.approx(undisturbed["losses"][step], rel=framework.tolerance)
    assert framework.refuses in refused["error"]


def test_verl_s_models_on_shared_workers_continue_on_separate_ones(tmp_path: Path) -> None:
    uri = f"file://{tmp_path}/run"

    undisturbed, died, again = VERL.train(
        VERL.asked("own", str(tmp_path / "own"), policies=2, critics=2, is_colocated=True),
        VERL.asked("raycheck", uri, policies=2, critics=2, is_colocated=True, dies_at=8),
        VERL.asked("raycheck", uri, policies=1, critics=1, seed=7),
    )

    assert (died["died"], again["start"]) == (True, 6)
    for step, losses in after(6, again).items():
        assert losses == pytest.approx(undisturbed["losses"][step], rel=1e-5)


def test_verl_s_next_epoch_follows_a_checkpoint_of_an_epoch_s_end(tmp_path: Path) -> None:
    uri, epoch = f"file://{tmp_path}/run", 8

    undisturbed, _, again = VERL.train(
        VERL.asked("own", str(tmp_path / "own"), until=12),
        VERL.asked("raycheck", uri, until=epoch),
        VERL.asked("raycheck", uri, until=12, seed=7),
    )

    assert again["start"] == epoch
    assert after(epoch, again) == after(epoch, undisturbed) != {}


def test_openrlhf_s_moving_average_is_refused_where_zero_3_keeps_its_elements(tmp_path: Path) -> None:
    (refused,) = OPENRLHF.train(OPENRLHF.asked("raycheck", f"file://{tmp_path}/run", has_ema=True, stage=3))

    assert "state['actor.ema']" in refused["error"]
    assert not refused["losses"]
