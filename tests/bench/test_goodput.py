"""What the goodput bench makes of a trace and of a story; the replay itself needs minutes and a Ray of its own."""

from dataclasses import replace

import pytest

from tests.bench.goodput_rows import QUICK, Kill, Watched, counted, first_step, limit, rows, trace

NEVER = Kill(after_s=1e9, rank=0)
STORY = [
    {"kind": "start", "at": 10.0, "step": 0},
    *({"kind": "step", "at": 10.0 + step, "step": step, "seconds": 1.0} for step in (1, 2, 3)),
    {"kind": "save", "at": 13.5, "seconds": 0.5},
    {"kind": "step", "at": 14.5, "step": 4, "seconds": 1.0},
    {"kind": "start", "at": 20.0, "step": 2},
    *({"kind": "step", "at": 18.0 + step, "step": step, "seconds": 1.0} for step in (3, 4, 5, 6)),
]


def watched(*, steps: int, median_step_s: float) -> Watched:
    return Watched(
        wall_s=100.0, steps=steps, steps_lost=0, median_step_s=median_step_s, saves_s=(1.0,), restarts_s=(5.0, 9.0, 6.0)
    )


def test_a_trace_is_the_same_every_time_and_outlasts_what_is_watched() -> None:
    kills = trace(QUICK, ranks=2, seed=7)

    assert kills == trace(QUICK, ranks=2, seed=7)
    assert kills != trace(QUICK, ranks=2, seed=8)
    assert {kill.rank for kill in kills} == {0, 1}
    assert sum(kill.after_s for kill in kills) > 2 * QUICK.wall_s
    longer = trace(replace(QUICK, wall_s=1e5), ranks=2, seed=7)
    assert sum(kill.after_s for kill in longer) / len(longer) == pytest.approx(QUICK.mtbf_s, rel=0.1)


def test_a_story_tells_what_stands_and_what_was_lost() -> None:
    found = counted(STORY, end=23.5, restarts_s=[3.0])

    assert found.steps == 5, "step 6 came too late"
    assert found.steps_lost == 4 - 2
    assert found.wall_s == 23.5 - 10.0
    assert found.saves_s == (0.5,)


def test_a_group_is_up_with_its_own_first_step() -> None:
    assert first_step(STORY, since=0.0) == 21.0
    assert first_step(STORY[:5], since=0.0) == 11.0
    assert first_step(STORY[:6], since=15.0) is None, "killed"
    assert first_step(STORY[:7], since=15.0) is None, "started, nothing done"
    assert first_step(STORY[:8], since=15.0) == 21.0


@pytest.mark.parametrize(
    ("kills", "cost_s", "share"),
    [
        ([NEVER], 0.0, 1.0),
        ([NEVER], 1.0, (9 * 10 + 1) / 100),  # nine saves, and one second since the last
        ([Kill(after_s=45.0, rank=0), NEVER], 0.0, (40 + 50) / 100),
        ([Kill(after_s=97.0, rank=0), NEVER], 0.0, 90 / 102),  # the restart is not cut off
    ],
)
def test_the_limit_is_what_saves_restarts_and_lost_steps_leave(kills: list[Kill], cost_s: float, share: float) -> None:
    assert limit(kills, interval_s=10.0, cost_s=cost_s, restart_s=5.0, wall_s=100.0) == pytest.approx(share)


def test_steps_count_for_what_they_take_at_best() -> None:
    found = rows(
        {"quick": watched(steps=200, median_step_s=0.25), "slowed": watched(steps=160, median_step_s=0.3)},
        [NEVER],
        QUICK,
        bare="quick",
    )

    assert found["slowed"]["restart_ratio"] == 1.0
    assert found["quick"]["goodput"] == pytest.approx(0.5)
    assert found["slowed"]["goodput"] == pytest.approx(0.4)
    assert found["slowed"]["restart_s"] == 6.0
    assert found["slowed"]["kills"] == 3
