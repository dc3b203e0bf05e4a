"""The shape of the project: imports point down, nothing heavy loads for browsing, functions stay small."""

import ast
import importlib
import inspect
import pickle
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path
from typing import get_args, get_type_hints

import pytest

import raycheck
from raycheck import errors
from raycheck.show_progress import ShowProgress, show_nothing
from tests.support.public_names import PUBLIC, PUBLIC_MODULE, public_value

PACKAGE = Path(raycheck.__file__).parent
FILES = sorted(PACKAGE.rglob("*.py"))
RINGS = (
    ("terminal", "errors", "settings", "storage_settings", "show_progress", "host", "public_names"),
    ("bucket", "log"),
    ("alerts",),
    ("views",),
    ("transfer",),
    ("state",),
    ("huggingface",),
    ("published",),
    ("data",),
    ("group",),
    ("on_ray",),
    ("run",),
    ("catalog",),
    ("adapters", "values"),  # public names, loaded on first use
    ("frameworks", "loggers"),
    ("__init__",),  # the public names in front, loaded on first use
    ("http_server", "http_callers"),  # below both servers
    ("page", "tinker"),
    ("cli", "demo"),
    ("__main__",),
)
"""Modules of the top folder from the ground up: each may import its own ring and those before it."""
RING = {name: number for number, names in enumerate(RINGS) for name in names}


def module_of(path: Path) -> str:
    return ".".join(("raycheck", *path.relative_to(PACKAGE).with_suffix("").parts))


FILE_OF = {module_of(path).removesuffix(".__init__"): path for path in FILES}


@cache
def nodes(path: Path) -> tuple[ast.AST, ...]:
    """All nodes of a file, its module first: most of these tests look at every one of the package's."""
    return tuple(ast.walk(ast.parse(path.read_text())))


@pytest.fixture(scope="module", autouse=True)
def forgotten_nodes() -> Iterator[None]:
    yield
    nodes.cache_clear()


def imports(path: Path) -> set[str]:
    """Every module of raycheck that a file imports: also inside functions, and for types alone."""
    found = set()
    for node in nodes(path):
        assert not (isinstance(node, ast.ImportFrom) and node.level), f"{path} has a relative import"
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "raycheck":
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            found |= {name if name in FILE_OF else node.module for name in names}
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names if alias.name.partition(".")[0] == "raycheck"}
    return found - {module_of(path).removesuffix(".__init__")}


IMPORTS = {path: imports(path) for path in FILES}


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_point_down(path: Path) -> None:
    own = path.relative_to(PACKAGE).with_suffix("").parts[0]

    for module in IMPORTS[path]:
        name = module.partition(".")[2].partition(".")[0] or "__init__"
        assert RING[name] <= RING[own], f"{path} imports {module}"


@pytest.mark.parametrize("folder", sorted({path.parent for path in FILES}), ids=lambda path: path.name)
def test_in_no_folder_do_imports_go_in_a_circle(folder: Path) -> None:
    """Files and subfolders of one folder alike: a subfolder imports what any file in it does."""

    def child(path: Path) -> str | None:
        return path.relative_to(folder).parts[0] if path.is_relative_to(folder) else None

    graph: dict[str, set[str]] = {}
    for path, modules in IMPORTS.items():
        if (own := child(path)) is not None:
            others = {child(FILE_OF[module]) for module in modules} - {own, None}
            graph.setdefault(own, set()).update(filter(None, others))

    TopologicalSorter(graph).prepare()  # raises CycleError, which names the circle


def test_adapters_use_public_names_only() -> None:
    """So that a user can write an adapter of the same kind for another framework."""
    for path in sorted([*(PACKAGE / "frameworks").rglob("*.py"), *(PACKAGE / "tinker").rglob("*.py")]):
        own = ("raycheck.frameworks", "raycheck.tinker", "raycheck.http_server", "raycheck.http_callers")
        for node in nodes(path):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("raycheck"):
                names = {alias.name for alias in node.names}
                assert node.module.startswith(own) or names <= PUBLIC.get(node.module, set()), path
            if isinstance(node, ast.Import):
                assert not [alias.name for alias in node.names if alias.name.startswith("raycheck")], path


