"""The metrics of each commit as tables show them: with NaN and infinities, which `latest` does not have."""

from collections import defaultdict
from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from raycheck.views.history import RunHistory


def measured_of(history: "RunHistory") -> Mapping[str, Mapping[str, float]]:
    """Return the metrics of all commits by the checkpoint's name; a score takes the place of a metric of its name.

    `latest` has the finite ones. The others come from the metrics of the step that was saved.
    """
    found = {commit.key: {**commit.metrics, **commit.scores} for commit in history.commits}
    of_step: dict[tuple[int, int], list[dict[str, float]]] = defaultdict(list)
    for attempt in history.attempts:
        for commit in attempt.commits:
            of_step[attempt.number, commit.step].append(found[commit.key])
    for name in history.metrics:
        if all(name in values for values in found.values()):
            continue
        for line in history.curve(name):
            for step, value in zip(line.steps, line.values, strict=True):
                for values in of_step.get((line.attempt, step), ()):
                    values.setdefault(name, value)
    return found
