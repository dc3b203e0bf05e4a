"""Tests that what a coordinator does, and what it sends, grows no faster than its number of ranks.

Nothing is timed: lines that are executed are counted, each turn of a loop anew, in all threads, of raycheck's code alone.
What the coordinator does in the background, when nobody waits for it, does not count: it may fall into any call. The
ranks are numbers that count, too, when they are sorted, hashed or compared, as numbers in sets and dicts are.
"""

import asyncio

import pytest

from raycheck.group.coordinator.background_deletes import BackgroundDeletes
from raycheck.group.coordinator.history_writer import HistoryWriter
from tests.bench.many_ranks import LAYOUTS, Cost, measured
from tests.support.processes.counted_lines import Lines

WORLDS = (64, 128, 256)
TENSORS = 2
MOST = 2.5
"""What grows linearly costs twice as much more from the second world to the third as from the first to the second; what
grows by N log N, up to 2.3 times as much, and by the square four times."""
OTHER_LINES = 500
"""A call may have to repeat a swap of `latest`, which something in the background has changed meanwhile."""
MORE = [layout for layout in LAYOUTS if layout != "fsdp"]
BACKGROUND = {HistoryWriter._write.__code__, BackgroundDeletes._delete.__code__}


class Rank(int):
    """A rank's number, which counts what is done with it."""

    __slots__ = ()

    def __hash__(self) -> int:
        return int.__hash__(self)

    def __eq__(self, other: object) -> bool:
        return int.__eq__(self, other)

    def __lt__(self, other: int) -> bool:
        return int.__lt__(self, other)


OF_RANKS = {method.__code__ for method in (Rank.__hash__, Rank.__eq__, Rank.__lt__)}


def costs_of(layout: str, world_size: int) -> dict[str, Cost]:
    lines = Lines(also=OF_RANKS, background=BACKGROUND)
    with lines.counted():
        return asyncio.run(measured(layout, world_size, TENSORS, clock=lines, idle_after_s=0.0, numbered=Rank))


@pytest.mark.parametrize("layout", ["fsdp", *(pytest.param(more, marks=pytest.mark.slow) for more in MORE)])
def test_work_and_bytes_of_every_call_grow_linearly_with_the_ranks(layout: str) -> None:
    worlds = [costs_of(layout, world_size) for world_size in WORLDS]

    growth = {}
    for phase in worlds[0]:
        for what, slack in (("cpu_s", OTHER_LINES), ("sent_bytes", 0), ("answer_bytes", 0), ("messages", 0)):
            one, two, four = (float(getattr(world[phase], what)) for world in worlds)
            growth[phase, what] = (four - two - slack) / (two - one + slack)
            assert four > two > one > 0, (phase, what)
    assert {key: ratio for key, ratio in growth.items() if ratio > MOST} == {}
