"""The guides, held to the code: their blocks run, and every path, command, option and argument in them exists."""

import ast
import importlib.util
import inspect
import re
import tomllib
from dataclasses import fields
from functools import cache
from io import StringIO
from pathlib import Path
from tokenize import COMMENT, generate_tokens
from typing import Any

import pytest
import torch
import typer
from peft import LoraConfig, get_peft_model
from typer.testing import CliRunner

import raycheck
from raycheck.bucket.format import object_keys
from raycheck.bucket.store import open_store
from raycheck.catalog.doctor import examine
from raycheck.cli import app
from raycheck.errors import RaycheckError
from raycheck.group.worker.group_restore import RestoreResult
from raycheck.host import Host
from raycheck.on_ray.ray_host import RayHost
from raycheck.settings import HFExport
from raycheck.state.preview import Preview
from raycheck.state.restore_result import RestoreReport
from tests.cli.test_hints import CALLS
from tests.support.processes.coordinator_in_thread import group_of
from tests.support.processes.save_without_ray import save_state
from tests.support.public_names import PUBLIC_MODULE, is_public, public_value
from tests.support.samples import hf_models
from tests.support.samples.documents import (
    GUIDES,
    PACKAGE,
    README,
    ROOT,
    TEXTS,
    Block,
    blocks,
    commands,
    names_in,
    prose,
    spans,
)
from tests.support.servers.ports import free_port

BUCKET = "s3://bucket"
KINDS = {"python", "sh", "console", "diff", "text"}
OPERATORS = {"aws", "gcloud", "helm", "kubectl", "ray", "sed", "zip", "export"}
"""Programs of other people, which only those who set up a cluster are told to run."""
NOT_RUN = {"demo", "page", "submit", "tinker", "watch", "watch-node"}
"""Commands that take minutes, serve until they are ended, or need a cluster. What is given to them is parsed."""
USERS_OWN = {"train.py", "script.py"}
NOT_OURS = {
    *USERS_OWN,
    "storage.yaml",
    "holds/",
    "pages/",
    "alerts/",
    "policy.yaml",
    "exports/",
    "published/",
    "published/versions.json",
    "policy/latest",
    "probes/",
    "checkpoints/",
    "attempts/",
    "ray/",
    "runs/",
}
"""What is named like a path and is the reader's own, or lies in a bucket."""
OTHER_FLAGS = {"--preemption-notice-duration", "--all", "--quick", "--json", "--clear-soft-delete", "--write-readme"}
OTHER_FLAGS |= {"--search", "--newest"}  # of tests/run.sh
OTHER_FLAGS |= {"--install-completion", "--show-completion"}  # of raycheck itself
OTHER_FLAGS |= {"--standalone", "--rdzv-backend"}  # torchrun's
each_text = pytest.mark.parametrize("path", TEXTS, ids=lambda path: str(path.relative_to(ROOT)))
each_guide = pytest.mark.parametrize("path", GUIDES, ids=lambda path: path.stem)


def of_kind(path: Path, kind: str) -> list[Block]:
    return [block for block in blocks(path) if block.kind == kind]


# --- form ---


@pytest.mark.parametrize("path", [README, *GUIDES], ids=lambda path: path.stem)
def test_every_block_is_of_a_kind_that_a_test_looks_at(path: Path) -> None:
    assert {block.kind for block in blocks(path)} <= KINDS


def test_the_readme_is_short_and_leads_to_every_guide() -> None:
    lines = README.read_text().splitlines()

    assert len(lines) <= 130
    assert [line for line in lines if len(line) > 120 and not line.startswith("|") and "](" not in line] == []
    for guide in GUIDES:
        assert f"](raycheck/docs/{guide.name})" in README.read_text()


