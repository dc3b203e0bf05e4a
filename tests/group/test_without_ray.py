"""Tests that a group needs no Ray: where Ray is not installed, a torchrun training saves, dies, and is restored.

The environment has every package of this one except Ray.
"""

import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from raycheck.bucket.store import open_store
from tests.support.histories.invariants import assert_invariants
from tests.support.samples.documents import PACKAGE

WITHIN_S = 400.0
pytestmark = pytest.mark.training
SCRIPT = """
import importlib.util, os, sys
import torch
import torch.distributed as dist
import raycheck

assert importlib.util.find_spec("ray") is None
dist.init_process_group("gloo")

def note(uri, key):
    raycheck.open_run(uri).score(key, {"seen": 1})

def train(uri, dies_in):
    torch.manual_seed(0)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4))
    optimizer = torch.optim.AdamW(model.parameters())
    data = raycheck.Batches(range(64), global_batch=4)
    settings = raycheck.SaveSettings(every_steps=2, after_commit=raycheck.AfterCommit(note, mode="sync"))
    state = {"model": model, "optimizer": optimizer, "data": data}
    with raycheck.Checkpointer(state, settings, group=raycheck.torchrun_group(uri)) as ckpt:
        at = ckpt.restore()
        for ids in data.loader(at.epoch):
            optimizer.zero_grad()
            model(torch.ones(1, 4) * ids[0]).sum().backward()
            optimizer.step()
            ckpt.end_step()
            if ckpt._counter.step == 6 and at.attempt == dies_in:
                ckpt.wait()
                if dist.get_rank() == 1:
                    os._exit(9)
        if dist.get_rank() == 0:
            print("from", at.step, "to", ckpt._counter.step, "sum", model.module.weight.sum().item().hex())

train(sys.argv[1], dies_in=1)
train(sys.argv[1] + "-undisturbed", dies_in=None)
"""


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make the environment: links to the packages of this one. Returns its interpreter."""
    folder = tmp_path_factory.mktemp("without-ray")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True, timeout=60)
    (packages,) = folder.glob("lib/python*/site-packages")
    for found in Path(sysconfig.get_paths()["purelib"]).iterdir():
        if found.name != "ray" and not found.name.startswith("ray-"):
            (packages / found.name).symlink_to(found)
    return folder / "bin/python"


def trained(python: Path, script: Path, uri: str, restarts: int) -> str:
    command = [python, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    done = subprocess.run(
        [*command, f"--max-restarts={restarts}", script, uri],
        capture_output=True,
        text=True,
        check=False,
        timeout=WITHIN_S,
        env=os.environ | {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "PYTHONPATH": str(PACKAGE.parent)},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_without_ray_installed_a_training_saves_dies_and_is_restored(python: Path, tmp_path: Path) -> None:
    script, uri = tmp_path / "train.py", f"file://{tmp_path}/run"
    script.write_text(SCRIPT)

    told, expected = trained(python, script, uri, restarts=1).splitlines()

    assert told.split()[:4] == ["from", "6", "to", "16"]
    assert expected.split()[:4] == ["from", "0", "to", "16"]
    assert told.split()[5] == expected.split()[5], "to the last bit"
    body = assert_invariants(open_store(uri))
    assert (body.attempt.number, body.live[-1].scores) == (2, {"seen": 1.0})
