"""A publisher that is killed at any of its requests, and a campaign of kills: readers never have anything wrong."""

import os
import random
import shutil
import signal
import time
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import pytest
import torch
from transformers import AutoModelForCausalLM

import raycheck
from raycheck.bucket.reading import Checkpoint, read_latest
from raycheck.bucket.store import open_store
from raycheck.bucket.store.local import LocalStore
from raycheck.bucket.store.memory import MemoryStore
from raycheck.errors import ConflictError, RaycheckError, StoreError
from raycheck.published.publish import publish
from raycheck.settings import Publish
from tests.published.weights import Trained, assert_equal, change, loaded
from tests.support.processes.coordinator_in_thread import group_of
from tests.support.processes.fork_server import fork_server
from tests.support.samples import hf_models
from tests.support.samples.hf_models import IDS

if TYPE_CHECKING:
    from multiprocessing.context import ForkServerProcess

WRITES = "put", "put_parts", "put_if_absent", "put_if_match", "delete"
STEPS, WITHIN_S = 200, 420


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
            if body.head is not None:
                publish(Checkpoint(store, body.entry(body.head)), Publish(cache=cache, whole_every=8))
        except (RaycheckError, ConflictError):
            pass
        if Path(root, "over").exists():
            return
        time.sleep(0.01)


def train_all(root: str, log: str) -> None:
    """Train from the newest checkpoint on. Note the logits of each step before it can be committed."""
    model = hf_models.llama_bf16()
    settings = raycheck.SaveSettings(every_steps=1, keep_last=3)
    with raycheck.Checkpointer({"model": model}, settings, group=group_of(f"file://{root}")[0]) as checkpointer:
        for step in range(checkpointer.restore().step + 1, STEPS + 1):
            change(model, torch.Generator().manual_seed(step), share=0.01)
            note(log, step, model)
            checkpointer.end_step()
            time.sleep(0.3)


def note(log: str, step: int, model: Any) -> None:
    logits = model(IDS).logits.float().sum(0).flatten()[:8].tolist()
    with Path(log).open("a") as file:
        file.write(f"{step} {logits}\n")


def noted(log: Path) -> list[tuple[int, str]]:
    lines = [line.split(" ", 1) for line in log.read_text().splitlines()] if log.exists() else []
    return [(int(step), text) for step, text in lines]


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
        note(log, version.step, AutoModelForCausalLM.from_pretrained(version.path))


@pytest.mark.slow
def test_200_steps_with_kills_and_a_store_that_fails(tmp_path: Path):
    """Each version that a reader has loaded gives the logits of the trainer's model at that step, to the bit."""
    root, trained, read = tmp_path / "run", tmp_path / "trained", tmp_path / "read"
    chance = random.Random(7)
    processes: dict[str, ForkServerProcess] = {}
    kills: Counter[str] = Counter()
    had: dict[str, int] = {}  # done when the process was started

    def done(name: str) -> int:
        if name == "publisher":
            found = raycheck.open_run(f"file://{root}").published() if (root / "latest").exists() else None
            return found.versions[-1].number if found else 0
        return len(noted(trained if name == "trainer" else read))

    def start(name: str) -> None:
        had[name] = done(name)
        target, args = {
            "trainer": (train_all, (str(root), str(trained))),
            "publisher": (publish_all, (str(root), str(tmp_path / "cache"), chance.randrange(10**6))),
            "reader": (follow_all, (str(root), str(tmp_path / "local"), str(read), chance.randrange(10**6))),
        }[name]
        processes[name] = fork_server().Process(target=target, args=args)
        processes[name].start()

    for name in ("trainer", "publisher", "reader"):
        start(name)
    end = time.monotonic() + WITHIN_S
    while max((step for step, _ in noted(read)), default=0) < STEPS and time.monotonic() < end:
        time.sleep(0.3)
        for name, process in list(processes.items()):
            if process.exitcode == 0:
                continue  # the training is over
            assert process.exitcode is None, name
            if chance.random() < (0.05 if done(name) > had[name] else 0.003):
                os.kill(process.pid, signal.SIGKILL)
                process.join()
                kills[name] += 1
                start(name)
    (root / "over").touch()
    for process in processes.values():
        process.join(60)

    expected = dict(noted(trained))
    assert [line for line in noted(trained) if expected[line[0]] != line[1]] == []  # a step that was lost is repeated
    assert expected.keys() == set(range(1, STEPS + 1))
    assert len(noted(trained)) > STEPS
    assert max(step for step, _ in noted(read)) == STEPS
    assert min(kills[name] for name in processes) > 3
    assert [line for line in noted(read) if expected[line[0]] != line[1]] == []
    assert len({step for step, _ in noted(read)}) > 20
