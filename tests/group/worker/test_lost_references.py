"""Tests that a commit notices a frozen component that has vanished from the bucket and names its key, and that the next
save uploads it again."""

import logging
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
import torch
from torch import nn

import raycheck
from raycheck.bucket.format.latest import Entry
from raycheck.bucket.format.manifest import Manifest
from raycheck.bucket.protocol.referred_objects import ReferenceLostError, ReferredObjects
from raycheck.bucket.protocol.sharing.fork import fork
from raycheck.bucket.reading import Checkpoint, read_latest
from raycheck.bucket.store import Store, open_store
from raycheck.errors import StoreError
from tests.support.processes.background_call import InThread
from tests.support.processes.coordinator_in_thread import InProcess, again, group_of

BASE = "model.frozen"
Steps = Callable[[raycheck.Checkpointer, int], object]


class Adapted(nn.Module):
    """A frozen base that is spread over ranks, and a part that is trained."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.base = nn.ParameterList(nn.Parameter(torch.randn(1 << 18), requires_grad=False) for _ in range(2))
        self.head = nn.Parameter(torch.zeros(4))


def train(groups: list[InProcess], *, until: int, before: Steps = lambda *_: None, **settings: Any) -> None:
    """Train every rank to a step, and save at each. before: called by rank 0 before each step ends, when all earlier
    saves have ended."""

    def rank(group: InProcess, model: Adapted) -> None:
        chosen = raycheck.SaveSettings(**{"every_steps": 1} | settings)
        with raycheck.Checkpointer({"model": model}, chosen, group=group) as ckpt:
            for step in range(ckpt.restore().step + 1, until + 1):
                with torch.no_grad():
                    model.head.fill_(step)
                ended(ckpt)
                if not group.rank:
                    before(ckpt, step)
                ckpt.end_step()

    def ended(ckpt: raycheck.Checkpointer) -> None:
        with suppress(raycheck.errors.SaveFailedError):
            ckpt.wait()

    places = [(group, Adapted(seed=0)) for group in groups]
    for thread in [InThread(lambda at=at: rank(*at)) for at in places]:
        thread.join()


def base_objects(store: Store, entry: Entry) -> list[str]:
    """Return the keys of the objects of the frozen component that a checkpoint refers to."""
    keys = [key for key, _ in Checkpoint(store, entry).read_manifest().objects()]
    return [key for key in keys if f"/{BASE}/" in key]


def newest(store: Store) -> Entry:
    body = read_latest(store)
    found = body.entry(body.head or "")
    assert found is not None
    return found


def lose(store: Store, which: Callable[[str], bool]) -> str:
    key = next(key for key in base_objects(store, newest(store)) if which(key))
    store.delete(key)
    return key


def assert_whole(store: Store, step: int) -> None:
    entry = newest(store)
    assert entry.step == step
    assert not [finding for finding in Checkpoint(store, entry).verify() if finding.problem]
    model = Adapted(seed=9)
    raycheck.open_run(store.uri).restore(into={"model": model})
    assert all(torch.equal(one, other) for one, other in zip(model.base, Adapted(seed=0).base, strict=True))


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("name", [".distcp", ".metadata"])
def test_a_frozen_object_that_is_gone_fails_one_save_by_its_key_and_is_uploaded_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, world_size: int, name: str
) -> None:
    store = open_store(f"file://{tmp_path}/run")
    lost: list[str] = []

    def before(_: raycheck.Checkpointer, step: int) -> None:
        if step == 2:
            lost.append(lose(store, lambda key: key.endswith(name)))

    train(group_of(store.uri, world_size=world_size), until=4, before=before, max_failed_saves=1)

    steps = [entry.step for entry in read_latest(store).live]
    assert steps == [1, 3, 4], "step 2 is not reported as good"
    assert_whole(store, 4)
    (said,) = [record.message for record in caplog.records if record.levelno == logging.ERROR]
    assert f"{lost[0]} is missing" in said
    assert "1 checkpoint(s) cannot be restored unless it is put back" in said
    assert f"The next save uploads {BASE} again" in said


def test_the_last_save_of_a_run_uploads_it_again_at_once(tmp_path: Path) -> None:
    store = open_store(f"file://{tmp_path}/run")

    def before(_: raycheck.Checkpointer, step: int) -> None:
        if step == 2:
            lose(store, lambda key: key.endswith(".distcp"))

    train(group_of(store.uri), until=2, before=before, every_steps=1, max_failed_saves=1)

    assert_whole(store, 2)


def test_the_first_commit_after_a_restart_looks_whenever_the_last_look_was(tmp_path: Path) -> None:
    store = open_store(f"file://{tmp_path}/run")
    groups = group_of(store.uri)
    train(groups, until=3)

    def before(_: raycheck.Checkpointer, step: int) -> None:
        if step == 4:
            lose(store, lambda key: key.endswith(".distcp"))

    train(again(groups), until=5, before=before)

    assert [entry.step for entry in read_latest(store).live] == [1, 2, 3, 5]
    assert_whole(store, 5)


def test_a_borrowed_component_that_is_gone_is_uploaded_into_the_run_itself(tmp_path: Path) -> None:
    base = open_store(f"file://{tmp_path}/base")
    train(group_of(base.uri), until=1)
    store = open_store(f"file://{tmp_path}/run")
    fork(base, store, run_id=uuid4().hex)

    def before(_: raycheck.Checkpointer, step: int) -> None:
        if step == 2:
            lose(base, lambda key: key.endswith(".distcp"))

    train(group_of(store.uri), until=4, before=before)

    assert [entry.step for entry in read_latest(store).live] == [1, 3, 4]
    assert_whole(store, 4)
    assert newest(store).refs == ("step-000000003-a1-s2",)


class Counting(Store):
    """A store that answers HEAD as it is told, and counts the calls."""

    uri = "memory://counting"

    def __init__(self, inner: Store) -> None:
        self.inner, self.heads, self.answers = inner, 0, []

    def head(self, key: str) -> int:
        self.heads += 1
        answer = self.answers.pop(0) if self.answers else None
        if isinstance(answer, Exception):
            raise answer
        return self.inner.head(key) if answer is None else answer

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


for _name in Store.__abstractmethods__ - {"head"}:
    setattr(Counting, _name, lambda self, *args, _name=_name: getattr(self.inner, _name)(*args))
Counting.__abstractmethods__ = frozenset()


@pytest.fixture
def referring(tmp_path: Path) -> tuple[Counting, Manifest]:
    """Return a run's store, and the manifest of a checkpoint that refers to an earlier one."""
    store = open_store(f"file://{tmp_path}/run")
    train(group_of(store.uri), until=2)
    return Counting(store), Checkpoint(store, newest(store)).read_manifest()


