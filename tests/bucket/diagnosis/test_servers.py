"""The checks of a place on servers of other people: Ceph RGW, ministack, SeaweedFS, Azurite, one of Google's API.

What is planted is planted by each server's own API.
"""

import json
import urllib.request
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from urllib.parse import parse_qs, urlsplit
from uuid import uuid4

import pytest

from raycheck.bucket.diagnosis.checks import check_rights, check_rules, refuse_unfit_place
from raycheck.bucket.diagnosis.finding import BucketFinding
from raycheck.bucket.diagnosis.finding import found as found_by
from raycheck.bucket.store import open_store
from raycheck.bucket.store.address import join_uri
from raycheck.catalog import examine_bucket
from raycheck.errors import ConfigError
from tests.conftest import EMULATOR
from tests.support.servers.azurite_server import ACCOUNT, CONTAINER, KEY
from tests.support.servers.gcs_server import BUCKET
from tests.support.servers.http_fault_proxy import Answer, FaultProxy, fault_proxy
from tests.support.servers.planted_buckets import FROZEN_RULE, planted_bucket

SMALL = 1024 * 1024
on_others = pytest.mark.parametrize(
    "server", [pytest.param(name, marks=pytest.mark.slow) for name in ("ministack", "ceph", "seaweed")]
)
on_google = pytest.mark.parametrize("server", ["gcs", *(["emulator"] if EMULATOR else [])])


def examined(uri: str) -> dict[str, BucketFinding]:
    return {finding.name: finding for finding in examine_bucket(uri, transfer_bytes=SMALL)}


def wrong(found: dict[str, BucketFinding]) -> list[str]:
    return [name for name, finding in found.items() if finding.state == "wrong"]


@on_others
def test_a_fit_bucket_on_another_s3_has_nothing_wrong(server: str, request: pytest.FixtureRequest) -> None:
    uri = join_uri(request.getfixturevalue(server), uuid4().hex)

    found = examined(uri)

    assert wrong(found) == []
    assert "4 processes raced for 5 objects" in found["atomicity"].text
    assert list(open_store(uri).list_objects("")) == []
    refuse_unfit_place(open_store(uri), node="n")


@on_others
def test_a_rule_that_deletes_by_age_is_read_from_another_s3(server: str, request: pytest.FixtureRequest) -> None:
    uri = planted_bucket(request.getfixturevalue(server), rules=[FROZEN_RULE])

    found = {finding.name: finding for finding in check_rules(open_store(uri))}

    assert wrong(found) == ["lifecycle rules"]
    assert "deletes objects after 30 days" in found["lifecycle rules"].text
    with pytest.raises(ConfigError, match="deletes objects after 30 days"):
        refuse_unfit_place(open_store(uri), node="n")


@pytest.mark.slow
def test_a_race_before_another_s3_is_found(ministack: str) -> None:
    with fault_proxy(ministack) as proxy:
        proxy.rule("check_first", "PUT", "/probes/", times=10_000, delay_s=1.0)

        found = examined(join_uri(proxy.uri, uuid4().hex))

    assert wrong(found) == ["atomicity"]


@pytest.mark.slow
def test_a_bucket_with_versioning_on_ceph_is_wrong_as_its_conditional_writes_are(ceph: str) -> None:
    uri = planted_bucket(ceph, versioning=True)

    found = examined(uri)

    assert wrong(found) == ["conditional writes"]
    assert "conditional put: " in found["conditional writes"].text
    assert "creates over an existing object although told not to" in found["conditional writes"].text
    assert found["versioning"].state == "advice"
    with pytest.raises(ConfigError, match="creates over an existing object although told not to"):
        refuse_unfit_place(open_store(uri), node="n")


@pytest.fixture
def google(server: str, request: pytest.FixtureRequest) -> Iterator[str]:
    """The address of a bucket on a server of Google's API, whose rules are as before afterwards."""
    given = request.getfixturevalue(server)
    uri = given if server == "emulator" else f"gs://{BUCKET}?endpoint_override={urlsplit(given).netloc}&scheme=http"
    yield uri if "anonymous" in uri else f"{uri}&anonymous=true"
    change(uri, lifecycle=None, versioning=None)


