"""Saves the view of one run as a single file, for a pull request or a colleague. It needs no server and no network."""

from pathlib import Path

from raycheck.page.pages import PageScope, run_view
from raycheck.page.rendering import render
from raycheck.page.server import static_text


def save_run(place: PageScope, path: Path) -> None:
    """Write the view of the run at the place's prefix to `path`, including the style sheet.

    Raises NotFoundError if there is no run.
    """
    html = render("saved_run.html", place, style=static_text("page.css"), has_links=False, **run_view(place, ""))
    path.write_text(html, encoding="utf-8")
