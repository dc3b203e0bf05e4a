"""What the goodput bench makes of a trace and of a story; the replay itself needs minutes and a Ray of its own."""

from dataclasses import replace
from typing import Any

import pytest

from tests.bench.goodput_rows import (
    PIECES,
    QUICK,
    WARM_UP_SAVES,
    Kill,
    Watched,
    counted,
    counted_replicas,
    first_step,
    limit,
    overlooked,
    pieces,
    rows,
    step_cost,
    steps_between,
    trace,
)

STORY = [
    {"kind": "start", "at": 10.0, "step": 0},
    *({"kind": "step", "at": 10.0 + step, "step": step, "seconds": 1.0} for step in (1, 2, 3)),
    {"kind": "save", "at": 13.5, "seconds": 0.5},
    {"kind": "step", "at": 14.5, "step": 4, "seconds": 1.0},
    {"kind": "start", "at": 20.0, "step": 2},
    *({"kind": "step", "at": 18.0 + step, "step": step, "seconds": 1.0} for step in (3, 4, 5, 6)),
]


# The first of two replicas trains alone at first, and again when the second one is killed at 14.2.
SURVIVOR = [
    {"kind": "start", "at": 9.0, "step": 0},
    {"kind": "step", "at": 10.0, "step": 1, "batches": 1, "seconds": 1.0},
    {"kind": "step", "at": 11.0, "step": 2, "batches": 2, "seconds": 1.0},
    {"kind": "step", "at": 12.0, "step": 3, "batches": 4, "seconds": 1.0},
    {"kind": "step", "at": 13.0, "step": 4, "batches": 6, "seconds": 1.0},
    {"kind": "step", "at": 14.0, "step": 5, "batches": 8, "seconds": 1.0},
    {"kind": "dropped", "at": 15.0, "step": 5, "batches": 8, "seconds": 1.0},
    {"kind": "step", "at": 17.0, "step": 6, "batches": 9, "seconds": 2.0},
    {"kind": "step", "at": 18.0, "step": 7, "batches": 10, "seconds": 1.0},
    {"kind": "step", "at": 19.0, "step": 8, "batches": 11, "seconds": 1.0},
    {"kind": "step", "at": 20.0, "step": 9, "batches": 13, "seconds": 1.0},
]
KILLED = [
    {"kind": "start", "at": 9.5, "step": 0},
    {"kind": "step", "at": 11.1, "step": 2, "batches": 2, "seconds": 1.5},
    *({**event, "at": event["at"] + 0.1} for event in SURVIVOR[3:6]),
    {"kind": "start", "at": 17.5, "step": 0},
    {"kind": "step", "at": 19.1, "step": 8, "batches": 11, "seconds": 1.5},
    {"kind": "step", "at": 20.1, "step": 9, "batches": 13, "seconds": 1.0},
]


def replicas(*stories: list[dict[str, Any]], end: float = 20.5, kills_at: tuple[float, ...] = (14.2,)) -> Watched:
    return counted_replicas(stories, end=end, kills_at=kills_at, restarts_s=[4.9])


def watched(*, steps: float, updates: int, lost: int = 0) -> Watched:
    return Watched(
        wall_s=100.0,
        steps=steps,
        updates=updates,
        steps_lost=lost,
        median_step_s=0.25,
        saves_s=(1.0,),
        restarts_s=(5.0, 9.0, 6.0),
        pauses_s=(1.0, 2.0, 1.5),
    )


def saved(*, blocked_s: float, slowed_s: float, saves: int) -> list[dict[str, float | str]]:
    """A story with a save after each two steps of a second; the step after it takes longer."""
    story: list[dict[str, float | str]] = []
    at = 0.0
    for _ in range(saves):
        for seconds in (1.0 + slowed_s, 1.0):
            at += seconds
            story.append({"kind": "step", "at": at, "seconds": seconds})
        at += blocked_s
        story.append({"kind": "save", "at": at, "seconds": blocked_s})
    return story