def imported(path: Path) -> set[str]:
    """The top names of all that a file imports, also inside functions."""
    names = set()
    for node in nodes(path):
        if isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module.partition(".")[0])
        if isinstance(node, ast.Import):
            names |= {alias.name.partition(".")[0] for alias in node.names}
    return names


def test_only_the_store_touches_a_store_client() -> None:
    clients = {"fsspec", "s3fs", "gcsfs", "obstore", "botocore", "aiobotocore", "adlfs", "azure", "aiohttp"}

    for path in FILES:
        is_server = any(
            path.is_relative_to(PACKAGE / name) for name in ("page", "tinker", "http_server.py", "http_callers.py")
        )
        served = {"aiohttp"} if is_server else set()
        assert not imported(path) & clients - served or path.is_relative_to(PACKAGE / "bucket/store"), path


def test_the_command_line_prints_only_text_that_is_fit_for_a_terminal() -> None:
    """By the Text of cli/options.py. rich's own would hand on what lies in a bucket, and a bare str is its markup."""
    for path in sorted((PACKAGE / "cli").rglob("*.py")):
        assert path.name == "options.py" or "rich.text" not in path.read_text(), path
        for node in nodes(path):
            if isinstance(node, ast.Call) and ast.unparse(node.func) in ("out.print", "table.add_row"):
                for item in node.args:
                    is_fit = ast.unparse(item).startswith(("Text(", "table", "*map(Text, ", "*(Text("))
                    assert is_fit, f"{path.name}:{node.lineno}"


def test_messages_show_addresses_without_settings() -> None:
    """By `shown_uri`, or by the store itself, whose text it is. A bare `uri` in a text is an address to be used."""
    addresses = {"bucket/protocol/sharing/fork.py", "catalog/archive/unpack.py", "catalog/copy.py", "page/acts.py"}
    addresses |= {"frameworks/transformers/trainer_run.py"}
    for path in FILES:
        if str(path.relative_to(PACKAGE)) not in addresses:
            for node in nodes(path):
                if isinstance(node, ast.FormattedValue):
                    assert not ast.unparse(node.value).endswith("uri"), f"{path.name}:{node.lineno}"


def test_browsing_imports_neither_torch_nor_ray() -> None:
    code = "import raycheck, raycheck.cli, sys; raycheck.open_run, raycheck.adapters, raycheck.catalog; print(sorted({'torch', 'ray', 'numpy'} & set(sys.modules)))"

    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)

    assert found.stdout.strip() == "[]"


def test_ray_is_named_in_one_folder_and_in_the_faces_that_run_on_it() -> None:
    naming = {path.relative_to(PACKAGE) for path in FILES if "ray" in imported(path)}

    assert {path for path in naming if path.parts[0] not in ("on_ray", "tinker", "demo")} == {
        Path("cli/submit.py"),
        Path("frameworks/lightning/strategies.py"),
    }


def test_a_group_loads_no_ray() -> None:
    code = "import sys, raycheck.group.worker.checkpointer, raycheck.group.served_group, raycheck.data.batches; print('ray' in sys.modules)"

    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)

    assert found.stdout.strip() == "False"


def test_every_public_name_loads() -> None:
    for module, names in PUBLIC.items():
        for name in names:
            assert getattr(sys.modules[module], name) is not None
    with pytest.raises(AttributeError):
        raycheck.Experiment  # noqa: B018


def named_in(module: str) -> dict[str, object]:
    """All that a module's annotations may name: also what it imports for types alone."""
    loaded = importlib.import_module(module)
    found = dict(vars(loaded))
    for node in ast.parse(inspect.getsource(loaded)).body:
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            exec(ast.unparse(node.body), found)
    return found


def types_in(hint: object) -> Iterator[type]:
    if isinstance(hint, type) and not get_args(hint):
        yield hint
    for part in get_args(hint):
        for own in part if isinstance(part, list) else [part]:
            yield from types_in(own)


