"""Runs that use each other's directories, and that somebody has moved by the store's own tools."""

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import raycheck
from raycheck.bucket.format.latest import dump_latest
from raycheck.bucket.reading import read_latest
from raycheck.bucket.store import open_store
from raycheck.errors import CorruptError, DamagedError
from tests.support.processes.coordinator_in_thread import group_of
from tests.support.processes.save_without_ray import save_state

KEY = "step-000000007-a1-s1"


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """A folder with the run "base" and its fork "variant", which uses its directory."""
    save_state(open_store(f"{tmp_path}/runs/base"), {"model": torch.nn.Linear(30, 20)}, step=7)
    raycheck.catalog.fork_run(f"{tmp_path}/runs/base", f"{tmp_path}/runs/variant")
    return tmp_path / "runs"


def restores(uri: str) -> None:
    raycheck.open_run(uri).restore(into={"model": torch.nn.Linear(30, 20)})


def trains(uri: str) -> None:
    (group,) = group_of(f"file://{uri}")
    with raycheck.Checkpointer({"model": torch.nn.Linear(30, 20)}, group=group) as ckpt:
        ckpt.restore()


READERS: dict[str, Callable[[str], object]] = {
    "restore": restores,
    "training": trains,
    "download": lambda uri: raycheck.catalog.download(uri, f"{uri}-here"),
    "pack": lambda uri: raycheck.catalog.pack(uri, f"{uri}.tar"),
    "cp": lambda uri: raycheck.catalog.copy_run(uri, f"{uri}-copy", at=7),
}


@pytest.mark.parametrize("reader", READERS)
def test_a_reader_says_which_run_is_not_where_it_was_and_marks_nothing_as_damaged(runs: Path, reader: str) -> None:
    shutil.move(runs / "base", runs / "elsewhere")

    with pytest.raises(CorruptError) as error:
        READERS[reader](f"{runs}/variant")

    assert not isinstance(error.value, DamagedError)
    assert f"file://{runs}/variant: ../base/{KEY}, a directory that checkpoint" in str(error.value)
    assert f"is not there: there is no run at file://{runs}/base. " in str(error.value)
    assert "Put it back" in str(error.value)
    assert not any(entry.damaged for entry in read_latest(open_store(f"{runs}/variant")).live)
    shutil.move(runs / "elsewhere", runs / "base")
    READERS[reader](f"{runs}/variant")


def test_a_run_that_was_moved_itself_says_so(runs: Path) -> None:
    (runs / "deeper").mkdir()
    shutil.move(runs / "variant", runs / "deeper" / "variant")

    with pytest.raises(CorruptError, match=f"there is no run at file://{runs}/deeper/base") as error:
        trains(f"{runs}/deeper/variant")
    (bad,) = [it for it in raycheck.open_run(f"{runs}/deeper/variant").head.verify() if it.key.endswith("distcp")]

    assert not isinstance(error.value, DamagedError)
    assert bad.problem.startswith(f"missing: file://{runs}/deeper/variant: ../base/{KEY}, a directory")


def test_another_run_in_the_place_of_the_one_that_was_moved_is_not_taken_for_it(runs: Path) -> None:
    shutil.move(runs / "base", runs / "elsewhere")
    store = open_store(f"{runs}/base")
    save_state(store, {"model": torch.nn.Linear(30, 20)}, step=8)
    store.put("latest", dump_latest(replace(read_latest(store), run_id="another")))

    with pytest.raises(CorruptError, match="there is a different run now") as error:
        trains(f"{runs}/variant")

    assert not isinstance(error.value, DamagedError)


def test_a_directory_that_is_gone_from_the_very_run_that_had_it_is_damage(runs: Path) -> None:
    shutil.rmtree(runs / "base" / "checkpoints")

    with pytest.raises(DamagedError, match="although latest lists its checkpoint"):
        trains(f"{runs}/variant")
