"""How much memory and how many requests it takes to pack, unpack and download a checkpoint of 512 MiB."""

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch

from raycheck.bucket.store import open_store
from raycheck.bucket.store.address import join_uri
from tests.support.histories.invariants import assert_invariants
from tests.support.processes.save_without_ray import save_state
from tests.support.servers.http_fault_proxy import FaultProxy

MIB = 1 << 20
SIZE = 512 * MIB
BOUND = 256 * MIB
"""Of what a stream may hold at a time: 8 spans of 8 MiB read ahead, and 5 parts of 16 MiB on their way, and
as much again that Python has not given back."""

CHILD = """
import json, os, resource, sys, time
import raycheck, raycheck.catalog.archive.pack, raycheck.catalog.archive.unpack, raycheck.catalog.download_checkpoint
from raycheck.run import open_run
work, *arguments = sys.argv[1:]
open_run(os.environ["WARM"]).head.details()  # the client is loaded
if "safetensors" in arguments:
    import torch, raycheck.catalog.download_safetensors
def peak():
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("VmHWM")) * 1024
with open("/proc/self/clear_refs", "w") as file:
    file.write("5")
before, began = peak(), time.monotonic()
{
    "pack": lambda uri, file: raycheck.catalog.pack(uri, file),
    "unpack": lambda file, uri: raycheck.catalog.unpack(file, uri),
    "download": lambda uri, folder, form="dcp": raycheck.catalog.download(uri, folder, format=form),
}[work](*arguments)
print(json.dumps({"memory": peak() - before, "seconds": time.monotonic() - began}))
"""


def measured(proxy: FaultProxy | None, *arguments: str, warm: str) -> dict[str, float]:
    before = len(proxy.heads) if proxy else 0
    done = subprocess.run(
        [sys.executable, "-c", CHILD, *arguments],
        env={**os.environ, "WARM": warm},
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    verbs = Counter(head.method for head in proxy.heads[before:]) if proxy else {}
    return json.loads(done.stdout) | {"requests": dict(verbs)}


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["file", "s3"])
def test_a_checkpoint_of_512_mib_goes_through_bounded_memory(
    kind: str, request: pytest.FixtureRequest, tmp_path: Path, record_property
) -> None:
    proxy = None
    base = f"file://{tmp_path}/bucket"
    if kind == "s3":
        proxy = request.getfixturevalue("wire")
        base = join_uri(proxy.uri, "memory")
    uri, file, new = (join_uri(base, name) for name in ("run", "a.tar", "new"))
    state = {"model": torch.nn.ParameterList([torch.randn(SIZE // 16, dtype=torch.float32) for _ in range(4)])}
    save_state(open_store(uri), state)

    found = {
        "pack": measured(proxy, "pack", uri, file, warm=uri),
        "unpack": measured(proxy, "unpack", file, new, warm=uri),
        "download": measured(proxy, "download", uri, f"{tmp_path}/dcp", warm=uri),
        "safetensors": measured(proxy, "download", uri, f"{tmp_path}/st", "safetensors", warm=uri),
    }

    record_property("measured", json.dumps(found))
    assert {work: one["memory"] < BOUND for work, one in found.items()} == dict.fromkeys(found, True)
    assert_invariants(open_store(new))