def handed_out_by(value: object) -> Iterator[tuple[str, type]]:
    """What a call returns; of a class, its public fields and what its public methods and properties return."""
    if inspect.isfunction(value):
        function = inspect.unwrap(value)
        hint = get_type_hints(function, named_in(function.__module__)).get("return")
        yield from ((function.__qualname__, item) for item in types_in(hint))
    for base in value.__mro__ if inspect.isclass(value) else ():
        if base.__module__.startswith("raycheck"):
            for name, hint in get_type_hints(base, named_in(base.__module__)).items():
                if not name.startswith("_"):
                    yield from ((f"{base.__name__}.{name}", item) for item in types_in(hint))
            for name, member in vars(base).items():
                if not name.startswith("_"):
                    yield from handed_out_by(getattr(member, "fget", None) or getattr(member, "__func__", member))


ASKED_BY_RAYCHECK = {"Group", "RayGroup"}
"""Handles that a user only passes on: what their methods return is for the Checkpointer."""
WRITTEN_ONLY = {"SaveSettings.every_steps", "SaveSettings.keep_last"}
"""Fields whose default is a mark that nobody else needs."""


def test_every_type_that_a_public_call_hands_out_is_public() -> None:
    """So no call hands out a store, a register, or the body of `latest`."""
    waiting = [public_value(name) for name in PUBLIC_MODULE if name not in ASKED_BY_RAYCHECK]
    public = {id(public_value(name)) for name in PUBLIC_MODULE}

    private = {
        f"{where} -> {item.__name__}"
        for value in waiting
        for where, item in handed_out_by(value)
        if item.__module__.startswith("raycheck") and id(item) not in public and where not in WRITTEN_ONLY
    }

    assert private == set()


MARKS = {"pin", "unpin", "name_checkpoint", "rename_checkpoint", "unname_checkpoint", "score"}
LONG_CHANGES = {"rewind", "prune", "sweep", "copy_run", "delete_checkpoint", "delete_run", "fork_run"}
LONG_CHANGES |= {"import_checkpoint", "export_hf", "pack", "prune_runs", "clean", "unpack"}


def test_dry_run_and_progress_are_spelled_one_way() -> None:
    calls = dict(vars(raycheck.Run))
    calls |= {name: public_value(name) for name in PUBLIC["raycheck.catalog"] | PUBLIC["raycheck"]}
    calls = {name: it for name, it in calls.items() if inspect.isfunction(it) and not name.startswith("_")}
    found = {name: inspect.signature(call).parameters for name, call in calls.items()}

    dry = {name for name, arguments in found.items() if "dry_run" in arguments}
    shown = {name for name, arguments in found.items() if "progress" in arguments}

    assert dry == MARKS | LONG_CHANGES | {"delete_export"}
    assert {(item.kind, item.default) for name in dry if (item := found[name]["dry_run"])} == {
        (inspect.Parameter.KEYWORD_ONLY, False)
    }
    assert shown == LONG_CHANGES | {"download", "follow_run"}
    assert {(item.annotation, item.default) for name in shown if (item := found[name]["progress"])} == {
        (ShowProgress, show_nothing)
    }


def test_modules_say_why_they_exist_and_functions_stay_small() -> None:
    for path in FILES:
        assert ast.get_docstring(nodes(path)[0]), f"{path} does not say why it is there"
        for node in nodes(path):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                assert node.end_lineno - node.lineno < 60, f"{path}: {node.name}"


def test_errors_are_few_and_survive_pickling() -> None:
    """The limit counts what a caller may have to handle: the subclasses of the root, which itself is only caught."""
    classes = [value for value in vars(errors).values() if isinstance(value, type)]

    assert len([error for error in classes if error is not errors.RaycheckError]) <= 12
    for error in classes:
        copy = pickle.loads(pickle.dumps(error("run x: what to do")))
        assert type(copy) is error
        assert str(copy) == "run x: what to do"
        assert issubclass(error, errors.RaycheckError)


