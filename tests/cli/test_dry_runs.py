"""What rewind and delete would do is told whole, and `show` says of a restart only what is true."""

import json
from uuid import uuid4

import pytest

import raycheck as raycheck_api
from raycheck.bucket.attempt_records import ResumeRecord, record_resume
from raycheck.bucket.store import Store, open_store
from raycheck.errors import NotFoundError
from tests.support.processes.command_line import raycheck
from tests.support.samples.sample_checkpoints import Driver, everything


@pytest.fixture
def run() -> tuple[str, Store, Driver]:
    """A run with checkpoints of the steps 10, 20 and 30, whose attempt is the live one."""
    uri = f"memory://{uuid4().hex}"
    driver = Driver(open_store(uri))
    driver.claim("g")
    for save in (1, 2, 3):
        driver.save(1, save)
    return uri, driver.store, driver


def test_a_dry_rewind_says_what_it_would_do_and_writes_nothing(run: tuple[str, Store, Driver]) -> None:
    uri, store, _ = run
    before = everything(store)

    done = raycheck("rewind", uri, "10", "--dry-run")

    assert done.stdout.splitlines()[:2] == [
        "step-000000010-a1-s1 would be the head, instead of step-000000030-a1-s3",
        "the later checkpoints, of steps 20, 30, would remain listed",
    ]
    assert "training would be stopped: running" in done.stdout
    assert everything(store) == before
    assert raycheck("rewind", uri, "15", "--dry-run").returncode == 2
    with pytest.raises(NotFoundError):
        raycheck_api.open_run(uri).plan_rewind(15)
    assert everything(store) == before


def test_a_dry_rewind_to_a_checkpoint_that_is_no_longer_there_is_refused(run: tuple[str, Store, Driver]) -> None:
    uri, _, driver = run
    opened = raycheck_api.open_run(uri)
    driver.save(1, 4, keep_last=1)

    with pytest.raises(NotFoundError, match="no longer live"):
        opened.plan_rewind(10)


def test_delete_says_by_what_a_checkpoint_is_kept(run: tuple[str, Store, Driver]) -> None:
    uri, _, _ = run
    raycheck("pin", uri, "10")
    raycheck("name", uri, "10", "base")

    dry = raycheck("delete", uri, "10", "--dry-run")
    plain = raycheck("delete", uri, "20", "--dry-run")
    facts = json.loads(raycheck("delete", uri, "10", "--dry-run", "--json").stdout)
    refused = raycheck("delete", uri, "10")

    assert dry.stdout.startswith("step-000000010-a1-s1 (")
    assert dry.stdout.endswith(", pinned, named base): would be deleted\n")
    assert "pinned" not in plain.stdout
    assert (facts["is_pinned"], facts["name"], facts["is_deleted"]) == (True, "base", False)
    assert "pinned, named base" in refused.stderr
    assert len(raycheck_api.open_run(uri).checkpoints) == 3


@pytest.mark.parametrize(
    ("restored", "size", "words"),
    [
        (None, 0, "at step 0, as no checkpoint was there, 2 -> 2 ranks, lost: 3 steps, 1.0 s"),
        ("step-000000010-a1-s1", 1200, "at step 10 of step-000000010-a1-s1, 2 -> 2 ranks, lost: 3 steps, 1.0 s"),
    ],
)
def test_show_tells_of_a_restart_only_what_there_was(
    run: tuple[str, Store, Driver], restored: str | None, size: int, words: str
) -> None:
    uri, store, driver = run
    driver.claim("h")
    resume = ResumeRecord(
        attempt=2,
        after=1,
        cause="a worker died",
        restored=restored,
        step=10 if restored else 0,
        world_size_before=2,
        world_size=2,
        lost_steps=3,
        lost_s=1.0,
        since_commit_s=None,
        restore_s=0.5,
        restore_bytes=size,
        what="all",
    )
    record_resume(store, resume)

    (line,) = [line for line in raycheck("show", uri).stdout.splitlines() if line.startswith("attempt 2")]

    assert words in line
    assert "nothing" not in line
    assert "0.0 MB" not in line
    assert ("1.2 kB restored in 0.50 s" in line) == bool(restored)


def test_a_run_without_a_checkpoint_has_no_head_called_none() -> None:
    uri = f"memory://{uuid4().hex}"
    Driver(open_store(uri)).claim("g")

    assert "head -, 0 checkpoints" in raycheck("show", uri).stdout
