"""Tests how a `resume` value is parsed. What each value restores is tested in test_commit.py."""

import numpy as np
import pytest

from raycheck.bucket.format.label import RESERVED
from raycheck.bucket.protocol.resume import WORDS, AtName, Auto, Fork, Must, Never, Step, parse_resume
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
        ("before-rlhf", AtName("before-rlhf")),
        ("step-000000020-a1-s2", AtName("step-000000020-a1-s2")),
    ],
)
def test_a_word_a_step_a_name_and_a_uri_are_told_apart(given, meant) -> None:
    assert parse_resume(given) == meant


@pytest.mark.parametrize("given", ["120", "runs/old", "", 1.5, "a b", "-x"])
def test_anything_else_is_refused(given) -> None:
    with pytest.raises(
        ConfigError, match=r"give 'auto', 'never', 'must', 'best', a step, a checkpoint's name, or another"
    ):
        parse_resume(given)


def test_no_checkpoint_can_have_the_name_of_a_word():
    assert set(WORDS) <= RESERVED
