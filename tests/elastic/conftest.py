"""Makes a multi-node Ray, a run and a driver for each row of the matrix, and prints the table of what each row cost."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

from raycheck.bucket.store.address import join_uri
from tests.support.processes.ray_cluster import Arena, Driver, arena

_ROWS = pytest.StashKey[list[str]]()


@pytest.fixture
def nodes(forks: None) -> Iterator[Arena]:
    """Makes a new Ray for each row: what Ray keeps of killed drivers would hold nodes back."""
    with arena() as made:
        yield made


@pytest.fixture
def drive(nodes: Arena, s3: str, tmp_path: Path) -> Iterator[Callable[..., Driver]]:
    """Starts drivers of this test's run, or of another `name`: drive(workers=2, steps=40, settings={...}) -> Driver."""
    uri = join_uri(s3, uuid4().hex)
    started: list[Driver] = []

    def start(**config: Any) -> Driver:
        folder = tmp_path / config.get("name", "")
        folder.mkdir(exist_ok=True)
        started.append(nodes.drive(folder, config.pop("uri", uri), **config))
        return started[-1]

    yield start
    for driver in started:
        driver.close()


@pytest.fixture
def row(request: pytest.FixtureRequest) -> Callable[..., None]:
    """Adds lines to the table that is printed at the end of the tests."""

    def add(what: str, *, lost_steps: int, seconds: float) -> None:
        rows = request.config.stash.setdefault(_ROWS, [])
        rows.append(f"{what:<60} {lost_steps:>3} steps lost, {seconds:6.1f} s from the failure to the first new step")

    return add


def pytest_terminal_summary(terminalreporter: Any) -> None:
    for line in terminalreporter.config.stash.get(_ROWS, []):
        terminalreporter.write_line(line)
