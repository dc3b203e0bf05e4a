"""Tests that a rendezvous gives all ranks one decision, and tells a rank that waits for it which ranks are missing."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from raycheck.errors import SaveFailedError
from raycheck.group.coordinator.messages import Pending
from raycheck.group.coordinator.rendezvous import Rendezvous, RendezvousTable


def run(story: Callable[[Rendezvous[str, str]], Awaitable[None]], *, world_size: int = 2) -> None:
    async def told() -> None:
        await story(Rendezvous(world_size, awaited="reported"))

    asyncio.run(asyncio.wait_for(told(), timeout=60.0))


def test_a_rank_that_waits_is_told_which_ranks_are_missing() -> None:
    """I9: so the error at its deadline can name them."""

    async def story(rendezvous: Rendezvous[str, str]) -> None:
        rendezvous.arrive(1, "b")

        assert await rendezvous.answer(0.01) == Pending(message="ranks [0, 2] have not reported")

    run(story, world_size=3)


def test_all_ranks_are_told_one_decision_from_what_they_first_handed_in() -> None:
    async def story(rendezvous: Rendezvous[str, str]) -> None:
        rendezvous.arrive(1, "b")
        rendezvous.arrive(1, "asked again")
        rendezvous.arrive(0, "a")
        rendezvous.decide("".join)
        rendezvous.arrive(0, "too late")
        rendezvous.decide(lambda arrivals: "another")

        assert [await rendezvous.answer(0.0) for _ in range(2)] == ["ab", "ab"]
        assert (rendezvous.came, rendezvous.arrivals) == ([0, 1], {})

    run(story)


def test_a_decision_that_takes_time_is_pending_until_it_is_made() -> None:
    async def story(rendezvous: Rendezvous[str, str]) -> None:
        go = asyncio.Event()

        async def work() -> str:
            await go.wait()
            return "done"

        for rank in range(2):
            rendezvous.arrive(rank, "x")
        rendezvous.decide_later(work())
        assert (rendezvous.is_open, rendezvous.is_deciding, rendezvous.is_decided) == (False, True, False)
        assert await rendezvous.answer(0.01) == Pending(message="the decision is under way")
        go.set()

        assert await rendezvous.answer(5.0) == "done"

    run(story)


@pytest.mark.parametrize("how", ["at once", "later", "by a rank"])
def test_an_error_is_told_to_all_ranks(how: str) -> None:
    def fails(*arrivals: Any) -> str:
        raise SaveFailedError("rank 1: disk full")

    async def story(rendezvous: Rendezvous[str, str]) -> None:
        rendezvous.arrive(0, "x")
        if how == "at once":
            rendezvous.decide(fails)
        elif how == "later":
            rendezvous.decide_later(asyncio.to_thread(fails))
        else:
            rendezvous.fail(SaveFailedError("rank 1: disk full"))

        for _ in range(2):
            with pytest.raises(SaveFailedError, match="disk full"):
                await rendezvous.answer(5.0)
        rendezvous.fail(SaveFailedError("another"))
        with pytest.raises(SaveFailedError, match="disk full"):
            await rendezvous.answer(0.0)

    run(story)


def test_a_save_before_a_later_one_is_over_unless_all_ranks_have_reported_it() -> None:
    async def story() -> None:
        table, go = RendezvousTable(), asyncio.Event()

        def save(number: int) -> Rendezvous[Any, Any]:
            return table.meet("group", "memory", number, world_size=2, awaited="reported")

        async def work() -> str:
            await go.wait()
            return "done"

        missing, deciding, other = save(1), save(2), table.meet("group", "save", 1, world_size=2, awaited="reported")
        deciding.decide_later(work())
        table.end_before("group", "memory", 3)

        with pytest.raises(SaveFailedError, match="a later one was begun"):
            await missing.answer(0.0)
        assert (table.find("group", "memory", 1), save(2), table.find("group", "save", 1)) == (None, deciding, other)
        assert other.is_open
        go.set()
        assert await save(2).answer(5.0) == "done"

    asyncio.run(asyncio.wait_for(story(), timeout=60.0))
