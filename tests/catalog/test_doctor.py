"""raycheck doctor as a whole: what it says of real places with planted faults, in Python and on the command line."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from uuid import uuid4

import pytest
import torch

import raycheck
from raycheck.bucket.diagnosis.checks import rules_of
from raycheck.bucket.store import open_store
from raycheck.bucket.store.address import join_uri
from raycheck.bucket.store.retry import noting_repeats
from raycheck.catalog import BucketFinding, SavePlan, examine_bucket, fork_run
from raycheck.catalog.doctor.plan import cost_of_saves, interval, plan_of_run, requests_of, with_interval
from raycheck.catalog.doctor.speed import Speed, check_latency, measure, throttling
from raycheck.errors import ConfigError
from raycheck.group.worker.young_daly import daly_interval_s
from raycheck.views.in_words import size
from tests.bucket.protocol.test_iam_policy import OF_THE_BUCKET, refused
from tests.support.processes.command_line import raycheck as command
from tests.support.processes.coordinator_in_thread import group_of
from tests.support.processes.replicated_rank import Holder
from tests.support.processes.save_without_ray import save_state
from tests.support.servers.http_fault_proxy import FaultProxy
from tests.support.servers.planted_buckets import FROZEN_RULE, planted_bucket
from tests.support.servers.rclone_server import rclone_server

ROOT = Path(__file__).parents[2]
SMALL = 1024 * 1024
MEASURED = ("latency", "throughput")
"""What a busy machine may make slow."""


@pytest.fixture(autouse=True)
def two_processes(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets only two processes race, which takes half as long, except in the test that asks for `all_processes`."""
    if "all_processes" not in request.fixturenames:
        monkeypatch.setattr("raycheck.catalog.doctor.examine.PROCESSES", 2)


@pytest.fixture
def all_processes() -> None:
    pass


def examined(uri: str, **more: object) -> dict[str, BucketFinding]:
    return {finding.name: finding for finding in examine_bucket(uri, transfer_bytes=SMALL, **more)}


def bad(found: dict[str, BucketFinding], *states: str) -> list[str]:
    return [name for name, finding in found.items() if finding.state in states and name not in MEASURED]


def test_a_fit_bucket_has_nothing_wrong_and_nothing_is_left_there(s3: str, all_processes: None) -> None:
    uri = join_uri(s3, uuid4().hex)
    seen: list[BucketFinding] = []

    found = examine_bucket(uri, transfer_bytes=SMALL, on_finding=seen.append)

    assert tuple(seen) == found
    by_name = {finding.name: finding for finding in found}
    assert bad(by_name, "wrong", "slow", "unknown") == []
    assert "4 processes raced for 5 objects" in by_name["atomicity"].text
    assert by_name["Ray's file system"].state == "ok"
    assert by_name["throttling"].text.startswith("no request had to be repeated")
    assert list(open_store(uri).list_objects("")) == []
    assert list(open_store(uri).list_uploads("probes/")) == []


def test_a_folder_is_examined_too(tmp_path: Path) -> None:
    found = examined(f"file://{tmp_path}/runs")

    assert bad(found, "wrong", "slow", "unknown") == []
    assert {"atomicity", "latency", "throughput", "Ray's file system"} <= found.keys()
    assert "clock" not in found, "it is this machine's"
    assert "throttling" not in found, "nobody throttles"
    assert not [finding for finding in found.values() if "region" in finding.sentence]


@pytest.mark.parametrize("where", ["gs", pytest.param("az", marks=pytest.mark.slow)])
def test_the_other_clouds_are_examined_too(where: str, request: pytest.FixtureRequest) -> None:
    request.getfixturevalue({"gs": "gcs", "az": "azure"}[where])
    query = {"gs": "", "az": "?account_name=devstoreaccount1"}[where]

    found = examined(f"{where}://raycheck/{uuid4().hex}{query}")

    assert bad(found, "wrong") == []
    assert found["lifecycle rules"].state == {"gs": "ok", "az": "unknown"}[where]
    assert found["checksums"].state == {"gs": "ok", "az": "advice"}[where]


