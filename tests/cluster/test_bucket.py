"""cluster/bucket: S3 takes the lifecycle rules, no rule touches a live checkpoint, and on Google Cloud each role can do its
work with the rights it is given, and is given none that it never uses.

What grant.gcs.sh would do is read from the calls that it makes of gcloud; what a role asks of the store is recorded on the
wire, and Ray's part of it made with the file system that Ray would use.
"""

import json
import os
import re
import shlex
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import parse_qs, unquote, urlsplit
from uuid import uuid4

import botocore.session
import pytest
import yaml
from google.cloud.storage.bucket import Bucket
from pyarrow.fs import GcsFileSystem

from raycheck.bucket.format import object_keys
from raycheck.bucket.protocol.preflight import probe, probe_node
from raycheck.bucket.protocol.removal.prune_and_sweep import prune, sweep
from raycheck.bucket.store import open_store
from tests.bucket.protocol.test_iam_policy import leave_holds, reads, sweeps
from tests.support.histories.small_pages import small_pages
from tests.support.processes.cluster_files import CLUSTER
from tests.support.samples.sample_checkpoints import Driver, write_export
from tests.support.servers.http_fault_proxy import FaultProxy, fault_proxy

BUCKET = CLUSTER / "bucket"
LARGE = 16 * 1024 * 1024 + 1  # bytes: more than one part, so a resumable upload
GET, LIST = "storage.objects.get", "storage.objects.list"
CREATE, DELETE = "storage.objects.create", "storage.objects.delete"
LOOK = "storage.buckets.get"
# --- lifecycle ---


def of_aws() -> dict:
    return json.loads((BUCKET / "lifecycle.aws.json").read_text())


def of_google() -> list[dict]:
    return json.loads((BUCKET / "lifecycle.gcs.json").read_text())["lifecycle"]["rule"]


def test_s3_takes_the_lifecycle_rules_and_gives_them_back(s3: str) -> None:
    endpoint = parse_qs(urlsplit(s3).query)["endpoint_override"][0]
    client = botocore.session.get_session().create_client(
        "s3", endpoint_url=f"http://{endpoint}", region_name="us-east-1"
    )
    bucket = uuid4().hex
    client.create_bucket(Bucket=bucket)

    client.put_bucket_lifecycle_configuration(Bucket=bucket, LifecycleConfiguration=of_aws())

    assert client.get_bucket_lifecycle_configuration(Bucket=bucket)["Rules"] == of_aws()["Rules"]
    client.close()


def test_no_rule_of_aws_lets_a_live_object_expire_or_go_cold() -> None:
    kinds = {"AbortIncompleteMultipartUpload", "NoncurrentVersionExpiration", "Expiration"}

    for rule in of_aws()["Rules"]:
        assert rule.keys() <= {"ID", "Status", "Filter"} | kinds
        assert rule.get("Expiration", {"ExpiredObjectDeleteMarker": True}) == {"ExpiredObjectDeleteMarker": True}


def test_google_takes_the_rules_and_none_deletes_a_live_object() -> None:
    bucket = Bucket(client=None, name="bucket")
    bucket._properties["lifecycle"] = {"rule": of_google()}

    abort, delete = bucket.lifecycle_rules

    assert abort == {"action": {"type": "AbortIncompleteMultipartUpload"}, "condition": {"age": 7}}
    assert delete["action"] == {"type": "Delete"}
    assert delete["condition"]["isLive"] is False


# --- rights on Google Cloud ---


@dataclass(frozen=True, kw_only=True)
class Grant:
    """A role that somebody has, and on which objects; None: on the bucket itself."""

    account: str
    permissions: frozenset[str]
    expression: str | None

    def allows(self, permission: str, name: str | None) -> bool:
        if permission not in self.permissions:
            return False
        return name is None or self.expression is None or holds(self.expression, f"projects/_/buckets/b/objects/{name}")


def holds(expression: str, resource: str) -> bool:
    """The part of IAM's condition language that the script uses."""
    for term in expression.split(" && "):
        call, argument, rest = re.fullmatch(r"resource\.name\.(\w+)\('([^']*)'\)( != '')?", term).groups()
        if call == "extract":
            before, after = argument.split("{run}")
            assert rest
            found = re.search(f"{re.escape(before)}(.+?){re.escape(after)}", resource)
        else:
            found = getattr(resource, {"startsWith": "startswith", "endsWith": "endswith"}[call])(argument)
        if not found:
            return False
    return True


