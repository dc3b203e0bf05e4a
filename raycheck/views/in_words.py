"""Formats sizes, times, and numbers for people."""

import math
from datetime import UTC, datetime

from raycheck.bucket.run_status import ago

PRICE = 0.023
"""The list price of S3 Standard in its cheapest regions: dollars for a GiB and month."""


def monthly_cost(count: float, price: float) -> float:
    """Return what this many bytes cost in a month, at `price` for a GiB."""
    return count / 2**30 * price


def size(count: float) -> str:
    """Return a number of bytes in a readable form: 1.5 MB."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"


def time_of(at: float) -> str:
    """Return a time in unix seconds in ISO 8601 form: 2026-08-01T12:00:00Z.

    Times come from a bucket and may be any number; one that is not a date is shown as such.
    """
    try:
        return datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    except (ValueError, OverflowError, OSError):
        return f"no date ({at:.3g})"


def age(at: float, now: float) -> str:
    """Return a time relative to `now`, in one unit: "3 min ago", "in 2 d"."""
    return f"{ago(now - at)} ago" if at <= now else f"in {ago(at - now)}"


def duration(seconds: float) -> str:
    """Return a duration in its two largest units: "3 h 20 min", "2.5 s"."""
    if not math.isfinite(seconds) or seconds < 60:
        return f"{seconds:.3g} s"
    (high, low), (unit, part) = next(
        (sizes, names) for sizes, names in _DURATIONS if seconds >= sizes[0] or names[0] == "min"
    )
    count, rest = divmod(round(seconds / low), high // low)
    return f"{count} {unit} {rest} {part}" if rest else f"{count} {unit}"


_DURATIONS = (((86400, 3600), ("d", "h")), ((3600, 60), ("h", "min")), ((60, 1), ("min", "s")))


def short_number(value: float) -> str:
    """Return a number with at most six significant digits; whole numbers stay unchanged."""
    return str(value) if isinstance(value, int) else f"{value:.6g}"


def counted(number: int, what: str) -> str:
    """Return a number of things: "1 run", "2 runs"."""
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def goodput_text(goodput: float | None, limit: float | None) -> str:
    """Return a goodput and, if known, the highest possible one: "93.1 %, of 96.4 % at best"."""
    said = "unknown" if goodput is None else f"{100 * goodput:.1f} %"
    return said if goodput is None or limit is None else f"{said}, of {100 * limit:.1f} % at best"
