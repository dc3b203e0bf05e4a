"""Tests cluster/bucket/policy.json: each role has the permissions that its work needs, and none that it never uses.

The requests of each role are recorded on the wire, and the policy decides about each of them.
"""

import json
from collections.abc import Callable, Iterator
from fnmatch import fnmatchcase
from pathlib import Path
from urllib.parse import parse_qs, unquote, urlsplit
from uuid import uuid4

import pytest
from typer.testing import CliRunner

from raycheck.bucket.diagnosis.checks import refuse_unfit_place
from raycheck.bucket.format import object_keys
from raycheck.bucket.protocol.preflight import probe, probe_node
from raycheck.bucket.protocol.removal.prune_and_sweep import prune, sweep
from raycheck.bucket.protocol.rewind import rewind
from raycheck.bucket.protocol.sharing.fork import fork
from raycheck.bucket.protocol.swap import Register
from raycheck.bucket.store import Store, open_store
from raycheck.bucket.store.address import join_uri
from raycheck.bucket.store.s3.obstore_store import FastS3Store
from raycheck.cli import app
from raycheck.errors import StoreError
from raycheck.settings import Retention
from tests.bucket.store.test_conformance import begin_upload
from tests.support.histories.small_pages import small_pages
from tests.support.samples.sample_checkpoints import Driver, sealed, write_export
from tests.support.servers.s3_engines import by_s3fs_alone

POLICY = json.loads((Path(__file__).parents[3] / "cluster/bucket/policy.json").read_text())
NEVER_ASKED = {"ReaderListings"}
"""Needed all the same: without it S3 says of a missing object that it is denied."""
OF_THE_BUCKET = {
    "lifecycle": "s3:GetLifecycleConfiguration",
    "versioning": "s3:GetBucketVersioning",
    "object-lock": "s3:GetBucketObjectLockConfiguration",
}
"""What fit and raycheck doctor read of a bucket itself."""
Asked = tuple[str, str]
"""An action, and the resource that it is asked for."""


def statements(role: str) -> list[dict]:
    return [item for item in POLICY["Statement"] if item["Principal"]["AWS"].endswith(f"role/{role.upper()}")]


def listed(value: str | list[str]) -> list[str]:
    return [value] if isinstance(value, str) else value


def allows(statement: dict, asked: Asked) -> bool:
    action, resource = asked
    patterns = [text.replace("/PREFIX/", "/") for text in listed(statement["Resource"])]
    return action in listed(statement["Action"]) and any(fnmatchcase(resource, pattern) for pattern in patterns)


def asked_of(line: str) -> Asked:
    """Return the name of the permission that S3 checks for a request."""
    method, _, target = line.partition(" ")
    split = urlsplit(target)
    _, _, key = unquote(split.path).lstrip("/").partition("/")
    query = parse_qs(split.query, keep_blank_values=True)
    bucket, one = "arn:aws:s3:::BUCKET", f"arn:aws:s3:::BUCKET/{key}"
    match method:
        case "GET" if (about := {*query} & {*OF_THE_BUCKET}) and not key:
            return OF_THE_BUCKET[about.pop()], bucket
        case "GET" if "uploads" in query:
            return "s3:ListBucketMultipartUploads", bucket
        case "GET" | "HEAD" if not key:
            return "s3:ListBucket", bucket
        case "GET" if "uploadId" in query:
            return "s3:ListMultipartUploadParts", one
        case "GET" | "HEAD":
            return "s3:GetObject", one
        case "PUT" if not key:
            return "s3:CreateBucket", bucket
        case "PUT" | "POST":
            return "s3:PutObject", one
        case "DELETE" if "uploadId" in query:
            return "s3:AbortMultipartUpload", one
        case "DELETE":
            return "s3:DeleteObject", one
    raise AssertionError(line)


def refused(role: str, requests: list[str]) -> list[Asked]:
    """Return the requests that the policy does not allow that role."""
    asked = {asked_of(line) for line in requests}
    return [one for one in asked if not any(allows(statement, one) for statement in statements(role))]


def trains(store: Store) -> None:
    """Do what driver, nodes and coordinator do: fit's checks, a node's probe, claim, an upload that fails, saves, a
    restart, pruning."""
    refuse_unfit_place(store, node="n")
    probe_node(store, node="n")
    probe(store)
    ann = Driver(store)
    ann.claim("g1")
    with pytest.raises(ZeroDivisionError):
        store.put_parts("checkpoints/step-000000009-a1-s9/train/__0_0.distcp", failing(store), 3 * store.part_bytes(0))
    for save in (1, 2):
        ann.save(1, save, keep_last=1)
    begin_upload(store, object_keys.shard_key("step-000000050-a1-s5", "train", 1))
    ann.claim("g2")
    prune(ann.register, grace_s=0.0)
    sweep(store)


