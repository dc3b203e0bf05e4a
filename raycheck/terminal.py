"""Makes text from a bucket safe for a terminal. No other file does.

Names, metrics, notes and servers' responses are whatever someone has written into the bucket. A terminal executes
escape sequences and C1 codes in them, bidirectional and zero-width characters make one name look like another, and a
newline makes one message look like two. So everything printed for people passes through here: every error's text
(errors.py), every log line (`PrintableFilter`), and every cell and line of the command line (cli/options.py). `--json`
prints exact values: JSON escapes what it must.
"""

import logging
from collections.abc import Sequence

_INVISIBLE = frozenset(
    "\u034f\u115f\u1160\u17b4\u17b5\u180b\u180c\u180d\u180f\u2800\u3164\uffa0"
    + "".join(map(chr, (*range(0xFE00, 0xFE10), *range(0xE0100, 0xE01F0))))
)
"""Fillers, joiners, variation selectors and the empty Braille pattern, which Unicode counts among letters, marks and
symbols; `str.isprintable` knows all others."""


def printable(text: str) -> str:
    """Return `text` on one line, with every character that a terminal would not show written as \\x1b or \\u202e."""
    if text.isprintable() and _INVISIBLE.isdisjoint(text):
        return text
    return "".join(map(_seen, text))


def first_few(names: Sequence[object], most: int = 8) -> str:
    """Return the first of these, and how many more there are, so that messages stay short."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(map(str, names[:most])) + more


def printable_lines(text: str) -> str:
    """Return `text` with each of its lines made `printable`.

    Lines after the first are indented, so that none looks like the start of another message.
    """
    first, *more = map(printable, text.split("\n"))
    return "\n".join([first, *(line if line[:1] in ("", " ") else f"  {line}" for line in more)])


class PrintableFilter(logging.Filter):
    """A filter that makes a logger's lines `printable_lines`, whichever handler they go to."""

    def filter(self, record: logging.LogRecord) -> bool:
        record.msg, record.args = printable_lines(record.getMessage()), None
        return True


def _seen(letter: str) -> str:
    if letter.isprintable() and letter not in _INVISIBLE:
        return letter
    return letter.encode("unicode_escape").decode("ascii")
