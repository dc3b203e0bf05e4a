"""Two forks, copies, unpackings or imports that begin a run in one place at once: one run comes of it, and it is whole.

The second one runs from beginning to end just before a write of the first one, for each of its writes.
"""

import itertools
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

import raycheck
from raycheck.bucket.store import open_store
from raycheck.bucket.store.local import LocalStore
from raycheck.errors import ConfigError
from tests.support.histories.invariants import assert_invariants
from tests.support.processes.save_without_ray import save_state

STEP = 9
WRITES = ("put_parts", "put_if_absent", "put_if_match")


def model(number: int) -> torch.nn.Linear:
    module = torch.nn.Linear(30, 20)
    torch.nn.init.constant_(module.weight, number)
    torch.nn.init.constant_(module.bias, number)
    return module


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make runs 1 and 2 with a checkpoint of one step, and what they become as archives and as files of torch.save."""
    folder = tmp_path_factory.mktemp("sources")
    for number in (1, 2):
        save_state(open_store(f"{folder}/run-{number}"), {"model": model(number)}, step=STEP)
        raycheck.catalog.pack(f"{folder}/run-{number}", f"{folder}/{number}.tar")
        torch.save(model(number).state_dict(), folder / f"{number}.pt")
    return folder


BEGINNINGS: dict[str, Callable[[Path, int, str], Any]] = {
    "fork": lambda folder, number, dest: raycheck.catalog.fork_run(f"{folder}/run-{number}", dest, copy=True),
    "copy": lambda folder, number, dest: raycheck.catalog.copy_run(f"{folder}/run-{number}", dest, at=STEP),
    "unpack": lambda folder, number, dest: raycheck.catalog.unpack(f"{folder}/{number}.tar", dest),
    "import": lambda folder, number, dest: raycheck.catalog.import_checkpoint(f"{folder}/{number}.pt", dest, step=STEP),
}


def interrupt(write: int, dest: Path, second: Callable[[], object], patch: pytest.MonkeyPatch) -> None:
    """Have `second` run before the write of this number, from 1 on, below `dest`."""
    writes = itertools.count(1)

    def before(store: LocalStore) -> None:
        if store.uri.endswith(str(dest)) and next(writes) == write:
            with suppress(ConfigError):  # the place is taken
                second()

    for name in WRITES:
        real = getattr(LocalStore, name)
        patch.setattr(LocalStore, name, lambda self, *args, real=real: (before(self), real(self, *args))[1])


@pytest.mark.parametrize(("one", "other"), list(itertools.product(BEGINNINGS, repeat=2)))
def test_two_that_begin_a_run_in_one_place_at_once_never_write_to_one_key(
    sources: Path, tmp_path: Path, one: str, other: str
) -> None:
    for write in range(1, 30):
        dest = tmp_path / str(write)
        done = []

        def second(dest: Path = dest, done: list[bool] = done) -> None:
            done.append(True)
            BEGINNINGS[other](sources, 2, str(dest))

        with pytest.MonkeyPatch.context() as patch, suppress(ConfigError):
            interrupt(write, dest, second, patch)
            BEGINNINGS[one](sources, 1, str(dest))

        body = assert_invariants(open_store(str(dest)))
        assert body is not None
        run = raycheck.open_run(str(dest))
        assert not [found for found in run.head.verify() if found.problem]
        loaded = model(0)
        run.restore(into={"model": loaded})
        values = set(loaded.weight.unique().tolist()) | set(loaded.bias.unique().tolist())
        assert len(values) == 1
        if not done:
            assert values == {1.0}
            break
    assert 5 < write < 30


@pytest.mark.parametrize("begin", [*BEGINNINGS.values(), lambda folder, number, dest: raycheck.catalog.copy_run(
    f"{folder}/run-{number}", dest)], ids=[*BEGINNINGS, "copy of the whole run"])  # fmt: skip
def test_a_folder_of_runs_does_not_become_a_run(sources: Path, tmp_path: Path, begin: Callable[..., Any]) -> None:
    BEGINNINGS["fork"](sources, 1, f"{tmp_path}/runs/first")
    before = sorted(tmp_path.rglob("*"))

    with pytest.raises(ConfigError, match=r"runs: this is a folder of runs, and first is one of them.*runs/my-run"):
        begin(sources, 2, f"{tmp_path}/runs")

    assert sorted(tmp_path.rglob("*")) == before
    begin(sources, 2, f"{tmp_path}/runs/second")
    assert len(raycheck.list_runs(f"{tmp_path}/runs")) == 2


def test_a_run_begins_beside_folders_of_others_that_have_a_latest_of_another_kind(
    sources: Path, tmp_path: Path
) -> None:
    (tmp_path / "run/sweep/3").mkdir(parents=True)
    (tmp_path / "run/sweep/latest").symlink_to("3")
    (tmp_path / "run/logs/latest").mkdir(parents=True)

    BEGINNINGS["fork"](sources, 1, f"{tmp_path}/run")

    assert raycheck.open_run(f"{tmp_path}/run").head is not None
