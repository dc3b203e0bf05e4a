"""A rank's calls of its coordinator, where that is a Ray actor."""

from pathlib import Path

import pytest
import ray

from raycheck.adapters import RayGroup, start_coordinator
from raycheck.errors import StoreError

pytestmark = pytest.mark.ray


def test_a_coordinator_that_has_ended_is_not_waited_for(cluster: None, tmp_path: Path) -> None:
    uri = f"file://{tmp_path}/run"
    coordinator = start_coordinator(uri, owner="me")
    group = RayGroup(id="group", uri=uri, rank=1, world_size=2, coordinator=coordinator)
    assert group.ask("has_trained", timeout_s=60, what="a call") is False

    ray.kill(coordinator)

    with pytest.raises(StoreError, match=r"rank 1: a call: the coordinator has ended.*start the workers again"):
        group.ask("has_trained", timeout_s=60, what="a call")
