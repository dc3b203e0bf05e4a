"""What rank 0 saves when a node is about to go, second by second."""

import math

from raycheck.train.leaving import Leaving


class Clock:
    def __init__(self, now: float) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


def saves(*, notice_s: float, save_s: float, busy_s: float = 0.0, ask_every_s: float = 0.5) -> list[float]:
    """Seconds after a notice of `notice_s` at which a save is begun, until the node goes."""
    clock = Clock(1000.0)
    leaving = Leaving(clock)
    begun = []
    while clock.now < 1000.0 + notice_s:
        under_way = max(0.0, busy_s - (clock.now - 1000.0))
        is_news = leaving.hear(1000.0 + notice_s)
        if (leaving.fits if is_news else leaving.is_late)(save_s=save_s, busy_s=under_way):
            begun.append(clock.now - 1000.0)
        clock.now += ask_every_s
    return begun


def test_a_save_at_once_and_one_as_late_as_it_surely_fits() -> None:
    begun = saves(notice_s=30.0, save_s=4.0)

    assert begun == [0.0, 16.0]
    assert 30.0 - begun[-1] > 2 * 4.0, "it may take twice as long as the last one"


def test_a_save_that_cannot_end_in_time_is_not_begun() -> None:
    assert saves(notice_s=10.0, save_s=8.0) == []


def test_what_the_save_under_way_still_needs_is_counted() -> None:
    assert saves(notice_s=20.0, save_s=6.0, busy_s=2.0)[0] == 0.0
    assert saves(notice_s=10.0, save_s=6.0, busy_s=4.0) == [], "it ends, and another one would not"


def test_a_notice_without_a_time_is_a_save_at_once_and_no_other() -> None:
    leaving = Leaving(Clock(1000.0))

    assert leaving.hear(math.inf)
    assert leaving.fits(save_s=500.0, busy_s=0.0)
    assert not leaving.is_late(save_s=500.0, busy_s=0.0)


def test_a_time_from_a_clock_an_hour_off_still_brings_a_save() -> None:
    behind, ahead = Leaving(Clock(1000.0 + 3600.0)), Leaving(Clock(1000.0 - 3600.0))

    for leaving in (behind, ahead):
        assert leaving.hear(1030.0)
        assert leaving.fits(save_s=10.0, busy_s=0.0)
        assert not leaving.is_late(save_s=10.0, busy_s=0.0)


def test_each_new_time_is_news_and_brings_its_own_saves() -> None:
    clock = Clock(0.0)
    leaving = Leaving(clock)

    news = [leaving.hear(notice) for notice in (None, 100.0, 100.0, 60.0)]

    assert news == [False, True, False, True]
    clock.now = 52.0
    assert leaving.is_late(save_s=2.0, busy_s=0.0)
    assert not leaving.is_late(save_s=2.0, busy_s=0.0), "once"
