"""A rank's calls of its coordinator, where that is a Ray actor."""

from pathlib import Path
from typing import Any

import pytest
import ray
from ray.exceptions import ActorDiedError, ActorUnavailableError, GetTimeoutError

from raycheck.adapters import RayGroup, start_coordinator
from raycheck.errors import StoreError
from raycheck.group.coordinator.messages import RankProof
from tests.support.processes.ray_cluster import wait_for

pytestmark = pytest.mark.ray


def has_ended(actor: Any) -> bool:
    """Return whether Ray says so. It answers ray.kill before the actor has ended, which may still answer a call then."""
    try:
        ray.get(actor.__ray_ready__.remote(), timeout=10)
    except ActorDiedError:
        return True
    except (ActorUnavailableError, GetTimeoutError):
        return False
    return False


def test_a_coordinator_that_has_ended_is_not_waited_for(cluster: None, tmp_path: Path) -> None:
    uri = f"file://{tmp_path}/run"
    coordinator = start_coordinator(uri, owner="me")
    group = RayGroup(id="group", uri=uri, rank=1, world_size=2, coordinator=coordinator)
    assert group.ask("has_trained", timeout_s=60, what="a call") is False

    ray.kill(coordinator)
    wait_for(lambda: has_ended(coordinator), within_s=60, why="the actor has not ended")

    with pytest.raises(StoreError, match=r"rank 1: a call: the coordinator has ended.*start the workers again"):
        group.ask("has_trained", timeout_s=60, what="a call")


@pytest.mark.slow
def test_thousands_of_waiting_calls_do_not_hold_up_another_one(cluster: None, tmp_path: Path) -> None:
    coordinator = start_coordinator(f"file://{tmp_path}/run", owner="me")
    ray.get(coordinator.claim.remote("group", 5000), timeout=60)
    proofs = [RankProof(group="group", rank=rank, world_size=5000, stream=None, proof=None) for rank in range(4200)]

    waiting = [coordinator.compare_data.remote(proof, 300.0) for proof in proofs]

    assert ray.get(coordinator.has_trained.remote(), timeout=120) is False
    assert ray.wait(waiting, timeout=0)[0] == [], "all of them wait still"
    ray.kill(coordinator)
