"""The project's texts for people, and what can be held to the code in them: blocks, commands, paths, arguments."""

import ast
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[3]
PACKAGE = ROOT / "raycheck"
README = ROOT / "README.md"
GUIDES = sorted((PACKAGE / "docs").glob("*.md"))
OTHERS = [ROOT / name for name in ("cluster/README.md", "cluster/bucket/README.md", "tests/bench/README.md")]
TEXTS = [README, *GUIDES, *OTHERS, ROOT / "tests/parity.md"]
NEEDS_RAY = ("raycheck.fit(trainer)", "raycheck.ActorCheckpointer(", "raycheck.adapters.start_coordinator(")
"""A block of Python that has one of these calls runs on a real Ray."""


@dataclass(frozen=True, kw_only=True)
class Block:
    """A fenced block of a text. line: where it begins."""

    path: Path
    line: int
    kind: str
    text: str

    def __str__(self) -> str:
        return f"{self.path.relative_to(ROOT)}:{self.line}"

    @property
    def needs_ray(self) -> bool:
        return any(call in self.text for call in NEEDS_RAY)


@cache
def blocks(path: Path) -> tuple[Block, ...]:
    """All fenced blocks of a text, in order."""
    found: list[Block] = []
    kind, first, lines = None, 0, list[str]()
    for number, line in enumerate(path.read_text().splitlines(), 1):
        if kind is None and line.startswith("```"):
            kind, first, lines = line.removeprefix("```"), number, []
        elif kind is not None and line == "```":
            found.append(Block(path=path, line=first, kind=kind, text="\n".join(lines) + "\n"))
            kind = None
        else:
            lines.append(line)
    assert kind is None, f"{path}:{first}: a block without an end"
    return tuple(found)


def prose(path: Path) -> str:
    """A text without its blocks."""
    return re.sub(r"^```.*?^```$", "", path.read_text(), flags=re.DOTALL | re.MULTILINE)


def spans(path: Path) -> list[str]:
    """What stands between backticks outside of blocks."""
    return re.findall(r"`([^`\n]+)`", prose(path))


def commands(path: Path) -> Iterator[tuple[str, list[str]]]:
    """Every command line of a text's blocks, as (where, words), without comments and prompts."""
    for block in blocks(path):
        if block.kind not in ("sh", "console"):
            continue
        is_shell = block.kind == "sh"
        lines = block.text.replace("\\\n", " ").splitlines()
        for line in lines:
            if is_shell or line.startswith("$ "):
                for part in re.split(r" && | & ", line.removeprefix("$ ")):
                    if words := shlex.split(part, comments=True):
                        yield str(block), words


@cache
def names_in(path: Path) -> frozenset[str]:
    """What a module defines: classes, functions, methods and assigned names."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            found.add(node.name)
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            found |= {target.id for target in targets if isinstance(target, ast.Name)}
    return frozenset(found)
