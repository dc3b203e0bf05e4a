"""`raycheck bench`, as a real process."""

import json
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from uuid import uuid4

import pytest

from raycheck.bucket.store import open_store
from raycheck.bucket.store.address import join_uri
from tests.cli.test_commands import raycheck
from tests.support.http_fault_proxy import fault_proxy


def objects(folder: Path) -> list[str]:
    return [item.key for item in open_store(f"file://{folder}").list_objects("")]


def test_bench_shows_latency_speeds_and_share_and_leaves_nothing(tmp_path: Path) -> None:
    done = raycheck("bench", f"file://{tmp_path}", "--size", "16", "--seconds", "1")

    assert done.returncode == 0, done.stderr
    assert "about 1 s" in done.stderr
    assert "below probes/" in done.stderr
    for text in ("PUT, If-Match", "8 MiB", "2 at once", "of the best plain PUT", "of the best plain GET", "15 ways"):
        assert text in done.stdout
    assert "USD" not in done.stdout, "a folder costs no requests"
    assert objects(tmp_path) == []


def test_bench_of_a_bucket_estimates_costs_at_the_prices_given(s3: str) -> None:
    uri = join_uri(s3, uuid4().hex)
    prices = ("--put-price", "1000", "--get-price", "10")

    done = raycheck("bench", uri, "--size", "32", "--seconds", "1", "--ranks", "2", *prices, "--json")

    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["requests"]["upload by all ranks"]["puts"] == 2 * (2 + 2)
    assert found["estimated_cost"] == pytest.approx((8 + 4 + 1 + 1) * 1.0)
    assert found["writing"]["share"] > 0
    assert {"part_bytes", "in_flight", "median", "samples"} == set(found["reading"]["plain"][0])
    assert list(open_store(uri).list_objects("")) == []


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_bench_and_leaves_nothing(tmp_path: Path, sent: signal.Signals) -> None:
    command = [sys.executable, "-m", "raycheck", "bench", f"file://{tmp_path}", "--size", "64", "--seconds", "60"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as bench:
        while largest(tmp_path) < 1_000_000:
            assert bench.poll() is None
            time.sleep(0.02)

        bench.send_signal(sent)
        _, text = bench.communicate(timeout=60)

    assert bench.returncode not in (0, 2)
    assert "Traceback" not in text
    assert objects(tmp_path) == []


def largest(folder: Path) -> int:
    """The bytes of the largest object there is just now; the bench deletes as it goes."""
    sizes = [0]
    with suppress(FileNotFoundError):
        sizes += [path.stat().st_size for path in (folder / "probes").glob("*/[0-9]*")]
    return max(sizes)


def test_who_may_only_read_is_told_in_one_line(s3: str) -> None:
    with fault_proxy(s3) as proxy:
        proxy.rule("deny", "PUT", "", times=100)

        done = raycheck("bench", join_uri(proxy.uri, uuid4().hex), "--size", "16")

    assert done.returncode == 2
    assert "s3:PutObject" in done.stderr.splitlines()[-1]
    assert "Traceback" not in done.stderr