def test_a_place_that_cannot_be_reached_is_the_only_finding(s3: str) -> None:
    (finding,) = examine_bucket(s3.replace("s3://raycheck", "s3://no-such-bucket/runs"))

    assert (finding.name, finding.state) == ("endpoint", "wrong")
    assert "there is no such bucket; create it" in finding.text


# --- least rights ---


def test_nothing_is_asked_for_that_a_trainer_may_not_and_the_right_to_read_rules_is_not_needed(
    wire: FaultProxy, s3: str
) -> None:
    wire.rule("deny", "GET", rf"\?({'|'.join(OF_THE_BUCKET)})", times=10_000)

    found = examined(join_uri(wire.uri, uuid4().hex))

    assert bad(found, "wrong") == []
    assert set(bad(found, "unknown")) == {"object lock", "lifecycle rules"}
    assert refused("trainer", wire.requests) == []


def test_a_missing_right_is_said_once_and_what_depends_on_it_is_unknown(wire: FaultProxy, s3: str) -> None:
    wire.rule("deny", "GET", "list-type", times=10_000)

    found = examined(join_uri(wire.uri, uuid4().hex))

    assert bad(found, "wrong") == ["rights"]
    assert "list: " in found["rights"].text
    assert "Grant s3:ListBucket" in found["rights"].text
    assert found["all else"].state == "unknown"
    assert found["lifecycle rules"].state == "ok", "which needs none of them"


def test_without_the_right_to_delete_one_line_is_wrong_and_no_load_is_said_to_be_borne(
    wire: FaultProxy, s3: str
) -> None:
    wire.rule("deny", "DELETE", r"probes/[^?]*$", times=10_000)

    found = examined(join_uri(wire.uri, uuid4().hex))

    assert bad(found, "wrong") == ["rights"]
    assert found["the bucket's rules"].state == "unknown"
    assert "throttling" not in found


def test_ignored_conditions_are_said_as_such_and_all_else_is_examined(s3: str) -> None:
    with rclone_server() as uri:
        found = examined(join_uri(uri, "runs"))

    assert "conditional writes" in bad(found, "wrong")
    assert "although told not to" in found["conditional writes"].text
    assert {"rights", "all else"}.isdisjoint(found)
    assert "throughput" in found


def test_an_endpoint_that_does_not_answer_is_said_with_what_to_look_at(wire: FaultProxy, s3: str, monkeypatch) -> None:
    monkeypatch.setattr("raycheck.bucket.store.retry.CHANCE.uniform", lambda *_: 0.0)
    wire.rule("reset", "GET", ".", times=1000)

    (finding,) = examine_bucket(wire.uri)

    assert (finding.name, finding.state) == ("endpoint", "wrong")
    assert "Check the address, and from this machine the network to it" in finding.cure
    assert ": : " not in finding.text


# --- Ray's file system ---


def test_rays_file_system_that_may_not_write_is_wrong(wire: FaultProxy, s3: str) -> None:
    wire.rule("deny", "PUT|POST", "probes/.*-ray", times=10_000)

    found = examined(join_uri(wire.uri, uuid4().hex))

    assert bad(found, "wrong") == ["Ray's file system"]
    assert "Ray's own file system (FSSpecHandler) cannot write there" in found["Ray's file system"].text


# --- speed ---


def test_a_store_that_throttles_is_slow_and_said_to_throttle(wire: FaultProxy, s3: str) -> None:
    wire.rule("busy", "HEAD", "probes/", times=7)

    with noting_repeats() as repeats:
        list(check_latency(open_store(join_uri(wire.uri, uuid4().hex))))
    finding = throttling(repeats)

    assert finding.state == "slow"
    assert "7 requests had to be repeated: the store answered 503" in finding.text


def test_a_narrow_network_is_slow(wire: FaultProxy, s3: str) -> None:
    wire.throttle(bytes_per_s=8e6)  # which no machine can make faster

    _, finding = measure(open_store(join_uri(wire.uri, uuid4().hex)), SMALL)

    assert (finding.name, finding.state) == ("throughput", "slow")
    assert "one rank writes" in finding.text


def test_conditional_writes_that_take_a_second_are_slow(wire: FaultProxy, s3: str) -> None:
    wire.rule("delay", "PUT", "probes/", times=10_000, delay_s=0.6)

    (finding,) = check_latency(open_store(join_uri(wire.uri, uuid4().hex)))

    assert (finding.name, finding.state) == ("latency", "slow")


