"""A run that was killed goes on as if it had not been: with equal losses and weights, and with all that was committed."""

import os
import signal
from pathlib import Path
from uuid import uuid4

import pytest
import torch

import raycheck
from raycheck.bucket.format import object_keys
from raycheck.bucket.store import open_store
from raycheck.bucket.store.address import join_uri
from tests.support.histories.invariants import assert_invariants
from tests.support.processes.background_call import InThread
from tests.support.processes.ray_jobs import BATCH, SAMPLES, story
from tests.support.servers.http_fault_proxy import fault_proxy

pytestmark = [pytest.mark.ray, pytest.mark.filterwarnings("ignore")]  # Ray itself warns
STEPS = 2 * SAMPLES // BATCH


def losses(folder: Path, rank: int) -> dict[int, float]:
    """Returns the loss of each step. A step that ran twice must have had one loss both times."""
    by_step: dict[int, float] = {}
    for event in story(folder, "step", rank):
        assert by_step.setdefault(event["step"], event["loss"]) == event["loss"], f"step {event['step']} differs"
    return by_step


@pytest.fixture(scope="module")
def unbroken(cluster: None, tmp_path_factory) -> dict[str, Path]:
    """Returns the folders of runs that were never killed, by mode. Tests fill it on demand."""
    return {}


def assert_equal_to_unbroken(job, unbroken: dict[str, Path], hurt: Path, mode: str, workers: int) -> None:
    """Checks losses and weights against those of a run that was never killed, to the last bit."""
    if mode not in unbroken:
        unbroken[mode] = hurt.with_name(f"{hurt.name}-{mode}")
        unbroken[mode].mkdir()
        raycheck.fit(
            job(f"file://{unbroken[mode]}/runs", "whole", workers=workers, mode=mode, folder=str(unbroken[mode]))
        )
    for rank in range(workers):
        assert losses(hurt, rank) == losses(unbroken[mode], rank)
        assert len(losses(hurt, rank)) == STEPS
    expected, weights = torch.load(unbroken[mode] / "weights.pt"), torch.load(hurt / "weights.pt")
    assert expected.keys() == weights.keys()
    assert all(torch.equal(expected[name], weights[name]) for name in expected)


# By default the worker that is killed in the middle of its upload, below, shows the same.
@pytest.mark.slow
@pytest.mark.parametrize("mode", ["plain", "ddp", "fsdp"])
@pytest.mark.parametrize("loader_workers", [0, 2])
def test_a_killed_run_is_bit_identical_to_one_never_killed(
    job, s3: str, tmp_path: Path, unbroken: dict[str, Path], mode: str, loader_workers: int
) -> None:
    workers = 1 if mode == "plain" else 2
    storage = join_uri(s3, uuid4().hex) if loader_workers else f"file://{tmp_path}/runs"

    raycheck.fit(
        job(
            storage,
            "hurt",
            workers=workers,
            mode=mode,
            kill=(workers - 1, 14),
            committed=12,
            loader_workers=loader_workers,
        )
    )

    assert [event["at"] for event in story(tmp_path, "start")] == [0, 12]
    assert_equal_to_unbroken(job, unbroken, tmp_path, mode, workers)
    body = assert_invariants(open_store(join_uri(storage, "hurt")))
    assert body is not None
    assert body.entry(body.head).step == STEPS
    if mode == "fsdp":
        assert {entry.refs for entry in body.live[1:]} == {(body.live[0].key,)}, "what is frozen was written once"


@pytest.mark.slow
def test_right_after_a_commit_raycheck_is_not_behind_although_ray_is(job, s3: str, tmp_path: Path) -> None:
    storage = join_uri(s3, uuid4().hex)

    raycheck.fit(job(storage, "run", kill=(1, 12), committed=12))

    first, second = story(tmp_path, "start")
    assert first["ray"] is None
    assert second["at"] == 12
    assert second["ray"] is None or "step-000000012" not in second["ray"]
    assert_invariants(open_store(join_uri(storage, "run")))


