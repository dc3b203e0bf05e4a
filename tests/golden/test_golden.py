"""Runs that earlier code wrote stay readable: by raycheck at another world size, and by stock torch."""

import math
import random
import shutil
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemReader

import raycheck
from raycheck.bucket.format.document import FORMAT_VERSION
from raycheck.bucket.format.object_keys import component_prefix
from raycheck.bucket.reading import Checkpoint, read_latest
from raycheck.bucket.store import open_store
from raycheck.errors import FencedError
from raycheck.state.train_state import TrainState
from raycheck.transfer.stage.local_box import TRAIN
from tests.golden import state as golden
from tests.support.frameworks import fsdp_training
from tests.support.histories.invariants import assert_invariants
from tests.support.samples.sample_checkpoints import Driver, latest_tree

FOLDERS = sorted(Path(__file__).parent.glob("v*/run"))
no_group = pytest.mark.filterwarnings("ignore:torch.distributed is disabled, unavailable or uninitialized:UserWarning")
steps = pytest.mark.parametrize("step", golden.STEPS)


@pytest.fixture(params=FOLDERS, ids=[folder.parent.name for folder in FOLDERS])
def folder(request: pytest.FixtureRequest) -> Path:
    return request.param


@pytest.fixture
def random_state():
    """The process's own random state, which a restore changes."""
    kept = random.getstate(), np.random.get_state(), torch.get_rng_state()  # noqa: NPY002
    yield
    random.setstate(kept[0])
    np.random.set_state(kept[1])  # noqa: NPY002
    torch.set_rng_state(kept[2])


def test_every_format_version_is_there() -> None:
    versions = [folder.parent.name for folder in FOLDERS]

    assert versions == [f"v{number}" for number in range(1, FORMAT_VERSION + 1)]


def test_the_catalog_lists_it_every_object_is_whole_and_reading_writes_nothing(folder: Path) -> None:
    before = sorted(folder.rglob("*"))

    run = raycheck.open_run(f"file://{folder}")

    assert run.run_id == "run"
    assert [checkpoint.step for checkpoint in run.checkpoints] == list(golden.STEPS)
    assert [checkpoint.is_pinned for checkpoint in run.checkpoints] == [True, False]
    assert run.head is not None
    assert run.head.metrics == {"loss": 0.25}
    assert run._latest.is_finished is not is_of_version_1(folder)
    for checkpoint in run.checkpoints:
        findings = list(checkpoint.verify())
        assert len(findings) == 5 + golden.WORLD_SIZE
        assert [item.problem for item in findings] == [""] * len(findings)
    first, second = (checkpoint._stored.read_manifest() for checkpoint in run.checkpoints)
    assert [part.name for part in second.components] == ["reference.frozen", TRAIN]
    assert second.refs == (first.key,)
    assert_invariants(run._store)
    assert sorted(folder.rglob("*")) == before


@steps
def test_raycheck_restores_it_into_one_process(folder: Path, step: int, random_state: None) -> None:
    state = golden.build(is_sharded=False)
    kinds = state.pop("kinds") if is_of_version_1(folder) else state["kinds"]

    restored = TrainState(state, rank=0, world_size=1).apply(checkpoint_of(folder, step))
    restored.apply_rng()

    assert restored.progress == golden.progress_of(step)
    tensors = golden.tensors_of(state)
    assert len(tensors) == 3 + 3 * 3, "parameters, and three slots of each"
    fsdp_training.assert_same(tensors, expected(tensors, step))
    fsdp_training.assert_same(golden.frozen_of(state), expected(golden.frozen_of(state), 0))
    assert state["model"].head.weight is state["model"].embed.weight
    assert state["scheduler"].last_epoch == step
    assert dict(state["scheduler"].milestones) == {1: 1, 3: 2}
    assert [group["lr"] for group in state["optimizer"].param_groups] == state["scheduler"].get_last_lr()
    fsdp_training.assert_same(state["tensors"].state, golden.others_of(step))
    assert_equal(state["values"].state, golden.values_of(step))
    assert_equal(kinds, golden.kinds_of(0 if is_of_version_1(folder) else step))
    assert_equal(state["counter"].value, {"of rank": 0, "tensor": torch.tensor([0, step])})
    assert random.random() == random.Random(golden.SEED).random()
    assert torch.equal(torch.rand(3), torch.rand(3, generator=torch.Generator().manual_seed(golden.SEED)))


