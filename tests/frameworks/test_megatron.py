"""A training of Megatron-core is saved by one line, and restored at other degrees of every parallelism.

The judge is Megatron itself: its own ShardedTensors and factories put the 32-bit weights and the moments together,
before the save and after the restore, and the next losses are those of the undisturbed training.
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import raycheck
from tests.support.frameworks import engine_runs, megatron_training
from tests.support.frameworks.megatron_training import Training

pytestmark = pytest.mark.slow

KINDS: dict[str, dict[str, Any]] = {
    "tp": {"tp": 2, "dropout": 0.1},
    "tp-dp": {"tp": 2, "dp": 2, "dtype": "bf16"},
    "pp": {"pp": 2, "is_tied": True},
    "pp-dp": {"pp": 2, "dp": 2, "is_tied": True, "dtype": "bf16"},
    "chunks": {"pp": 2, "chunks": 2},
    "tp-pp": {"tp": 2, "pp": 2, "kind": "plain", "dtype": "bf16", "is_tied": True},
    "dp": {"dp": 2, "dtype": "fp16", "has_overlap": True},
    "plain": {"dp": 2, "kind": "plain", "is_gated": False},
    "dropout": {"dp": 2, "dropout": 0.1},
    "experts": {"dp": 2, "ep": 2, "has_experts": True, "dtype": "bf16"},
}


@pytest.fixture(scope="module", autouse=True)
def installed() -> None:
    megatron_training.prepare()


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., tuple[Training, dict[str, Any]]]:
    """Return a training that has saved one checkpoint, and what it was, once for each kind."""
    made: dict[str, tuple[Training, dict[str, Any]]] = {}

    def train(kind: str) -> tuple[Training, dict[str, Any]]:
        if kind not in made:
            training = Training(uri=f"file://{tmp_path_factory.mktemp('megatron')}/run", **KINDS[kind])
            made[kind] = training, training.run()
        return made[kind]

    return train


resumed = partial(engine_runs.resumed, step=3)


def check(found: dict[str, Any], before: dict[str, Any], *, tolerance: float = 0.0) -> None:
    assert found["start"] == 3
    assert found["digests"] == before["digests"]
    assert found["losses"] == pytest.approx(before["losses"][3:], abs=tolerance, rel=0.0)


@pytest.mark.parametrize("kind", KINDS)
def test_the_same_degrees_resume_as_if_nothing_had_happened(kind: str, saved: Any, tmp_path: Path) -> None:
    training, before = saved(kind)

    found = resumed(training, tmp_path)

    check(found, before)
    assert (found["scale"], found["random"]) == (before["scale"], before["random"])
    # With overlap, the training before the save has gathered its low-precision weights only at the next forward.
    assert training.has_overlap or found["low"] == before["low"]


@pytest.mark.parametrize(
    ("kind", "degrees"),
    [
        ("tp", {"tp": 1}),
        ("tp", {"dp": 2}),
        ("tp", {"tp": 1, "pp": 2}),
        ("dropout", {"tp": 2, "dp": 1}),
        ("dropout", {"tp": 2, "pp": 2, "dp": 1}),
        ("dropout", {"dp": 3}),
        ("tp-dp", {"dp": 1}),
        ("tp-dp", {"tp": 1, "pp": 2, "dp": 1}),
        ("tp-dp", {"tp": 1, "dp": 3}),
        ("pp", {"pp": 1}),
        ("pp", {"pp": 4}),
        ("pp", {"pp": 1, "tp": 2, "dp": 2}),
        ("pp-dp", {"pp": 1}),
        ("pp-dp", {"tp": 2, "dp": 1}),
        ("chunks", {"chunks": 1}),
        ("chunks", {"pp": 1, "chunks": 1, "tp": 2}),
        ("tp-pp", {"tp": 1}),
        ("tp-pp", {"pp": 1, "dp": 2}),
        ("dp", {"dp": 1, "tp": 2}),
        ("dp", {"dp": 3}),
        ("plain", {"dp": 1, "tp": 2}),
        ("experts", {"ep": 1}),
        ("experts", {"dp": 4, "ep": 4}),
        ("experts", {"dp": 1, "ep": 1}),
        ("experts", {"pp": 2}),
    ],
    ids=str,
)
def test_other_degrees_have_every_weight_and_moment_to_the_bit(
    kind: str, degrees: dict[str, Any], saved: Any, tmp_path: Path
) -> None:
    training, before = saved(kind)

    found = resumed(training, tmp_path, **degrees)

    assert found["start"] == 3
    assert found["digests"] == before["digests"]
    if training.dropout:
        check_random(found["random"], before["random"], training, degrees)
    else:
        assert found["losses"] == pytest.approx(before["losses"][3:], abs=2e-2, rel=0.0)


def check_random(found: list[str], before: list[str], training: Training, degrees: dict[str, Any]) -> None:
    """Check that a tensor-parallel group has the states of torch's generator that the group at its place had, or one
    that no other group has."""
    here = Training(**{**vars(training), **degrees})
    groups = [found[rank : rank + here.tp] for rank in range(0, len(found), here.tp)]  # dp before pp
    own = {divmod(number, here.dp): set(states) for number, states in enumerate(groups)}
    saved = {(0, number): set(before[number * training.tp :][: training.tp]) for number in range(training.dp)}
    assert all(len(states) == 1 for states in (*own.values(), *saved.values()))
    assert all(own[place] == saved[place] for place in own.keys() & saved.keys())
    assert len({*map(min, own.values())}) == len(own)


@pytest.mark.parametrize(("kind", "other"), [("tp-dp", "plain"), ("tp-pp", "distributed")])
def test_the_other_optimizer_continues(kind: str, other: str, saved: Any, tmp_path: Path) -> None:
    training, before = saved(kind)

    check(resumed(training, tmp_path, kind=other), before, tolerance=1e-3)


@pytest.mark.parametrize("words", [40, 30])
def test_a_vocabulary_padded_in_another_way_has_its_real_rows(words: int, saved: Any, tmp_path: Path) -> None:
    training, before = saved("tp-dp")

    found = resumed(training, tmp_path, words=words)

    assert found["start"] == 3
    assert found["digests"] == before["digests"]
    assert f"engine.model.output_layer.weight: {words} rows here, 32 saved; the first 3" in "\n".join(found["fresh"])
    wanted = [tensor for tensor in raycheck.open_run(training.uri).at(3).tensors() if "output_layer" in tensor.name]
    assert {tuple(tensor.shape) for tensor in wanted if "step" not in tensor.name} == {(32, 16)}


def test_a_checkpoint_has_whole_tensors_by_the_names_of_the_model_and_no_16_bit_copy(saved: Any) -> None:
    training, _ = saved("experts")

    found = {tensor.name: tensor for tensor in raycheck.open_run(training.uri).at(3).tensors()}

    for name in ("w", "v"):
        fused = f"decoder.layers.3.mlp.experts.experts.2.linear_fc1.weight_{name}"
        assert tuple(found[f"engine.model.{fused}"].shape) == (8, 16)
        assert tuple(found[f"engine.optimizer.state.{fused}.exp_avg_sq"].shape) == (8, 16)
    own = [tensor for name, tensor in found.items() if name.startswith(("engine.model.", "engine.optimizer."))]
    assert {tensor.dtype for tensor in own} == {"float32"}


def test_random_states_are_restored_at_the_same_degrees_and_a_warning_says_where_they_are_not(
    saved: Any, tmp_path: Path
) -> None:
    training, before = saved("tp")

    found = resumed(training, tmp_path, tp=1)

    assert "the random states of Megatron were saved with" in found["log"]
    assert found["losses"] != pytest.approx(before["losses"][3:], abs=1e-4)  # dropout draws other numbers


def test_layers_that_no_rank_has_here_are_refused(saved: Any, tmp_path: Path) -> None:
    training, _ = saved("pp")

    with pytest.raises(
        RuntimeError, match=r"StateMismatchError|only in the checkpoint: engine\.model\.decoder\.layers\.2"
    ):
        resumed(training, tmp_path, odd={"model": {"num_layers": 2}})


@pytest.mark.parametrize(
    ("odd", "name"),
    [({"model": {"num_query_groups": 1}}, "num_query_groups below"), ({"optimizer": {"optimizer": "sgd"}}, "SGD")],
    ids=["query groups", "sgd"],
)
def test_what_was_not_tried_is_refused_by_name_before_the_first_step(
    odd: dict[str, Any], name: str, tmp_path: Path
) -> None:
    with pytest.raises(RuntimeError, match=f"ConfigError: this is a training of Megatron-core with .*{name}"):
        Training(uri=f"file://{tmp_path}/run", tp=2, kind="plain", odd=odd).run()
