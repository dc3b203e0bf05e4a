"""Tests saves of a shard that is larger than the memory that its process may still claim. A kernel limit enforces this.

Training waits until the last slice is copied. What training changes afterwards is not in the checkpoint.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
import torch

import raycheck
from raycheck.bucket.store import open_store
from raycheck.bucket.store.address import join_uri
from tests.support.histories.invariants import assert_invariants
from tests.support.processes.fork_server import run_code
from tests.support.servers.http_fault_proxy import FaultProxy, fault_proxy

MIB = 1 << 20
TRAINING = """
import ctypes, json, resource, sys, threading, time
from pathlib import Path
threading.stack_size(512 << 10)  # the limit is one of address space: else each thread would claim 70 MiB, and use little
assert ctypes.CDLL(None).mallopt(-8, 1)  # M_ARENA_MAX
import torch
import raycheck
from tests.support.processes.coordinator_in_thread import group_of
from tests.group.worker.test_sliced_saves import model_of

def status(name):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(name + ":")) * 1024

uri, size_bytes, left_bytes, frozen, asks, settings = json.loads(sys.argv[1])
model = model_of(size_bytes, frozen=frozen)
(group,) = group_of(uri)
ckpt = raycheck.Checkpointer({"model": model, "note": {"text": "a value"}}, raycheck.SaveSettings(**settings), group=group)
ckpt.restore()
resource.setrlimit(resource.RLIMIT_AS, (status("VmSize") + left_bytes, resource.RLIM_INFINITY))
Path("/proc/self/clear_refs").write_text("5")  # the peak is counted from here
before, problems, blocked_s, keys = status("VmRSS"), [], [], []
for step in (1, 2):
    began = time.monotonic()
    ckpt.end_step()
    if asks:
        handle = ckpt.save()
        keys.append(handle.result().key)
    blocked_s.append(time.monotonic() - began)
    if step == 1:
        with torch.no_grad():  # at once
            for parameter in model.parameters():
                if parameter.requires_grad:
                    parameter.fill_(torch.nan)
    try:
        ckpt.wait()
    except raycheck.errors.SaveFailedError as error:
        problems.append(str(error))
