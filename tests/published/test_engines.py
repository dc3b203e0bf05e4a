"""vLLM, SGLang and SkyRL's receiver load what a follower makes, and then have what was trained, to the bit."""

import os
import re
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.support.frameworks import sglang_engine, vllm_engine
from tests.support.frameworks.engine_versions import ROOT, Served, digests

GUIDE = ROOT / "raycheck/docs/serving.md"
WITHIN_S = 120.0


def assert_loaded(found: list[dict[str, Any]], expected: list[tuple[str, int]]) -> None:
    assert [(note["how"], note["step"]) for note in found] == expected
    assert [note["how"] for note in found if note["loaded"] != note["trained"]] == []
    trained = {note["step"]: frozenset(note["trained"].items()) for note in found}
    assert len(set(trained.values())) == len(trained) > 1  # or an engine that loads nothing would pass


@pytest.mark.slow
def test_vllm_has_the_weights_of_each_version(tmp_path: Path):
    found = vllm_engine.judged(tmp_path)

    assert_loaded(
        found,
        [
            ("a new engine", 1),
            ("read as auto, threads=False", 2),
            ("reloaded from the folder", 2),
            ("read as safetensors, threads=False", 3),
            ("reloaded from the folder", 3),
            ("read as auto, threads=True", 4),
            ("reloaded from the folder", 4),
            ("reloaded from version.tensors()", 5),
            ("reloaded from version.tensors()", 6),
            ("read while newer versions come", 7),
            ("SkyRL's receiver", 10),
            ("SkyRL's patch upon a version", 11),
        ],
    )
    distances = [note["distance"] for note in found if "distance" in note]
    assert len(distances) == 8
    assert max(distances) < 0.02  # vLLM rounds to bfloat16 elsewhere than transformers does


@pytest.mark.slow
def test_sglang_has_the_weights_of_each_version(tmp_path: Path):
    assert_loaded(
        sglang_engine.judged(tmp_path),
        [
            ("a new model", 1),
            ("read as auto, threads=True", 2),
            ("updated from the folder", 2),
            ("read as safetensors, threads=True", 3),
            ("updated from the folder", 3),
            ("read as auto, threads=False", 4),
            ("updated from the folder", 4),
            ("updated from version.tensors(changed_only=False)", 5),
            ("updated from version.tensors(changed_only=True)", 6),
            ("read while newer versions come", 7),
        ],
    )


def command_of_guide(word: str, instead: Mapping[str, str]) -> str:
    """Return the command of the guide that contains this word, with other names in it."""
    (command,) = [block for block in re.findall(r"```text\n(.*?)```", GUIDE.read_text(), re.DOTALL) if word in block]
    for name, other in instead.items():
        command, count = re.subn(re.escape(name), other, command)
        assert count == 1, name
    return command


@pytest.mark.slow
def test_a_server_of_vllms_follows_with_the_command_of_the_guide(tmp_path: Path):
    served = Served(tmp_path)
    path = served.next_version().path
    with vllm_engine.server(path, tmp_path) as address:
        command = command_of_guide(
            "collective_rpc",
            {
                "s3://bucket/runs/my-run": served.trained.store.uri,
                "./policy": f"{tmp_path}/policy",
                "127.0.0.1:8000": address,
            },
        )
        found_by_name = {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}
        follower = subprocess.Popen(["sh", "-c", command], env=os.environ | found_by_name, start_new_session=True)
        deadline = time.monotonic() + WITHIN_S
        try:
            for _ in range(3):
                served.next_version()
                expected = digests(served.trained.weights.items())
                while (found := vllm_engine.digests_in(address)) != expected:
                    assert follower.poll() is None
                    assert time.monotonic() < deadline, found
                    time.sleep(0.2)
        finally:
            os.killpg(follower.pid, 15)
            follower.wait(30)
    served.follower.close()
