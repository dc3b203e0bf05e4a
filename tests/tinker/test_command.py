"""`raycheck tinker` refuses what would expose it or could not work, before it starts Ray."""

import os
import socket
import subprocess
from pathlib import Path

import pytest
import ray
from typer.testing import CliRunner

from raycheck.cli import app
from raycheck.errors import ConfigError
from raycheck.tinker.access import check_bind
from tests.support.frameworks import tinker_oldest_sdk


def refusal(*words: str) -> str:
    done = CliRunner().invoke(app, ["tinker", *words])
    assert isinstance(done.exception, ConfigError), done.output
    return str(done.exception)


def test_an_address_that_others_can_reach_needs_a_key(base, tmp_path) -> None:
    text = refusal("--base-model", base, "--checkpoints", str(tmp_path), "--host", "0.0.0.0", "--no-key")

    assert "needs a key; leave --no-key out" in text
    check_bind("0.0.0.0", None)  # for a key that the server makes


@pytest.mark.parametrize(("written", "words"), [(None, "No such file"), ("", "it is empty"), (b"\xff", "decode")])
def test_a_key_file_without_a_key_is_refused(base, tmp_path, written, words) -> None:
    file = tmp_path / "key"
    if written is not None:
        file.write_bytes(written or b"\n")

    assert words in refusal("--base-model", base, "--checkpoints", str(tmp_path), "--api-key-file", str(file))


def test_a_key_and_none_is_refused(base, tmp_path) -> None:
    words = ["--api-key-file", str(tmp_path / "key"), "--no-key"]

    assert "not both" in refusal("--base-model", base, "--checkpoints", str(tmp_path), *words)


def test_a_key_that_is_soon_guessed_is_refused(base, tmp_path) -> None:
    (tmp_path / "key").write_text("tml-1\n")

    assert "12 characters" in refusal(
        "--base-model", base, "--checkpoints", str(tmp_path), "--api-key-file", str(tmp_path / "key")
    )


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "::1"])
def test_this_machine_needs_no_key(host) -> None:
    check_bind(host, "")


def test_an_unknown_type_of_weights_is_refused(base, tmp_path) -> None:
    assert "--dtype" in refusal("--base-model", base, "--checkpoints", str(tmp_path), "--dtype", "int4")


def test_a_taken_port_is_said_before_ray_is_started(base, tmp_path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        text = refusal("--base-model", base, "--checkpoints", str(tmp_path), "--port", port)

    assert f"--port {port}: Address already in use; stop the program that listens there" in text
    assert not ray.is_initialized()


def test_an_sdk_that_is_too_old_is_refused_before_ray_is_started(base, tmp_path, monkeypatch) -> None:
    folder = tmp_path / "tinker-0.24.1.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: tinker\nVersion: 0.24.1\n")
    monkeypatch.syspath_prepend(tmp_path)

    text = refusal("--base-model", base, "--checkpoints", str(tmp_path / "runs"))

    assert text.startswith("tinker 0.24.1 is older than 0.38")
    assert text.endswith("pip install 'raycheck[tinker]'")
    assert not ray.is_initialized()


@pytest.mark.slow
def test_the_oldest_sdk_beside_the_server_is_refused(base, tmp_path) -> None:
    tinker_oldest_sdk.prepare()

    done = subprocess.run(
        [tinker_oldest_sdk.PYTHON, "-m", "raycheck", "tinker", "--base-model", base, "--checkpoints", str(tmp_path)],
        check=False,
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
    )

    assert done.returncode == 2, done.stderr
    assert "tinker 0.24.1 is older than 0.38" in " ".join(done.stderr.split())
