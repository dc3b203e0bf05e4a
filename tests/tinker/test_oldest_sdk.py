"""SDK 0.24.1 in a process of its own: as this server has it speak, and as it speaks by itself."""

import json
import os
import subprocess

import pytest

from raycheck.tinker.routes import sessions
from tests.support.frameworks import tinker_oldest_sdk
from tests.support.frameworks.tinker_client import new_model, train

pytestmark = pytest.mark.slow
FLAGS = ("proto_write_fwdbwd", "fwd_via_fwdbwd", "create_model_via_load_weights")


@pytest.mark.parametrize("speaks_as_newest", [True, False])
def test_the_oldest_sdk_trains_saves_resumes_and_samples(server, connect, base, monkeypatch, speaks_as_newest) -> None:
    tinker_oldest_sdk.prepare()
    for flag in FLAGS:
        monkeypatch.setitem(sessions.CLIENT_CONFIG, flag, speaks_as_newest)
    expected = train(new_model(connect(server), base), range(4))

    done = subprocess.run(  # noqa: PLW1510  its return code is looked at below
        [tinker_oldest_sdk.PYTHON, tinker_oldest_sdk.__file__, server.url, base],
        capture_output=True,
        text=True,
        timeout=200,
        env={**os.environ, "TINKER_TELEMETRY": "0"},
    )

    assert done.returncode == 0, done.stderr[-3000:]
    seen = json.loads(done.stdout.splitlines()[-1])
    assert seen["version"] == tinker_oldest_sdk.VERSION
    assert seen["losses"] == expected
    assert seen["again"] == expected[2:]
    assert seen["sampled"][0] == seen["sampled"][1]
    assert seen["listed"] == ["sampler_weights/four"]
    assert {"adapter_config.json", "adapter_model.safetensors"} <= set(seen["archived"])
    assert seen["rank"] == 4
