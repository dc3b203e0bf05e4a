"""Records which rows of a dataset were consumed, by their ids.

Ids that are close together take one bit each, between the lowest and the highest; all others take 8 bytes each. The
cost of adding a batch is proportional to the batch, so a step does not pay for the epoch so far.
"""

# ruff: noqa: SLF001  a set takes over the memory of another

from collections.abc import Iterable, Iterator
from typing import Any, Self, cast

import numpy as np
import torch

from raycheck.errors import CorruptError

Ids = np.ndarray[Any, np.dtype[np.uint64]]
Mask = np.ndarray[Any, np.dtype[np.bool_]]

SPARSE_FROM_BYTES = 1 << 16
"""Up to this size a bitmap is used whatever the ids are."""
CHUNK_BYTES = 1 << 20
END = 1 << 64
"""The first number that is not a valid id. A bitmap never extends beyond it."""


class RowSet:
    """A set of whole numbers from 0 to 2**64 - 1: as a bitmap, or as numbers in the order of arrival.

    The memory that `state_dict` returns stays in the same place until it has to grow, and then doubles: only then does
    a save plan its objects again.
    """

    def __init__(self) -> None:
        self._first = 0  # the id of the lowest bit, a multiple of 8
        self._bits = np.zeros(64, np.uint8)
        self._ids: Ids | None = None  # instead of the bits, if these would take more memory
        self._count = 0
        self._order: Ids | None = None  # the numbers in ascending order, for look-ups

    def __len__(self) -> int:
        """Return how many ids were added."""
        return self._count

    def add(self, ids: Ids) -> None:
        """Add ids, none of which is in the set."""
        if not ids.size:
            return
        if self._ids is not None and self._count + ids.size > self._ids.size:
            self._grow(ids)
        if self._ids is None and not self._make_room(int(ids.min()), int(ids.max()), self._count + ids.size):
            self._leave_bits(ids.size)
        if self._ids is None:
            place = (ids - np.uint64(self._first)).astype(np.int64)
            np.bitwise_or.at(self._bits, place >> 3, np.left_shift(1, place & 7).astype(np.uint8))
        else:
            self._ids[self._count : self._count + ids.size] = ids
            self._order = None
        self._count += ids.size

    def contains(self, ids: Ids) -> Mask:
        """Return for each id whether it is in the set."""
        if self._ids is None:
            inside = (ids >= np.uint64(self._first)) & (ids - np.uint64(self._first) < np.uint64(self._bits.size * 8))
            place = np.where(inside, ids - np.uint64(self._first), np.uint64(0)).astype(np.int64)
            bits = (self._bits[place >> 3] >> (place & 7).astype(np.uint8)) & 1
            return cast("Mask", np.logical_and(inside, bits))
        self.sorted_for_look_ups()
        assert self._order is not None, "numbers are in order now, and there are some"
        nearest = self._order[np.minimum(np.searchsorted(self._order, ids), self._order.size - 1)]
        return cast("Mask", nearest == ids)

    def sorted_for_look_ups(self) -> Self:
        """Sort the numbers now, instead of in each process that the set is sent to. Return the set."""
        if self._ids is not None and self._order is None:
            self._order = np.sort(self._ids[: self._count])
        return self

    def repeated(self, ids: Ids) -> int | None:
        """Return a duplicate id if one can be found cheaply: one that is twice in `ids`, or already in the set."""
        order = np.sort(ids)
        again = order[1:][order[1:] == order[:-1]]
        if not again.size and self._ids is None:
            again = ids[self.contains(ids)]
        return int(again[0]) if again.size else None

    def parts(self) -> Iterator[Ids]:
        """Yield all ids, in arrays of a bounded size."""
        if self._ids is not None:
            for at in range(0, self._count, CHUNK_BYTES):
                yield self._ids[at : min(at + CHUNK_BYTES, self._count)]
            return
        for at in range(0, self._bits.size, CHUNK_BYTES):
            found = np.flatnonzero(np.unpackbits(self._bits[at : at + CHUNK_BYTES], bitorder="little"))
            yield found.astype(np.uint64) + np.uint64(self._first + at * 8)

    @classmethod
    def union(cls, sets: Iterable[Self]) -> Self:
        """Return a set of all ids in these sets, no two of which share one."""
        whole = cls()
        for one in sets:
            whole._take(one)
        return whole

    def state_dict(self) -> dict[str, Any]:
        """Return the set as a tensor and three numbers. The tensor is the set's own memory."""
        data = self._bits if self._ids is None else self._ids.view(np.uint8)
        return {"first": self._first, "count": self._count, "bits": self._ids is None, "data": torch.from_numpy(data)}

    @classmethod
    def of_state(cls, state: dict[str, Any]) -> Self:
        """Return a set from what `state_dict` returned. Raises CorruptError if its parts do not fit together.

        A bitmap that extends beyond the last id is cut there: older versions wrote such bitmaps.
        """
        found, data = cls(), state["data"].detach().cpu().contiguous().numpy()
        first, count = int(state["first"]), int(state["count"])
        if data.dtype != np.uint8 or data.ndim != 1 or not 0 <= first < END or first % 8:
            raise CorruptError("the consumed rows are not in a form that a RowSet has")
        found._first, found._count = first, count
        if state["bits"]:
            found._bits = data[: (END - first) // 8].copy()
            is_whole = sum(part.size for part in found.parts()) == count
        else:
            is_whole = data.size % 8 == 0 and 0 < count <= data.size // 8
            found._ids = data.copy().view(np.uint64) if is_whole else None
        if not is_whole:
            raise CorruptError(f"the state counts {count} consumed rows, but does not have that many ids")
        return found

    def _take(self, other: "RowSet") -> None:
        """Add the ids of another set, as bits if both store them as bits."""
        low, high = other._first, other._first + other._bits.size * 8 - 1
        are_bits = self._ids is None and other._ids is None and other._count
        if are_bits and self._make_room(low, high, self._count + other._count):
            at = (low - self._first) // 8
            self._bits[at : at + other._bits.size] |= other._bits
            self._count += other._count
            return
        for part in other.parts():
            self.add(part)

    def _make_room(self, low: int, high: int, count: int) -> bool:
        """Extend the bits to the range from `low` to `high`.

        Return False if they would take too much memory for `count`.
        """
        if not self._count:
            self._first = min(low // 8 * 8, END - self._bits.size * 8)
        first, end = self._first, self._first + self._bits.size * 8
        if low >= first and high < end:
            return True
        new_first, new_end = min(first, low // 8 * 8), max(end, high + 1)
        if (new_end - new_first) // 8 > max(SPARSE_FROM_BYTES, 16 * count):
            return False
        if low < first:
            new_first = max(0, min(new_first, first - (end - first)))
        if high >= end:
            new_end = min(END, max(new_end, end + (end - first)))
        bits = np.zeros((new_end - new_first + 7) // 8, np.uint8)
        at = (first - new_first) // 8
        bits[at : at + self._bits.size] = self._bits
        self._first, self._bits = new_first, bits
        return True

    def _leave_bits(self, coming: int) -> None:
        numbers = list(self.parts())
        self._ids = np.concatenate([*numbers, np.zeros(max(64, self._count, 2 * coming), np.uint64)])
        self._first, self._bits = 0, np.zeros(64, np.uint8)

    def _grow(self, coming: Ids) -> None:
        """Make room for more numbers, or switch to bits if these take less memory by now."""
        assert self._ids is not None, "bits grow by _make_room"
        numbers = self._ids[: self._count]
        low, high = min(int(numbers.min()), int(coming.min())), max(int(numbers.max()), int(coming.max()))
        if (high - low) // 8 <= 8 * self._count:
            self._ids, self._order, self._count = None, None, 0
            self._first = low // 8 * 8
            self._bits = np.zeros((high - self._first) // 8 + 1, np.uint8)
            self.add(numbers)
        else:
            self._ids = np.concatenate([self._ids, np.zeros(max(self._ids.size, coming.size), np.uint64)])


def ids_of(column: Any) -> Ids | None:
    """Return a batch's id column; None if it contains anything but whole numbers of at least 0.

    column: a tensor, an array, or a column of pandas or pyarrow.
    """
    found = np.asarray(column.detach().cpu() if isinstance(column, torch.Tensor) else column).reshape(-1)
    if found.dtype.kind not in "iu" or (found.dtype.kind == "i" and found.size and found.min() < 0):
        return None
    return found.astype(np.uint64)
