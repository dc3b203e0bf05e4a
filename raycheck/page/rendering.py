"""Makes HTML from a template and values. Every text is escaped, and made fit to be looked at, unless it is markup.

Names of runs and tensors come from a bucket: whoever may write there chooses them.
"""

import json
import re
import shlex
from functools import cache
from typing import Any
from urllib.parse import urlencode

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from raycheck.page.pages import PageScope, version
from raycheck.terminal import printable_lines
from raycheck.views.drawing import curve_svg, heat_svg, histogram_svg, timeline_svg
from raycheck.views.in_words import age, short_number, size, time_of

_SETTINGS = re.compile(r"(\w+://[^\s?'\"]+)\?[^\s'\"]*?(?=[:,.;)]*(?:[\s'\"]|$))")
"""The query of an address in a sentence, without the punctuation after it."""


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
    env.filters |= {"size": size, "date": time_of, "number": short_number}
    env.filters |= {"pystring": json.dumps, "shell": shlex.quote, "markup": Markup, "bare": without_settings}
    env.globals |= {
        "age": age,
        "link": _link,
        "drawing": {"timeline": timeline_svg, "curve": curve_svg, "histogram": histogram_svg, "heat": heat_svg},
        "version": version(),
    }
    return env


def without_settings(text: str) -> str:
    """Return a sentence with no settings in its addresses: they may be nobody else's business."""
    return _SETTINGS.sub(r"\1", text)


def _fit(value: Any) -> Any:
    """Return a text as it may be shown: with direction marks and control characters written out."""
    return printable_lines(value) if isinstance(value, str) and not isinstance(value, Markup) else value


def _link(page: str, **arguments: object) -> str:
    """Return a relative link to a view. All views lie side by side, so that it holds below any path."""
    query = urlencode({name: value for name, value in arguments.items() if value != ""})
    return f"{page}?{query}" if query else page


def render(template: str, place: PageScope, **values: Any) -> str:
    """Return the HTML of a view."""
    known = {"place": place, "prefix": place.prefix.partition("?")[0], "has_links": True}
    return _environment().get_template(template).render(known | values)
