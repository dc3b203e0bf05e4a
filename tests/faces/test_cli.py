"""The command line, as a real process on a real run."""

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from raycheck.bucket import layout
from raycheck.bucket.catalog import read_latest
from raycheck.bucket.store import Store, open_store
from tests.invariants import assert_invariants
from tests.shards import hf
from tests.shards.saving import save_state


@pytest.fixture
def run(tmp_path: Path) -> tuple[str, Store]:
    """A run with two committed checkpoints of a small model."""
    uri = f"file://{tmp_path}/runs/mine"
    store = open_store(uri)
    for number, step in enumerate((3, 6), 1):
        state = {"model": torch.nn.Linear(40, 30)}
        save_state(store, state, save_number=number, step=step, metrics={"loss": 1.0 / step})
    return uri, store


def raycheck(*args: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-m", "raycheck", *args], capture_output=True, text=True, check=False, timeout=60
    )


def test_ls_lists_committed_checkpoints(run) -> None:
    uri, store = run

    text, data = raycheck("ls", uri), raycheck("ls", uri, "--json")

    assert text.returncode == data.returncode == 0
    assert "loss 0.1667" in text.stdout
    assert [item["step"] for item in json.loads(data.stdout)] == [3, 6]
    assert [item["is_head"] for item in json.loads(data.stdout)] == [False, True]
    assert_invariants(store)


def test_show_tells_attempts_and_what_is_in_a_checkpoint(run) -> None:
    uri, _ = run

    text, data = raycheck("show", uri), raycheck("show", uri, "--step", "3", "--json")

    assert text.returncode == data.returncode == 0
    assert "fresh start" in text.stdout
    facts = json.loads(data.stdout)["checkpoint"]
    assert (facts["step"], facts["tensors"], facts["components"]) == (3, 2, ["train"])


def test_verify_is_content_with_a_whole_run(run) -> None:
    uri, _ = run

    text, data = raycheck("verify", uri), raycheck("verify", uri, "--json")

    assert text.returncode == data.returncode == 0
    assert json.loads(data.stdout)["problems"] == []
    assert text.stdout.count("ok ") == 2


@pytest.mark.parametrize("damage", ["flip", "cut", "remove"])
def test_verify_names_the_guilty_object_and_exits_with_1(run, damage: str) -> None:
    uri, store = run
    key = layout.shard_key(read_latest(store).live[0].key, "train", 0)
    data = bytearray(store.get(key).data)
    data[len(data) // 2] ^= 1
    if damage == "remove":
        store.delete(key)
    else:
        store.put(key, data if damage == "flip" else data[:-9])

    text, data = raycheck("verify", uri), raycheck("verify", uri, "--json")

    assert text.returncode == data.returncode == 1
    assert "BAD" in text.stdout
    assert key in text.stdout
    assert [item["key"] for item in json.loads(data.stdout)["problems"]] == [key]
    assert raycheck("verify", uri, "--step", "6").returncode == 0


def test_export_hf_writes_what_others_load(run, tmp_path: Path) -> None:
    uri = f"file://{tmp_path}/runs/models"
    models = {"policy": hf.llama(seed=1), "critic": hf.llama(seed=2)}
    save_state(open_store(uri), models)

    text = raycheck("export-hf", uri, f"{tmp_path}/policy", "--entry", "policy")
    data = raycheck("export-hf", uri, f"{tmp_path}/critic", "--entry", "critic", "--dtype", "bfloat16", "--json")

    assert text.returncode == data.returncode == 0, text.stderr + data.stderr
    assert "model-00001-of-00001.safetensors" in text.stdout
    facts = json.loads(data.stdout)
    sizes = {path.name: path.stat().st_size for path in (tmp_path / "critic").iterdir()}
    assert (facts["files"], facts["bytes"]) == (sizes, sum(sizes.values()))
    assert facts["seconds"] > 0
    assert torch.equal(hf.logits(hf.from_pretrained(tmp_path / "policy")), hf.logits(models["policy"]))
    assert hf.from_pretrained(tmp_path / "critic").dtype == torch.bfloat16
    assert_invariants(open_store(uri))


def test_export_hf_says_what_to_do_instead(run, tmp_path: Path) -> None:
    uri, _ = run

    for args, text in (((), "config_from="), (("--merge-lora",), "config_from="), (("--step", "4"), "there are: 3, 6")):
        answer = raycheck("export-hf", uri, f"{tmp_path}/hf", *args)

        assert answer.returncode == 2
        assert answer.stderr.startswith("raycheck: ")
        assert text in answer.stderr
    assert not (tmp_path / "hf").exists()


def test_what_cannot_be_done_is_one_line_and_exit_code_2(run, tmp_path: Path) -> None:
    uri, _ = run

    for args in (("ls", f"file://{tmp_path}/none"), ("show", uri, "--step", "5"), ("ls", "ftp://host/x")):
        answer = raycheck(*args)

        assert answer.returncode == 2
        assert answer.stderr.startswith("raycheck: ")
        assert "Traceback" not in answer.stderr


def test_help_is_quick() -> None:
    began = time.monotonic()

    answer = raycheck("--help")

    assert answer.returncode == 0
    assert time.monotonic() - began < 5, "a command that browses must not load torch or ray"
    assert all(command in answer.stdout for command in ("ls", "show", "verify", "export-hf", "demo"))