def test_a_trace_is_the_same_every_time_and_has_one_kill_more_than_happen() -> None:
    kills = trace(QUICK, ranks=2, seed=7)

    assert kills == trace(QUICK, ranks=2, seed=7)
    assert kills != trace(QUICK, ranks=2, seed=8)
    assert len(kills) == QUICK.kills + 1
    longer = trace(replace(QUICK, kills=5000), ranks=2, seed=7)
    assert {kill.rank for kill in longer} == {0, 1}
    assert sum(kill.after_s for kill in longer) / len(longer) == pytest.approx(QUICK.mtbf_s, rel=0.1)


def test_a_story_tells_what_stands_and_what_was_lost() -> None:
    found = counted(STORY, end=23.5, restarts_s=[3.0])

    assert found.steps == 5, "step 6 came too late"
    assert found.steps_lost == 4 - 2
    assert found.wall_s == 23.5 - 10.0
    assert found.saves_s == (0.5,)


def test_a_restart_is_divided_by_the_rank_that_ends_each_piece_last() -> None:
    def story(*at: float) -> list[dict[str, Any]]:
        """One that starts twice; `at`: when its second process began, and what it told then."""
        began, called, built, start, step = at
        return [
            {"kind": "called", "at": 3.0, "began": 1.0},
            {"kind": "built", "at": 4.0},
            *STORY[:6],
            {"kind": "called", "at": called, "began": began},
            {"kind": "built", "at": built},
            {"kind": "start", "at": start, "step": 2},
            {"kind": "step", "at": step, "step": 3, "seconds": 1.0},
        ]

    found = pieces([story(16.0, 20.0, 21.0, 22.5, 23.0), story(15.0, 20.5, 20.75, 22.0, 23.5)], since=15.5)

    assert list(found.values()) == [0.5, 4.5, 0.5, 1.5, 1.0]
    assert list(found) == list(PIECES)


def test_a_step_of_one_replica_of_two_counts_half() -> None:
    found = replicas(SURVIVOR, KILLED)

    assert found.wall_s == pytest.approx(20.5 - 11.1), "from when both have done a step"
    assert found.updates == 9 - 2
    assert found.steps == 4 + 3 / 2
    assert found == replicas(KILLED, SURVIVOR)


def test_a_step_that_the_quorum_drops_is_lost_by_who_did_it() -> None:
    assert replicas(SURVIVOR, KILLED).steps_lost == 1 / 2
    assert replicas(SURVIVOR, KILLED, end=14.9, kills_at=()).steps_lost == 0


def test_the_other_replica_pauses_for_less_than_a_restart_takes() -> None:
    found = replicas(SURVIVOR, KILLED)

    assert found.pauses_s == pytest.approx((17.0 - 14.2,))
    assert found.restarts_s == (4.9,)


def test_what_one_replica_tells_late_is_not_lost() -> None:
    late = [{**event, "at": event["at"] + 1.5} if event["kind"] == "step" else event for event in KILLED[:5]]

    assert replicas(SURVIVOR[:6], late, kills_at=()).steps_lost == 0


def test_everything_is_lost_with_the_last_replica() -> None:
    again = [
        {"kind": "start", "at": 20.3, "step": 0},
        {"kind": "step", "at": 21.0, "step": 1, "batches": 2, "seconds": 1.0},
        {"kind": "step", "at": 22.0, "step": 2, "batches": 4, "seconds": 1.0},
    ]

    found = replicas([*SURVIVOR, *again], [*KILLED, *again], end=22.5)

    assert found.steps == 2
    assert found.updates == 2
    assert found.steps_lost == 1 / 2 + 4 + 3 / 2


def test_a_group_is_up_with_its_own_first_step() -> None:
    assert first_step(STORY, since=0.0) == 21.0
    assert first_step(STORY[:5], since=0.0) == 11.0
    assert first_step(STORY[:6], since=15.0) is None, "killed"
    assert first_step(STORY[:7], since=15.0) is None, "started, nothing done"
    assert first_step(STORY[:8], since=15.0) == 21.0


