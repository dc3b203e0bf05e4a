"""Tests that no history of a run breaks an invariant. By default the histories are short; --all has 500 steps each.

A failure prints the steps of its history. With `RAYCHECK_SHRINK=1`, hypothesis looks for the shortest history that
fails, which takes minutes. The mutants prove that the machine can fail at all.
"""

import itertools
import os
import time

import pytest
from hypothesis import HealthCheck, Phase, seed, settings
from hypothesis.stateful import run_state_machine_as_test

from raycheck.bucket.pages import PageMissingError
from raycheck.errors import RaycheckError
from tests.support.histories import stepped_processes
from tests.support.histories.broken_protocols import MUTANTS, PAGE_MUTANTS, Mutant
from tests.support.histories.history_rules import Histories
from tests.support.histories.small_pages import small_pages

pytestmark = pytest.mark.enumeration

LONG_S = 180.0
QUICK = settings(
    max_examples=4 * settings().max_examples // 5,
    stateful_step_count=50,
    report_multiple_bugs=False,
    suppress_health_check=list(HealthCheck),
    phases=tuple(Phase) if os.environ.get("RAYCHECK_SHRINK") else (Phase.generate,),
)
LONG = settings(QUICK, max_examples=4, stateful_step_count=500, derandomize=False, print_blob=True)


@pytest.fixture(autouse=True)
def patience(monkeypatch):
    """Let a call be suspended for the whole of its history."""
    monkeypatch.setattr(stepped_processes, "STEP_DEADLINE_S", 600.0)


@pytest.mark.hypothesis  # so that --search runs it
def test_no_history_of_50_steps_breaks_an_invariant():
    """I1 to I8 hold in random histories of several processes."""
    run_state_machine_as_test(Histories, settings=QUICK)


@pytest.mark.hypothesis
def test_no_history_breaks_an_invariant_where_most_checkpoints_are_in_pages():
    with small_pages():
        run_state_machine_as_test(Histories, settings=settings(QUICK, max_examples=QUICK.max_examples // 2))


@pytest.mark.slow
def test_no_history_of_500_steps_breaks_an_invariant():
    end = time.monotonic() + LONG_S
    for number in itertools.count(1):
        run_state_machine_as_test(Histories, settings=LONG)
        if time.monotonic() > end:
            print(f"{number} times {LONG.max_examples} histories")
            break


def run_short_ones() -> None:
    """Run a few histories several times, as hypothesis begins each time with tiny ones."""
    for number in range(10):
        machine = seed(number)(type("Histories", (Histories,), {}))
        run_state_machine_as_test(machine, settings=settings(QUICK, max_examples=40, derandomize=False))


@pytest.mark.slow
@pytest.mark.parametrize("mutant", [pytest.param(it, id=it.lacks.replace(" ", "-")) for it in MUTANTS])
def test_the_histories_notice_when(mutant: Mutant, monkeypatch):
    mutant.install(monkeypatch)

    # KeyError: an answer about an attempt that the ledger does not know, since it refused the write
    with pytest.raises((AssertionError, KeyError, RaycheckError)):
        run_short_ones()


@pytest.mark.slow
@pytest.mark.parametrize("mutant", [pytest.param(it, id=it.lacks.replace(" ", "-")) for it in PAGE_MUTANTS])
def test_the_histories_with_pages_notice_when(mutant: Mutant, monkeypatch):
    mutant.install(monkeypatch)

    with small_pages(), pytest.raises((AssertionError, KeyError, RaycheckError, PageMissingError)):
        run_short_ones()
