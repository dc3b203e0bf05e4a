"""Uploads by the node's actor: what a rank has staged is committed although it dies, and nothing depends on the actor."""

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from uuid import uuid4

import psutil
import pytest
import ray

import raycheck
from raycheck.bucket.store import open_store
from raycheck.bucket.store.address import join_uri
from raycheck.group.worker.group_restore import claim_run
from raycheck.on_ray.nodes import node_uploads
from raycheck.on_ray.nodes.node_uploads import NodeUploads
from tests.on_ray.nodes.test_node_saves import staged_and_reported
from tests.support.histories.invariants import assert_invariants
from tests.support.processes.background_call import InThread
from tests.support.processes.ray_jobs import story
from tests.support.servers.http_fault_proxy import Rule, fault_proxy

pytestmark = [pytest.mark.ray, pytest.mark.filterwarnings("ignore")]  # Ray itself warns
BY_NODE = {"upload_by": "node"}


def agents() -> list[int]:
    """Returns the processes that upload for a node of this test's Ray, by the title that Ray gives them."""
    found = []
    for process in psutil.Process().children(recursive=True):
        try:
            if "ray::NodeAgent" in " ".join(process.cmdline()):
                found.append(process.pid)
        except psutil.Error:
            continue
    return found


def until_gone(pids: list[int], within_s: float = 90.0) -> None:
    deadline = time.monotonic() + within_s
    while any(psutil.pid_exists(pid) for pid in pids):
        assert time.monotonic() < deadline, "the actor outlives its run"
        time.sleep(0.1)


@contextmanager
def held_in_upload(job, s3: str, checkpoint: str) -> Iterator[tuple[str, Rule, InThread]]:
    """Trains until both ranks' shards of this checkpoint are with the actor, and rank 1's is on its way.

    Yields the storage, what holds that one, and the fit."""
    with fault_proxy(s3) as proxy:
        storage = join_uri(proxy.uri, uuid4().hex)
        held = proxy.rule("hold", "PUT", f"{checkpoint}/train/__1_0.distcp")
        other = proxy.rule("hold", "PUT", f"{checkpoint}/train/__0_0.distcp")
        fitting = InThread(lambda: raycheck.fit(job(storage, "run", settings=BY_NODE)))
        held.wait()
        other.wait()
        other.release()
        yield storage, held, fitting


def test_a_save_that_was_staged_is_committed_although_its_ranks_die(job, s3: str, tmp_path: Path) -> None:
    with held_in_upload(job, s3, "step-000000012-a1-s3") as (storage, held, fitting):
        uploading = agents()
        assert len(uploading) == 1, "one actor for the ranks of a node"
        ranks = [story(tmp_path, "start", rank=rank)[0]["pid"] for rank in (0, 1)]

        for pid in ranks:
            os.kill(pid, signal.SIGKILL)
        until_gone(ranks)
        held.release()
        fitting.join()

        body = assert_invariants(open_store(join_uri(storage, "run")))
        assert [event["at"] for event in story(tmp_path, "start")] == [0, 12], "the second attempt waited for it"
        assert body is not None
        assert "step-000000012-a1-s3" in [entry.key for entry in body.live]
        until_gone(uploading)
    for rank in (0, 1):
        steps = story(tmp_path, "step", rank=rank)
        assert len({event["step"] for event in steps}) == len({(event["step"], event["loss"]) for event in steps})


def test_ranks_upload_themselves_what_a_dead_actor_had(job, s3: str, tmp_path: Path) -> None:
    with held_in_upload(job, s3, "step-000000008-a1-s2") as (storage, held, fitting):
        (uploading,) = agents()

        os.kill(uploading, signal.SIGKILL)
        until_gone([uploading])
        held.release()
        fitting.join()

        assert [event["at"] for event in story(tmp_path, "start")] == [0], "no attempt was lost"
        run = raycheck.open_run(join_uri(storage, "run"))
        assert 8 in [checkpoint.step for checkpoint in run.checkpoints]
        assert_invariants(open_store(join_uri(storage, "run")))


@pytest.mark.slow
def test_a_save_that_an_actor_lost_with_its_ranks_is_not_waited_for(job, s3: str, tmp_path: Path) -> None:
    with held_in_upload(job, s3, "step-000000012-a1-s3") as (storage, _, fitting):
        for pid in [*agents(), *(story(tmp_path, "start", rank=rank)[0]["pid"] for rank in (0, 1))]:
            os.kill(pid, signal.SIGKILL)
        fitting.join()

        assert [event["at"] for event in story(tmp_path, "start")] == [0, 8]
        assert_invariants(open_store(join_uri(storage, "run")))


class Unreadable:
    """Is a value that only the process that made it can pickle and read."""

    def __reduce__(self):
        return open, ("/nowhere/at/all",)


@pytest.fixture
def group(cluster: None, tmp_path: Path) -> Iterator[raycheck.adapters.Group]:
    """Makes the place of the only rank of a group, in this process, with Ray's actors."""
    uri = f"file://{tmp_path}/run"
    coordinator = raycheck.adapters.start_coordinator(uri, owner=uuid4().hex)
    group = raycheck.adapters.RayGroup(id=uuid4().hex, uri=uri, rank=0, world_size=1, coordinator=coordinator)
    claim_run(group)
    yield group
    uploading = agents()
    ray.kill(coordinator)
    until_gone(uploading)


def test_what_the_actor_does_not_take_is_left_to_the_rank_and_twice_is_enough(group: raycheck.adapters.Group) -> None:
    uploads = NodeUploads(group, timeout_s=60.0, given_up=print)
    deadline = time.monotonic() + 60.0
    outcomes, apart = [], []

    for save in (1, 2, 3, 4):
        staged, report = staged_and_reported(group, save)
        values = {} if save == 1 else {"odd": Unreadable()}
        outcomes.append(uploads.save(replace(staged, values=values), report, deadline))
        apart.append(staged.staged[0].is_apart)

    assert [outcome and outcome.kind for outcome in outcomes] == ["committed", None, None, None]
    assert apart == [False, True, True, False], "the fourth was not given to the actor"


def test_an_actor_that_hangs_costs_one_save(group: raycheck.adapters.Group, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_uploads, "LAST_ANSWER_S", 0.0)
    uploads = NodeUploads(group, timeout_s=60.0, given_up=print)
    assert uploads.save(*staged_and_reported(group, 1), time.monotonic() + 60.0) is not None
    (hanging,) = agents()
    os.kill(hanging, signal.SIGSTOP)
    try:
        with pytest.raises(raycheck.errors.SaveFailedError, match="did not answer"):
            uploads.save(*staged_and_reported(group, 2), time.monotonic() + 0.5)
        outcome = uploads.save(*staged_and_reported(group, 3), time.monotonic() + 1.0)
    finally:
        os.kill(hanging, signal.SIGCONT)

    assert outcome is None


def test_an_actor_that_is_started_later_has_to_hurry_as_well(group: raycheck.adapters.Group) -> None:
    uploads = NodeUploads(group, timeout_s=60.0, given_up=print)
    uploads.hurry(7)
    uploads.prepare()

    def pauses(attempt: int) -> bool:
        return not ray.get(
            uploads._agent.__ray_call__.remote(lambda agent: agent._hurry_of(attempt).is_set()), timeout=30
        )

    deadline = time.monotonic() + 30.0
    while pauses(7):  # the actor is told without being waited for, and answers several calls at a time
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert pauses(8)
