"""An option that a message recommends is there, under the name that its reader can write."""

import ast
import inspect
import re
from collections.abc import Callable
from functools import cache
from pathlib import Path

import click
import pytest
import ray.train
import torch
import typer
from typer.testing import CliRunner

import raycheck
from raycheck.bucket.store import open_store
from raycheck.cli import GROUPS, app
from raycheck.settings import Retention
from tests.cli.test_commands import run as run_fixture
from tests.support.processes.save_without_ray import save_state
from tests.support.public_names import PUBLIC_MODULE, public_value
from tests.support.samples import hf_models

run = run_fixture
PACKAGE = Path(raycheck.__file__).parent
CALLS: dict[str, list[Callable[..., object]]] = {
    "ActorCheckpointer": [raycheck.ActorCheckpointer],
    "Batches": [raycheck.Batches],
    "Checkpointer": [raycheck.Checkpointer],
    "AfterCommit": [raycheck.AfterCommit],
    "Alerts": [raycheck.Alerts],
    "FailureConfig": [ray.train.FailureConfig],
    "Group": [raycheck.adapters.Group],
    "Periodic": [raycheck.adapters.Periodic],
    "Retention": [Retention],
    "RunConfig": [ray.train.RunConfig],
    "SaveSettings": [raycheck.SaveSettings],
    "ScalingConfig": [ray.train.ScalingConfig],
    "StorageSettings": [raycheck.StorageSettings],
    "end_step": [raycheck.Checkpointer.end_step, raycheck.ActorCheckpointer.end_step],
    "fit": [raycheck.fit],
    "loader": [raycheck.Batches.loader],
    "peek": [raycheck.Checkpointer.peek],
    "restore": [raycheck.Checkpointer.restore, raycheck.ActorCheckpointer.restore, raycheck.Run.restore],
    "save": [raycheck.Checkpointer.save, raycheck.ActorCheckpointer.save],
    "start_coordinator": [raycheck.adapters.start_coordinator],
    "wait": [raycheck.Checkpointer.wait, raycheck.ActorCheckpointer.wait],
}
ELSEWHERE = {"--lr", "--follow", "--standalone", "--rdzv-backend"}
"""Flags of other programs."""


@cache
def texts() -> list[tuple[str, str]]:
    """Returns every text in the package that is no docstring, with the placeholders of an f-string as `{}`."""
    found = []
    for path in sorted(PACKAGE.rglob("*.py")):
        name, nodes = path.relative_to(PACKAGE), list(ast.walk(ast.parse(path.read_text())))
        lone = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
        lone |= {id(part) for node in nodes if isinstance(node, ast.JoinedStr) for part in node.values}
        for node in nodes:
            if isinstance(node, ast.JoinedStr):
                text = "".join(str(p.value) if isinstance(p, ast.Constant) else "{}" for p in node.values)
                found.append((f"{name}:{node.lineno}", text))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in lone:
                found.append((f"{name}:{node.lineno}", node.value))
    return found


def test_every_argument_that_a_message_names_is_one_of_the_call_it_names() -> None:
    found = [
        (where, call, argument)
        for where, text in texts()
        for call, arguments in re.findall(r"\b(\w+)\(((?:\w+=[^()]*)+)", text)
        for argument in re.findall(r"(?:^|, )(\w+)=", arguments)
        if call in CALLS or call in PUBLIC_MODULE
    ]

    assert len(found) >= 25, "the messages are found"
    for where, call, argument in found:
        for target in CALLS.get(call) or [public_value(call)]:
            parameters = inspect.signature(target).parameters
            has_any = any(one.kind is one.VAR_KEYWORD for one in parameters.values())
            assert argument in parameters or has_any, f"{where}: {target.__qualname__} has no {argument}"


