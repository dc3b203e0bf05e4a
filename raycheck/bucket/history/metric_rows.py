"""The metrics of steps between commits, as a value: which metric had which value after which step of which attempt.

A value is known by its attempt, its metric and its step, so rows that arrive twice, in any order, are one set. Of too
many, `thinned` keeps the first value of each metric in each span of `every` steps. Spans of twice the length contain
whole spans, so it does not matter whether rows are thinned before or after they are joined.
"""

import math
import sys
from array import array
from base64 import b64decode, b64encode
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from operator import sub
from typing import ClassVar

from raycheck.bucket.format.column_codec import pack_column, unpack_column
from raycheck.bucket.format.document import Document
from raycheck.errors import CorruptError

TIME = ""
"""The name under which a row's time is kept, in unix seconds. No metric has this name."""
MAX_VALUES = 1_000_000
"""Above this number of values, the rows of a segment are thinned."""
BLOCK_STEPS = 16_384
"""Rows are written and read in blocks of this many steps, since no other thread runs while a column is converted."""
_WIDTHS = {"i1": 1, "i2": 2, "i4": 4, "i8": 8}
Series = Mapping[int, float]
"""One metric of one attempt: the value of each step."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MetricRows:
    """The rows of a run: for each attempt and metric, the value of each step.

    every: nothing between the first values of spans of so many steps is known to be complete; 1 when nothing was left
    out.
    """

    series: Mapping[tuple[int, str], Series] = field(default_factory=dict)
    every: int = 1

    def joined(self, other: "MetricRows") -> "MetricRows":
        """Return the union. Where both have a value of one step, which only a damaged writer could make differ, the
        larger counts, and a number rather than NaN."""
        series = dict(self.series)
        for key, values in other.series.items():
            mine = series.get(key)
            series[key] = values if mine is None else _union(mine, values)
        return MetricRows(series=series, every=max(self.every, other.every))

    def covers(self, other: "MetricRows") -> bool:
        """Return whether there is a value here in each span of `every` steps in which `other` has one."""
        return all(
            {step // self.every for step in values} <= {step // self.every for step in self.series.get(key, ())}
            for key, values in other.series.items()
        )

    def thinned(self, max_values: int = MAX_VALUES) -> "MetricRows":
        """Return at most `max_values` values: those of the shortest spans, of 1, 2, 4 and so on steps, that allow it.

        The spans are at least as long as `every` says. If even one value per metric and attempt is too much, the oldest
        attempts have none.
        """
        every, series = self.every, {key: _first_of_spans(values, self.every) for key, values in self.series.items()}
        longest = max((max(values, default=0) for values in series.values()), default=0)
        while sum(map(len, series.values())) > max_values and every <= longest:
            every *= 2
            series = {key: _first_of_spans(values, every) for key, values in series.items()}
        if len(series) > max_values:
            series = dict(sorted(series.items())[-max_values:])
        return MetricRows(series=series, every=every)


def _union(one: Series, other: Series) -> Series:
    if len(one) < len(other):
        one, other = other, one  # it takes long to insert a value, and not to copy a dict
    both = {**one, **other}
    for step in one.keys() & other.keys():
        both[step] = max(one[step], other[step], key=lambda value: (not math.isnan(value), value))
    return both


def _first_of_spans(values: Series, every: int) -> Series:
    if every == 1:
        return values
    found: dict[int, int] = {}
    for step in values:
        span = step // every
        if step < found.get(span, step + 1):
            found[span] = step
    return {step: values[step] for step in found.values()}


@dataclass(frozen=True, kw_only=True, slots=True)
class Block(Document):
    """Rows as a document has them: metrics of one attempt that have values at the same steps of a part of the run.

    first: the first of the steps. steps: how much higher each further one is than the one before it. metrics: the
    values of each metric, in the order of the steps; TIME has the times. A column is text: its type, a colon, and
    base64 of little-endian numbers. i1, i2, i4 and i8 are integers of that many bytes, f4 and f8 floating-point
    numbers; the smallest one is used that changes no value.
    """

    is_long: ClassVar[bool] = True

    attempt: int
    first: int
    steps: str
    metrics: Mapping[str, str]


def blocks_of(rows: MetricRows) -> tuple[Block, ...]:
    """Return rows in the form for a document. Equal rows give equal blocks."""
    groups: dict[tuple[int, tuple[int, ...]], dict[str, list[float]]] = {}
    for (attempt, name), values in sorted(rows.series.items()):
        for steps in _parts(sorted(values), BLOCK_STEPS * rows.every):
            groups.setdefault((attempt, steps), {})[name] = [values[step] for step in steps]
    return tuple(
        Block(
            attempt=attempt,
            first=steps[0],
            steps=_steps_text(steps),
            metrics={name: _floats_text(values) for name, values in columns.items()},
        )
        for (attempt, steps), columns in groups.items()
    )


def _parts(steps: Sequence[int], span: int) -> Iterator[tuple[int, ...]]:
    """Divide sorted steps by spans [k x span, (k + 1) x span), so that equal steps of two metrics are equal parts."""
    first = 0
    while first < len(steps):
        end = bisect_left(steps, (steps[first] // span + 1) * span, first)
        yield tuple(steps[first:end])
        first = end


def rows_of(blocks: Iterable[Block], *, every: int, what: str) -> MetricRows:
    """Return the rows of a document. Raises CorruptError for what `blocks_of` does not write. what: names it."""
    series: dict[tuple[int, str], dict[int, float]] = {}
    for block in blocks:
        try:
            steps = list(accumulate(_integers(block.steps), initial=block.first))
            columns = {name: _floats(text) for name, text in block.metrics.items()}
        except (ValueError, KeyError, OverflowError) as error:
            raise CorruptError(f"{what} has rows of attempt {block.attempt} that cannot be read: {error}") from None
        if any(len(column) != len(steps) for column in columns.values()):
            raise CorruptError(f"{what} has rows of attempt {block.attempt} with columns of different lengths")
        for name, column in columns.items():
            mine, values = series.setdefault((block.attempt, name), {}), dict(zip(steps, column, strict=True))
            mine.update(values if mine.keys().isdisjoint(values) else _union(mine, values))
    return MetricRows(series=series, every=every)


def _steps_text(steps: tuple[int, ...]) -> str:
    column = array("q", map(sub, steps[1:], steps))
    width, data = pack_column(column)
    return f"i{width}:{b64encode(data).decode()}"


def _floats_text(values: list[float]) -> str:
    column = array("d", values)
    short = array("f", values)
    is_exact = array("d", short).tobytes() == column.tobytes()
    data = _to_little(short if is_exact else column)
    return f"{'f4' if is_exact else 'f8'}:{b64encode(data).decode()}"


def _to_little(column: "array[float]") -> bytes:
    return _little(array(column.typecode, column)).tobytes()


def _little(column: "array[float]") -> "array[float]":
    """Convert a column to or from little-endian, in place."""
    if sys.byteorder == "big":
        column.byteswap()
    return column


def _integers(text: str) -> "array[int]":
    kind, _, packed = text.partition(":")
    return unpack_column(b64decode(packed, validate=True), _WIDTHS[kind], as_steps=False)


def _floats(text: str) -> "array[float]":
    kind, _, packed = text.partition(":")
    column: array[float] = array({"f4": "f", "f8": "d"}[kind])
    column.frombytes(b64decode(packed, validate=True))
    return _little(column)
