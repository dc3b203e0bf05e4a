"""Text from a bucket as text for a terminal: the one place where the first becomes the second.

Names, metrics, notes and servers' answers are whatever somebody has written into the bucket. A terminal obeys escape
sequences and C1 codes in them, bidirectional and zero-width characters make one name look like another, and a new line
makes one message look like two. So all that is printed for people passes here: every error's text (errors.py), every
log line (`PrintableFilter`), and every cell and line of the command line (cli/options.py). `--json` prints exact
values: JSON escapes what it must.
"""

import logging

_INVISIBLE = frozenset(
    "\u034f\u115f\u1160\u17b4\u17b5\u180b\u180c\u180d\u180f\u2800\u3164\uffa0"
    + "".join(map(chr, (*range(0xFE00, 0xFE10), *range(0xE0100, 0xE01F0))))
)
"""Fillers, joiners, variation selectors and the empty Braille pattern, which Unicode counts among letters, marks and
symbols; `str.isprintable` knows all others."""


def printable(text: str) -> str:
    """`text` on one line, and each character that is not seen as what it is in Python's notation: \\x1b, \\u202e."""
    if text.isprintable() and _INVISIBLE.isdisjoint(text):
        return text
    return "".join(map(_seen, text))


def printable_lines(text: str) -> str:
    """`text` as `printable` has it, but for its line ends; each line after the first is indented, so that none passes
    for the beginning of another message."""
    first, *more = map(printable, text.split("\n"))
    return "\n".join([first, *(line if line[:1] in ("", " ") else f"  {line}" for line in more)])


class PrintableFilter(logging.Filter):
    """For a logger: its lines as `printable_lines`, whatever handler they go to."""

    def filter(self, record: logging.LogRecord) -> bool:
        record.msg, record.args = printable_lines(record.getMessage()), None
        return True


def _seen(letter: str) -> str:
    if letter.isprintable() and letter not in _INVISIBLE:
        return letter
    return letter.encode("unicode_escape").decode("ascii")
