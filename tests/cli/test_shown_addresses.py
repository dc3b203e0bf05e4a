"""No command prints the settings in the query of an address, which may be nobody else's business."""

from pathlib import Path
from uuid import uuid4

import pytest
import torch

from raycheck.bucket.store import open_store
from raycheck.bucket.store.address import bare_uri, join_uri, shown_uri
from raycheck.cli import app
from tests.support.processes.command_line import raycheck
from tests.support.processes.save_without_ray import save_state

WITHOUT_RUN = {"submit", "watch-node", "page", "demo", "docs"}
"""Commands that take no run, or do not end by themselves. What they print of one goes through the same function."""
POLICY = "rules:\n  - states: [idle]\n    keep_last: 1\n"


@pytest.mark.slow
def test_no_verb_prints_the_settings_of_an_address(s3: str, tmp_path: Path) -> None:
    """Each is called so that it succeeds, or comes as far as to speak of what is in the run."""
    bucket = join_uri(s3, f"shown-{uuid4().hex}")
    uri, secret = join_uri(bucket, "mine"), s3.partition("?")[2]
    for number in (1, 2, 3):
        save_state(open_store(uri), {"model": torch.nn.Linear(3, 2)}, save_number=number, step=number)
    (tmp_path / "policy.yaml").write_text(POLICY)
    torch.save({"w": torch.ones(3)}, tmp_path / "last.pt")
    calls = [
        *(
            f"{verb} URI"
            for verb in ("ls", "show", "verify", "tensors", "top --once", "data --steps 1:2", "repair", "sweep")
        ),
        *(
            "diff URI 1 2",
            "prune URI --keep-last 9 --dry-run",
            "prune-exports URI --keep-last 1",
            "pin URI 1",
            "unpin URI 1",
        ),
        *("name URI 1 one", "name URI 2 one", "rename URI one two", "score URI two a=1", "unname URI two"),
        *("runs BUCKET", "runs BUCKET/nothing", "fork URI BUCKET/fork --dry-run", "fork URI BUCKET/fork --at 2"),
        *("fork URI BUCKET/fork", "show BUCKET/fork", "fork URI BUCKET", "cp URI BUCKET/copy --dry-run"),
        *("cp URI BUCKET/copy", "cp URI BUCKET/copy", "cp URI URI", "cp URI BUCKET/fork", "cp BUCKET/fork BUCKET/more"),
        *("pin BUCKET/copy 1", "show BUCKET/copy", "cp URI BUCKET/one --at 1", "pack URI 1 BUCKET/one.tar"),
        *("pack URI 1 BUCKET/one.tar", "unpack BUCKET/one.tar BUCKET/two", "unpack BUCKET/one.tar BUCKET/two"),
        *(f"download URI 1 {tmp_path}/here", f"import {tmp_path}/last.pt BUCKET/new", "import URI BUCKET/newer"),
        *(f"import {tmp_path}/last.pt URI", "import BUCKET/nothing BUCKET/newer", "export-hf URI BUCKET/exported"),
        *(
            "delete URI 3 --yes",
            "delete URI 1 --yes",
            "delete URI 2",
            "rewind URI 2",
            "delete-run URI --dry-run",
        ),
        *("delete-run URI --yes", "delete-run URI --yes --live", "delete-run URI --live --keep-shared"),
        *(
            f"prune-runs BUCKET --policy {tmp_path}/policy.yaml",
            "delete-run URI --yes --live --keep-shared",
            "show URI",
        ),
        "cp URI BUCKET/more",
    ]
    verbs = {(command.name or "").replace("_", "-") for command in app.registered_commands}
    assert {call.split()[0] for call in calls} == verbs - WITHOUT_RUN

    found = {}
    for call in calls:
        words = [join_uri(bucket, word[7:]) if word.startswith("BUCKET/") else word for word in call.split()]
        words = [{"URI": uri, "BUCKET": bucket}.get(word, word) for word in words]
        done = raycheck(*words)
        said = done.stdout + done.stderr
        assert said, call
        assert "Usage:" not in said, said
        if secret in said or "endpoint_override" in said:
            found[call] = said

    assert found == {}


def test_no_error_about_a_missing_run_prints_the_settings(s3: str) -> None:
    uri = join_uri(s3, f"nothing-{uuid4().hex}")
    here = {
        "name": ["1", "x"],
        "rename": ["x", "y"],
        "score": ["1", "a=1"],
        "diff": ["1", "2"],
        "data": ["--steps", "1:2"],
    }
    here |= {verb: ["1"] for verb in ("pin", "unpin", "rewind", "delete", "unname")}
    here |= {verb: [join_uri(uri, "b")] for verb in ("cp", "fork", "export-hf")}
    here |= {"pack": ["1", "x.tar"], "download": ["1", "x"]}
    here |= {verb: [] for verb in ("ls", "show", "verify", "tensors", "sweep", "repair", "delete-run")}

    for verb, more in here.items():
        done = raycheck(verb, uri, *more)
        said = done.stdout + done.stderr
        assert done.returncode, verb
        assert "Usage:" not in said, said
        assert "endpoint_override" not in said, said
        assert shown_uri(uri) in said, (verb, said)


@pytest.mark.parametrize(
    ("uri", "shown"),
    [
        ("s3://bucket/run?profile=mine&region=x", "s3://bucket/run"),
        ("s3://key:secret@bucket/run?x", "s3://bucket/run"),
        ("az://box/run?account_name=me", "az://box/run"),
        ("abfss://box@me.dfs.core.windows.net/run?x=y", "abfss://box@me.dfs.core.windows.net/run"),
        ("https://me:word@host/file.pt?X-Amz-Signature=1", "https://host/file.pt"),
        ("/runs/what?", "/runs/what?"),
        ("what://", "what://"),
        ("", ""),
    ],
)
def test_an_address_is_shown_without_what_may_be_secret(uri: str, shown: str) -> None:
    assert shown_uri(uri) == shown


def test_an_address_without_settings_still_names_the_place() -> None:
    assert bare_uri("az://box/run?account_name=me&endpoint_override=h") == "az://box/run?account_name=me"
    assert bare_uri("s3://bucket/run?profile=mine") == "s3://bucket/run"
    assert bare_uri("/runs/what?") == "/runs/what?"
    assert bare_uri("memory://a/b") == "memory://a/b"
