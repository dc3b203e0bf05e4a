"""Tests two drivers with one run name: the second takes over the run, and the first ends with FencedError for good."""

import os
import signal
from dataclasses import replace
from pathlib import Path
from uuid import uuid4

import pytest
import ray
from ray.train import TrainingFailedError

import raycheck
from raycheck.bucket.store import open_store
from raycheck.bucket.store.address import join_uri
from raycheck.on_ray.api.failure_causes import final_error
from tests.support.histories.invariants import assert_invariants
from tests.support.processes.background_call import InThread
from tests.support.processes.ray_jobs import story, wait_for_commit
from tests.support.servers.http_fault_proxy import fault_proxy

pytestmark = [pytest.mark.ray, pytest.mark.filterwarnings("ignore")]  # Ray itself warns


def coordinators() -> list[dict[str, str]]:
    """Return the coordinators that are alive now. Some of earlier tests may be among them."""
    return [item for item in ray.util.list_named_actors(all_namespaces=True) if item["name"].startswith("raycheck:")]


def by_raycheck(trainer):
    return raycheck.fit(trainer)


def by_ray(trainer):
    return trainer.fit()


@pytest.mark.slow  # tests/elastic has a shorter one
@pytest.mark.parametrize("start", [by_raycheck, by_ray])
def test_a_second_driver_fences_the_first_which_ends_and_stays_ended(job, s3: str, tmp_path: Path, start) -> None:
    storage = join_uri(s3, uuid4().hex)
    uri = join_uri(storage, "run")
    folders = [tmp_path / "first", tmp_path / "second"]
    for folder in folders:
        folder.mkdir()
    first = InThread(
        lambda: start(job(storage, "run", folder=str(folders[0]), max_failures=-1, epochs=10_000, pause_s=0.3))
    )
    wait_for_commit(uri, 8)

    second = start(job(storage, "run", folder=str(folders[1]), epochs=30, every=40))

    with pytest.raises(raycheck.errors.FencedError if start is by_raycheck else TrainingFailedError) as ended:
        first.join()
    assert isinstance(final_error(ended.value), raycheck.errors.FencedError)
    assert len(story(folders[0], "start")) == 1, "the fenced driver restarted its workers"
    assert story(folders[1], "start")[0]["at"] >= 8
    assert raycheck.open_checkpoint(second.checkpoint).step == 360
    body = assert_invariants(open_store(uri))
    assert [attempt.owner for attempt in body.attempts] == list(body.owners)
    assert body.entry(body.head).step == 360


@pytest.mark.slow
def test_plain_trainer_fit_survives_a_killed_worker(job, s3: str, tmp_path: Path) -> None:
    storage = join_uri(s3, uuid4().hex)

    job(storage, "run", kill=(1, 10), committed=8, epochs=1, max_failures=1).fit()

    assert [event["at"] for event in story(tmp_path, "start")] == [0, 8]
    body = assert_invariants(open_store(join_uri(storage, "run")))
    assert body.entry(body.head).step == 12
    assert len(body.owners) == 1


@pytest.mark.slow
def test_a_coordinator_killed_between_manifest_and_latest_loses_no_save(job, s3: str, tmp_path: Path) -> None:
    with fault_proxy(s3) as proxy:
        storage = join_uri(proxy.uri, uuid4().hex)
        # The first PUTs of latest are the claim (1) and the commits of 4 (2) and 8 (3).
        held = [proxy.rule("delay", "PUT", "/run/latest", times=2), proxy.rule("hold", "PUT", "/run/latest")]
        others = coordinators()
        fitting = InThread(lambda: raycheck.fit(job(storage, "run", epochs=1)))
        held[1].wait()
        (actor,) = (item for item in coordinators() if item not in others)
        coordinator = ray.get_actor(actor["name"], namespace=actor["namespace"])

        os.kill(ray.get(coordinator.__ray_call__.remote(lambda _: os.getpid())), signal.SIGKILL)
        held[1].release()
        fitting.join()

        assert len(story(tmp_path, "start")) == 1, "the workers were restarted"
        body = assert_invariants(open_store(join_uri(storage, "run")))
        assert [entry.step for entry in body.live] == [4, 8, 12]
        assert len(body.attempts) == 1


