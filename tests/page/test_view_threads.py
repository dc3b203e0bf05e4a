"""The page's threads: as many as there may be, none for good, and one question for all tabs of a live run."""

import asyncio
import threading
import time
from collections.abc import Iterator

import pytest

from raycheck.bucket.store import open_store
from raycheck.bucket.store.address import join_uri
from raycheck.errors import StoreError
from raycheck.page.view_threads import BusyError, LiveAnswers, ViewThreads
from raycheck.views.context_pool import reads_for
from raycheck.views.history import read_history
from tests.support.samples.many_runs import a_run
from tests.support.servers.distant_bucket import distant_bucket, traffic

DEADLINE_S = 30.0


@pytest.fixture
def threads() -> Iterator[ViewThreads]:
    made = ViewThreads(at_once=2, timeout_s=0.2)
    yield made
    made.close()


def test_a_slow_bucket_makes_the_page_refuse_views_and_not_wait_for_ever(threads: ViewThreads) -> None:
    released = threading.Event()

    async def ask() -> None:
        for _ in range(2):
            with pytest.raises(TimeoutError):
                await threads.read(lambda: released.wait(DEADLINE_S))
        with pytest.raises(BusyError):
            await threads.read(lambda: None)

    asyncio.run(ask())
    released.set()
    ends = time.monotonic() + DEADLINE_S
    while True:
        try:
            assert asyncio.run(threads.read(lambda: "read")) == "read"
            break
        except BusyError:
            assert time.monotonic() < ends, "the places are free once the calls have ended"
            time.sleep(0.01)


def test_a_thread_whose_time_is_over_begins_no_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither in its own thread nor in those that read the attempts' records: it ends with the requests under way, though
    a view of this run makes several, one after the other."""
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "demo")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "demo")
    objects = {f"run/{key}": data for key, data in a_run(steps=3).items()}
    with distant_bucket(objects, delay_s=0.6) as uri:
        store = open_store(join_uri(uri, "run"))
        assert read_history(store).commits
        whole, _ = traffic(uri)
        with reads_for(0.3), pytest.raises(StoreError):
            read_history(store)
        cut, _ = traffic(uri)

    assert cut < whole


def test_many_tabs_of_a_run_make_one_question_and_get_one_answer() -> None:
    asked: list[str] = []

    async def ask(name: str) -> int:
        asked.append(name)
        number = len(asked)
        await asyncio.sleep(0)  # the other tabs ask meanwhile
        return number

    async def tabs() -> None:
        now = 100.0
        live = LiveAnswers(ask, every_s=0.5, clock=lambda: now)
        found = await asyncio.gather(*(live.get("a") for _ in range(50)), live.get("b"))
        assert (found, asked) == ([1] * 50 + [2], ["a", "b"])
        now += 0.4
        assert await live.get("a") == 1
        now += 0.2
        assert await live.get("a") == 3

    asyncio.run(tabs())


def test_a_tab_that_goes_away_takes_no_answer_from_the_others() -> None:
    async def tabs() -> None:
        begun, released = asyncio.Event(), asyncio.Event()

        async def ask(name: str) -> str:
            begun.set()
            await released.wait()
            return name

        live = LiveAnswers(ask)
        gone, stays = asyncio.ensure_future(live.get("a")), asyncio.ensure_future(live.get("a"))
        await begun.wait()
        gone.cancel()
        released.set()
        assert await stays == "a"

    asyncio.run(tabs())


def test_names_that_nobody_asks_for_any_more_are_forgotten() -> None:
    async def ask(name: str) -> str:
        return name

    async def tabs() -> None:
        live = LiveAnswers(ask)
        for number in range(3000):
            await live.get(str(number))
        assert len(live._answers) <= 1000

    asyncio.run(tabs())