@pytest.mark.parametrize(("blocked_s", "slowed_s"), [(0.5, 0.0), (0.25, 0.5), (0.0078125, 0.125)])
def test_a_save_costs_what_it_blocks_and_what_it_slows(blocked_s: float, slowed_s: float) -> None:
    story = saved(blocked_s=blocked_s, slowed_s=slowed_s, saves=WARM_UP_SAVES + 4)

    assert step_cost(story, saves=3, pace_s=1.0) == pytest.approx(blocked_s + slowed_s)
    assert step_cost(story[:-1], saves=3, pace_s=1.0) is None
    assert step_cost(story, saves=3, pace_s=2.0) == blocked_s, "at least that"


def test_each_way_saves_as_often_as_daly_says_but_not_more_than_once_a_step() -> None:
    assert steps_between(0.2, pace_s=0.25, scale=QUICK) == pytest.approx((2 * 0.2 * QUICK.mtbf_s) ** 0.5 / 0.25, abs=1)
    assert steps_between(1e-9, pace_s=0.25, scale=QUICK) == 1


@pytest.mark.parametrize(
    ("after_s", "cost_s", "share"),
    [
        ([100.0], 0.0, 1.0),
        ([100.0], 1.0, (9 * 10 + 1) / 100),  # nine saves, and one second since the last
        ([45.0, 55.0], 0.0, (40 + 55) / 105),
        ([3.0, 27.0, 10.0], 0.0, (0 + 20 + 10) / 50),
    ],
)
def test_the_limit_is_what_saves_restarts_and_lost_steps_leave(
    after_s: list[float], cost_s: float, share: float
) -> None:
    kills = [Kill(after_s=seconds, rank=0) for seconds in after_s]

    assert limit(kills, interval_s=10.0, cost_s=cost_s, restart_s=5.0) == pytest.approx(share)


def test_rounds_are_added_up_and_steps_count_for_what_they_take_at_best() -> None:
    rounds = [watched(steps=200, updates=200, lost=5), watched(steps=160, updates=200, lost=4)]
    kills = [Kill(after_s=50.0, rank=0), Kill(after_s=50.0, rank=1)]

    found = rows({"way": rounds}, [kills, kills], {"way": 4}, pace_s=0.25, bare_s=5.5, raw_get_s=0.5)["way"]

    assert found["goodput"] == pytest.approx(360 * 0.25 / 200)
    assert found["goodput_of_updates"] == pytest.approx(400 * 0.25 / 200)
    assert found["kills"] == 6
    assert found["lost_per_kill"] == 9 / 6
    assert found["restart_s"] == 6.0
    assert found["restart_ratio"] == 1.0
    assert found["pause_s"] == 1.5
    assert found["every"] == 4


def test_a_listed_memory_checkpoint_that_the_next_group_does_not_restore_is_found() -> None:
    story = [
        {"kind": "start", "step": 0},
        {"kind": "step", "step": 8},
        {"kind": "listed", "memory_step": 8},
        {"kind": "start", "step": 8},
        {"kind": "listed", "memory_step": 12},
        {"kind": "start", "step": 8},
        {"kind": "start", "step": 8},
    ]

    assert overlooked(story) == [(12, 8)]


def test_a_way_that_saves_nothing_has_no_interval_and_no_limit() -> None:
    kills = [Kill(after_s=50.0, rank=0), Kill(after_s=50.0, rank=1)]
    nothing_saved = replace(watched(steps=200, updates=200), saves_s=())

    found = rows({"way": [nothing_saved]}, [kills], {}, pace_s=0.25, bare_s=5.5, raw_get_s=0.5)["way"]

    assert found["every"] is None
    assert found["limit"] is None
    assert found["save_s"] == 0.0
    assert found["goodput"] == pytest.approx(200 * 0.25 / 100)
