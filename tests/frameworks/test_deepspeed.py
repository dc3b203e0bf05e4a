"""An engine of DeepSpeed is saved by one line, and restored at any stage, any world size, and outside of DeepSpeed.

The judge is DeepSpeed itself: its own functions put the 32-bit weights and the moments together, before the save and
after the restore, and the engine's next losses are those of the undisturbed training.
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import raycheck
from tests.support.frameworks import deepspeed_training, engine_runs
from tests.support.frameworks.deepspeed_training import Training

pytestmark = pytest.mark.slow

KINDS = ["fp32-0", "fp32-1", "fp32-2", "fp32-3", "bf16-0", "bf16-1", "bf16-2", "bf16-3", "fp16-2", "fp16-3"]


@pytest.fixture(scope="module", autouse=True)
def installed() -> None:
    deepspeed_training.prepare()


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., tuple[Training, dict[str, Any]]]:
    """Return a training of two ranks that has saved one checkpoint, and what it was, once for each kind."""
    made: dict[str, tuple[Training, dict[str, Any]]] = {}

    def train(kind: str, **more: Any) -> tuple[Training, dict[str, Any]]:
        name = f"{kind}{sorted(more.items())}"
        if name not in made:
            dtype, _, stage = kind.partition("-")
            folder = tmp_path_factory.mktemp("zero")
            training = Training(uri=f"file://{folder}/run", world_size=2, stage=int(stage), dtype=dtype, **more)
            made[name] = training, training.run()
        return made[name]

    return train


resumed = partial(engine_runs.resumed, step=4)


def check(found: dict[str, Any], before: dict[str, Any], *, tolerance: float = 0.0) -> None:
    assert found["start"] == 4
    assert found["digests"] == before["digests"]
    assert found["client"] == before["client"] != ""
    assert found["losses"] == pytest.approx(before["losses"][4:], abs=tolerance, rel=0.0)
    assert found["scale"] == before["scale"] or None in (found["scale"], before["scale"])


@pytest.mark.parametrize("kind", KINDS)
def test_the_same_engine_resumes_as_if_nothing_had_happened(kind: str, saved: Any, tmp_path: Path) -> None:
    training, before = saved(kind)

    check(resumed(training, tmp_path), before)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("kind", ["bf16-1", "bf16-2", "bf16-3"])
def test_another_stage_has_every_weight_and_moment_to_the_bit(
    kind: str, stage: int, saved: Any, tmp_path: Path
) -> None:
    training, before = saved(kind)

    check(resumed(training, tmp_path, stage=stage), before, tolerance=2e-3)


@pytest.mark.parametrize(("stage", "world_size"), [(1, 1), (2, 3), (3, 1), (3, 4), (1, 3)])
@pytest.mark.parametrize("kind", ["fp32-1", "bf16-3"])
def test_another_world_size_has_every_weight_and_moment_to_the_bit(
    kind: str, stage: int, world_size: int, saved: Any, tmp_path: Path
) -> None:
    training, before = saved(kind)

    check(resumed(training, tmp_path, stage=stage, world_size=world_size), before, tolerance=5e-3)


@pytest.mark.parametrize(
    "more",
    [{"is_tied": True}, {"zero": {"offload_optimizer": {"device": "cpu"}}}],
    ids=["tied", "offload"],
)
@pytest.mark.parametrize("kind", ["bf16-2", "bf16-3"])
def test_tied_weights_and_offloaded_state_are_restored(
    kind: str, more: dict[str, Any], saved: Any, tmp_path: Path
) -> None:
    training, before = saved(kind, **more)

    check(resumed(training, tmp_path, world_size=1), before, tolerance=5e-3)


@pytest.mark.parametrize("kind", ["bf16-2", "bf16-3"])
def test_states_that_were_moved_between_two_saves_are_saved_from_where_they_are(
    kind: str, saved: Any, tmp_path: Path
) -> None:
    training, before = saved(kind, moves="back")

    check(resumed(training, tmp_path, moves=""), before)
    assert not [each.name for each in raycheck.open_run(training.uri).at(4).tensors() if "offload" in each.name]


def test_a_save_while_states_are_offloaded_is_refused(tmp_path: Path) -> None:
    away = Training(uri=f"file://{tmp_path}/run", world_size=2, stage=3, dtype="bf16", moves="off")

    with pytest.raises(RuntimeError, match=r"has offloaded its states \(.*\); call engine\.reload_states\(\)"):
        away.run()


@pytest.mark.parametrize("kind", ["fp32-2", "bf16-3"])
def test_plain_ddp_continues_from_an_engine(kind: str, saved: Any, tmp_path: Path) -> None:
    training, before = saved(kind)

    check(resumed(training, tmp_path, stage=None, is_strict=False, is_cast=True), before, tolerance=2e-2)


@pytest.mark.parametrize(("stage", "dtype"), [(1, "bf16"), (3, "bf16"), (2, "fp32"), (0, "bf16")])
def test_an_engine_continues_from_plain_ddp(stage: int, dtype: str, tmp_path: Path) -> None:
    plain = Training(uri=f"file://{tmp_path}/plain", world_size=2, stage=None, is_strict=False)
    before = plain.run()

    check(resumed(plain, tmp_path, stage=stage, dtype=dtype, is_cast=True), before, tolerance=2e-2)


@pytest.mark.parametrize("kind", ["fp32-2", "fp32-3", "bf16-1", "bf16-3"])
def test_fsdp2_continues_from_an_engine(kind: str, saved: Any, tmp_path: Path) -> None:
    """The 32-bit weights that an engine keeps beside its 16-bit ones are the weights of the sharded model."""
    training, before = saved(kind)

    found = resumed(training, tmp_path, stage=None, is_sharded=True, is_strict=False, is_cast=True)

    check(found, before, tolerance=2e-2)


@pytest.mark.parametrize(("stage", "dtype"), [(1, "bf16"), (2, "fp32"), (3, "bf16"), (3, "fp32")])
def test_an_engine_continues_from_fsdp2(stage: int, dtype: str, tmp_path: Path) -> None:
    sharded = Training(uri=f"file://{tmp_path}/sharded", world_size=2, stage=None, is_sharded=True, is_strict=False)
    before = sharded.run()

    check(resumed(sharded, tmp_path, stage=stage, is_sharded=False, dtype=dtype, is_cast=True), before, tolerance=2e-2)


def test_a_parameter_is_one_tensor_of_its_own_shape_and_no_16_bit_copy_is_stored(saved: Any) -> None:
    training, _ = saved("bf16-3")

    found = {tensor.name: tensor for tensor in raycheck.open_run(training.uri).at(4).tensors()}

    assert tuple(found["engine.model.hidden.weight"].shape) == (8, 6)
    assert tuple(found["engine.optimizer.state.hidden.weight.exp_avg"].shape) == (8, 6)
    trained = [tensor for name, tensor in found.items() if "frozen" not in name]
    assert {tensor.dtype for tensor in trained} == {"float32"}


def test_what_was_not_tried_is_refused_by_name_before_the_first_step(tmp_path: Path) -> None:
    zero = {"zero_hpz_partition_size": 2}
    odd = Training(uri=f"file://{tmp_path}/run", world_size=2, stage=3, dtype="bf16", zero=zero)

    with pytest.raises(
        RuntimeError, match=r"ConfigError: state\['engine'\] is an engine of DeepSpeed with zero_hpz_partition_size"
    ):
        odd.run()
