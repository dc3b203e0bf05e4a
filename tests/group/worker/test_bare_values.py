"""Tests bare values in the state: each save reads them from the caller's dict, and a restore writes them there."""

from typing import Any

import pytest
import torch

import raycheck
from tests.support.processes.coordinator_in_thread import group_of


class Rank:
    def __init__(self, uri: str) -> None:
        self.state: dict[str, Any] = {
            "best": 9.0,
            "history": [],
            "queue": torch.zeros(2),
            "model": torch.nn.Linear(1, 1),
        }
        self.history, self.queue = self.state["history"], self.state["queue"]
        self.late: list[int] = []
        self.ckpt = raycheck.Checkpointer(self.state, raycheck.SaveSettings(every_steps=2), group=group_of(uri)[0])
        self.ckpt.add("late", self.late)

    def run(self, steps: int) -> tuple[Any, ...]:
        self.ckpt.restore()
        found = self.state["best"], list(self.history), self.queue.tolist(), list(self.late)
        for step in range(steps):
            self.state["best"] -= 1.0
            self.history.append(step)
            self.late.append(-step)
            self.queue += 1
            self.ckpt.end_step()
        self.ckpt.close()
        return found


def test_bare_values_go_on_in_the_dict_that_the_script_holds(uri: str) -> None:
    first = Rank(uri).run(4)
    second = Rank(uri).run(0)

    assert first == (9.0, [], [0.0, 0.0], [])
    assert second == (5.0, [0, 1, 2, 3], [4.0, 4.0], [0, -1, -2, -3])


def test_a_bare_number_that_is_added_is_refused_since_nobody_would_see_it_restored(uri: str) -> None:
    with pytest.raises(
        raycheck.errors.ConfigError, match=r"state\['more'\] is a float .*keep it in your own dict or list"
    ):
        Rank(uri).ckpt.add("more", 0.5)
