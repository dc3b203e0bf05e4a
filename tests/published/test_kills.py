"""A publisher that is killed at any of its requests, and a campaign of kills: readers never have anything wrong."""

import os
import random
import shutil
import signal
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import pytest
from transformers import AutoModelForCausalLM

import raycheck
from raycheck.bucket.reading import Checkpoint, read_latest
from raycheck.bucket.store import open_store
from raycheck.bucket.store.local import LocalStore
from raycheck.bucket.store.memory import MemoryStore
from raycheck.errors import ConflictError, RaycheckError, StoreError
from raycheck.published.publish import publish
from raycheck.settings import Publish
from tests.published.weights import Trained, assert_equal, loaded
from tests.support.processes.fork_server import fork_server
from tests.support.samples.hf_models import IDS

if TYPE_CHECKING:
    from multiprocessing.context import ForkServerProcess

WRITES = "put", "put_parts", "put_if_absent", "put_if_match", "delete"
STEPS = 200


class KilledError(BaseException):
    """The publisher does not exist any more."""


def die_at(patch: pytest.MonkeyPatch, number: int, *, is_applied: bool) -> None:
    """Kill whoever makes this write to a bucket in memory: just before it is applied, or just after."""
    made = 0

    def dying(verb: str) -> Any:
        apply = getattr(MemoryStore, verb)

        def write(self: MemoryStore, *args: Any) -> Any:
            nonlocal made
            made += 1
            mine = made
            if mine == number and not is_applied:
                raise KilledError
            done = apply(self, *args)
            if mine == number:
                raise KilledError
            return done

        return write

    for verb in WRITES:
        patch.setattr(MemoryStore, verb, dying(verb))


@pytest.mark.enumeration
@pytest.mark.parametrize("is_applied", [False, True])
def test_a_publisher_may_be_killed_at_each_of_its_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_applied: bool
):
    """Readers have the version before or the new one; the next publish succeeds, and leaves nothing behind."""
    trained = Trained(open_store(f"memory://{uuid4().hex}"), tmp_path / "cache")
    options = {"whole_every": 2, "keep_last": 1}
    trained.publish(**options)
    trained.publish(**options)
    weights, later = {2: trained.weights}, {}
    for step in (3, 4):
        later[step], weights[step] = trained.step(), trained.weights
    number, was_killed = 0, True
    while was_killed:
        number, was_killed = number + 1, False
        store, cache = open_store(f"memory://{uuid4().hex}"), tmp_path / f"cache-{number}"
        for item in trained.store.list_objects(""):
            store.put(item.key, trained.store.get(item.key).data)
        shutil.copytree(trained.cache, cache, symlinks=True)
        with monkeypatch.context() as patch:
            die_at(patch, number, is_applied=is_applied)
            try:
                publish(Checkpoint(store, later[3].entry), Publish(cache=str(cache), **options))
            except KilledError:
                was_killed = True
        with raycheck.follow(store.uri, tmp_path / f"local-{number}") as follower:
            version = follower.update()
            assert_equal(loaded(version.path), weights[version.step])
            assert version.step in (2, 3)
            publish(Checkpoint(store, later[4].entry), Publish(cache=str(cache), **options))
            newest = follower.update()
            assert_equal(loaded(newest.path), weights[4])
        listed = {item.directory for item in raycheck.open_run(store.uri).published().versions}
        keys = [item.key.split("/")[1] for item in store.list_objects("published/")]
        assert {key for key in keys if key.startswith("version-")} == listed
    assert number > 5


class FailingStore(LocalStore):
    """A folder of which 3 % of all requests fail, half of the writes after they were applied."""

    chance = random.Random(0)


def _failing(verb: str) -> Any:
    apply = getattr(LocalStore, verb)

    def call(self: FailingStore, *args: Any) -> Any:
        draw = self.chance.random()
        if draw < 0.03:
            if draw < 0.015 and verb in WRITES:
                apply(self, *args)
            raise StoreError("the store fails")
        return apply(self, *args)

    return call


for _verb in (*WRITES, "get", "get_range", "list_objects"):
    setattr(FailingStore, _verb, _failing(_verb))


def publish_all(root: str, cache: str, number: int) -> None:
    """Publish each new head until there are no more."""
    FailingStore.chance = random.Random(number)
    store = FailingStore(f"file://{root}", root)
    while True:
        try:
            body = read_latest(open_store(f"file://{root}"))
            publish(Checkpoint(store, body.entry(body.head)), Publish(cache=cache, whole_every=8))
        except (RaycheckError, ConflictError):
            pass
        if Path(root, "over").exists():
            return
        time.sleep(0.01)


def follow_all(root: str, folder: str, log: str, number: int) -> None:
    """Load each version by transformers, and note its step and logits."""
    FailingStore.chance = random.Random(number)
    follower = raycheck.follow(f"file://{root}", folder)
    follower._store = FailingStore(f"file://{root}", root)
    while True:
        version = follower.wait(1)
        if version is None:
            if Path(root, "over").exists():
                return
            continue
        model = AutoModelForCausalLM.from_pretrained(version.path)
        logits = model(IDS).logits.float().sum(0).flatten()[:8].tolist()
        with Path(log).open("a") as file:
            file.write(f"{version.step} {logits}\n")


@pytest.mark.slow
def test_200_steps_with_kills_and_a_store_that_fails(tmp_path: Path):
    """Each version that a reader has loaded gives the logits of the trainer's model at that step, to the bit."""
    root, log = tmp_path / "run", tmp_path / "log"
    trained = Trained(open_store(f"file://{root}"), tmp_path / "cache")
    chance = random.Random(7)
    expected: dict[int, list[float]] = {}
    processes: dict[str, ForkServerProcess] = {}
    kills = 0

    def start(name: str) -> None:
        args = (str(root), str(tmp_path / "cache"), chance.randrange(10**6))
        if name == "reader":
            args = (str(root), str(tmp_path / "local"), str(log), chance.randrange(10**6))
        processes[name] = fork_server().Process(target=publish_all if name == "publisher" else follow_all, args=args)
        processes[name].start()

    for step in range(1, STEPS + 1):
        trained.step(share=0.01)
        expected[step] = trained.model(IDS).logits.float().sum(0).flatten()[:8].tolist()
        for name in ("publisher", "reader"):
            if name not in processes:
                start(name)
            elif chance.random() < 0.05:
                os.kill(processes[name].pid, signal.SIGKILL)
                processes[name].join()
                kills += 1
                start(name)
        time.sleep(0.3)
    done, end = 0, time.monotonic() + 120
    while done < STEPS and time.monotonic() < end:
        lines = [line.split(" ", 1) for line in log.read_text().splitlines()]
        done = max((int(step) for step, _ in lines), default=0)
        time.sleep(0.2)
    (root / "over").touch()
    for process in processes.values():
        process.join(60)

    assert done == STEPS
    assert kills > 5
    assert len({int(step) for step, _ in lines}) > 20
    assert [(step, text) for step, text in lines if text != str(expected[int(step)])] == []