def test_each_component_is_looked_at_once_in_ten_minutes(referring: tuple[Counting, Manifest]) -> None:
    store, manifest = referring
    now = [1000.0]
    referred = ReferredObjects(store, clock=lambda: now[0])
    heads = []
    for seconds in (0, 599, 1, 300, 300):
        now[0] += seconds
        referred.refuse_lost(manifest)
        heads.append(store.heads)
    referred.forget()
    referred.refuse_lost(manifest)

    assert heads == [2, 2, 4, 4, 6], "one HEAD of the shard and one of its .metadata"
    assert store.heads == 8
    store.inner.delete(base_objects(store.inner, newest(store.inner))[1])
    now[0] += 700
    with pytest.raises(ReferenceLostError, match=r"is missing\. 700 s ago it was there\. 2 checkpoint\(s\) cannot"):
        referred.refuse_lost(manifest)
    with pytest.raises(ReferenceLostError, match="is missing"):
        referred.refuse_lost(manifest)  # until it is there


def test_a_wrong_answer_is_asked_for_again_and_a_store_that_is_away_proves_nothing(
    referring: tuple[Counting, Manifest],
) -> None:
    store, manifest = referring
    referred = ReferredObjects(store)

    store.answers = [raycheck.errors.NotFoundError("late"), None, 3]
    referred.refuse_lost(manifest)
    assert store.heads == 4
    referred.forget()
    store.answers = [StoreError("away")]
    referred.refuse_lost(manifest)
    before = store.heads
    referred.refuse_lost(manifest)

    assert store.heads == before + 2, "the next commit looks, since this one has seen nothing"
    referred.forget()
    store.answers = [3, 3]
    with pytest.raises(ReferenceLostError, match="has 3 bytes, and should have"):
        referred.refuse_lost(manifest)
