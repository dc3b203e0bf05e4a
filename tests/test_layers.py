"""The shape of the project: imports point down, nothing heavy loads for browsing, functions stay small."""

import ast
import pickle
import subprocess
import sys
from pathlib import Path

import pytest

import raycheck
from raycheck import errors

PACKAGE = Path(raycheck.__file__).parent
RINGS = {
    "terminal": 0,
    "errors": 0,
    "settings": 0,
    "storage_settings": 0,
    "nodes": 1,
    "bucket": 1,
    "shards": 2,
    "train": 3,
}
RINGS |= {"run": 4, "submit": 4, "cli": 5, "demo": 5, "__main__": 6}
MODULES = sorted(PACKAGE.rglob("*.py"))


def imports(path: Path) -> set[str]:
    """Every module of raycheck that `path` imports, also inside functions; TYPE_CHECKING blocks do not count."""
    tree = ast.parse(path.read_text())
    hidden = {
        id(child)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"
        for child in ast.walk(node)
    }
    found = set()
    for node in ast.walk(tree):
        if id(node) in hidden:
            continue
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("raycheck"):
            found.add(node.module)
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names if alias.name.startswith("raycheck.")}
    return found


def ring(module: str) -> int:
    return RINGS[module.split(".")[1]]


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_point_down(path: Path) -> None:
    own = path.relative_to(PACKAGE).with_suffix("").parts[0]
    if own == "__init__":
        return  # the public names, loaded on first use

    for module in imports(path) - {"raycheck"}:
        is_lazy_command = (own, module) in {("cli", "raycheck.demo"), ("demo", "raycheck.cli.common")}
        # run.py puts a checkpoint into live objects; that is its one look at torch, inside a function.
        assert ring(module) <= RINGS[own] or is_lazy_command, f"{path.name} imports {module}"


def test_there_is_no_import_cycle() -> None:
    name_of = {path: ".".join(("raycheck", *path.relative_to(PACKAGE).with_suffix("").parts)) for path in MODULES}
    graph = {name.removesuffix(".__init__"): top_level(path) for path, name in name_of.items()}

    def visit(name: str, trail: tuple[str, ...]) -> None:
        assert name not in trail, " -> ".join((*trail, name))
        for child in graph.get(name, ()):
            visit(child, (*trail, name))

    for name in graph:
        visit(name, ())


def top_level(path: Path) -> set[str]:
    """Modules imported when `path` is; what a function imports cannot make a cycle at import."""
    found = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("raycheck."):
            found.add(node.module)
    return found


def test_only_the_store_touches_a_store_client() -> None:
    clients = {"fsspec", "s3fs", "gcsfs", "obstore", "botocore", "aiobotocore", "adlfs", "azure", "aiohttp"}

    for path in MODULES:
        tree = ast.parse(path.read_text())
        names = {
            node.module.split(".")[0] for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.module
        }
        names |= {
            alias.name.split(".")[0] for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names
        }
        assert not names & clients or path.parent.name == "store", path


def test_the_command_line_prints_only_text_that_is_fit_for_a_terminal() -> None:
    """By the Text of cli/common.py. rich's own would hand on what lies in a bucket, and a bare str is its markup."""
    for path in sorted((PACKAGE / "cli").glob("*.py")):
        tree = ast.parse(path.read_text())
        assert path.name == "common.py" or "rich.text" not in path.read_text(), path
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and ast.unparse(node.func) in ("out.print", "table.add_row"):
                for item in node.args:
                    is_fit = ast.unparse(item).startswith(("Text(", "table", "*map(Text, ", "*(Text("))
                    assert is_fit, f"{path.name}:{node.lineno}"


def test_browsing_imports_neither_torch_nor_ray() -> None:
    code = "import raycheck, raycheck.cli, sys; raycheck.open_run; print(sorted({'torch', 'ray', 'numpy'} & set(sys.modules)))"

    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)

    assert found.stdout.strip() == "[]"


def test_every_public_name_loads() -> None:
    for name in raycheck.__all__:
        assert getattr(raycheck, name) is not None
    with pytest.raises(AttributeError):
        raycheck.Experiment  # noqa: B018


def test_modules_say_why_they_exist_and_functions_stay_small() -> None:
    for path in MODULES:
        text = path.read_text()
        assert ast.get_docstring(ast.parse(text)), f"{path} does not say why it is there"
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                assert node.end_lineno - node.lineno < 60, f"{path}: {node.name}"


def test_errors_are_few_and_survive_pickling() -> None:
    classes = [value for value in vars(errors).values() if isinstance(value, type)]

    assert len(classes) <= 11
    for error in classes:
        copy = pickle.loads(pickle.dumps(error("run x: what to do")))
        assert type(copy) is error
        assert str(copy) == "run x: what to do"
        assert issubclass(error, errors.RaycheckError)
