"""The checks of a place for runs, on real servers with planted faults: what is wrong is what fit refuses, in its words."""

import errno
import os
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from uuid import uuid4

import pytest

from raycheck.bucket.diagnosis import checks
from raycheck.bucket.diagnosis.checks import (
    check_checksums,
    check_clock,
    check_conditions,
    check_copies,
    check_endpoint,
    check_parts,
    check_race,
    check_rights,
    check_rules,
    check_uploads,
    refuse_unfit_place,
)
from raycheck.bucket.diagnosis.finding import BucketFinding, found
from raycheck.bucket.diagnosis.race import Outcome, Turn, race
from raycheck.bucket.diagnosis.racing_process import by_processes
from raycheck.bucket.store import Store, open_store
from raycheck.bucket.store.address import join_uri
from raycheck.errors import ConfigError, RaycheckError, StoreError
from tests.support.servers.http_fault_proxy import FaultProxy, of_s3
from tests.support.servers.planted_buckets import FROZEN_RULE, planted_bucket
from tests.support.servers.rclone_server import rclone_server

ALL: tuple[Callable[[Store], Iterator[BucketFinding]], ...] = (
    check_endpoint,
    check_clock,
    lambda store: check_rights(store, node="n"),
    check_conditions,
    check_race,
    check_parts,
    check_uploads,
    check_checksums,
    check_copies,
    check_rules,
)


def findings(store: Store) -> list[BucketFinding]:
    return [finding for check in ALL for finding in found("check", lambda check=check: check(store))]


def wrong(store: Store) -> list[BucketFinding]:
    return [finding for finding in findings(store) if finding.state == "wrong"]


def states(found_: list[BucketFinding]) -> dict[str, str]:
    return {finding.name: finding.state for finding in found_}


def assert_refused_in_these_words(store: Store, finding: BucketFinding) -> None:
    with pytest.raises(RaycheckError) as caught:
        refuse_unfit_place(store, node="n")
    assert finding.sentence in str(caught.value)


def place(uri: str) -> Store:
    return open_store(join_uri(uri, uuid4().hex))


# --- places that are fit ---


def test_a_fit_place_is_not_refused_and_nothing_is_left_there(store: Store) -> None:
    refuse_unfit_place(store, node="n")

    assert wrong(store) == []
    assert list(store.list_objects("")) == []


def test_a_fit_bucket_on_a_cloud_is_not_refused_and_nothing_is_left_there(cloud_uri: str) -> None:
    store = open_store(cloud_uri)

    refuse_unfit_place(store, node="n")

    assert wrong(store) == []
    assert list(store.list_objects("")) == []


def test_a_fit_bucket_on_s3_says_what_each_check_has_found(s3: str) -> None:
    store = place(s3)

    said = findings(store)

    assert {name for name, state in states(said).items() if state == "ok"} >= {
        "endpoint",
        "clock",
        "right to put",
        "right to get",
        "right to conditional put",
        "right to list",
        "right to delete",
        "right to list uploads",
        "right to abort uploads",
        "conditional writes",
        "atomicity",
        "objects in parts",
        "versioning",
        "object lock",
        "lifecycle rules",
    }
    assert list(store.list_objects("")) == []
    assert list(store.list_uploads("probes/")) == []


def test_what_is_wrong_cannot_be_built_without_words_that_say_it() -> None:
    one = BucketFinding(name="clock", state="wrong", text="this is so", cure="Do that")

    with pytest.raises(ConfigError, match=r"^s3://b: clock: this is so\. Do that$"):
        checks.refuse("s3://b", [one])


# --- conditions ---


def test_a_store_that_ignores_conditions_is_wrong(s3: str) -> None:
    with rclone_server() as uri:
        store = place(uri)

        (finding,) = found("conditional writes", lambda: check_conditions(store))

        assert (finding.state, "although told not to" in finding.text) == ("wrong", True)
        assert "conditional put: " in wrong(store)[0].text  # a node's own check meets it before
        assert [
            item.name for item in found("rights", lambda: check_rights(store, node="n")) if item.state == "wrong"
        ] == ["conditional writes"]
        assert_refused_in_these_words(store, wrong(store)[0])