# --- the cost of saves, and the interval ---

FAST = Speed(up=1e9, down=1e9, copy=1e10)


def test_the_interval_is_that_of_young_and_daly() -> None:
    plan = SavePlan(size_bytes=80 * 10**9, world_size=8, step_s=2.0, failure_every_s=6 * 3600)

    (finding,) = interval(plan, FAST)

    best_s = daly_interval_s(1.0, 6 * 3600)  # 10 GB a rank at 10 GB/s of memory
    assert finding.state == "ok"
    assert f"{best_s / 60:.0f} min, {round(best_s / 2)} steps" in finding.text
    assert with_interval(plan, FAST).every_steps == round(best_s / 2)


def test_an_interval_that_is_shorter_than_an_upload_is_slow_and_says_a_longer_one() -> None:
    plan = SavePlan(size_bytes=80 * 10**9, world_size=8, step_s=0.5, every_steps=10)

    (finding,) = interval(plan, FAST)

    assert finding.state == "slow"
    assert "due after 5 s, before the last is uploaded" in finding.text


def test_the_interval_is_never_shorter_than_an_upload() -> None:
    plan = SavePlan(size_bytes=10**12, step_s=1.0, blocked_s=0.001, failure_every_s=60.0)

    assert with_interval(plan, FAST).every_steps == 1000


def test_the_cost_is_said_with_what_versioning_keeps(s3: str) -> None:
    plan = SavePlan(size_bytes=10**9, world_size=2, every_steps=864, step_s=1.0, keep_last=3)
    ends = {"ID": "v", "Status": "Enabled", "Filter": {}, "NoncurrentVersionExpiration": {"NoncurrentDays": 7}}

    def said(uri: str) -> str:
        store = open_store(uri)
        (finding,) = cost_of_saves(plan, store, rules_of(store), price=0.02)
        return finding.text

    plain = said(planted_bucket(s3))
    forever = said(planted_bucket(s3, versioning=True))
    a_week = said(planted_bucket(s3, versioning=True, rules=[ends]))

    assert f"keep_last=3 occupies {size(3e9)}" in plain
    assert "a save every 864 steps is 100 a day" in plain
    assert "kept" not in plain
    assert f"versioning keeps all of them, {size(100e9)} more every day" in forever
    assert f"kept for 7 days, {size(700e9)} more" in a_week


def test_a_runs_own_saves_are_the_plan(tmp_path: Path) -> None:
    uri = f"file://{tmp_path}/my-run"
    for number, step in enumerate((10, 20, 30), 1):
        save_state(open_store(uri), {"model": torch.nn.Linear(40, 30)}, save_number=number, step=step)

    plan = plan_of_run(open_store(uri))

    assert plan is not None
    head = raycheck.open_run(uri).head
    assert (plan.size_bytes, plan.world_size, plan.every_steps, plan.num_kept) == (head.size_bytes, 1, 10, 3)
    found = examined(uri)
    assert "interval" in found
    assert found["cost of saves"].text.startswith("what this run keeps (checkpoints: 3) occupies")


def test_how_long_a_step_of_a_fork_takes_follows_from_its_own_steps(tmp_path: Path) -> None:
    source, fork = f"file://{tmp_path}/source", f"file://{tmp_path}/fork"
    for uri, steps in ((source, 6), (fork, 2)):
        (holder,) = [Holder(place) for place in group_of(uri)]
        holder.restore()
        holder.train(steps)
        holder.ckpt.close()
        if uri == source:
            fork_run(source, fork)

    head = raycheck.open_run(fork).head
    plan = plan_of_run(open_store(fork))

    assert plan is not None
    assert head.step == 8
    assert plan.step_s == head.details().trained_s / 2