@pytest.fixture(scope="session")
def gcloud_calls(tmp_path_factory: pytest.TempPathFactory) -> list[list[str]]:
    """What the script asks of gcloud for project p, bucket b and prefix runs; no role exists yet."""
    folder = tmp_path_factory.mktemp("gcloud")
    (folder / "gcloud").write_text(
        f'#!/bin/bash\nif [ "$3" = describe ]; then exit 1; fi\nprintf "%q " "$@" >>{folder}/calls\necho >>{folder}/calls\n'
    )
    (folder / "gcloud").chmod(0o755)
    environment = {**os.environ, "PATH": f"{folder}:{os.environ['PATH']}"}
    command = ["sh", str(BUCKET / "grant.gcs.sh"), "p", "b", "runs"]
    subprocess.run(command, env=environment, check=True, timeout=60)
    return [shlex.split(line) for line in (folder / "calls").read_text().splitlines()]


@pytest.fixture(scope="session")
def grants(gcloud_calls: list[list[str]]) -> list[Grant]:
    roles = {
        call[3]: yaml.safe_load(Path(call[call.index("--file") + 1]).read_text())
        for call in gcloud_calls
        if call[:3] == ["iam", "roles", "create"]
    }
    found = []
    for call in gcloud_calls:
        if call[:3] != ["storage", "buckets", "add-iam-policy-binding"]:
            continue
        condition, member, role = (call[call.index(flag) + 1] for flag in ("--condition", "--member", "--role"))
        found.append(
            Grant(
                account=member.removeprefix("serviceAccount:").partition("@")[0],
                permissions=frozenset(roles[role.removeprefix("projects/p/roles/")]["includedPermissions"]),
                expression=None if condition == "None" else condition.partition(",expression=")[2],
            )
        )
    assert len(roles) + len(found) == len(gcloud_calls)
    return found


def asked_of(line: str) -> set[tuple[str, str | None]]:
    """The permissions that Google documents for a request, and the object's name where the request line has it."""
    method, _, target = line.partition(" ")
    split = urlsplit(target)
    query = parse_qs(split.query, keep_blank_values=True)
    name = unquote(split.path.partition("/o/")[2]) or None
    if "upload_id" in query:
        return set()  # the upload's address is its own credential
    match method:
        case "GET" if name:
            return {(GET, name)}
        case "GET" if split.path.endswith("/o"):
            return {(LIST, None)}
        case "GET":
            return {(LOOK, None)}
        case "DELETE":
            return {(DELETE, name)}
        case "POST":
            name = query.get("name", [None])[0]
            is_new = query.get("ifGenerationMatch") == ["0"]
            return {(CREATE, name)} | (set() if is_new else {(DELETE, name)})
    raise AssertionError(line)


@pytest.fixture
def google(gcs: str) -> Iterator[FaultProxy]:
    """A server on which nobody has used the prefix yet: Ray's file system leaves an empty object of that name."""
    open_store("gs://raycheck").delete("runs/")
    with fault_proxy(f"gs://raycheck?endpoint_override={gcs.removeprefix('http://')}") as proxy:
        yield proxy


def uri_of(proxy: FaultProxy, name: str) -> str:
    return f"gs://raycheck/runs/{name}?endpoint_override=127.0.0.1:{proxy.port}&scheme=http&anonymous=true"


def ray_writes(proxy: FaultProxy, name: str) -> None:
    """What Ray does with a storage path before the first step, and again when the run goes on."""
    files = GcsFileSystem(endpoint_override=f"127.0.0.1:{proxy.port}", scheme="http", anonymous=True)
    for _ in range(2):
        files.create_dir(f"raycheck/runs/{name}")
        with files.open_output_stream(f"raycheck/runs/{name}/.validate_storage_marker"):
            pass
    files.get_file_info(f"raycheck/runs/{name}/.validate_storage_marker")


def trains(proxy: FaultProxy, name: str) -> None:
    store = open_store(uri_of(proxy, name))
    ray_writes(proxy, name)
    probe_node(store, node="n")
    probe(store)
    driver = Driver(store)
    driver.claim("g1")
    store.put_parts(object_keys.shard_key("step-000000050-a1-s5", "train", 1), iter([memoryview(bytes(LARGE))]), LARGE)
    for save in (1, 2):
        driver.save(1, save, keep_last=1)
    driver.claim("g2")
    prune(driver.register, grace_s=0.0)
    sweep(store)