def failing(store: Store) -> Iterator[memoryview]:
    for _ in range(2):
        yield memoryview(bytes(store.part_bytes(0)))
    raise ZeroDivisionError


def reads(store: Store) -> None:
    for command in ("ls", "show", "verify"):
        raycheck(command, store.uri)


def sweeps(store: Store) -> None:
    raycheck("pin", store.uri, "20")
    raycheck("unpin", store.uri, "20")
    raycheck("sweep", store.uri, "--dry-run")
    raycheck("sweep", store.uri, "--whole")
    raycheck("prune", store.uri, "--keep-last", "1", "--grace", "0")
    raycheck("prune-exports", store.uri, "--keep-last", "1")
    prune(Register(store), Retention(keep_last=1), grace_s=0.0)


def raycheck(*arguments: str) -> None:
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 0, done.output


def a_run(uri: str) -> None:
    """Make a run with three checkpoints, and with an incomplete save and an upload of an attempt that has ended."""
    store = open_store(uri)
    ann = Driver(store)
    ann.claim("g1")
    for save in (1, 2, 3):
        ann.save(1, save)
    for entry in ann.look().live:
        write_export(store, object_keys.exports_prefix(entry.key), entry.key)
    store.put(object_keys.shard_key("step-000000040-a1-s4", "train", 0), b"torn")
    begin_upload(store, object_keys.shard_key("step-000000050-a1-s5", "train", 1))
    ann.claim("g2")
    leave_holds(store)


def leave_holds(store: Store) -> None:
    """Leave the hold of a deleted fork, and records of other holds that ended long ago."""
    for run_id in ("forked", "broken-off"):
        fork(store, store.beside("../fork"), run_id=run_id)
        for item in list(store.beside("../fork").list_objects("")):
            store.beside("../fork").delete(item.key)
    age = {"at": 1.0}
    record = next(iter(store.list_objects("holds/broken-off/")))
    store.put(record.key, sealed(json.loads(store.get(record.key).data) | age))
    store.put(record.key.replace("broken-off", "another"), sealed(json.loads(store.get(record.key).data)))


@pytest.mark.parametrize(
    ("role", "works"),
    [
        ("trainer", trains),
        pytest.param("trainer", lambda store: trains(by_s3fs_alone(store)), marks=pytest.mark.slow),
        pytest.param("reader", reads, marks=pytest.mark.slow),
        ("sweeper", sweeps),
    ],
    ids=["trainer by obstore", "trainer by s3fs", "reader", "sweeper"],
)
def test_a_role_asks_for_what_it_may_and_needs_all_of_that(s3, wire, role, works: Callable[[FastS3Store], None]):
    name = uuid4().hex
    with small_pages(writes=1):
        if role != "trainer":
            a_run(join_uri(s3, name))

        works(open_store(join_uri(wire.uri, name)))

    asked = {asked_of(line) for line in wire.requests}
    assert refused(role, wire.requests) == []
    for statement in statements(role):
        used = {action for action, resource in asked if allows(statement, (action, resource))}
        assert statement["Sid"] in NEVER_ASKED or used == set(listed(statement["Action"])), statement["Sid"]


def test_the_policy_gives_nothing_to_anybody_else():
    assert {item["Sid"] for item in POLICY["Statement"]} == {
        item["Sid"] for role in ("trainer", "reader", "sweeper") for item in statements(role)
    }
    assert all(item["Effect"] == "Allow" and "*" not in "".join(listed(item["Action"])) for item in POLICY["Statement"])


def test_a_reader_needs_no_right_to_write(s3, wire, tmp_path):
    """Commands that only read run on a store that denies all writes (I8)."""
    name = uuid4().hex
    a_run(join_uri(s3, name))
    for method in ("PUT", "POST", "DELETE"):
        wire.rule("deny", method, ".", times=999)

    reads(open_store(join_uri(wire.uri, name)))

    assert {line.split()[0] for line in wire.requests} <= {"GET", "HEAD"}
    with pytest.raises(StoreError, match="s3:PutObject"):
        rewind(Register(open_store(join_uri(wire.uri, name))), "step-000000010-a1-s1")
