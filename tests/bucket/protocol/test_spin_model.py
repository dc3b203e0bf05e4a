"""Tests models of the protocol in all their states: protocol.pml and pages.pml say what is modelled, within which bounds.

Each run of spin answers one of two questions: does the protocol hold in this configuration, and does the checker find a
violation when one rule is removed? These tests run with --all only, because spin is a Debian package:
pytest --all tests/bucket/protocol/test_spin_model.py.
"""

import os
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

MODEL, PAGES = (Path(__file__).with_name(name) for name in ("protocol.pml", "pages.pml"))
FORMAT = Path(__file__).parents[3] / "raycheck/bucket/FORMAT.md"
CONFIGURATIONS = {
    "everything": "DRIVER_2 RESTART FAULTS=1 SWEEP WHOLE",
    "restart": "RESTART FAULTS=2 S=2 INFLIGHT=2",
    "regroup": "RESTART FAULTS=1 KILLS=1",
    "drivers": "DRIVER_2 FAULTS=2 KILLS=1 WHOLE",
    "sweep": "DRIVER_2 KILLS=1 SWEEP",
    "references": "COMPONENTS RESTART S=3 INFLIGHT=2",
    "same-step": "TRACK FAULTS=1 S=2 KEEP=2",
    "index": "INDEX RESTART FAULTS=1",
    "pin": "PIN RESTART FAULTS=1 S=2",
    "reader": "READER COMPONENTS DRIVER_2 S=2",
    "loss": "LOSS TRACK DRIVER_2 RESTART",
    "loss-late": "LOSS TRACK DRIVER_2 FAULTS=1 WHOLE",
    "loss-sweep": "LOSS SWEEP DRIVER_2 RESTART ONE_GROUP WHOLE",
    "rewind": "REWIND DRIVER_2 FAULTS=1 S=2 KEEP=2 WHOLE",
}
CONFIGURATIONS_OF_PAGES = {
    "pages": "FAULTS=1 PASSES=2",
    "pages-put-back": "FAULTS=1 HAND",
}
RULES = {  # what catches each rule's absence: configuration, and words of the assertion or the kind of end
    "CAS": ("drivers", "IN(k)|committed"),
    "EFFECT": ("restart", "L.live"),
    "RECOMPUTE": ("pin", "pinned"),
    "SEEN": ("loss", "head"),
    "OWNERS": ("drivers", "owners"),
    "PROVEN": ("loss", "head"),
    "SOFT": ("regroup", "owner"),
    "PROOF": ("regroup", "half2"),
    "KEY": ("same-step", "overwritten"),
    "PURE": ("index", "named"),
    "ATTEMPT": ("regroup", "L.attempt"),
    "LAST": ("restart", "head"),
    "REFS": ("references", "base"),
    "LEAVE": ("restart", "half1"),
    "EVICT_FIRST": ("restart", "half1"),
    "HELD": ("references", "base"),
    "LOWER": ("sweep", "half1"),
    "REFUSE": ("loss-sweep", "gone"),
    "REREAD": ("reader", "live"),
    "MOVED": ("rewind", "owners"),
    "NAMED": ("drivers", "owners"),
    "COUNTER": ("pages", "there"),
    "WRITTEN_FIRST": ("pages", "there"),
    "TOKEN": ("pages", "content"),
    "PAST": ("pages-put-back", "there"),
    "LISTED_FIRST": ("pages-put-back", "there"),
    "AGAIN": ("pages", "missing"),
}
NOT_MODELLED = {
    6: "probe",
    7: "a bounded wait: the model's claims need not wait for commits",
    21: "with 20",
    26: "reserved",
    27: "with 10",
    30: "fork; test_holds enumerates it",
    32: "repair",
    33: "moves neither head nor attempt; test_crashes and test_interleavings enumerate it",
    34: "exports, which nothing restores",
    35: "archives, which are no part of a run",
    36: "unpacking, a fork from outside",
    37: "a delete by hand; test_delete enumerates it",
    38: "mirrors: tests/catalog enumerates the crashes of a copy",
    39: "a base, borrowed as by a fork; test_holds enumerates it",
    41: "history, which nothing restores",
    42: "published versions, which nothing restores",
    43: "with 42; tests/published/test_kills.py enumerates its crashes",
    44: "with 42",
    45: "with 42",
    46: "a form of bytes",
}
SEARCH_TIMEOUT_S = 200
MEMORY_MIB = 6000