print(json.dumps({
    "extra_bytes": status("VmHWM") - before,
    "blocked_s": blocked_s,
    "problems": problems,
    "keys": keys,
    "buffers": ckpt._state.components.buffers,
}))
"""


def model_of(size_bytes: int, *, frozen: bool = False) -> torch.nn.Module:
    """Return a model of this size, whose weights all differ: the first transposed, the last frozen if that is asked
    for. Their bits are counted up, which is faster than drawing them."""
    rows = size_bytes // 4 // 8192 // 4
    bits = torch.arange(4 * rows * 8192, dtype=torch.int32).view(torch.float32).chunk(4)
    weights = [bits[0].view(8192, rows).t(), *(part.view(rows, 8192) for part in bits[1:])]
    return torch.nn.ParameterList(
        torch.nn.Parameter(weight, requires_grad=number < 3 or not frozen) for number, weight in enumerate(weights)
    )


def trained(
    uri: str, *, size_bytes: int, left_bytes: int, frozen: bool = False, asks: bool = False, **settings: Any
) -> dict[str, Any]:
    """Save step 1, fill the weights with NaN, and save step 2, in a process that may claim `left_bytes` more.

    asks: save by `save`, and wait for its handle's result in the training thread. Returns what it tells, and the
    warnings that it logged.
    """
    given = json.dumps([uri, size_bytes, left_bytes, frozen, asks, {"every_steps": 1, **settings}])
    done = run_code(TRAINING, given, timeout_s=200)
    assert not done.returncode, done.stderr
    return {**json.loads(done.stdout.splitlines()[-1]), "warnings": done.stderr.splitlines()}


def assert_saved(uri: str, step: int, *, size_bytes: int) -> None:
    """Check that a checkpoint has all weights to the last bit, as they were before training went on."""
    assert_invariants(open_store(uri))
    model = model_of(size_bytes)
    expected = [parameter.detach().clone() for parameter in model]
    with torch.no_grad():
        for parameter in model:
            parameter.zero_()
    raycheck.open_run(uri).restore(step, into={"model": model})
    assert all(torch.equal(found, wanted) for found, wanted in zip(model, expected, strict=True))


def of_slices(told: dict[str, Any]) -> list[str]:
    return [line for line in told["warnings"] if "uploaded in slices" in line]


@pytest.fixture
def proxy(s3: str) -> Iterator[FaultProxy]:
    with fault_proxy(s3) as proxy:
        yield proxy


@pytest.mark.parametrize("where", ["file", pytest.param("s3", marks=pytest.mark.slow)])
def test_a_shard_larger_than_the_memory_is_saved_within_it_while_training_waits(
    where: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    size_bytes = 256 * MIB
    uri = f"file://{tmp_path}/run" if where == "file" else join_uri(request.getfixturevalue("s3"), uuid4().hex)

    told = trained(uri, size_bytes=size_bytes, left_bytes=250 * MIB)

    assert told["problems"] == []
    assert told["extra_bytes"] < 150 * MIB
    assert len(of_slices(told)) == 1, "it is said once"
    assert_saved(uri, 1, size_bytes=size_bytes)
    for checkpoint, waited_s in zip(raycheck.open_run(uri).checkpoints, told["blocked_s"], strict=True):
        (rank,) = checkpoint._stored.read_manifest().ranks
        assert 0 < rank.blocked_s <= waited_s
        assert rank.staged_s == rank.blocked_s


def test_a_rank_uploads_slices_itself_although_its_node_should(tmp_path: Path) -> None:
    uri, size_bytes = f"file://{tmp_path}/run", 256 * MIB

    told = trained(uri, size_bytes=size_bytes, left_bytes=250 * MIB, upload_by="node")

    assert told["problems"] == []
    assert ["upload_by='node'" in line for line in of_slices(told)] == [True]
    assert_saved(uri, 1, size_bytes=size_bytes)


def test_the_training_thread_may_wait_for_the_result_of_a_save_in_slices(tmp_path: Path) -> None:
    """`save` itself has waited for the last slice, so the upload no longer needs the thread."""
    uri, size_bytes = f"file://{tmp_path}/run", 256 * MIB

    told = trained(uri, size_bytes=size_bytes, left_bytes=250 * MIB, asks=True, every_steps=None)

    assert told["keys"] == ["step-000000001-a1-s1", "step-000000002-a1-s2"]
    assert len(of_slices(told)) == 1
    assert_saved(uri, 1, size_bytes=size_bytes)


def test_a_failed_upload_lets_training_go_on_and_the_next_save_is_whole(proxy: FaultProxy) -> None:
    uri = join_uri(proxy.uri, uuid4().hex)
    proxy.rule("deny", "PUT", "step-000000001-.*partNumber=3", times=99)

    told = trained(uri, size_bytes=256 * MIB, left_bytes=250 * MIB)

    (problem,) = told["problems"]
    assert "AccessDenied" in problem or "403" in problem or "DeniedError" in problem
    assert told["blocked_s"][0] < 60
    body = assert_invariants(open_store(uri))
    assert [entry.step for entry in body.live] == [2]


def test_a_store_that_stalls_holds_training_up_until_the_deadline(proxy: FaultProxy) -> None:
    uri = join_uri(proxy.uri, uuid4().hex)
    proxy.rule("hold", "PUT", "step-000000001-.*partNumber=[3-9]", times=99)  # as many as are sent at a time, and more

    told = trained(uri, size_bytes=256 * MIB, left_bytes=250 * MIB, every_steps=None, at_steps=[1], save_timeout_s=8.0)

    assert "no answer in time" in told["problems"][0]
    assert told["blocked_s"][0] >= 8.0
    assert assert_invariants(open_store(uri)).live == ()


def test_what_is_frozen_is_written_once_and_only_that_save_waits(tmp_path: Path) -> None:
    """The trained part has a buffer. There is no memory for another one of the frozen part."""
    uri, size_bytes = f"file://{tmp_path}/run", 1024 * MIB

    told = trained(uri, size_bytes=size_bytes, left_bytes=990 * MIB, frozen=True)

    assert told["problems"] == []
    first, second = (checkpoint._stored.read_manifest() for checkpoint in raycheck.open_run(uri).checkpoints)
    assert {part.name: part.checkpoint for part in second.components}["model.frozen"] == first.key
    assert ["model.frozen" in line for line in of_slices(told)] == [True]


def test_where_two_buffers_do_not_fit_one_is_used(tmp_path: Path) -> None:
    uri, size_bytes = f"file://{tmp_path}/run", 256 * MIB

    told = trained(uri, size_bytes=size_bytes, left_bytes=450 * MIB, when_busy="copy")

    assert told["problems"] == []
    assert told["buffers"] == 1
    assert of_slices(told) == []
    assert_saved(uri, 1, size_bytes=size_bytes)


def test_memory_that_is_too_little_for_slices_is_told_with_the_numbers(tmp_path: Path) -> None:
    given = json.dumps([f"file://{tmp_path}/run", 256 * MIB, 120 * MIB, False, False, {"every_steps": 1}])

    done = run_code(TRAINING, given, timeout_s=200)

    assert "ConfigError: staging this rank's shard needs " in done.stderr
