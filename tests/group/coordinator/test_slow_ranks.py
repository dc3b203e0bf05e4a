"""Tests which rank counts as slow, by what the ranks say of themselves, and what that costs for thousands of them."""

import asyncio
from collections.abc import Collection, Sequence

import pytest

from raycheck.bucket.attempt_records import SlowRecord
from raycheck.group.coordinator.messages import Pending, RankProgress
from raycheck.group.coordinator.rendezvous import Rendezvous
from raycheck.group.coordinator.slow_ranks import LOOK_EVERY_S, SlowRanks

KEY = "step-000000002-a1-s1"


class Heard:
    """Keeps what a run log is told."""

    attempt, now = 3, 1000.0

    def __init__(self) -> None:
        self.all: list[tuple[SlowRecord, bool]] = []

    def slow(self, slow: SlowRecord, *, is_new: bool) -> None:
        self.all.append((slow, is_new))


def progress(rank: int, done: int | None, *, of: int, object_: str = "shard") -> RankProgress:
    """A restore's message. done: of 100 bytes; None when it has not begun to read."""
    return RankProgress(
        group="g",
        rank=rank,
        world_size=of,
        node=f"node-{rank}",
        checkpoint=KEY,
        save=None,
        done_bytes=done or 0,
        wanted_bytes=None if done is None else 100,
        object=object_,
        seconds=30.0,
    )


def slow_of(done: Sequence[int | None], came: Collection[int] = ()) -> tuple[list[tuple[SlowRecord, bool]], str]:
    """Return what was recorded when all ranks but those that came have said how far they are, and the last answer."""

    async def play() -> tuple[list[tuple[SlowRecord, bool]], str]:
        heard, now = Heard(), [0.0]
        slow = SlowRanks(heard, clock=lambda: now[0])  # type: ignore[arg-type]
        meeting: Rendezvous[None, None] = Rendezvous(len(done), awaited="restored it")
        for rank in came:
            meeting.arrive(rank, None)
        said = ""
        for rank, share in enumerate(done):
            now[0] += 0.0 if rank < len(done) - 1 else LOOK_EVERY_S
            if rank not in came:
                said = slow.note(progress(rank, share, of=len(done)), meeting)
        now[0] += LOOK_EVERY_S
        last = next(rank for rank in range(len(done)) if rank not in came)
        said = slow.note(progress(last, done[last], of=len(done)), meeting)
        return heard.all, said

    return asyncio.run(play())


@pytest.mark.parametrize(
    ("done", "came", "slowest"),
    [
        ([99, 7], (), 1),
        ([0, 90], (0,), 1),
        ([100, 98, 0, 0], (0, 1, 3), 2),
        ([50, 60, 10, 55], (), 2),
        ([50, None, 60, 70], (), 1),
    ],
    ids=["far behind", "all others are done", "one of four is left", "far behind three", "not begun"],
)
def test_who_is_slow(done: list[int | None], came: Collection[int], slowest: int) -> None:
    recorded, said = slow_of(done, came)

    record = recorded[-1][0]
    assert (record.rank, record.node, record.attempt, record.is_restore) == (slowest, f"node-{slowest}", 3, True)
    assert record.finished == len(came)
    assert said == str(record)
    assert [is_new for _, is_new in recorded if _.rank == slowest].count(True) == 1


@pytest.mark.parametrize("done", [[50, 60], [1, 1, 1, 1], [0, 0], [None, None], [40, 60, 70, 50]])
def test_where_all_are_as_slow_nobody_is(done: list[int | None]) -> None:
    recorded, said = slow_of(done)

    assert recorded == []
    assert f"restore of {KEY}: rank " in said, "an error at the deadline names the slowest all the same"


def test_the_words() -> None:
    record = slow_of([41, 3], (0,))[0][-1][0]

    assert str(record) == (
        f"restore of {KEY}: rank 1 on node node-1 has read 3 of 100 B in 30 s, and is at shard; the others have finished"
    )


def test_a_rank_that_waits_is_told_who_is_slowest() -> None:
    slow = SlowRanks(Heard())  # type: ignore[arg-type]
    slow.note(progress(1, 3, of=2), None)

    answer = slow.named_in(Pending(message="ranks [1] have not restored it"), "g", KEY)

    assert isinstance(answer, Pending)
    assert answer.message.startswith("ranks [1] have not restored it; slowest: restore of ")
    assert slow.named_in(None, "g", KEY) is None
    assert slow.named_in(Pending(message="x"), "another group", KEY) == Pending(message="x")


def test_thousands_of_ranks_are_looked_at_once_a_second() -> None:
    """A look costs as much as there are ranks, so it must not be made for each of their messages."""
    heard, now, of = Heard(), [0.0], 4096
    slow = SlowRanks(heard, clock=lambda: now[0])  # type: ignore[arg-type]
    for _ in range(3):
        for rank in range(of):
            slow.note(progress(rank, 0 if rank == 17 else 99, of=of), None)
        now[0] += LOOK_EVERY_S

    assert len(heard.all) <= 3
    assert {record.rank for record, _ in heard.all} == {17}
