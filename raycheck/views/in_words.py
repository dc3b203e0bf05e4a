"""Says sizes, times and numbers as people read them."""

from datetime import UTC, datetime

from raycheck.bucket.run_status import ago


def size(count: float) -> str:
    """Return a number of bytes as people read it: 1.5 MB."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"


def time_of(at: float) -> str:
    """Return a time in unix seconds as people and programs read it: 2026-08-01T12:00:00Z.

    Times come from a bucket, so that any number may be there; one that is no date is shown as that.
    """
    try:
        return datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    except (ValueError, OverflowError, OSError):
        return f"no date ({at:.3g})"


def age(at: float, now: float) -> str:
    """Return how long before or after `now` a time is, in one unit: "3 min ago", "in 2 d"."""
    return f"{ago(now - at)} ago" if at <= now else f"in {ago(at - now)}"


def short_number(value: float) -> str:
    """Return a number with at most six significant digits, and a whole number unchanged."""
    return str(value) if isinstance(value, int) else f"{value:.6g}"


def goodput_text(goodput: float | None, limit: float | None) -> str:
    """Return a goodput, and what it could be at best where that is known: "93.1 %, of 96.4 % at best"."""
    said = "unknown" if goodput is None else f"{100 * goodput:.1f} %"
    return said if goodput is None or limit is None else f"{said}, of {100 * limit:.1f} % at best"
