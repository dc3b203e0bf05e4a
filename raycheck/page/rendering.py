"""Renders HTML from a template and values. Every text that is not markup is escaped and made safe to display.

Names of runs and tensors come from a bucket, where any writer can choose them.
"""

import json
import math
import re
import shlex
from functools import cache
from typing import Any
from urllib.parse import urlencode

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape

from raycheck.page.pages import PageScope, version
from raycheck.terminal import printable_lines
from raycheck.views.drawing import heat_svg, histogram_svg, metric_svg, timeline_svg
from raycheck.views.in_words import age, counted, duration, short_number, size, time_of

_SETTINGS = re.compile(r"(\w+://[^\s?'\"]+)\?[^\s'\"]*?(?=[:,.;)]*(?:[\s'\"]|$))")
"""The query of a URI in a sentence, without the punctuation after it."""


@cache
def _environment() -> Environment:
    env = Environment(
        loader=PackageLoader("raycheck", "page/templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=_fit,
    )
    env.filters |= {"size": size, "date": moment, "number": short_number, "duration": duration}
    env.filters |= {"counted": counted, "sortable": sortable}
    env.filters |= {"pystring": json.dumps, "shell": shlex.quote, "markup": Markup, "bare": without_settings}
    env.globals |= {
        "since": since,
        "moving": moving,
        "told": told,
        "link": _link,
        "drawing": {"timeline": timeline_svg, "metric": metric_svg, "histogram": histogram_svg, "heat": heat_svg},
        "version": version(),
    }
    return env


def without_settings(text: str) -> str:
    """Return a sentence without the settings in its URIs, which may be private."""
    return _SETTINGS.sub(r"\1", text)


def sortable(value: float) -> float | str:
    """Return the number by which a cell sorts; one that is not finite sorts as an empty cell does, at the end."""
    return value if math.isfinite(value) else ""


def moment(at: float) -> Markup:
    """Return a time as an element that shows it in one line, in UTC: 2026-08-01 12:00:00."""
    text = time_of(at)
    return Markup('<time datetime="{}">{}</time>').format(text, text.replace("T", " ").removesuffix("Z"))


def since(at: float, now: float) -> Markup:
    """Return how long ago `at` was, as an element that static/page.js keeps current."""
    said = age(at, now)
    if at > now:
        return Markup('<time datetime="{}">{}</time>').format(time_of(at), said)
    return _age(at, now, said.removesuffix(" ago")) + " ago"


def _age(at: float, now: float, text: str) -> Markup:
    form = Markup('<time datetime="{0}" title="{0}" data-age="{1:.0f}">{2}</time>')
    return form.format(time_of(at), now - at, text)


def moving(text: str, at: float, now: float, *, later_s: float = 0.0) -> Markup:
    """Return a sentence whose first mention of how long before `now` something was is kept current.

    later_s: how much later than `now` the sentence is shown.
    """
    said = age(at, now).removesuffix(" ago")
    before, found, after = _fit(text).partition(said)
    if not found or at > now:
        return escape(_fit(text))
    shown = age(at, now + later_s).removesuffix(" ago")
    sentence: Markup = escape(before) + _age(at, now + later_s, shown) + after
    return sentence


def told(state: str, text: str) -> str:
    """Return a state's text without the state at its start, for a view that shows the state before it."""
    return text.removeprefix(state).lstrip(" ,:")


def _fit(value: Any) -> Any:
    """Return a text that is safe to display: direction marks and control characters are written out."""
    return printable_lines(value) if isinstance(value, str) and not isinstance(value, Markup) else value


def _link(page: str, **arguments: object) -> str:
    """Return a relative link to a view. All views are siblings, so the link works under any path."""
    query = urlencode({name: value for name, value in arguments.items() if value != ""})
    return f"{page}?{query}" if query else page


def render(template: str, place: PageScope, **values: Any) -> str:
    """Return the HTML of a view."""
    known = {"place": place, "prefix": place.prefix.partition("?")[0], "has_links": True}
    return _environment().get_template(template).render(known | values)
