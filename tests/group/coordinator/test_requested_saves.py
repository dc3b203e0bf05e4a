"""Tests that a save requested from outside is the first one that begins after the group has learned of the request."""

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from raycheck.group.coordinator.requested_saves import RequestedSaves


def run(story: Callable[[RequestedSaves], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(story(RequestedSaves()), timeout=60.0))


def test_one_save_is_asked_for_and_not_another_while_it_is_under_way() -> None:
    async def story(requested: RequestedSaves) -> None:
        assert not requested.note_step(6, begun=0, step_s=0.1)
        waiting = asyncio.create_task(requested.wait())
        await asyncio.sleep(0)

        assert requested.note_step(7, begun=0, step_s=0.1)
        assert requested.note_step(8, begun=0, step_s=0.1), "the answer may have been lost"
        assert not requested.note_step(9, begun=8, step_s=0.1)
        requested.committed(5, save_s=1.0)
        assert not waiting.done()
        requested.committed(8, save_s=1.0)

        assert await waiting

    run(story)


def test_a_second_request_is_not_met_by_the_save_of_the_first() -> None:
    async def story(requested: RequestedSaves) -> None:
        first = asyncio.create_task(requested.wait())
        await asyncio.sleep(0)
        assert requested.note_step(7, begun=0, step_s=0.1)
        second = asyncio.create_task(requested.wait())
        await asyncio.sleep(0)
        assert requested.note_step(20, begun=8, step_s=0.1)

        requested.committed(8, save_s=1.0)
        assert await first
        assert not second.done()
        requested.committed(21, save_s=1.0)

        assert await second

    run(story)


def test_a_request_that_nobody_answers_ends_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("raycheck.group.coordinator.requested_saves.PATIENCE_S", 0.05)

    async def story(requested: RequestedSaves) -> None:
        assert await requested.wait() is False
        assert not requested.note_step(5, begun=0, step_s=0.1)

    run(story)
