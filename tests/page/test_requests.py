"""What the page's views ask of a bucket: each document once."""

import re
from collections import Counter
from uuid import uuid4

import pytest
import torch

from raycheck.bucket.store import open_store
from raycheck.bucket.store.address import join_uri
from raycheck.page import pages
from raycheck.page.pages import PageScope
from tests.support.processes.save_without_ray import save_state
from tests.support.servers.http_fault_proxy import FaultProxy

KEYS = ("step-000000001-a1-s1", "step-000000002-a1-s2")


@pytest.fixture
def scope(wire: FaultProxy) -> PageScope:
    """A folder with a run of two checkpoints."""
    prefix = join_uri(wire.uri, uuid4().hex)
    model = torch.nn.Linear(8, 4)
    for number in (1, 2):
        save_state(open_store(join_uri(prefix, "run")), {"model": model}, save_number=number, step=number)
    pages._remembered.cache_clear()
    return PageScope(prefix=prefix)


def asked(wire: FaultProxy, before: int) -> Counter[str]:
    """The objects that were read since, by the end of their names; the shards by "data"."""
    found: Counter[str] = Counter()
    for head in wire.heads[before:]:
        path = head.target.partition("?")[0]
        name = re.sub(r".*/(attempts/.*|checkpoints/.*|published/.*|latest)$", r"\1", path)
        found["data" if name.endswith(".distcp") else name] += 1
    return found


def documents(*keys: str) -> Counter[str]:
    return Counter(f"checkpoints/{key}/{name}" for key in keys for name in ("index", "manifest.json"))


def test_each_view_reads_each_document_once(scope: PageScope, wire: FaultProxy) -> None:
    def view(call, *arguments: str) -> Counter[str]:
        before = len(wire.heads)
        call(scope, *arguments)
        return asked(wire, before)

    latest = Counter({"latest": 1})
    published = Counter({"published/versions.json": 1})
    records = Counter({f"attempts/000001.{name}": 1 for name in ("json", "start.json", "slow.json")})
    lists = Counter({"/raycheck": 2})  # of the segments of the history, and of the records that none of them has
    assert view(pages.run_view, "run") == latest + lists + records + published + Counter(
        {f"checkpoints/{KEYS[1]}/manifest.json": 1}
    )
    assert view(pages.live_version, "run") == latest
    assert view(pages.checkpoint_view, "run", KEYS[0]) == latest + documents(*KEYS), "the head has the rules"
    assert view(pages.checkpoint_view, "run", KEYS[0]) == latest, "a checkpoint never changes"
    assert view(pages.tensor_view, "run", KEYS[0], "model.weight") == latest + Counter({"data": 1})
    pages._remembered.cache_clear()
    assert view(pages.tensor_view, "run", KEYS[0], "model.weight") == latest + documents(KEYS[0]) + Counter({"data": 1})
    pages._remembered.cache_clear()
    assert view(pages.diff_view, "run", *KEYS) == latest + documents(*KEYS)


def test_a_run_that_is_opened_again_shows_later_commits_by_one_request(scope: PageScope, wire: FaultProxy) -> None:
    run = scope.run("run")
    save_state(open_store(run.uri), {"model": torch.nn.Linear(8, 4)}, save_number=3, step=3)
    before = len(wire.heads)

    later = run.reopened()

    assert asked(wire, before) == Counter({"latest": 1})
    assert (run.head.key, later.head.key) == (KEYS[1], "step-000000003-a1-s3")
    assert later._store is run._store
    assert scope.run("run")._store._fs is run._store._fs, "the page goes on by its connections"
    assert later.read_at is not None
    assert run.read_at is not None
    assert later.read_at >= run.read_at
