"""Policy and critic of verl, in its Megatron engines, are saved as one checkpoint.

What replaces verl's saving and loading is the code that the guide shows.
"""

from pathlib import Path
from typing import Any

import pytest

import raycheck
from raycheck.bucket.store import open_store
from tests.support.frameworks import megatron_training, rl_frameworks
from tests.support.frameworks.megatron_training import Training
from tests.support.histories.invariants import assert_invariants

pytestmark = pytest.mark.slow
SAVED: dict[str, dict[str, Any]] = {"actor": {"tp": 2}, "critic": {"dp": 2}}
"""The degrees of each role in the run that others continue."""


def asked(way: str, folder: str, *, actor: dict[str, Any], critic: dict[str, Any], **options: Any) -> dict[str, Any]:
    """Return what to ask of `train`. way: verl's "own" checkpoints, or raycheck's. actor, critic: the degrees."""
    degrees = {"actor": actor, "critic": critic}
    sizes = {role: Training(uri="", **own).world_size for role, own in degrees.items()}
    return {"way": way, "folder": folder, "sizes": sizes, "degrees": degrees, "until": 8, **options}


def train(*trainings: dict[str, Any]) -> list[dict[str, Any]]:
    rl_frameworks.prepare()
    megatron_training.prepare()
    return rl_frameworks.run(
        "verl_megatron_training", *trainings, also=[*megatron_training.FOLDER.glob("lib/python*/site-packages")]
    )


def after(step: int, found: dict[str, Any], what: str = "losses") -> dict[str, Any]:
    assert "error" not in found, found
    return {number: value for number, value in found[what].items() if int(number) > step}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, dict[str, Any]]:
    """Return a run that was killed after its checkpoint of step 3, and what the same training is undisturbed."""
    place = tmp_path_factory.mktemp("saved")
    uri = f"file://{place}/run"
    undisturbed, died = train(asked("own", f"{place}/own", **SAVED), asked("raycheck", uri, dies_at=5, **SAVED))
    assert (died.get("error"), died["died"]) == (None, True)
    return uri, undisturbed


def test_a_killed_worker_costs_the_steps_after_the_last_save(tmp_path: Path) -> None:
    uri = f"file://{tmp_path}/run"
    degrees = {"actor": {"tp": 2, "dropout": 0.1}, "critic": {"dp": 2, "dropout": 0.1}}

    undisturbed, died, again = train(
        asked("own", str(tmp_path / "own"), **degrees),
        asked("raycheck", uri, dies_at=8, **degrees),
        asked("raycheck", uri, seed=7, **degrees),
    )

    assert (died.get("error"), died["start"], died["died"]) == (None, 0, True)
    assert (again.get("error"), again["start"], again["died"]) == (None, 6, False)
    for what in ("losses", "drawn", "weights"):
        assert after(6, again, what) == after(6, undisturbed, what), what
    assert_invariants(open_store(uri))
    names = {tensor.name: tuple(tensor.shape) for tensor in raycheck.open_run(uri).head.tensors()}
    assert names["actor.engine.model.embedding.word_embeddings.weight"] == (32, 16)
    assert names["critic.engine.model.output_layer.weight"] == (1, 16)


def test_each_role_may_have_other_degrees(saved: tuple[str, dict[str, Any]]) -> None:
    uri, undisturbed = saved

    exchanged, others = train(
        asked("raycheck", uri, dies_at=8, seed=7, actor=SAVED["critic"], critic=SAVED["actor"]),
        asked("raycheck", uri, seed=8, actor={}, critic={"tp": 2, "dp": 2}),
    )

    assert (exchanged["start"], exchanged["died"], others["start"], others["died"]) == (3, True, 6, False)
    assert exchanged["weights"]["3"] == undisturbed["weights"]["3"]
    assert others["weights"]["6"] == exchanged["weights"]["6"]
    continued = {**after(3, exchanged), **after(6, others)}
    assert list(continued) == ["4", "5", "6", "7", "8"]
    for step, losses in continued.items():
        assert losses == pytest.approx(undisturbed["losses"][step], abs=2e-2), step
    assert_invariants(open_store(uri))


def test_offloaded_weights_are_refused_before_the_first_step(tmp_path: Path) -> None:
    (refused,) = train(
        asked("raycheck", f"file://{tmp_path}/run", actor={"tp": 2}, critic={}, config={"param_offload": True})
    )

    assert "has model weights whose memory was freed" in refused["error"]
    assert not refused["losses"]