def test_other_modules_define_only_the_errors_that_errors_py_names() -> None:
    """Each is a subclass of a class there which already says what a caller does; none extends the root itself."""
    kinds = {name for name, value in vars(errors).items() if isinstance(value, type)}
    found = {
        node.name: {ast.unparse(base) for base in node.bases}
        for path in FILES
        if path.name != "errors.py" or path.parent != PACKAGE
        for node in nodes(path)
        if isinstance(node, ast.ClassDef)
    }
    elsewhere = {name: bases & kinds for name, bases in found.items() if bases & kinds}

    assert elsewhere == {
        "NewerFormatError": {"CorruptError"},
        "ReferenceLostError": {"SaveFailedError"},
        "OverloadedError": {"StoreError"},
    }
    assert all(name in (errors.__doc__ or "") for name in kinds | set(elsewhere))
    assert not [name for name, bases in found.items() if bases & set(elsewhere)]


def test_every_invariant_is_named_where_it_is_upheld_and_where_it_is_proven() -> None:
    """A function of the package names it in its docstring, and a test in its name or docstring."""
    text = (PACKAGE / "bucket" / "FORMAT.md").read_text()
    invariants = set(re.findall(r"^- \*\*(I\d+)\*\* ", text, re.MULTILINE))
    naming = [
        path for path in Path(__file__).parent.rglob("*.py") if re.search(r"(?i)(?<![a-z0-9])i\d", path.read_text())
    ]
    tests = [node for path in naming for node in functions(path) if node.name.startswith("test_")]

    upheld = {
        name for path in FILES for node in functions(path) for name in invariants_in(ast.get_docstring(node) or "")
    }
    proven = {
        name
        for node in tests
        for name in invariants_in(f"{node.name.replace('_', ' ').upper()} {ast.get_docstring(node) or ''}")
    }

    assert len(invariants) >= 11
    assert invariants - upheld == set()
    assert invariants - proven == set()
    assert (upheld | proven) - invariants == set()


def functions(path: Path) -> list[ast.FunctionDef | ast.AsyncFunctionDef]:
    return [node for node in nodes(path) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]


def invariants_in(text: str) -> set[str]:
    """Return the invariants that a text names: each by its number, so that a search for one finds the text."""
    return set(re.findall(r"\bI[1-9]\d?\b", text))


def test_no_class_name_stands_for_two_things() -> None:
    homes: dict[str, list[str]] = {}
    for path in FILES:
        for node in nodes(path):
            if isinstance(node, ast.ClassDef):
                homes.setdefault(node.name, []).append(str(path.relative_to(PACKAGE)))

    assert {name: where for name, where in homes.items() if len(where) > 1} == {}


ASKS = ("is_", "has_", "can_", "may_", "must_", "needs_", "knows", "fits", "takes", "touches")
CHANGES = ("append", "add", "pop", "popleft", "insert", "remove", "discard", "clear", "update", "setdefault", "extend")
TALKS = ("remote", "flock", "broadcast", "all_gather", "barrier", "info", "warning")


def act_in(function: ast.AST) -> str:
    """The first statement of a function that changes something it does not own, or talks to somebody; "" if none does."""
    for node in ast.walk(function):
        targets = getattr(node, "targets", [getattr(node, "target", None)])
        if isinstance(node, ast.Assign | ast.AugAssign | ast.AnnAssign | ast.Delete):
            own = [item for target in targets for item in getattr(target, "elts", [target])]
            if any(isinstance(item, ast.Attribute | ast.Subscript) for item in own):
                return ast.unparse(node)
        if isinstance(node, ast.Global | ast.Nonlocal):
            return ast.unparse(node)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            if node.func.attr in CHANGES and ast.unparse(node.func.value).startswith("self."):
                return ast.unparse(node)
            if node.func.attr in TALKS:
                return ast.unparse(node)
    return ""


def test_a_question_does_not_act() -> None:
    """What is called like a question, or is a property, changes nothing and talks to nobody."""
    acting = {}
    for path in FILES:
        for node in nodes(path):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                is_property = any(ast.unparse(mark).endswith("property") for mark in node.decorator_list)
                if (is_property or node.name.lstrip("_").startswith(ASKS)) and (act := act_in(node)):
                    acting[f"{path.relative_to(PACKAGE)}:{node.name}"] = act

    assert acting == {}
