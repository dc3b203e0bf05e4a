"""Columns of integers as bytes: differences of neighbours, in the narrowest width that holds them all.

What a checkpoint says of each box of each tensor hardly changes from one rank to the next, so nearly all differences
are equal and compress to nothing; undoing them is one pass at C speed. Stdlib only: browsing a run loads no numpy.
"""

import sys
from array import array
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate, chain, repeat
from operator import sub

_CODE_OF_WIDTH = {1: "b", 2: "h", 4: "i", 8: "q"}


def packed(column: Sequence[int]) -> tuple[int, bytes]:
    """Width in bytes of one difference, and all differences, signed and little-endian; the first one is to 0.
    Raises OverflowError for what 64 bits do not hold."""
    steps = array("q", map(sub, column, chain((0,), column)))
    low, high = min(steps, default=0), max(steps, default=0)
    width = next(width for width in _CODE_OF_WIDTH if -(1 << 8 * width - 1) <= low and high < 1 << 8 * width - 1)
    return width, little_endian(array(_CODE_OF_WIDTH[width], steps)).tobytes()


def unpacked(data: bytes | memoryview, width: int) -> "array[int]":
    """The column behind `packed`. Raises ValueError, KeyError or OverflowError for what is none."""
    steps = array(_CODE_OF_WIDTH[width])
    steps.frombytes(data)
    return array("q", accumulate(little_endian(steps)))


def little_endian(column: "array[int]") -> "array[int]":
    """To or from little-endian: the very column, unless this machine is a big-endian one."""
    if sys.byteorder == "big":
        column.byteswap()
    return column


def running(groups: Iterable[int], steps: Iterable[int], starts: Iterable[int]) -> Iterator[int]:
    """Where each item begins when those of a group lie one after the other: the sum of the steps before it."""
    at = list(starts)
    for group, step in zip(groups, steps, strict=True):
        here = at[group]
        at[group] = here + step
        yield here


def spread(values: Iterable[int], counts: Iterable[int]) -> Iterator[int]:
    """Each value as often as its count says."""
    return chain.from_iterable(map(repeat, values, counts))