@pytest.mark.slow
def test_failed_saves_do_not_end_training_before_their_limit(job, s3: str, tmp_path: Path) -> None:
    """I10: a failed save costs only its own checkpoint."""
    with fault_proxy(s3) as proxy:
        storage = join_uri(proxy.uri, uuid4().hex)
        proxy.rule("reset", "PUT", "step-000000004-.*__1_0.distcp", times=100)

        raycheck.fit(job(storage, "run", epochs=1, pause_s=0.2))

        body = assert_invariants(open_store(join_uri(storage, "run")))
        assert len(story(tmp_path, "start")) == 1
        assert 4 not in [entry.step for entry in body.live]
        assert body.entry(body.head).step == 12


@pytest.mark.slow
def test_too_many_failed_saves_in_a_row_end_training_with_the_reason(job, s3: str, tmp_path: Path) -> None:
    with fault_proxy(s3) as proxy:
        storage = join_uri(proxy.uri, uuid4().hex)
        proxy.rule("reset", "PUT", "__1_0.distcp", times=10_000)
        settings = {"max_failed_saves": 1}

        with pytest.raises(
            TrainingFailedError, match=r"upload of checkpoints/step-000000004-a\d-s1/train/__1_0.distcp"
        ):
            raycheck.fit(job(storage, "run", epochs=2, pause_s=0.2, settings=settings, max_failures=1))

        assert_invariants(open_store(join_uri(storage, "run")))


@pytest.mark.slow
def test_wrong_settings_end_the_run_before_any_worker_starts(job, tmp_path: Path) -> None:
    storage = f"file://{tmp_path}/runs"
    raycheck.fit(job(storage, "run", epochs=1, workers=1, mode="plain"))

    with pytest.raises(raycheck.errors.ConfigError, match="resume='never'"):
        raycheck.fit(job(storage, "run", epochs=1, workers=1, mode="plain", max_failures=-1), resume="never")
    with pytest.raises(raycheck.errors.ConfigError, match="resume='must'"):
        raycheck.fit(job(storage, "other", epochs=1, workers=1, mode="plain"), resume="must")
    with pytest.raises(raycheck.errors.ConfigError, match="name"):
        raycheck.fit(job(storage, ""))
    with pytest.raises(raycheck.errors.ConfigError, match="resume="):
        raycheck.fit(job(storage, "run"), resume="yesterday")

    assert_invariants(open_store(f"{storage}/run"))


@pytest.mark.slow
def test_resume_at_a_step_goes_back_to_it(job, tmp_path: Path) -> None:
    storage = f"file://{tmp_path}/runs"
    raycheck.fit(job(storage, "run", epochs=1, workers=1, mode="plain"))

    raycheck.fit(job(storage, "run", epochs=2, workers=1, mode="plain"), resume=8)

    assert [event["at"] for event in story(tmp_path, "start")] == [0, 8]
    body = assert_invariants(open_store(f"{storage}/run"))
    assert [entry.step for entry in body.live] == [4, 8, 12, 12, 16, 20, 24]


@pytest.mark.slow
def test_a_run_begins_from_a_copy_of_another_runs_head(job, tmp_path: Path) -> None:
    storage = f"file://{tmp_path}/runs"
    raycheck.fit(job(storage, "old", epochs=1, workers=1, mode="plain"))
    before = assert_invariants(open_store(f"{storage}/old"))

    for _ in range(2):  # the second time the new run exists, and goes on
        raycheck.fit(job(storage, "new", epochs=2, workers=1, mode="plain"), resume=f"{storage}/old")

    assert [event["at"] for event in story(tmp_path, "start")] == [0, 12, 24]
    body = assert_invariants(open_store(f"{storage}/new"))
    assert [entry.step for entry in body.live] == [12, 16, 20, 24]
    assert body.run_id != before.run_id
    after = assert_invariants(open_store(f"{storage}/old"))
    assert [hold.run_id for hold in after.holds] == [body.run_id], "the new run uses the old one's directory"
    assert replace(after, holds=(), counter=before.counter) == before
