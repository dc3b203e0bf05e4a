"""The notebooks: each runs, its kept outputs are what it prints, and they tell nothing of the machine they came from."""

import ast
import json
import re
import socket
from pathlib import Path

import nbformat
import pytest
from nbformat import NotebookNode

from tests.notebooks.execute import FOLDER, executed, notebooks
from tests.support.public_names import is_public

MAX_BYTES = 300_000
NEEDS_RAY = {"kill_it_and_watch", "trainer_with_lora_to_generation"}
TELLS = {
    "a path": re.compile(r"(?<![\w./:>-])/(?:home|root|tmp|work|usr|opt|var|mnt|Users|__w)\b|\b[A-Z]:\\|site-packages"),
    "a host": re.compile(
        r"\b(?:\d{1,3}\.){3}\d{1,3}\b|localhost|endpoint_override|\bpid=|" + re.escape(socket.gethostname())
    ),
    "a time": re.compile(r"\b\d{4}-\d\d-\d\d\b|\b\d\d:\d\d\b|\b\d+(?:\.\d+)? ?(?:ms|s|sec|seconds)\b|\bago\b"),
    "where an object lay": re.compile(r"\bat 0x[0-9a-f]{6,}"),
}
each = pytest.mark.parametrize("path", notebooks(), ids=lambda path: path.stem)


def test_there_are_five() -> None:
    assert {path.stem for path in notebooks()} == {
        "kill_it_and_watch",
        "serve_while_training",
        "trainer_with_lora_to_generation",
        "what_is_in_a_checkpoint",
        "what_spot_costs",
    }
    assert {path.suffix for path in FOLDER.iterdir()} == {".ipynb"}


@each
def test_its_outputs_are_kept_and_tell_nothing_of_the_machine(path: Path) -> None:
    assert path.stat().st_size < MAX_BYTES
    notebook = nbformat.read(path, 4)
    nbformat.validate(notebook)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]

    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1)), "run in one go"
    assert notebook.metadata.keys() <= {"kernelspec", "language_info"}
    for cell in notebook.cells:
        assert not cell.metadata, "when a cell ran is kept there"
        for output in cell.get("outputs", []):
            assert output.output_type != "error"
            assert output.get("name") != "stderr"
            assert set(output.get("data", {})) <= {"text/plain", "text/html", "image/svg+xml"}
        text = json.dumps(cell.get("outputs", []))
        for what, pattern in TELLS.items():
            found = pattern.search(text)
            assert found is None, f"{what}: {text[max(0, found.start() - 60) : found.end() + 60]}"
    assert sum(len(cell.outputs) for cell in code) >= 4


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("/root/x/y.py", "a path"), ('File "/tmp/rc-nb-1/a"', "a path"), ("[127.0.0.1]:10625", "a host"),
        ("s3://b/x?endpoint_override=h", "a host"), (socket.gethostname(), "a host"), ("took 3.2 s", "a time"),
        ("15 ms", "a time"), ("2026-08-01", "a time"), ("at 12:30", "a time"), ("<Axes at 0x7f00aa11>", "where an object lay"),
    ],
)  # fmt: skip
def test_what_must_not_be_told_would_be_found(text: str, what: str) -> None:
    assert TELLS[what].search(json.dumps(text))


@each
def test_it_uses_public_names_only(path: Path) -> None:
    """Those of raycheck itself, and the demo's server."""
    for cell in nbformat.read(path, 4).cells:
        if cell.cell_type != "code":
            continue
        tree = ast.parse(cell.source.removeprefix("%%capture"))
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("raycheck"):
                assert (node.module, [alias.name for alias in node.names]) == ("raycheck.demo.server", ["s3_server"])
            if isinstance(node, ast.Attribute) and re.fullmatch(r"raycheck(\.\w+)+", ast.unparse(node)):
                assert is_public(ast.unparse(node).split(".")[1:]), ast.unparse(node)
            if isinstance(node, ast.Attribute):
                assert not node.attr.startswith("_"), node.attr


@pytest.mark.slow
@pytest.mark.server
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning")
@pytest.mark.parametrize(
    "path",
    [pytest.param(path, marks=[pytest.mark.ray] * (path.stem in NEEDS_RAY)) for path in notebooks()],
    ids=lambda path: path.stem,
)
def test_it_runs_and_says_what_it_says_in_the_repository(path: Path, may_start_servers: None) -> None:
    """Up to numbers, and to where the lines of a picture lie: both follow from the machine's arithmetic."""
    kept = nbformat.read(path, 4)

    now = executed(path)

    for before, after in zip(kept.cells, now.cells, strict=True):
        assert said(after) == said(before), before.source


def said(cell: NotebookNode) -> list[object]:
    """What a cell has put out, without numbers and pictures."""
    found: list[object] = []
    for output in cell.get("outputs", []):
        texts = [
            output.get("text", ""),
            *(str(text) for kind, text in output.get("data", {}).items() if "svg" not in kind),
        ]
        words = re.sub(r"<svg.*?</svg>", "<svg>", " ".join(texts), flags=re.DOTALL)
        found.append((output.output_type, " ".join(re.sub(r"-?\d[\d.e+-]*", "0", words).split())))
    return found
