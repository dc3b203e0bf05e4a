"""Bare values through a Checkpointer: they are read from the caller's own dict at each save, and put back there."""

from typing import Any
from uuid import uuid4

import pytest
import ray

import raycheck
from raycheck.bucket.store.address import join_uri
from tests.support.reused_processes import reused

pytestmark = [pytest.mark.ray, pytest.mark.filterwarnings("ignore")]  # Ray itself warns


@reused
class Rank:
    def __init__(self, uri: str, group: str, coordinator: Any) -> None:
        import torch

        self.state: dict[str, Any] = {
            "best": 9.0,
            "history": [],
            "queue": torch.zeros(2),
            "model": torch.nn.Linear(1, 1),
        }
        self.history, self.queue = self.state["history"], self.state["queue"]
        self.late: list[int] = []
        place = raycheck.Group(id=group, uri=uri, rank=0, world_size=1, coordinator=coordinator)
        self.ckpt = raycheck.Checkpointer(self.state, raycheck.SaveSettings(every_steps=2), group=place)
        self.ckpt.add("late", self.late)

    def add(self, value: Any) -> None:
        self.ckpt.add("more", value)

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


def rank_of(uri: str, group: str) -> Any:
    return Rank.remote(uri, group, raycheck.start_coordinator(uri, owner=group, suffix=f":{group}"))


def test_bare_values_go_on_in_the_dict_that_the_script_holds(cluster: None, s3: str) -> None:
    uri = join_uri(s3, uuid4().hex)

    first = ray.get(rank_of(uri, "first").run.remote(4))
    second = ray.get(rank_of(uri, "second").run.remote(0))

    assert first == (9.0, [], [0.0, 0.0], [])
    assert second == (5.0, [0, 1, 2, 3], [4.0, 4.0], [0, -1, -2, -3])


def test_a_bare_number_that_is_added_is_refused_since_nobody_would_see_it_restored(cluster: None, s3: str) -> None:
    rank = rank_of(join_uri(s3, uuid4().hex), "first")

    with pytest.raises(
        raycheck.ConfigError, match=r"state\['more'\] is a float .*hold it in a dict or list of your own"
    ):
        ray.get(rank.add.remote(0.5))