def test_a_race_in_the_store_is_found_where_each_condition_alone_is_honored(wire: FaultProxy, s3: str) -> None:
    wire.rule("check_first", "PUT", "/probes/", times=10_000, delay_s=1.0)
    store = place(wire.uri)
    assert states(list(check_conditions(store))) == {"conditional writes": "ok"}

    (finding,) = found("atomicity", lambda: check_race(store))

    assert finding.state == "wrong"
    assert "8 concurrent creates of one object succeeded" in finding.text
    assert "use a store whose conditional writes are atomic" in finding.text
    assert list(store.list_objects("")) == []


def test_processes_find_a_race_too(wire: FaultProxy, s3: str) -> None:
    wire.rule("check_first", "PUT", "/probes/", times=10_000, delay_s=30.0)
    store = place(wire.uri)

    with by_processes(store, 2) as writers, pytest.raises(ConfigError, match="2 of 2 concurrent creates"):
        race(store, writers, rounds=1)


def test_processes_race_on_a_fit_store_and_never_do_two_of_them_win(s3: str) -> None:
    store = place(s3)

    with by_processes(store, 3) as writers:
        assert race(store, writers, rounds=2) == 3

    assert list(store.list_objects("")) == []


def test_a_race_in_which_nobody_gets_an_answer_proves_nothing() -> None:
    store = open_store(f"memory://{uuid4().hex}")

    def unanswered(turn: Turn) -> list[Outcome]:
        store.put(turn.key, b"somebody's")
        return ["unknown", "unknown"]

    with pytest.raises(StoreError, match="none of 2 concurrent"):
        race(store, unanswered)


# --- folders ---