def test_an_option_replaces_what_a_run_shows_and_needs_no_size(tmp_path: Path) -> None:
    store = open_store(f"file://{tmp_path}/my-run")
    save_state(store, {"model": torch.nn.Linear(40, 30)}, save_number=1, step=10)

    done = command(
        "doctor", store.uri, "--transfer-size", "1MiB", "--failure-hours", "12", "--keep-last", "7", "--step-s", "2"
    )

    assert done.returncode == 0, done.stderr
    lines = {line[9:37].strip(): line[38:] for line in done.stdout.splitlines()}
    assert lines["interval"].startswith("with a failure every 12 h, ")
    assert " steps; " in lines["interval"]
    assert lines["cost of saves"].startswith("keep_last=7 occupies ")


@pytest.mark.parametrize("field", ["size_bytes", "world_size", "every_steps", "step_s", "keep_last"])
def test_a_plan_that_cannot_be_is_refused(field: str) -> None:
    with pytest.raises(ConfigError, match=field):
        SavePlan(**{"size_bytes": 1, field: 0})


def test_a_folder_costs_its_space_and_no_requests(tmp_path: Path) -> None:
    store = open_store(f"file://{tmp_path}")

    (finding,) = cost_of_saves(SavePlan(size_bytes=10**9, keep_last=3), store, rules_of(store), price=0.02)

    assert finding.text == "keep_last=3 occupies 3.0 GB, and nobody bills requests"


def test_small_and_large_shares_are_counted_as_they_are_sent() -> None:
    assert requests_of(SavePlan(size_bytes=100, world_size=4), part_bytes=50).puts == 4 + 5
    assert requests_of(SavePlan(size_bytes=400, world_size=4), part_bytes=50).puts == 4 * 4 + 5


# --- the command ---


def test_the_command_prints_a_line_for_each_finding_and_exits_with_0(s3: str) -> None:
    done = command("doctor", join_uri(s3, uuid4().hex), "--transfer-size", "1MiB", "--save-size", "1GB")

    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    assert all(line.split()[0] in ("ok", "advice", "slow", "unknown") for line in lines)
    assert any(line.startswith("ok       conditional writes") for line in lines)
    assert any("keep_last=10 occupies 10.0 GB" in line for line in lines)


def test_the_command_exits_with_1_and_says_what_fit_would_when_something_is_wrong(s3: str) -> None:
    uri = planted_bucket(s3, rules=[FROZEN_RULE])

    text = command("doctor", uri, "--transfer-size", "1MiB")
    data = command("doctor", uri, "--transfer-size", "1MiB", "--json")

    assert text.returncode == data.returncode == 1
    assert "1 wrong: raycheck refuses to train here" in text.stdout
    facts = json.loads(data.stdout)
    assert facts["is_fit"] is False
    (finding,) = (item for item in facts["findings"] if item["state"] == "wrong")
    assert f"{finding['text']}. {finding['cure']}" in text.stdout


def test_a_machine_whose_clock_is_wrong_is_told_so(s3: str) -> None:
    path = os.pathsep.join((str(ROOT / "tests/elastic/clock"), str(ROOT)))
    env = {**os.environ, "PYTHONPATH": path, "RAYCHECK_TEST_CLOCK_S": "7500"}
    arguments = ["doctor", join_uri(s3, uuid4().hex), "--transfer-size", "1MiB", "--json"]

    done = subprocess.run(
        [sys.executable, "-m", "raycheck", *arguments],
        env=env,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )

    assert done.returncode == 1, done.stderr
    wrong = [item for item in json.loads(done.stdout)["findings"] if item["state"] == "wrong"]
    assert [item["name"] for item in wrong] == ["clock"]
    assert re.search(r"7\d\d\d s ahead", wrong[0]["text"])


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--save-size", "much"), "--save-size much: give a size above 0"),
        (("--transfer-size", "0"), "--transfer-size 0: give a size above 0"),
        (("--ranks", "8"), "--save-size is missing"),
    ],
)
def test_a_number_that_cannot_be_is_refused_by_its_flag(tmp_path: Path, arguments: tuple[str, ...], said: str) -> None:
    done = command("doctor", f"file://{tmp_path}", *arguments)

    assert done.returncode == 2
    assert said in done.stderr


def test_an_address_without_a_cluster_is_refused(tmp_path: Path) -> None:
    done = command("doctor", f"file://{tmp_path}", "--address", "127.0.0.1:1", "--transfer-size", "1MiB")

    assert done.returncode == 2
    assert "no Ray cluster there" in done.stderr
