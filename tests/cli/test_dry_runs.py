"""What rewind and delete would do is told whole, and `show` says of a restart only what is true."""

import json
from collections.abc import Callable
from dataclasses import replace
from uuid import uuid4

import pytest

import raycheck as raycheck_api
from raycheck.bucket.attempt_records import ResumeRecord, record_resume
from raycheck.bucket.store import Store, open_store
from raycheck.errors import NotFoundError
from raycheck.settings import Retention
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
        raycheck_api.open_run(uri).rewind(15, dry_run=True)
    assert everything(store) == before


def test_a_dry_rewind_to_a_checkpoint_that_is_no_longer_there_is_refused(run: tuple[str, Store, Driver]) -> None:
    uri, _, driver = run
    opened = raycheck_api.open_run(uri)
    driver.save(1, 4, keep_last=1)

    with pytest.raises(NotFoundError, match="no longer live"):
        opened.rewind(10, dry_run=True)


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


CHANGES: dict[str, Callable[..., object]] = {
    "pin": lambda uri, **dry: raycheck_api.open_run(uri).pin(10, **dry),
    "unpin": lambda uri, **dry: raycheck_api.open_run(uri).unpin("kept", **dry),
    "name": lambda uri, **dry: raycheck_api.open_run(uri).name_checkpoint(10, "kept", overwrite=True, **dry),
    "rename": lambda uri, **dry: raycheck_api.open_run(uri).rename_checkpoint("kept", "better", **dry),
    "unname": lambda uri, **dry: raycheck_api.open_run(uri).unname_checkpoint("kept", **dry),
    "score": lambda uri, **dry: raycheck_api.open_run(uri).score("kept", {"mmlu": 0.5}, **dry),
    "rewind": lambda uri, **dry: raycheck_api.open_run(uri).rewind(10, **dry),
    "prune": lambda uri, **dry: raycheck_api.open_run(uri).prune(Retention(keep_last=1), grace_s=0, **dry),
    "sweep": lambda uri, **dry: raycheck_api.open_run(uri).sweep(**dry),
    "delete_export": lambda uri, **dry: raycheck_api.open_run(uri).delete_export("mine", **dry),
    "delete_checkpoint": lambda uri, **dry: raycheck_api.catalog.delete_checkpoint(uri, 10, **dry),
    "delete_run": lambda uri, **dry: raycheck_api.catalog.delete_run(uri, live=True, **dry),
    "fork_run": lambda uri, **dry: raycheck_api.catalog.fork_run(uri, f"{uri}-fork", **dry),
    "copy_run": lambda uri, **dry: raycheck_api.catalog.copy_run(uri, f"{uri}-copy", **dry),
}


def told(found: object) -> object:
    """What a call returns, without what only a real one can know."""
    if isinstance(found, raycheck_api.Run):
        return found.head.key, [(it.key, it.name, it.is_pinned, it.scores) for it in found.checkpoints]
    if isinstance(found, tuple):
        return [replace(item, is_deleted=False) for item in found]
    later = {"key": "", "is_gone": False, "sent_bytes": 0}
    known = {name: value for name, value in later.items() if hasattr(found, name)}
    return replace(found, **known) if known else found


@pytest.mark.parametrize("change", CHANGES)
def test_a_dry_run_writes_nothing_and_returns_what_the_change_returns(
    run: tuple[str, Store, Driver], change: str
) -> None:
    uri, store, driver = run
    raycheck_api.open_run(uri).name_checkpoint(20, "kept").pin("kept")
    for file in ("weights", "model.safetensors.index.json"):
        store.put(f"exports/mine/{file}", b"1234")
    if change == "sweep":
        store.put("checkpoints/step-000000040-a1-s4/train/part", b"left")
        driver.claim("h")
    stores = [store, *(open_store(f"{uri}{end}") for end in ("-fork", "-copy"))]
    before = [everything(item) for item in stores]

    seen = CHANGES[change](uri, dry_run=True)

    assert [everything(item) for item in stores] == before
    assert told(CHANGES[change](uri)) == told(seen)
    assert [everything(item) for item in stores] != before
