"""What a newer writer of the same format version adds is ignored by readers and kept by writers, in a real run."""

import json
import struct
import zlib
from collections.abc import Callable
from typing import Any
from uuid import uuid4

import pytest
import torch

import raycheck
from raycheck.bucket.format import object_keys
from raycheck.bucket.format.checksum import crc32
from raycheck.bucket.format.index_codec import MAGIC
from raycheck.bucket.protocol import pin_and_evict
from raycheck.bucket.protocol.swap import Register
from raycheck.bucket.store import Store, open_store
from raycheck.settings import Retention
from tests.support.histories.invariants import assert_invariants
from tests.support.processes.save_without_ray import claimed, save_state
from tests.support.samples.sample_checkpoints import sealed

NEW = {"of a newer writer": [1, {"deep": None}]}


@pytest.fixture
def run() -> Store:
    """Two checkpoints, the older one evicted, and fields that nobody knows in `latest`, the head's manifest and index."""
    store = open_store(f"memory://{uuid4().hex}")
    for number in (1, 2):
        save_state(store, {"model": model(number)}, save_number=number, step=number, metrics={"loss": 0.5})
    pin_and_evict.evict(Register(store), Retention(keep_last=1))
    name = raycheck.open_run(store.uri).head.key
    assert name is not None
    index = rewritten(store, object_keys.index_key(name), with_new_index_header)

    def manifest_with_new(data: bytes) -> bytes:
        tree = json.loads(data)
        tree["index"] |= {"size_bytes": len(index), "crc32": crc32(index)}
        return sealed(with_new(tree))

    manifest = rewritten(store, object_keys.manifest_key(name), manifest_with_new)

    def latest_with_new(data: bytes) -> bytes:
        tree = json.loads(data)
        tree["newest"][-1]["manifest_crc32"] = crc32(manifest)
        tree["newest"][-1]["size_bytes"] = sum(
            item.size_bytes
            for item in store.list_objects(object_keys.checkpoint_prefix(name))
            if item.key != object_keys.manifest_key(name)
        )
        return sealed(with_new(tree))

    rewritten(store, object_keys.LATEST_KEY, latest_with_new)
    return store


def model(seed: int) -> torch.nn.Linear:
    torch.manual_seed(seed)
    return torch.nn.Linear(3, 2)


def rewritten(store: Store, key: str, change: Callable[[bytes], bytes]) -> bytes:
    data = change(store.get(key).data)
    store.put(key, data)
    return data


def with_new(tree: Any, *, is_document: bool = True) -> Any:
    """A field more in every document of the tree; metrics, scores and a note are values by name, no documents."""
    if isinstance(tree, list):
        return [with_new(item) for item in tree]
    if not isinstance(tree, dict):
        return tree
    again = {key: with_new(item, is_document=key not in ("metrics", "scores", "note")) for key, item in tree.items()}
    return again | NEW if is_document else again


def with_new_index_header(data: bytes) -> bytes:
    """A field and a part more in the header; in the plan a field more, and a column behind the others."""
    (length,) = struct.unpack_from("<Q", data, len(MAGIC))
    start = len(MAGIC) + 8
    header, parts = json.loads(data[start : start + length]), data[start + length :]
    (_, plan_size), *others = header["parts"]
    plan = with_new_plan_header(parts[:plan_size])
    listed = [["plan", len(plan)], *others, ["of a newer writer", 3]]
    text = json.dumps(header | NEW | {"parts": listed}).encode()
    return MAGIC + struct.pack("<Q", len(text)) + text + plan + parts[plan_size:] + b"new"


def with_new_plan_header(data: bytes) -> bytes:
    raw = zlib.decompress(data)
    (length,) = struct.unpack_from("<Q", raw)
    header = json.loads(raw[8 : 8 + length])
    columns = [*header["columns"], ["of a newer writer", 2, 1, header["columns"][0][3]]]
    text = json.dumps(header | NEW | {"columns": columns}).encode()
    return zlib.compress(struct.pack("<Q", len(text)) + text + raw[8 + length :] + b"\x01\x02")


def news_in(store: Store) -> int:
    """How many documents of `latest` carry the new field."""
    return store.get(object_keys.LATEST_KEY).data.decode().count('"of a newer writer"')


def test_readers_ignore_them(run: Store) -> None:
    found = raycheck.open_run(run.uri)
    again = {"model": model(9)}

    findings = list(found.head.verify())
    step = found.restore(into=again)

    assert [item.problem for item in findings] == [""] * 4
    assert step == 2
    assert torch.equal(again["model"].weight, model(2).weight)
    assert_invariants(run)


def test_a_swap_of_latest_keeps_them_in_every_document(run: Store) -> None:
    before = news_in(run)
    key = raycheck.open_run(run.uri).checkpoints[0].key

    pin_and_evict.pin(Register(run), key, pinned=True)

    assert before == news_in(run) == 1 + 1 + 1 + 1, "the body, its attempt, its live entry and the evicted one"
    assert_invariants(run)


def test_a_commit_and_a_claim_keep_them_too(run: Store) -> None:
    before = news_in(run)

    save_state(run, {"model": model(3)}, save_number=3, step=3)
    claimed(run, world_size=2)

    assert news_in(run) == before
    assert [entry.step for entry in assert_invariants(run).live] == [2, 3]
