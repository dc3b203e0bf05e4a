"""Encodes columns of integers as bytes: plain, or as differences of neighbors, in the smallest width.

The description of each box of a tensor hardly changes from one rank to the next: then either the numbers or their
differences are equal, and compress to almost nothing. Undoing either is one pass at C speed. This module needs only the
standard library: browsing a run loads no numpy.
"""

import sys
from array import array
from collections.abc import Iterable, Iterator
from itertools import accumulate, chain, repeat
from operator import sub

_CODE_OF_WIDTH = {1: "b", 2: "h", 4: "i", 8: "q"}
_MAX = (1 << 63) - 1


def pack_column(column: "array[int]", *, as_steps: bool, top: int = _MAX) -> tuple[int, bytes]:
    """Encode a column. Return the width of one number in bytes, and all of them, signed and little-endian.

    as_steps: write each number as the difference from the one before it, the first as the difference from 0. top: a
    bound that no number exceeds. Raises OverflowError for a number that does not fit 64 bits.
    """
    low, high = 0, top
    if as_steps:
        column = array("q", map(sub, column, chain((0,), column)))
        low, high = min(column, default=0), max(column, default=0)
    width = next(width for width in _CODE_OF_WIDTH if -(1 << 8 * width - 1) <= low and high < 1 << 8 * width - 1)
    return width, little_endian(array(_CODE_OF_WIDTH[width], column)).tobytes()


def unpack_column(data: bytes, width: int, *, as_steps: bool) -> "array[int]":
    """Decode a column that `pack_column` wrote. Raises ValueError, KeyError or OverflowError for other bytes."""
    numbers = array(_CODE_OF_WIDTH[width])
    numbers.frombytes(data)
    return array("q", accumulate(little_endian(numbers)) if as_steps else little_endian(numbers))


def little_endian(column: "array[int]") -> "array[int]":
    """Convert a column to or from little-endian, in place. Does nothing except on a big-endian machine."""
    if sys.byteorder == "big":
        column.byteswap()
    return column


def spread(values: Iterable[int], counts: Iterable[int]) -> Iterator[int]:
    """Repeat each value as often as its count says."""
    return chain.from_iterable(map(repeat, values, counts))