@steps
@no_group
def test_stock_torch_loads_it_into_one_process(folder: Path, step: int) -> None:
    sample = golden.build(is_sharded=False)
    golden.fill(sample, 0, step)
    tensors = {name: torch.zeros_like(tensor) for name, tensor in golden.tensors_of(sample).items()}
    tensors["model.head.weight"] = torch.zeros(7, 4)
    others = {f"tensors.{name}": torch.zeros_like(tensor) for name, tensor in golden.others_of(step).items()}
    leaves: dict[str, Any] = {
        "scheduler": {"last_epoch": 0},
        "values": {"tuple": ()},
        "progress": {"step": 0, "epoch": 0, "samples": 0},
    }
    frozen = {name: torch.zeros_like(tensor) for name, tensor in golden.frozen_of(sample).items()}
    checkpoint = checkpoint_of(folder, step)
    place = folder / component_prefix(checkpoint.entry.key, TRAIN)

    dcp.load(
        frozen, storage_reader=FileSystemReader(folder / checkpoint.read_manifest().prefixes()["reference.frozen"])
    )
    dcp.load(tensors, storage_reader=FileSystemReader(place))
    dcp.load(others, storage_reader=FileSystemReader(place))
    dcp.load(leaves, storage_reader=FileSystemReader(place))

    assert torch.equal(tensors.pop("model.head.weight"), tensors["model.embed.weight"])
    fsdp_training.assert_same(tensors, expected(tensors, step))
    fsdp_training.assert_same(frozen, expected(frozen, 0))
    fsdp_training.assert_same(others, {f"tensors.{name}": tensor for name, tensor in golden.others_of(step).items()})
    assert leaves["scheduler"]["last_epoch"] == step
    assert leaves["values"]["tuple"] == golden.values_of(step)["tuple"]
    assert leaves["progress"] == {"step": step, "epoch": 1, "samples": 8 * step}


def test_it_is_continued_by_a_new_driver_and_stays_closed_to_those_that_started_it_before(
    folder: Path, tmp_path: Path
) -> None:
    """Its `latest` is then of the newest format version."""
    shutil.copytree(folder, tmp_path / "run")
    store = open_store(f"file://{tmp_path}/run")
    before = read_latest(store)

    zoe = Driver(store, "zoe")
    attempt, entry = zoe.claim("g1")
    zoe.save(attempt.number, 1, step=100, keep_last=None)

    body = assert_invariants(store)
    assert latest_tree(store)["format_version"] == FORMAT_VERSION
    assert entry == before.live[-1]
    assert body.live[:-1] == before.live
    assert body.owners == (*before.owners, "zoe")
    for owner in before.owners:
        with pytest.raises(FencedError):
            Driver(store, owner).claim("g2")


def test_its_history_has_its_commits_and_since_version_4_the_metrics_of_every_step(folder: Path) -> None:
    history = raycheck.open_run(f"file://{folder}").history()

    losses = {
        step: value for line in history.curve("loss") for step, value in zip(line.steps, line.values, strict=True)
    }
    rates = [value.hex() for line in history.curve("lr") for value in line.values]
    assert history.problems == ()
    if folder.parent.name in ("v1", "v2", "v3"):
        assert losses == {step: 1 / step for step in golden.STEPS}
        assert [commit.state for commit in history.commits] == ["kept", "kept"]
        return
    assert losses == {1: 1.0, 2: 0.5, 3: 1 / 3, 4: 0.25}
    assert rates == [value.hex() for value in (0.5, math.nan, math.inf, 0.125)]
    assert [row["time"] for row in history.rows()] == [1_700_000_000.125 + step for step in range(1, 5)]
    assert [(commit.step, commit.state, commit.why) for commit in history.commits] == [
        (2, "kept", ""),
        (4, "kept", ""),
        (1, "deleted", "expired"),
    ]


def is_of_version_1(folder: Path) -> bool:
    return folder.parent.name == "v1"


def checkpoint_of(folder: Path, step: int) -> Checkpoint:
    return raycheck.open_run(f"file://{folder}").at(step)._stored


def expected(tensors: fsdp_training.Tensors, step: int) -> fsdp_training.Tensors:
    return {name: golden.value_of(name, step, tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()}


def assert_equal(found: Any, wanted: Any) -> None:
    """Equal and of the same types, all the way down."""
    assert type(found) is type(wanted)
    if isinstance(wanted, dict):
        assert list(found) == list(wanted)
        for key in wanted:
            assert_equal(found[key], wanted[key])
    elif isinstance(wanted, list | tuple):
        assert len(found) == len(wanted)
        for one, other in zip(found, wanted, strict=True):
            assert_equal(one, other)
    elif isinstance(wanted, torch.Tensor | np.ndarray):
        assert found.dtype == wanted.dtype
        assert found.tolist() == wanted.tolist()
    elif isinstance(wanted, BytesIO):
        assert (found.getvalue(), found.tell()) == (wanted.getvalue(), wanted.tell())
    else:
        assert found == wanted
        assert getattr(found, "maxlen", None) == getattr(wanted, "maxlen", None)
