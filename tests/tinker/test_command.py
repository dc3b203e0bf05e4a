"""`raycheck tinker` refuses what would expose it or could not work, before it starts Ray."""

import pytest
from typer.testing import CliRunner

from raycheck.cli import app
from raycheck.errors import ConfigError
from raycheck.tinker.access import check_bind


def refusal(*words: str) -> str:
    done = CliRunner().invoke(app, ["tinker", *words])
    assert isinstance(done.exception, ConfigError), done.output
    return str(done.exception)


def test_an_address_that_others_can_reach_needs_a_key(base, tmp_path, monkeypatch) -> None:
    monkeypatch.delenv("RAYCHECK_TINKER_API_KEY", raising=False)

    text = refusal("--base-model", base, "--checkpoints", str(tmp_path), "--host", "0.0.0.0")

    assert "needs a key; give --api-key-file" in text


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