def test_help_lists_every_command_once_and_in_its_group() -> None:
    shown = CliRunner().invoke(app, ["--help"]).stdout

    groups = re.findall(r"^(Look|Change|Move|Run|Diagnose):\n((?:  .*\n)+)", shown, re.MULTILINE)
    listed = [line.split()[0] for _, lines in groups for line in lines.splitlines()]
    assert [name for name, _ in groups] == list(GROUPS)
    assert sorted(listed) == sorted(typer.main.get_command(app).commands)


def test_every_flag_that_a_message_names_is_one_of_a_command() -> None:
    group = typer.main.get_command(app)
    assert isinstance(group, click.Group) or hasattr(group, "commands")
    known = {
        name
        for sub in group.commands.values()
        for option in sub.params
        for name in (*option.opts, *option.secondary_opts)
    }
    found = [
        (where, flag)
        for where, text in texts()
        if not text.startswith("--")  # an option's own definition
        for flag in re.findall(r"(?<![\w-])--[a-z][a-z-]+", text)
    ]

    assert len(found) >= 15, "the messages are found"
    for where, flag in found:
        assert flag in known | ELSEWHERE, f"{where}: no command has {flag}"


def complaint(*args: str) -> str:
    """Returns what the command line would print. It runs in this process, since to import torch takes seconds."""
    error = CliRunner().invoke(app, args).exception
    assert isinstance(error, raycheck.RaycheckError)
    return str(error)


def test_a_message_on_the_command_line_names_flags_and_no_arguments(run, tmp_path: Path) -> None:
    uri, _ = run
    several = f"file://{tmp_path}/runs/models"
    models = {"policy": hf_models.llama(seed=1), "critic": hf_models.llama(seed=2)}
    save_state(open_store(several), models)

    for args, text in (
        (
            ("export-hf", uri, f"{tmp_path}/a"),
            "the model's entry with --entry, and a folder with its config.json with --config-from",
        ),
        (("export-hf", several, f"{tmp_path}/a"), "choose one with --entry"),
        (("export-hf", several, f"{tmp_path}/a", "--entry", "policy", "--dtype", "int8"), "--dtype int8: weights are"),
        (
            ("export-hf", uri, f"{tmp_path}/a", "--entry", "model", "--config-from", f"{tmp_path}"),
            f"--config-from {tmp_path}: ",
        ),
        (("export-hf", several, f"{tmp_path}/a", "--entry", "policy", "--files", "tok"), "'tok' is not a tokenizer"),
        (("prune", uri, "--keep-last", "0"), "--keep-last 0: give a whole number"),
    ):
        said = complaint(*args)

        assert text in said
        assert not re.search(r"\b(entry|config_from|files|dtype|keep_last)=", said)


def test_a_restore_outside_of_training_does_what_its_message_recommends(run) -> None:
    uri, _ = run
    here = {"model": torch.nn.Linear(40, 30, bias=False)}
    with pytest.raises(
        raycheck.errors.StateMismatchError, match=r"only in the checkpoint: model.bias[\s\S]*strict=False"
    ):
        raycheck.open_run(uri).restore(into=here)

    assert raycheck.open_run(uri).restore(3, into=here, strict=False) == 3
    both = torch.nn.Linear(40, 30)
    before = both.bias.clone()
    raycheck.open_run(uri).restore(3, into={"model": both}, skip=["model.bias"])

    assert torch.equal(both.bias, before)
    assert torch.equal(both.weight, here["model"].weight)


def test_what_is_no_checkpoint_is_told_from_what_was_dropped(run) -> None:
    uri, _ = run
    assert CliRunner().invoke(app, ["prune", uri, "--keep-last", "1"]).exit_code == 0

    for name, text in (
        ("abc", "'abc' is not a checkpoint's name. Names in use: none; keys are like step-000000006-a1-s2"),
        ("step-000000003-a1-s1", "was dropped"),
        ("step-000000009-a1-s9", "is not listed: never committed, or dropped"),
    ):
        said = complaint("pin", uri, name)

        assert text in said
        assert "no longer live" not in said
