"""No history of a run breaks an invariant (histories.py): short ones in every run, 500 steps each with --all."""

import itertools
import time

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from tests.bucket.histories import Histories

BUDGET_S = 200.0

settings.register_profile(
    "histories",
    max_examples=80,
    stateful_step_count=50,
    derandomize=True,
    deadline=None,
    database=None,
    suppress_health_check=list(HealthCheck),
)


def test_no_history_breaks_an_invariant():
    run_state_machine_as_test(Histories, settings=settings.get_profile("histories"))