def change(uri: str, **about: object) -> None:
    """Changes a bucket's metadata, as `gcloud storage buckets update` does."""
    query = parse_qs(urlsplit(uri).query)
    address = f"{query['scheme'][0]}://{query['endpoint_override'][0]}/storage/v1/b/{BUCKET}"
    request = urllib.request.Request(
        address, json.dumps(about).encode(), {"Content-Type": "application/json"}, method="PATCH"
    )
    with urllib.request.urlopen(request, timeout=60):
        pass


@on_google
@pytest.mark.parametrize(
    ("rule", "state", "text"),
    [
        (
            {"action": {"type": "Delete"}, "condition": {"age": 30}},
            "wrong",
            "(the whole bucket) deletes objects after 30",
        ),
        (
            {"action": {"type": "Delete"}, "condition": {"age": 30, "matchesPrefix": ["runs/"]}},
            "wrong",
            "(runs/) deletes objects",
        ),
        ({"action": {"type": "Delete"}, "condition": {"age": 30, "matchesPrefix": ["other/"]}}, "ok", "none deletes"),
        ({"action": {"type": "Delete"}, "condition": {"isLive": False, "daysSinceNoncurrentTime": 7}}, "ok", "none"),
        (
            {"action": {"type": "SetStorageClass", "storageClass": "ARCHIVE"}, "condition": {"age": 90}},
            "advice",
            "at that class's price",
        ),
    ],
)
def test_a_rule_of_google_is_judged_by_what_it_does_to_a_run(google: str, rule: dict, state: str, text: str) -> None:
    change(google, lifecycle={"rule": [rule]})
    store = open_store(join_uri(google, "runs/my-run"))

    finding = {finding.name: finding for finding in check_rules(store)}["lifecycle rules"]

    assert (finding.state, text in finding.text) == (state, True), finding
    if state == "wrong":
        with pytest.raises(ConfigError, match="deletes objects"):
            refuse_unfit_place(store, node="n")


@on_google
def test_versioning_on_google_is_said_with_how_long_it_keeps_what_is_deleted(google: str) -> None:
    store = open_store(join_uri(google, "runs/my-run"))
    ends = {"action": {"type": "Delete"}, "condition": {"isLive": False, "daysSinceNoncurrentTime": 7}}

    change(google, versioning={"enabled": True})
    forever = {finding.name: finding for finding in check_rules(store)}["versioning"]
    change(google, versioning={"enabled": True}, lifecycle={"rule": [ends]})
    a_week = {finding.name: finding for finding in check_rules(store)}["versioning"]

    assert (forever.state, a_week.state) == ("advice", "ok")
    assert "for 7 days" in a_week.text


def test_on_google_what_may_not_be_read_is_unknown_and_names_the_permission(gcs: str) -> None:
    with fault_proxy(f"gs://{BUCKET}?endpoint_override={urlsplit(gcs).netloc}") as proxy:
        proxy.rule("deny", "GET", rf"/storage/v1/b/{BUCKET}\?", times=100)
        uri = f"gs://{BUCKET}/runs/my-run?endpoint_override=127.0.0.1:{proxy.port}&scheme=http&anonymous=true"

        found = {finding.name: finding for finding in check_rules(open_store(uri))}

    assert {found[name].state for name in ("versioning", "object lock", "lifecycle rules")} == {"unknown"}
    assert "storage.buckets.get" in found["lifecycle rules"].text


def test_a_retention_policy_of_google_is_wrong(gcs: str) -> None:
    uri = f"gs://{BUCKET}?endpoint_override={urlsplit(gcs).netloc}&scheme=http"
    change(uri, retentionPolicy={"retentionPeriod": "86400"})
    try:
        found = {finding.name: finding for finding in check_rules(open_store(f"gs://{BUCKET}/runs"))}
    finally:
        change(uri, retentionPolicy=None)

    assert found["object lock"].state == "wrong"
    assert "a retention policy of 1 days: a new object can neither be replaced" in found["object lock"].text


# --- Azure ---


def container() -> str:
    return f"az://{CONTAINER}/{uuid4().hex}?account_name={ACCOUNT}"


