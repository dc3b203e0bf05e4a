"""How a batch is cut into groups that go through the model at a time."""

import numpy as np
import pytest

from raycheck.tinker.engine import passes
from raycheck.tinker.wire.training_data import TrainingDatum


def datum(length: int, width: int | None = None) -> TrainingDatum:
    shape = (length,) if width is None else (length, width)
    return TrainingDatum(tokens=np.zeros(length, np.int64), target_tokens=np.zeros(shape, np.int64), inputs={})


def sizes(*data: TrainingDatum) -> list[int]:
    return [len(group) for group in passes._groups(data)]


def test_with_one_target_for_each_token_groups_are_bounded_by_their_tokens_alone() -> None:
    assert sizes(*[datum(1000)] * 20) == [8, 8, 4]
    assert sizes(datum(10), datum(10000), datum(4096), datum(4096, 1), datum(1)) == [1, 1, 2, 1]


def test_wide_targets_are_split_into_bounded_groups() -> None:
    width = passes.MAX_GROUP_TARGETS // 40

    assert sizes(*[datum(1, width)] * 100) == [40, 40, 20]


@pytest.mark.parametrize("place", [0, 50, 99])
def test_one_wide_sequence_does_not_widen_all_others(place) -> None:
    data = [datum(64)] * 99
    data.insert(place, datum(64, passes.MAX_GROUP_TARGETS // 128))

    for group in passes._groups(data):
        longest, widest = max(len(item.tokens) for item in group), max(passes._width(item) for item in group)
        assert len(group) * longest * widest <= passes.MAX_GROUP_TARGETS
