"""What a user gives as `resume` is read in one place; tests of what each value restores are in test_commit.py."""

import numpy as np
import pytest

from raycheck.bucket.protocol.resume import Auto, Fork, Must, Never, Step, parse_resume
from raycheck.errors import ConfigError


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ("auto", Auto()),
        (None, Auto()),
        ("never", Never()),
        ("must", Must()),
        (0, Step(0)),
        (120, Step(120)),
        (np.int64(120), Step(120)),
        ("s3://bucket/run", Fork("s3://bucket/run")),
        ("/runs/old", Fork("/runs/old")),
    ],
)
def test_a_word_a_step_and_a_uri_are_told_apart(given, meant) -> None:
    assert parse_resume(given) == meant


@pytest.mark.parametrize("given", ["yesterday", "runs/old", "", 1.5])
def test_anything_else_is_refused(given) -> None:
    with pytest.raises(ConfigError, match=r"give 'auto', 'never', 'must', a step, or another run's URI"):
        parse_resume(given)