def a_run(proxy: FaultProxy, name: str) -> None:
    """With something for everybody: two checkpoints, and a torn save of an attempt that is over."""
    store = open_store(uri_of(proxy, name))
    driver = Driver(store)
    driver.claim("g1")
    for save in (1, 2):
        entry = driver.save(1, save)
        write_export(store, object_keys.exports_prefix(entry.key), entry.key)
    store.put(object_keys.shard_key("step-000000040-a1-s4", "train", 0), b"torn")
    driver.claim("g2")
    leave_holds(store)


@pytest.mark.parametrize(
    ("account", "works"),
    [
        ("trainer", trains),
        ("reader", lambda proxy, name: reads(open_store(uri_of(proxy, name)))),
        ("sweeper", lambda proxy, name: sweeps(open_store(uri_of(proxy, name)))),
    ],
    ids=["trainer", "reader", "sweeper"],
)
def test_a_role_asks_google_for_what_it_may_and_needs_all_of_that(
    google: FaultProxy, grants: list[Grant], account: str, works: Callable[[FaultProxy, str], None]
) -> None:
    name = uuid4().hex
    mine = [grant for grant in grants if grant.account == account]
    with small_pages():
        if account != "trainer":
            a_run(google, name)
        before = len(google.requests)

        works(google, name)

    asked = {one for line in google.requests[before:] for one in asked_of(line)}
    assert [one for one in asked if not any(grant.allows(*one) for grant in mine)] == []
    for grant in mine:
        used = {permission for permission, where in asked if grant.allows(permission, where)}
        assert used == grant.permissions, grant


def test_a_sweeper_writes_nothing_but_a_new_latest_its_pages_and_the_history(google: FaultProxy) -> None:
    name = uuid4().hex
    with small_pages():
        a_run(google, name)
        store = open_store(uri_of(google, name))
        there = {item.key for item in store.list_objects("")}
        before = len(google.requests)

        sweeps(store)

    writes = [urlsplit(line.partition(" ")[2]) for line in google.requests[before:] if line.startswith("POST")]
    assert any(parse_qs(split.query)["ifGenerationMatch"] != ["0"] for split in writes), "a swap of latest"
    created = {item.key for item in store.list_objects("")} - there
    assert created
    assert all(key.startswith((object_keys.PAGES_PREFIX, object_keys.HISTORY_PREFIX)) for key in created)


def test_a_sweeper_may_delete_checkpoints_and_exports_and_nothing_else(grants: list[Grant]) -> None:
    mine = [grant for grant in grants if grant.account == "sweeper"]

    def may(permission: str, name: str) -> bool:
        return any(grant.allows(permission, name) for grant in mine)

    assert may(DELETE, "runs/my-run/checkpoints/step-000000100-a3-s7/train/__0_0.distcp")
    assert may(DELETE, "runs/my-run/exports/step120/config.json")
    assert may(DELETE, "runs/my-run/pages/000000000123-3f9a0c51.json")
    assert not may(CREATE, "runs/my-run/exports/step120/config.json")
    assert not may(DELETE, "runs/my-run/attempts/000002.json")
    assert not may(CREATE, "runs/my-run/checkpoints/step-000000100-a3-s7/manifest.json")
    assert not may(GET, "runs/my-run/checkpoints/step-000000100-a3-s7/train/__0_0.distcp")
    assert not may(DELETE, "other/my-run/checkpoints/step-000000100-a3-s7/train/__0_0.distcp")


def test_without_the_right_to_look_at_the_bucket_ray_cannot_begin(google: FaultProxy) -> None:
    """Which is why the trainer has storage.buckets.get, that Google's own roles for objects do not have."""
    google.rule("deny", "GET", "/storage/v1/b/raycheck$", times=99)

    with pytest.raises(PermissionError, match="GetBucketMetadata"):
        ray_writes(google, uuid4().hex)


def test_nobody_gets_any_other_permission() -> None:
    all_permissions = {
        permission
        for path in (BUCKET / "roles.gcs").glob("*.yaml")
        for permission in yaml.safe_load(path.read_text())["includedPermissions"]
    }

    assert all_permissions == {GET, LIST, CREATE, DELETE, LOOK}