def test_a_worker_killed_in_the_middle_of_its_upload_leaves_no_half_checkpoint_and_the_run_ends_as_one_never_killed(
    job, s3: str, tmp_path: Path, unbroken: dict[str, Path]
) -> None:
    with fault_proxy(s3) as proxy:
        storage = join_uri(proxy.uri, uuid4().hex)
        held = proxy.rule("hold", "PUT", "step-000000012-a1-s3/train/__1_0.distcp")
        fitting = InThread(lambda: raycheck.fit(job(storage, "run", loader_workers=2)))
        held.wait()

        os.kill(story(tmp_path, "start", rank=1)[0]["pid"], signal.SIGKILL)
        fitting.join()

        store = open_store(join_uri(storage, "run"))
        body = assert_invariants(store)
        listed = [entry.key for entry in body.live]
        assert [event["at"] for event in story(tmp_path, "start")] == [0, 8]
        assert body.entry(body.head).step == STEPS
        assert {entry.refs for entry in body.live[1:]} == {(body.live[0].key,)}, "what is frozen was written once"
        assert not any("-a1-s3" in key for key in listed)
        assert store.list_names(object_keys.CHECKPOINTS_PREFIX) == sorted(listed), "torn objects were swept"
    assert_equal_to_unbroken(job, unbroken, tmp_path, "fsdp", 2)


@pytest.mark.slow
def test_a_worker_killed_after_every_report_loses_nothing(job, s3: str, tmp_path: Path) -> None:
    with fault_proxy(s3) as proxy:
        storage = join_uri(proxy.uri, uuid4().hex)
        held = proxy.rule("hold", "PUT", "step-000000012-a1-s3/manifest.json")
        fitting = InThread(lambda: raycheck.fit(job(storage, "run")))
        held.wait()

        os.kill(story(tmp_path, "start", rank=1)[0]["pid"], signal.SIGKILL)
        assert len(raycheck.open_run(join_uri(storage, "run")).checkpoints) == 2
        held.release()
        fitting.join()

        assert story(tmp_path, "start")[1]["at"] == 12
        assert_invariants(open_store(join_uri(storage, "run")))


@pytest.mark.slow
def test_a_worker_killed_after_its_own_report_but_before_the_others_resumes_before(
    job, s3: str, tmp_path: Path
) -> None:
    with fault_proxy(s3) as proxy:
        storage = join_uri(proxy.uri, uuid4().hex)
        held = proxy.rule("hold", "PUT", "step-000000012-a1-s3/train/__0_0.distcp")
        fitting = InThread(lambda: raycheck.fit(job(storage, "run")))
        held.wait()

        os.kill(story(tmp_path, "start", rank=1)[0]["pid"], signal.SIGKILL)
        fitting.join()

        assert story(tmp_path, "start")[1]["at"] == 8
        assert_invariants(open_store(join_uri(storage, "run")))


@pytest.mark.slow
def test_a_commit_whose_answer_is_lost_is_committed_once(job, s3: str, tmp_path: Path) -> None:
    with fault_proxy(s3) as proxy:
        storage = join_uri(proxy.uri, uuid4().hex)
        lost = proxy.rule("lose_answer", "PUT", "/run/latest", times=3)

        raycheck.fit(job(storage, "run", epochs=1))

        assert len(lost.seen) == 3
        assert len(story(tmp_path, "start")) == 1
        body = assert_invariants(open_store(join_uri(storage, "run")))
        assert [entry.step for entry in body.live] == [4, 8, 12]


@pytest.mark.slow
def test_settings_that_were_changed_hold_and_are_named(cluster: None, tmp_path: Path, caplog) -> None:
    uri = f"file://{tmp_path}/run"

    def train(**settings) -> None:
        place = raycheck.adapters.RayGroup(
            id=uuid4().hex,
            uri=uri,
            rank=0,
            world_size=1,
            coordinator=raycheck.adapters.start_coordinator(uri, owner=uuid4().hex),
        )
        with raycheck.Checkpointer(
            {"x": torch.nn.Linear(1, 1)}, raycheck.SaveSettings(**settings), group=place
        ) as ckpt:
            ckpt.restore()
            for _ in range(4):
                ckpt.end_step()

    caplog.set_level("INFO", "raycheck")
    train(every_steps=3, keep_last=5)
    assert "settings since" not in caplog.text
    train(every_steps=2, keep_last=5, after_commit=())

    assert [item.step for item in raycheck.open_run(uri).checkpoints] == [3, 4, 6, 8]
    assert "now=every_steps=2 before=every_steps=3 run=" in caplog.text
