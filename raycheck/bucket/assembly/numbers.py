"""Columns of an index as arrays of numpy, to work on those of all ranks at once.

numpy is imported at the first use: ranks and coordinators have it, and other readers of these modules may not.
"""

from array import array
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np

    from raycheck.bucket.format.index import Column

    Numbers = np.ndarray[Any, np.dtype[np.int64]]

FEW_BOXES = 32
"""Up to so many boxes, it takes less time to look at each of them than to make arrays."""


def numbers_of(column: "Sequence[int] | Numbers") -> "Numbers":
    """Return the column as an array, which shares its memory where there is any."""
    import numpy as np

    if isinstance(column, np.ndarray):
        return column
    if isinstance(column, range):
        return np.arange(column.start, column.stop)
    return np.frombuffer(column, np.int64) if isinstance(column, array) and column else np.array(column, np.int64)


def column_of(numbers: "Numbers") -> "Column[int]":
    """Return an array as a column."""
    return array("q", numbers.tobytes())
