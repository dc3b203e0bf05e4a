"""Encodes columns of integers as bytes: plain, or as differences of neighbors, in the smallest width.

The description of each box of a tensor hardly changes from one rank to the next: then either the numbers or their
differences are equal, and compress to almost nothing. Undoing either is one pass at C speed. This module needs only the
standard library: browsing a run loads no numpy.
"""

import sys
from array import array
from collections.abc import Iterable, Iterator
from itertools import accumulate, chain, repeat

_CODE_OF_WIDTH = {1: "b", 2: "h", 4: "i", 8: "q"}


def pack_column(column: "array[int]") -> tuple[int, bytes]:
    """Encode a column without negative numbers, plain. Return the width of one number in bytes, and all of them."""
    top = max(column, default=0)
    width = next(width for width in _CODE_OF_WIDTH if top < 1 << 8 * width - 1)
    return width, little_endian(array(_CODE_OF_WIDTH[width], column)).tobytes()


def unpack_column(data: bytes, width: int, *, as_steps: bool) -> "array[int]":
    """Decode a column. as_steps: each number is the difference from the one before it, the first from 0.

    Raises ValueError, KeyError or OverflowError for other bytes.
    """
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
