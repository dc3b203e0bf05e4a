"""`raycheck docs`: the guides of raycheck/docs/, which are installed with the package."""

import sys
from importlib.resources import files
from importlib.resources.abc import Traversable
from typing import Annotated

import typer

from raycheck.cli.options import Text, out, print_table
from raycheck.errors import ConfigError

FIRST = (
    "training",
    "transformers",
    "trl",
    "lightning",
    "data",
    "ray",
    "restoring",
    "storage",
    "huggingface",
    "serving",
    "accelerate",
    "torchtitan",
    "deepspeed",
    "megatron",
    "rl-frameworks",
    "torchrun",
    "failures",
    "preemption",
    "actors",
    "command-line",
    "page",
    "catalog",
    "limits",
)
"""The guides for users, in reading order. Those for developers follow, by name."""
MAX_WIDTH = 120


def docs(
    topic: Annotated[str | None, typer.Argument(help="A guide's name; without it all guides are listed.")] = None,
) -> None:
    """Show a guide, or list all guides. In a pipe the guide is printed as Markdown."""
    guides = _guides()
    if topic is None:
        summaries = [(name, _summary(guide.read_text(encoding="utf-8"))) for name, guide in guides.items()]
        print_table(("topic", "contents"), summaries)
        out.print(Text("\nraycheck docs TOPIC shows one of them."))
        return
    if topic not in guides:
        raise ConfigError(f"there is no guide {topic!r}; the guides are {', '.join(guides)}")
    text = guides[topic].read_text(encoding="utf-8")
    if sys.stdout.isatty():
        _render(text)
    else:
        sys.stdout.write(text)


def _guides() -> dict[str, Traversable]:
    """Return each guide's file by topic, in listing order."""
    found = {item.name.removesuffix(".md"): item for item in files("raycheck").joinpath("docs").iterdir()}
    return {name: found[name] for name in (*FIRST, *sorted(found.keys() - {*FIRST}))}


def _summary(text: str) -> str:
    """Return the first sentence of a guide."""
    return text.split("\n", 3)[2]


def _render(text: str) -> None:
    """Print Markdown for reading: headings, tables, and code in color, links by their text."""
    from rich.console import Console
    from rich.markdown import Markdown

    screen = Console()
    screen.print(Markdown(text, hyperlinks=False), width=min(screen.width, MAX_WIDTH))
