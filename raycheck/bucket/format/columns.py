"""Columns of integers as bytes, plain or as differences of neighbours, each in a width that holds them all.

What a checkpoint says of each box of a tensor hardly changes from one rank to the next: then plain numbers are equal,
else their differences are, and both compress to nothing. Undoing either is one pass at C speed. Stdlib only: browsing
a run loads no numpy.
"""

import sys
from array import array
from collections.abc import Iterable, Iterator
from itertools import accumulate, chain, repeat
from operator import sub

_CODE_OF_WIDTH = {1: "b", 2: "h", 4: "i", 8: "q"}
_MAX = (1 << 63) - 1


def packed(column: "array[int]", *, as_steps: bool, top: int = _MAX) -> tuple[int, bytes]:
    """Width in bytes of one number, and all of them, signed and little-endian. as_steps: each as the difference to the
    one before it, the first one to 0. top: no number is larger. Raises OverflowError for what 64 bits do not hold."""
    low, high = 0, top
    if as_steps:
        column = array("q", map(sub, column, chain((0,), column)))
        low, high = min(column, default=0), max(column, default=0)
    width = next(width for width in _CODE_OF_WIDTH if -(1 << 8 * width - 1) <= low and high < 1 << 8 * width - 1)
    return width, little_endian(array(_CODE_OF_WIDTH[width], column)).tobytes()


def unpacked(data: bytes, width: int, *, as_steps: bool) -> "array[int]":
    """The column behind `packed`. Raises ValueError, KeyError or OverflowError for what is none."""
    numbers = array(_CODE_OF_WIDTH[width])
    numbers.frombytes(data)
    return array("q", accumulate(little_endian(numbers)) if as_steps else little_endian(numbers))


def little_endian(column: "array[int]") -> "array[int]":
    """To or from little-endian: the very column, unless this machine is a big-endian one."""
    if sys.byteorder == "big":
        column.byteswap()
    return column


def spread(values: Iterable[int], counts: Iterable[int]) -> Iterator[int]:
    """Each value as often as its count says."""
    return chain.from_iterable(map(repeat, values, counts))