@pytest.fixture
def before_azure(azure: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultProxy]:
    """A proxy before Azurite. Requests carry a token in their address, which does not sign their headers."""
    from azure.storage.blob import AccountSasPermissions, ResourceTypes, generate_account_sas

    address = azure.partition("BlobEndpoint=http://")[2].partition("/")[0]
    token = generate_account_sas(
        ACCOUNT,
        KEY,
        ResourceTypes(service=True, container=True, object=True),
        AccountSasPermissions(read=True, write=True, delete=True, list=True, add=True, create=True),
        datetime.now(UTC) + timedelta(hours=1),
    )
    with fault_proxy(f"az://{CONTAINER}?endpoint_override={address}") as proxy:
        endpoint = f"BlobEndpoint=http://127.0.0.1:{proxy.port}/{ACCOUNT}"
        monkeypatch.setenv("AZURE_STORAGE_CONNECTION_STRING", f"{endpoint};SharedAccessSignature={token}")
        yield proxy


@pytest.mark.slow
def test_a_fit_container_has_nothing_wrong_and_nothing_is_left_there(azure: str) -> None:
    uri = container()

    found = examined(uri)

    assert wrong(found) == []
    assert {name for name, finding in found.items() if finding.state == "unknown"} == {"lifecycle rules"}
    assert "management-policy show" in found["lifecycle rules"].text
    assert "4 processes raced for 5 objects" in found["atomicity"].text
    assert found["clock"].state == "ok"
    assert list(open_store(uri).list_objects("")) == []
    refuse_unfit_place(open_store(uri), node="n")


@pytest.mark.slow
def test_soft_delete_of_an_account_is_advice_and_says_for_how_long(azure: str) -> None:
    from azure.storage.blob import BlobServiceClient, RetentionPolicy

    with BlobServiceClient.from_connection_string(azure) as service:
        off = {finding.name for finding in check_rules(open_store(container()))}
        service.set_service_properties(delete_retention_policy=RetentionPolicy(enabled=True, days=5))
        try:
            on = {finding.name: finding for finding in check_rules(open_store(container()))}
        finally:
            service.set_service_properties(delete_retention_policy=RetentionPolicy(enabled=False))

    assert "soft delete" not in off
    assert on["soft delete"].state == "advice"
    assert "is billed for 5 more days" in on["soft delete"].text


@pytest.mark.slow
def test_an_immutability_policy_of_a_container_is_wrong(before_azure: FaultProxy) -> None:
    """Azurite has none, so the proxy answers as Azure does."""
    header = ("x-ms-has-immutability-policy", "true")
    before_azure.rule("answer", "GET", "restype=container(?!.*comp)", times=100, answer=Answer("200 OK", header=header))

    finding = {finding.name: finding for finding in check_rules(open_store(container()))}["object lock"]

    assert finding.state == "wrong"
    with pytest.raises(ConfigError, match="a new object can neither be replaced nor deleted"):
        refuse_unfit_place(open_store(container()), node="n")


@pytest.mark.slow
def test_a_race_before_azure_is_found(before_azure: FaultProxy) -> None:
    before_azure.rule("check_first", "PUT", "/probes/", times=10_000, delay_s=1.0)

    found = examined(container())

    assert wrong(found) == ["atomicity"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "path", "verb"),
    [
        ("PUT", "/probes/", "put"),
        ("GET", "/probes/", "get"),
        ("GET", "comp=list", "list"),
        ("DELETE", "/probes/", "delete"),
    ],
)
def test_a_right_that_azure_denies_is_wrong_and_names_the_role(
    before_azure: FaultProxy, method: str, path: str, verb: str
) -> None:
    denied = Answer("403 Forbidden", header=("x-ms-error-code", "AuthorizationPermissionMismatch"))
    before_azure.rule("answer", method, path, times=10_000, answer=denied)

    (*_, finding) = found_by("rights", lambda: check_rights(open_store(container()), node="n"))

    assert finding.state == "wrong"
    assert f"node n: {verb}: " in finding.text
    assert "(AuthorizationPermissionMismatch)" in finding.text
    assert "the role Storage Blob Data Contributor" in finding.text


@pytest.mark.slow
def test_what_azure_does_not_let_read_is_unknown_and_refused_by_nobody(before_azure: FaultProxy) -> None:
    denied = Answer("403 Forbidden", header=("x-ms-error-code", "AuthorizationPermissionMismatch"))
    before_azure.rule("answer", "GET", "restype=(service|container)(?!.*comp=list)", times=100, answer=denied)

    found = {finding.name: finding for finding in check_rules(open_store(container()))}

    assert {found[name].state for name in ("object lock", "soft delete", "lifecycle rules")} == {"unknown"}
    assert found["versioning"].state == "ok"
    refuse_unfit_place(open_store(container()), node="n")