@dataclass(frozen=True, kw_only=True, slots=True)
class Search:
    """What spin found in a model, and the folder with its program and trail."""

    folder: Path
    model: str
    flags: list[str]
    output: str

    def number(self, what: str) -> int:
        found = re.search(what, self.output)
        assert found, self.output
        return int(found.group(1))

    @property
    def errors(self) -> int:
        return self.number(r"errors: (\d+)")

    @property
    def states(self) -> int:
        return self.number(r"(\d+) states, stored")

    @property
    def is_complete(self) -> bool:
        return not re.search(
            r"max search depth too small|out of memory|interrupted|truncated|\(Search not completed", self.output
        )

    def story(self) -> str:
        """Tell the counterexample in words: what each actor did, one line per request."""
        command = ["spin", *self.flags, "-B", "-t", self.model]
        replay = subprocess.run(
            command, cwd=self.folder, capture_output=True, text=True, timeout=60, check=False
        ).stdout
        return "\n".join(line for line in replay.splitlines() if not re.search(r"proc +\d|^\s*\d+:|^#processes", line))


@pytest.fixture(scope="session")
def spin() -> None:
    if shutil.which("spin") is None and os.geteuid() == 0 and shutil.which("apt-get"):
        subprocess.run(
            ["apt-get", "install", "--yes", "--quiet", "spin"], check=False, capture_output=True, timeout=200
        )
    missing = [name for name in ("spin", "cc") if shutil.which(name) is None]
    if missing:
        pytest.fail(f"{' and '.join(missing)} not found: apt-get install spin gcc libc6-dev")


def search(folder: Path, configuration: str, *more: str) -> Search:
    model = PAGES if configuration in CONFIGURATIONS_OF_PAGES else MODEL
    flags = [f"-D{word}" for word in [*(CONFIGURATIONS | CONFIGURATIONS_OF_PAGES)[configuration].split(), *more]]
    shutil.copy(model, folder)
    # A broken variant ends early: compiling it well would take longer than the search.
    options = ["-O0" if more else "-O2", "-w", "-DSAFETY", "-DCOLLAPSE", f"-DMEMLIM={MEMORY_MIB}", "-DVECTORSZ=1024"]
    run(folder, "spin", "-a", *flags, model.name)
    run(folder, "cc", *options, "-o", "pan", "pan.c")
    return Search(folder=folder, model=model.name, flags=flags, output=run(folder, "./pan", "-m5000"))


def run(folder: Path, *command: str) -> str:
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=SEARCH_TIMEOUT_S, check=False)
    assert done.returncode == 0, f"{' '.join(command)}: {done.stdout}{done.stderr}"
    return done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("configuration", CONFIGURATIONS | CONFIGURATIONS_OF_PAGES)
def test_the_protocol_holds(spin: None, tmp_path: Path, configuration: str) -> None:
    found = search(tmp_path, configuration)

    print(f"{configuration}: {found.states} states")
    assert found.errors == 0, f"{found.output}\n{found.story()}"
    assert found.is_complete, found.output


@pytest.mark.slow
@pytest.mark.parametrize("rule", RULES)
def test_without_this_rule_the_checker_finds_a_violation(spin: None, tmp_path: Path, rule: str) -> None:
    configuration, words = RULES[rule]

    found = search(tmp_path, configuration, f"WITHOUT={rule}")

    assert found.errors == 1, found.output
    assert re.search(f"assertion violated.*({words})", found.output), f"{found.output}\n{found.story()}"


def test_every_rule_of_the_models_has_a_broken_variant() -> None:
    rules = re.findall(r"^#define ([A-Z_]+) +\d+ +/\*", MODEL.read_text() + PAGES.read_text(), re.MULTILINE)

    assert sorted(RULES) == sorted(rules)


def test_every_step_and_invariant_that_the_models_name_is_in_the_format() -> None:
    text = FORMAT.read_text()
    comments = re.findall(r"/\* +(.*?) *\*/", MODEL.read_text() + PAGES.read_text(), re.DOTALL)
    marks = [re.match(r"((I?\d+)(, |: |; | +|$))+", comment) for comment in comments]
    named = {name for mark in marks if mark for name in re.findall(r"I?\d+", mark.group())}
    in_format = {*re.findall(r"^(\d+)\. ", text, re.MULTILINE), *re.findall(r"\*\*(I\d+)\*\*", text)}
    in_format |= {step for pair in re.findall(r"^Steps (\d+) and (\d+)", text, re.MULTILINE) for step in pair}

    assert len(named) > 20
    assert named <= in_format, f"not in FORMAT.md: {sorted(named - in_format)}"
    steps = {int(step) for step in in_format if step.isdigit()}
    assert steps - {int(step) for step in named if step.isdigit()} <= set(NOT_MODELLED), (
        "model this step, or say why not"
    )
