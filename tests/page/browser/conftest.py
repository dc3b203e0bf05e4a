"""A browser, and a page over a bucket whose every free text is hostile."""

import time
from collections.abc import Iterator
from uuid import uuid4

import pytest
import torch
from playwright.sync_api import Browser

from raycheck.bucket.attempt_records import ResumeRecord, record_end, record_resume
from raycheck.bucket.store import open_store
from raycheck.bucket.store.address import join_uri
from tests.support.processes.save_without_ray import save_state
from tests.support.samples.many_runs import mixed_runs, place
from tests.support.samples.sample_checkpoints import Driver
from tests.support.servers.chromium import Watched, chromium, watched_page
from tests.support.servers.memory_store import DictStore
from tests.support.servers.page_server import TOKEN, page_server

HOSTILE = "\"'><img src=x onerror=window.hacked=1><svg onload=window.hacked=1>{{7*7}}\u202e"
HOSTILE_RUN = "<img src=x onerror=window.hacked=1>&amp;"
"""A folder's name has no slash and no quotes in it."""
REAL, HURT, STORM, WIDE = "real", "ann/hurt", "storm", "wide"
LONG_NAME = "rewards_" * 18
KEYS = ("step-000000001-a1-s1", "step-000000002-a1-s2")


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as running:
        yield running


@pytest.fixture(scope="module", params=["file", "s3"])
def bucket(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> str:
    """A prefix with a run in every state, one with real tensors, one that lost workers, and a hostile name."""
    if request.param == "file":
        prefix = f"file://{tmp_path_factory.mktemp('page')}"
    else:
        prefix = join_uri(request.getfixturevalue("s3"), uuid4().hex)
    store = open_store(prefix)
    for name, (_, objects) in mixed_runs().items():
        place(store, name, objects)
    place(store, HOSTILE_RUN, mixed_runs()["ann/finished"][1])
    place(store, STORM, stormy_run())
    real_run(join_uri(prefix, REAL))
    hurt_run(join_uri(prefix, HURT))
    wide_run(join_uri(prefix, WIDE))
    return prefix


def real_run(uri: str) -> None:
    """Two checkpoints of a small model; tensors, metrics and values with hostile names."""
    model = torch.nn.Sequential(torch.nn.Linear(8, 4), torch.nn.Linear(4, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(torch.ones(2, 8)).sum().backward()
    optimizer.step()
    state = {"model": model, "optimizer": optimizer, "extra": {HOSTILE: torch.ones(2), "text": HOSTILE}}
    store = open_store(uri)
    save_state(store, state, save_number=1, step=1, metrics={"loss": 2.0, HOSTILE: 1.0})
    with torch.no_grad():
        model[0].weight += 1
        state["extra"][HOSTILE] += 1
    save_state(store, state, save_number=2, step=2, metrics={"loss": 1.0, HOSTILE: 3.0})


def wide_run(uri: str) -> None:
    """A run with more metrics than columns, long names, and numbers of many digits."""
    store = open_store(uri)
    metrics = {f"objective/part_{number}": 1.5 * number for number in range(12)}
    for step in (1, 2):
        more = {"a": 1.25e301 * step, "b": 12345.5 + step / 1e4, LONG_NAME: step * 1.0}
        save_state(store, {"x": torch.ones(2)}, save_number=step, step=step, metrics=metrics | more)


def hurt_run(uri: str) -> Driver:
    """A run whose first group lost a worker, and whose second one trains."""
    driver = Driver(open_store(uri))
    driver.claim("g1", world_size=2)
    driver.save(1, 1)
    lose_a_worker(driver, group="g2", cause=f"rank 1: {HOSTILE}")
    driver.save(2, 2)
    return driver


def stormy_run() -> dict[str, bytes]:
    """The objects of a run that was restarted 50 times within minutes, with fewer workers from half of them on."""
    store = DictStore(at=time.time() - 600)
    driver = Driver(store)
    driver.claim("g0", world_size=8)
    driver.save(1, 1, world_size=8)
    for number in range(1, 50):
        store.at += 6
        before = driver.look().attempt
        attempt, _ = driver.claim(f"g{number}", world_size=8 if number < 25 else 6)
        record_end(store, before, by=attempt, cause="rank 3: its process died: NCCL error: unhandled system error")
    return store.objects


def lose_a_worker(driver: Driver, *, group: str, cause: str) -> None:
    """Let another group go on, as a coordinator does: with both records of it."""
    before = driver.look()
    attempt, entry = driver.claim(group, world_size=1)
    record_end(driver.store, before.attempt, by=attempt, cause=cause)
    resume = ResumeRecord(
        attempt=attempt.number,
        after=before.attempt.number,
        cause=cause,
        restored=None if entry is None else entry.key,
        step=0 if entry is None else entry.step,
        world_size_before=before.attempt.world_size,
        world_size=1,
        lost_steps=3,
        lost_s=0.5,
        since_commit_s=1.0,
        restore_s=0.25,
        restore_bytes=10,
        what="all",
    )
    record_resume(driver.store, resume)


@pytest.fixture(scope="module")
def address(bucket: str) -> Iterator[str]:
    """Where the page over the bucket is."""
    with page_server(bucket) as place_of_it:
        yield place_of_it


@pytest.fixture
def signed_in(browser: Browser, address: str) -> Iterator[Watched]:
    """A page of the browser that has shown the token, on the list of runs. It is harmless in the end, too."""
    with watched_page(browser) as watched:
        watched.page.goto(f"{address}?token={TOKEN}")
        yield watched
        watched.assert_harmless()
