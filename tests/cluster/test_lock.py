"""The locked versions are whole, and fit what pyproject.toml and the versions chosen by hand ask for."""

import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
INSTALLED = ("train", "demo", "dev")
"""The extras that cluster/demo.sh and tests/run.sh install."""
each_lock = pytest.mark.parametrize("python", ["3.11", "3.12"])


def locked(python: str) -> dict[str, Version]:
    lines = (ROOT / "cluster" / f"constraints-{python}.txt").read_text().splitlines()
    assert [line for line in lines if not re.fullmatch(r"[a-z0-9.-]+==[0-9a-z.]+", line)] == []
    pairs = [line.split("==") for line in lines]
    return {canonicalize_name(name): Version(version) for name, version in pairs}


def wanted(extras: Iterator[str] | tuple[str, ...], python: str) -> Iterator[Requirement]:
    """Yields what an installation with these extras asks for itself, also by way of the project's other extras."""
    for text in [
        *PROJECT["dependencies"],
        *(text for extra in extras for text in PROJECT["optional-dependencies"][extra]),
    ]:
        requirement = Requirement(text)
        if requirement.name == PROJECT["name"]:
            yield from wanted(tuple(requirement.extras), python)
        elif requirement.marker is None or requirement.marker.evaluate({"python_version": python}):
            yield requirement


@each_lock
def test_every_requirement_is_locked_at_a_version_that_fits(python: str) -> None:
    versions = locked(python)

    for requirement in wanted(INSTALLED, python):
        assert requirement.specifier.contains(versions[canonicalize_name(requirement.name)]), requirement


@each_lock
def test_the_versions_chosen_by_hand_are_the_locked_ones(python: str) -> None:
    chosen = [line for line in (ROOT / "cluster/constraints.txt").read_text().splitlines() if "==" in line]
    versions = locked(python)

    assert chosen
    for requirement in map(Requirement, chosen):
        assert requirement.specifier.contains(versions[canonicalize_name(requirement.name)]), requirement


@each_lock
def test_a_lock_has_none_of_the_packages_of_torchs_cuda_build(python: str) -> None:
    assert [name for name in locked(python) if re.match("nvidia|cuda|triton", name)] == []