@pytest.mark.parametrize(
    ("call", "number", "lacks"),
    [
        ("os.link", errno.EPERM, "no hard links"),
        ("os.link", errno.EOPNOTSUPP, "no hard links"),
        ("fcntl.flock", errno.ENOSYS, "no flock"),
        ("fcntl.flock", errno.ENOLCK, "no flock"),
    ],
)
def test_a_folder_whose_file_system_lacks_what_is_needed_says_what_and_what_else_to_use(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, number: int, lacks: str
) -> None:
    def refuses(*_: object, **__: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(call, refuses)
    store = open_store(f"file://{tmp_path}/runs")

    finding, *_ = wrong(store)

    assert lacks in finding.text
    assert "for a bucket that is mounted here, give its own address" in finding.text
    assert_refused_in_these_words(store, finding)
    assert list(store.list_objects("")) == []


def test_memory_is_said_to_end_with_its_process_and_is_not_refused() -> None:
    store = open_store(f"memory://{uuid4().hex}")

    (finding,) = check_endpoint(store)

    assert (finding.state, "ends with this one" in finding.text) == ("advice", True)
    refuse_unfit_place(store, node="n")


def test_a_folder_that_does_not_exist_is_advice_and_what_cannot_be_one_is_wrong(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")

    (new,) = check_endpoint(open_store(f"file://{tmp_path}/new"))
    (there,) = check_endpoint(open_store(f"file://{tmp_path}"))
    (file,) = found("endpoint", lambda: check_endpoint(open_store(f"file://{tmp_path}/file")))
    (*_, system) = found("rights", lambda: check_rights(open_store("file:///proc/x"), node="n"))

    assert (new.state, there.state) == ("advice", "ok")
    assert "does not exist yet" in new.text
    assert not (tmp_path / "new").exists()
    assert (file.state, "this is a file" in file.text) == ("wrong", True)
    assert (system.state, "nothing can be created there" in system.text) == ("wrong", True)


# --- rights ---


@pytest.mark.parametrize(
    ("method", "path", "verb", "permission"),
    [
        ("PUT", "probes/", "put", "s3:PutObject"),
        ("GET", "probes/", "get", "s3:GetObject"),
        ("GET", "list-type", "list", "s3:ListBucket"),
        ("DELETE", r"probes/[^?]*$", "delete", "s3:DeleteObject"),
    ],
)
def test_a_right_that_is_missing_is_wrong_and_named(
    wire: FaultProxy, method: str, path: str, verb: str, permission: str
) -> None:
    wire.rule("deny", method, path, times=10_000)
    store = place(wire.uri)

    (*_, finding) = found("rights", lambda: check_rights(store, node="n"))

    assert finding.state == "wrong"
    assert f"node n: {verb}: " in finding.text
    assert f"Grant {permission}" in finding.text
    with pytest.raises(RaycheckError, match=permission):
        refuse_unfit_place(store, node="n")


@pytest.mark.parametrize(
    ("method", "path", "name", "permission"),
    [
        ("GET", "[?&]uploads", "right to list uploads", "s3:ListBucketMultipartUploads"),
        ("GET", "uploadId=", "right to count their parts", "s3:ListMultipartUploadParts"),
        ("DELETE", "uploadId=", "right to abort uploads", "s3:AbortMultipartUpload"),
    ],
)
def test_a_right_without_which_only_tidying_fails_is_advice(
    wire: FaultProxy, s3: str, method: str, path: str, name: str, permission: str
) -> None:
    wire.rule("deny", method, path, times=10_000)
    store = place(wire.uri)

    said = {finding.name: finding for finding in check_uploads(store)}

    assert said[name].state == "advice"
    assert permission in said[name].text
    assert "lifecycle rule" in said[name].cure
    refuse_unfit_place(store, node="n")


def test_an_upload_in_parts_that_is_refused_is_wrong(wire: FaultProxy, s3: str) -> None:
    wire.rule("answer", "POST", "[?&]uploads", times=10_000, answer=of_s3("405 Method Not Allowed", "MethodNotAllowed"))
    store = place(wire.uri)

    (finding,) = found("objects in parts", lambda: check_parts(store))

    assert (finding.state, "405" in finding.text) == ("wrong", True)
    with pytest.raises(StoreError, match="405"):
        refuse_unfit_place(store, node="n")


def test_parts_that_come_back_as_other_bytes_are_wrong(wire: FaultProxy, s3: str) -> None:
    wire.rule("edit", "GET", "/probes/[^?]*$", times=10_000, edit=lambda _, body: bytes(len(body)))

    (finding,) = found("objects in parts", lambda: check_parts(place(wire.uri)))

    assert (finding.state, "other bytes" in finding.text) == ("wrong", True)


# --- the clock ---


@pytest.mark.parametrize(
    ("off_s", "state", "word"), [(0, "ok", "within"), (120, "advice", "ahead"), (-7500, "wrong", r"7\d\d\d s behind")]
)
def test_a_clock_that_is_off_is_advice_and_one_that_is_far_off_is_wrong(
    s3: str, off_s: float, state: str, word: str
) -> None:
    (finding,) = check_clock(place(s3), now=lambda: time.time() + off_s)

    assert finding.state == state
    assert re.search(word, finding.text)


def test_a_store_that_refuses_this_machines_time_says_so_and_what_to_do(wire: FaultProxy, s3: str) -> None:
    wire.rule("answer", "GET|PUT", ".", times=10_000, answer=of_s3("403 Forbidden", "RequestTimeTooSkewed"))

    (finding,) = found("endpoint", lambda: check_endpoint(place(wire.uri)))

    assert finding.state == "wrong"
    assert "set this machine's clock" in finding.text


# --- what the bucket does on its own ---


def of_rules(uri: str) -> dict[str, BucketFinding]:
    """The last finding of each name."""
    return {finding.name: finding for finding in check_rules(open_store(uri))}


@pytest.mark.parametrize(
    ("rule", "state", "text"),
    [
        (FROZEN_RULE, "wrong", "'tidy up' (runs/) deletes objects after 30 days"),
        (FROZEN_RULE | {"Filter": {}}, "wrong", "(the whole bucket) deletes objects"),
        (FROZEN_RULE | {"Filter": {"Prefix": "runs/my-run/checkpoints/"}}, "wrong", "deletes objects"),
        (FROZEN_RULE | {"Filter": {"Prefix": "run"}}, "wrong", "deletes objects"),
        (FROZEN_RULE | {"Filter": {"Prefix": "runs/other/"}}, "ok", "none deletes"),
        (FROZEN_RULE | {"Filter": {"Prefix": "runs/my-run/exports/"}}, "ok", "none deletes"),
        (FROZEN_RULE | {"Filter": {"Tag": {"Key": "temporary", "Value": "yes"}}}, "ok", "none deletes"),
        (FROZEN_RULE | {"Status": "Disabled"}, "ok", "none deletes"),
        (
            {"ID": "cold", "Status": "Enabled", "Filter": {}, "Transitions": [{"Days": 9, "StorageClass": "GLACIER"}]},
            "wrong",
            "moves objects where they cannot be read at once after 9 days",
        ),
        (
            {
                "ID": "ia",
                "Status": "Enabled",
                "Filter": {"Prefix": "runs/"},
                "Transitions": [{"Days": 30, "StorageClass": "STANDARD_IA"}],
            },
            "advice",
            "moves objects to another class of storage after 30 days",
        ),
    ],
)
def test_a_lifecycle_rule_is_judged_by_what_it_does_to_a_run(s3: str, rule: dict, state: str, text: str) -> None:
    uri = planted_bucket(s3, rules=[rule])

    finding = of_rules(uri)["lifecycle rules"]

    assert (finding.state, text in finding.text) == (state, True), finding
    if state == "wrong":
        assert finding.cure
        assert_refused_in_these_words(open_store(uri), finding)
    else:
        refuse_unfit_place(open_store(uri), node="n")


def test_abandoned_uploads_that_no_rule_sweeps_are_advice(s3: str) -> None:
    sweeps = {
        "ID": "u",
        "Status": "Enabled",
        "Filter": {},
        "AbortIncompleteMultipartUpload": {"DaysAfterInitiation": 7},
    }

    swept, unswept = of_rules(planted_bucket(s3, rules=[sweeps])), of_rules(planted_bucket(s3))

    assert (swept["abandoned uploads"].state, unswept["abandoned uploads"].state) == ("ok", "advice")
    assert "after 7 days" in swept["abandoned uploads"].text


def test_versioning_is_said_with_how_long_it_keeps_what_is_deleted(s3: str) -> None:
    ends = {"ID": "v", "Status": "Enabled", "Filter": {}, "NoncurrentVersionExpiration": {"NoncurrentDays": 7}}

    off = of_rules(planted_bucket(s3))["versioning"]
    forever = of_rules(planted_bucket(s3, versioning=True))["versioning"]
    for_days = of_rules(planted_bucket(s3, versioning=True, rules=[ends]))["versioning"]

    assert (off.state, forever.state, for_days.state) == ("ok", "advice", "ok")
    assert "is billed, for ever" in forever.text
    assert "for 7 days" in for_days.text


def test_a_default_retention_of_new_objects_is_advice(s3: str) -> None:
    uri = planted_bucket(s3, lock={"Mode": "GOVERNANCE", "Days": 40})

    finding = of_rules(uri)["object lock"]

    assert (finding.state, "40 days in governance mode" in finding.text) == ("advice", True)


def test_what_the_credentials_may_not_read_is_unknown_and_names_the_permission(wire: FaultProxy, s3: str) -> None:
    wire.rule("deny", "GET", r"\?(lifecycle|object-lock|versioning)", times=10_000)
    uri = join_uri(wire.uri, uuid4().hex)

    said = of_rules(uri)

    assert (said["lifecycle rules"].state, said["object lock"].state) == ("unknown", "unknown")
    assert "s3:GetLifecycleConfiguration" in said["lifecycle rules"].text
    assert "s3:GetBucketObjectLockConfiguration" in said["object lock"].text
    assert said["versioning"].state == "ok", "a written object shows whether it gets a version"
    refuse_unfit_place(open_store(uri), node="n")


def test_versioning_is_seen_at_a_written_object_where_it_may_not_be_read(wire: FaultProxy, s3: str) -> None:
    wire.rule("deny", "GET", r"\?versioning", times=10_000)
    planted = planted_bucket(s3, versioning=True)
    port = f"127.0.0.1:{wire.port}"
    uri = planted.replace(planted.partition("endpoint_override=")[2].partition("&")[0], port)

    assert of_rules(uri)["versioning"].state == "advice"


# --- checksums and copies ---


def test_a_store_that_stores_other_bytes_than_the_checksums_is_advice(s3: str) -> None:
    """moto keeps what a checksum says, and never compares it."""
    store = place(s3)

    (finding,) = check_checksums(store)

    assert (finding.state, "objects and parts" in finding.text) == ("advice", True)
    assert list(store.list_objects("")) == []


def test_a_store_that_refuses_other_bytes_is_ok(gcs: str) -> None:
    store = open_store(f"gs://raycheck/{uuid4().hex}")

    assert states(list(check_checksums(store))) == {"checksums": "ok"}
    assert list(store.list_objects("")) == []


def test_copies_inside_a_store_are_ok_where_they_are_proven_and_advice_elsewhere(gcs: str, s3: str) -> None:
    assert states(list(check_copies(open_store(f"gs://raycheck/{uuid4().hex}")))) == {"server-side copies": "ok"}
    assert states(list(check_copies(place(s3)))) == {"server-side copies": "advice"}
