"""The checks of a place on servers of other people: Ceph RGW, ministack, Azurite, a server of Google's API.

What is planted is planted by each server's own API.
"""

import json
import urllib.request
from collections.abc import Iterator
from urllib.parse import parse_qs, urlsplit
from uuid import uuid4

import pytest

from raycheck.bucket.diagnosis.checks import check_rules, refuse_wrong
from raycheck.bucket.diagnosis.finding import BucketFinding
from raycheck.bucket.store import open_store
from raycheck.bucket.store.address import join_uri
from raycheck.catalog import examine_bucket
from raycheck.errors import ConfigError
from tests.conftest import EMULATOR
from tests.support.servers.gcs_server import BUCKET
from tests.support.servers.http_fault_proxy import fault_proxy
from tests.support.servers.planted_buckets import FROZEN_RULE, planted_bucket

SMALL = 1024 * 1024
on_both = pytest.mark.parametrize(
    "server", [pytest.param(name, marks=pytest.mark.slow) for name in ("ministack", "ceph")]
)
on_google = pytest.mark.parametrize("server", ["gcs", *(["emulator"] if EMULATOR else [])])


def examined(uri: str) -> dict[str, BucketFinding]:
    return {finding.name: finding for finding in examine_bucket(uri, transfer_bytes=SMALL)}


def wrong(found: dict[str, BucketFinding]) -> list[str]:
    return [name for name, finding in found.items() if finding.state == "wrong"]


@on_both
def test_a_fit_bucket_on_another_s3_has_nothing_wrong(server: str, request: pytest.FixtureRequest) -> None:
    uri = join_uri(request.getfixturevalue(server), uuid4().hex)

    found = examined(uri)

    assert wrong(found) == []
    assert "4 processes raced for 5 objects" in found["atomicity"].text
    assert list(open_store(uri).list_objects("")) == []
    refuse_wrong(open_store(uri), node="n")


@on_both
def test_a_rule_that_deletes_by_age_is_read_from_another_s3(server: str, request: pytest.FixtureRequest) -> None:
    uri = planted_bucket(request.getfixturevalue(server), rules=[FROZEN_RULE])

    found = {finding.name: finding for finding in check_rules(open_store(uri))}

    assert wrong(found) == ["lifecycle rules"]
    assert "deletes objects after 30 days" in found["lifecycle rules"].text
    with pytest.raises(ConfigError, match="deletes objects after 30 days"):
        refuse_wrong(open_store(uri), node="n")


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

    assert wrong(found) == ["rights"]
    assert "conditional put: " in found["rights"].text
    assert "creates over an existing object although told not to" in found["rights"].text
    assert found["versioning"].state == "advice"
    with pytest.raises(ConfigError, match="creates over an existing object although told not to"):
        refuse_wrong(open_store(uri), node="n")


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
            refuse_wrong(store, node="n")


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