@each_guide
def test_a_guide_begins_with_its_title_and_one_sentence(path: Path) -> None:
    title, blank, summary, *rest = path.read_text().splitlines()

    assert re.fullmatch(r"# \w[\w ]+", title)
    assert title.removeprefix("# ").lower().replace(" ", "") in (path.stem, path.stem.replace("-", ""))
    assert (blank, rest[0]) == ("", "")
    assert summary.endswith(".")
    assert [line for line in rest if len(line) > 120 and not line.startswith(("|", "+", "-"))] == []


# --- code ---


lightning = pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning")
hugging_face = pytest.mark.filterwarnings(
    "ignore::FutureWarning:transformers", "ignore::UserWarning:peft", "ignore::UserWarning:accelerate"
)


@pytest.fixture
def bucket(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A folder that is the bucket of the guides, and a worker group of one without Ray."""
    uri = f"file://{tmp_path}/bucket"
    monkeypatch.chdir(tmp_path)
    model = torch.nn.Linear(8, 1)
    torch.save(
        {"model": model.state_dict(), "optimizer": torch.optim.AdamW(model.parameters()).state_dict()}, "last.pt"
    )
    guide = next(path for path in GUIDES if path.stem == "catalog")
    policy = next(block.text for block in blocks(guide) if block.text.startswith("rules:"))
    Path("policy.yaml").write_text(policy)
    for host in (Host, RayHost):
        monkeypatch.setattr(host, "group", lambda _: group_of(f"{uri}/runs/my-run")[0])
    ended = f"{uri}/runs/ended"  # which nobody trains: something can be freed
    for number in (1, 2, 3):
        save_state(open_store(ended), {"model": torch.nn.Linear(100, 100)}, save_number=number, step=number)
    raycheck.open_run(ended).rewind(3)
    return uri


@pytest.fixture
def one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """The environment that torchrun gives to a world of one rank."""
    port = free_port()
    given = {"RANK": 0, "WORLD_SIZE": 1, "LOCAL_RANK": 0, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    for name, value in given.items():
        monkeypatch.setenv(name, str(value))


@pytest.fixture
def exported(bucket: str) -> str:
    """The run of the guides, with a LoRA model in it."""
    uri = f"{bucket}/runs/my-run"
    for number, step in enumerate((800, 1000, 1200), 1):
        data = raycheck.Batches(range(100_000), global_batch=16, rank=0, world_size=1)
        history = {"steps": step, "known_from": 0, "entries": [[0, step, 0, 0, 1]]}
        data.load_state_dict(data.state_dict() | {"consumed": 16 * step, "samples": 16 * step, "history": history})
        model = get_peft_model(hf_models.llama(seed=step), LoraConfig(task_type="CAUSAL_LM"))
        state = {"model": model, "data": data}
        save_state(open_store(uri), state, save_number=number, step=step, metrics={"loss": 1.0 / step})
    return uri


@hugging_face
@lightning
@each_guide
def test_the_python_of_a_guide_runs(path: Path, bucket: str, request: pytest.FixtureRequest) -> None:
    """Its blocks one after the other, as a reader would type them."""
    if path.stem in ("huggingface", "command-line", "page", "serving"):
        request.getfixturevalue("exported")
    if path.stem == "torchrun":  # as torchrun starts a single rank
        request.getfixturevalue("one_rank")
    Path("storage.yaml").write_text("endpoint: https://s3.example.org\nregion: eu-west-1\n")
    names: dict[str, Any] = {"__name__": "__main__"}

    for block in of_kind(path, "python"):
        if not block.needs_ray:
            exec(compile(block.text.replace(BUCKET, bucket), str(block), "exec"), names)


@hugging_face
def test_the_commands_of_the_guides_run(exported: str, bucket: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of `raycheck`, on one run, guide after guide. `doctor` is as small as it can be."""
    monkeypatch.setattr(examine, "PROCESSES", 2)
    ran = []
    for path in GUIDES:
        for where, (program, *words) in commands(path):
            if program != "raycheck" or words[0] in NOT_RUN:
                continue
            if words[0] == "repair":
                open_store(exported).delete(object_keys.LATEST_KEY)
            small = ["--transfer-size", "1MiB"] if words[0] == "doctor" else []
            done = CliRunner().invoke(app, [*(word.replace(BUCKET, bucket) for word in words), *small])
            assert done.exit_code == 0, (where, words, done.exception)
            ran.append(words[0])

    assert {*NOT_RUN, *ran} == set(command_line().commands), "every command has its example"


def test_the_output_in_the_readme_is_what_the_demo_prints() -> None:
    tree = ast.parse((PACKAGE / "demo/__init__.py").read_text())
    printed = []
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            parts = [str(part.value) if isinstance(part, ast.Constant) else None for part in node.values]
            if sum(map(len, filter(None, parts))) > 10:
                fixed = [None if part is None else re.sub(r"\[/?[a-z ]+\]", "", part).strip("\n") for part in parts]
                printed.append("".join(r".+" if part is None else re.escape(part) for part in fixed))
    (block,) = of_kind(README, "console")
    shown = [line for line in block.text.splitlines() if not line.startswith("$ ")]

    assert len(shown) == 6
    for line in shown:
        assert any(re.fullmatch(pattern, line) for pattern in printed), line


def test_the_log_line_in_a_guide_is_what_a_commit_logs(bucket: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", logger="raycheck")
    script = of_kind(PACKAGE / "docs/training.md", "python")[0]
    (shown,) = (block for block in of_kind(PACKAGE / "docs/failures.md", "text") if block.text.startswith("committed"))

    exec(compile(script.text, str(script), "exec"), {})

    logged = [record.getMessage() for record in caplog.records if record.getMessage().startswith("committed")]
    assert [shape_of(line) for line in logged] == [shape_of(" ".join(shown.text.split()))]


def shape_of(line: str) -> str:
    return re.sub(r"\d+(\.\d+)?", "0", line).partition(" run=")[0]


# --- trees ---


def test_the_buckets_that_the_texts_show_have_the_keys_of_the_format() -> None:
    name = "step-000000100-a3-s7"
    keys = {
        object_keys.LATEST_KEY,
        object_keys.manifest_key(name),
        object_keys.index_key(name),
        object_keys.metadata_key(name, "train"),
        *(object_keys.shard_key(name, "train", rank) for rank in (0, 1)),
        object_keys.attempt_key(2),
        object_keys.resume_key(3),
        object_keys.alert_key("attempt_died-000002"),
        object_keys.pointer_key(name),
        object_keys.page_key(123, "3f9a0c51"),
        object_keys.segment_key(123, "3f9a0c51"),
    }
    files = {key.rpartition("/")[2] for key in keys}
    folders = {part for key in keys for part in key.split("/")[:-1]} | {object_keys.EXPORTS_PREFIX.rstrip("/")}
    trees = [block for path in (README, *GUIDES) for block in of_kind(path, "text") if "runs/my-run/" in block.text]

    assert len(trees) == 2
    for tree in trees:
        for line in tree.text.splitlines()[1:]:
            for shown in re.split(r" {3,}", line.strip())[0].split():
                *parents, last = shown.split("/")
                assert last in files | {"", "..."} or shown == "step-.../pointer.json", f"{tree}: {shown}"
                assert set(parents) <= folders | {"model.frozen", "...", "step-..."}, f"{tree}: {shown}"


def test_the_architecture_shows_the_folders_that_there_are() -> None:
    (rings,) = (block for block in of_kind(PACKAGE / "docs/architecture.md", "text") if "cli/" in block.text)
    shown, parent = set(), ""
    for line in rings.text.splitlines():
        is_inside = line.startswith("  ")
        for name in re.split(r" {3,}", line.strip())[0].split():
            assert (PACKAGE / (parent if is_inside else "") / name).exists(), name
            shown.add(f"{parent if is_inside else ''}{name}".rstrip("/"))
            parent = parent if is_inside else name
    here = {str(path.parent.relative_to(PACKAGE)) for path in PACKAGE.glob("*/__init__.py")} - {"cli", "demo"}
    below = {str(path.parent.relative_to(PACKAGE)) for name in here for path in (PACKAGE / name).glob("*/__init__.py")}

    assert here | below <= shown
    assert {path.name for path in PACKAGE.glob("[a-z]*.py")} <= shown


# --- names ---


@each_text
def test_every_path_that_a_text_names_exists(path: Path) -> None:
    bases = (ROOT, PACKAGE, ROOT / "tests", path.parent)
    found = [name for name in spans(path) if re.fullmatch(r"[\w./-]*(\w/|\.(py|sh|md|yaml|toml|pml))", name)]

    for name in {*found} - NOT_OURS:
        assert any((base / name).exists() for base in bases), name
    for link in re.findall(r"\]\(([^)#]+)\)", prose(path)):
        assert (path.parent / link).exists(), link


def test_every_module_that_a_docstring_or_a_comment_names_exists() -> None:
    """By the end of its path."""
    files = [*PACKAGE.rglob("*.py"), *(ROOT / "tests").rglob("*.py")]
    places = [path.relative_to(ROOT).parts for path in files]
    known = USERS_OWN | {"/".join(parts[start:]) for parts in places for start in range(len(parts))}
    missing = [
        f"{path.relative_to(ROOT)}: {name}"
        for path in [*files, PACKAGE / "bucket/FORMAT.md"]
        for text in words_of(path)
        for name in re.findall(r"(?<![\w./*])((?:\w+/)*[a-z_]\w*\.py)\b", text)
        if name not in known
    ]

    assert missing == []


@each_text
def test_every_name_is_in_the_file_that_a_text_says(path: Path) -> None:
    for name, file in re.findall(r"`([\w.]+)`(?:\(\))?\s+in\s+`([\w/]+\.py)`", prose(path)):
        assert {*name.split(".")} <= names_in((ROOT if file.startswith("tests/") else PACKAGE) / file), (
            f"{name} in {file}"
        )


@each_text
def test_every_command_that_a_text_shows_exists_with_its_options(path: Path) -> None:
    for where, (program, *words) in commands(path):
        if program == "raycheck":
            check_command(words, where)
        elif program == "sh":
            assert (ROOT / words[0]).exists(), where
        elif program == "pip":
            check_extras(" ".join(words))
        elif program in ("python", ".venv/bin/python"):
            assert words[0] == "-m"
            assert importlib.util.find_spec(words[1]), where
        else:
            assert program in OPERATORS, f"{where}: {program}"
            assert ROOT / "cluster" in path.parents, f"{where}: {program}"
    for span in spans(path):
        check_extras(span)
        name, *rest = span.removeprefix("raycheck ").split()
        if span.startswith("raycheck "):
            assert name in command_line().commands, span
            assert {flag for flag in rest if flag.startswith("--")} <= flags(name), span


@each_text
def test_every_flag_that_a_text_names_is_one_of_a_command(path: Path) -> None:
    known = set.union(*map(flags, command_line().commands)) | OTHER_FLAGS
    found = {flag for span in spans(path) for flag in re.findall(r"(?<![\w-])--[a-z][a-z-]+", span)}

    if ROOT / "raycheck" in path.parents or path == README:
        assert found <= known


@each_text
def test_every_argument_that_a_text_names_is_one_of_the_call_it_names(path: Path) -> None:
    text = "\n".join([*spans(path), *(block.text for block in blocks(path) if block.kind != "text")])

    for call, arguments in re.findall(r"\b(\w+)\(((?:[^()]*\b\w+=[^()]*)+)", text):
        targets = CALLS.get(call) or ([public_value(call)] if call in PUBLIC_MODULE else [])
        known = {name for target in targets for name in inspect.signature(target).parameters}
        for argument in re.findall(r"(?:^|,)\s*(\w+)=", arguments):
            assert not targets or argument in known or call == "loader", f"{call}({argument}=...)"


def test_every_attribute_that_a_guide_names_is_there() -> None:
    owners: dict[str, tuple[type, ...]] = {
        "ckpt": (raycheck.Checkpointer, raycheck.ActorCheckpointer),
        "at": (RestoreResult,),
        "at.report": (RestoreReport,),
        "start": (Preview,),
        "data": (raycheck.Batches,),
        "run": (raycheck.Run,),
    }
    for path in (README, *GUIDES):
        text = "\n".join([*spans(path), *(block.text for block in of_kind(path, "python"))])
        for name, attribute in re.findall(r"(?<![\w.])(ckpt|at|at\.report|start|data|run)\.([a-z_]+)", text):
            assert any(hasattr(owner, attribute) for owner in owners[name]), f"{path.name}: {name}.{attribute}"
        for name in re.findall(r"(?<![\w./])raycheck((?:\.[a-zA-Z_]+)+)", text.replace("raycheck.json", "")):
            assert is_public(name.split(".")[1:]), f"{path.name}: raycheck{name}"


def test_every_setting_error_and_public_name_is_in_a_guide() -> None:
    text = "\n".join(path.read_text() for path in GUIDES)
    settings = (raycheck.SaveSettings, raycheck.AfterCommit, raycheck.Alerts, HFExport, raycheck.StorageSettings)

    for name in (*PUBLIC_MODULE, *(field.name for kind in settings for field in fields(kind))):
        assert re.search(rf"\b{name}\b", text), f"no guide names {name}"


def words_of(path: Path) -> list[str]:
    """What a file says to people: a module's docstrings and comments, or a whole text."""
    text = path.read_text()
    if path.suffix != ".py":
        return [text]
    if ".py" not in text:
        return []
    lone = [node.value for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Expr)]
    comments = [token.string for token in generate_tokens(StringIO(text).readline) if token.type == COMMENT]
    return [*comments, *(str(node.value) for node in lone if isinstance(node, ast.Constant))]


@cache
def command_line() -> Any:
    """Return the commands. To make them all takes longer than most of what is asked of them."""
    return typer.main.get_command(app)


def flags(name: str) -> set[str]:
    return {flag for option in command_line().commands[name].params for flag in (*option.opts, *option.secondary_opts)}


def check_command(words: list[str], where: str) -> None:
    """Raises what the command line would say to these words."""
    name, *rest = words
    assert name in command_line().commands, f"{where}: raycheck {name}"
    command_line().commands[name].make_context(name, rest)


def check_extras(text: str) -> None:
    known = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for extras in re.findall(r"\braycheck\[([\w,]+)\]", text):
        assert {*extras.split(",")} <= set(known), text


# --- the command ---


def test_docs_lists_every_guide_with_what_it_tells() -> None:
    done = CliRunner().invoke(app, ["docs"])

    assert done.exit_code == 0
    for path in GUIDES:
        summary = path.read_text().splitlines()[2]
        assert re.search(rf"^{path.stem} +{re.escape(summary)} *$", done.stdout, flags=re.MULTILINE)


@each_guide
def test_docs_prints_a_guide_as_it_is_in_a_pipe(path: Path) -> None:
    assert CliRunner().invoke(app, ["docs", path.stem]).stdout == path.read_text()


def test_docs_renders_a_guide_in_a_terminal(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)

    app(["docs", "preemption"], standalone_mode=False)

    shown = capsys.readouterr().out
    assert "A node is drained" in shown
    assert "## " not in shown


def test_docs_names_the_guides_when_asked_for_another_one() -> None:
    error = CliRunner().invoke(app, ["docs", "nothing"]).exception

    assert isinstance(error, RaycheckError)
    assert str(error).startswith("there is no guide 'nothing'; the guides are training, ")


def test_the_guides_are_installed_with_the_package() -> None:
    packaged = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]["raycheck"]

    assert {path for pattern in packaged for path in PACKAGE.glob(pattern)} >= {*GUIDES, PACKAGE / "bucket/FORMAT.md"}
