"""The charts of metrics, and when an attempt was starting, training and dead, from values alone."""

import json
import re
from dataclasses import replace
from math import inf, nan
from typing import Any

import pytest

from raycheck.bucket.attempt_records import ResumeRecord
from raycheck.page.pages import crosshair
from raycheck.views.attempts import AttemptHistory, Commit, MetricLine
from raycheck.views.charts import CHART_HEIGHT, LEFT, MAX_BAR_ROWS, RIGHT, WIDTH, steps_of, timeline_of
from raycheck.views.drawing import metric_svg, timeline_svg
from raycheck.views.metric_charts import RunCurve, metric_chart, smoothed


def line(
    attempt: int, points: dict[int, float], *, is_abandoned: bool = False, after: tuple[int, int] | None = None
) -> MetricLine:
    return MetricLine(
        name="loss",
        attempt=attempt,
        is_abandoned=is_abandoned,
        steps=tuple(points),
        values=tuple(points.values()),
        times=(None,) * len(points),
        continues=after,
    )


def test_a_run_is_one_line_across_attempts_and_one_for_what_it_went_back_behind() -> None:
    lines = [line(1, {1: 4.0, 2: 3.0}), line(1, {3: 9.0}, is_abandoned=True, after=(1, 2)), line(2, {3: 2.0, 4: 1.0})]

    chart = metric_chart("loss", [RunCurve("a", lines), RunCurve("b", [line(1, {2: 5.0})])])

    assert chart is not None
    assert [(path.run, path.is_abandoned, path.points) for path in chart.paths] == [
        (0, False, ((1, 4.0), (2, 3.0), (3, 2.0), (4, 1.0))),
        (0, True, ((2, 3.0), (3, 9.0))),
        (1, False, ((2, 5.0),)),
    ]
    assert (chart.first, chart.last) == (1, 4)
    assert [x for x, _ in chart.paths[0].places[::3]] == [LEFT, WIDTH - RIGHT]


def test_a_part_that_was_left_is_joined_to_the_checkpoint_from_which_its_attempt_started() -> None:
    lines = [
        line(1, {9: 109.0, 10: 110.0}),
        line(1, {15: 115.0, 20: 120.0}, is_abandoned=True, after=(1, 12)),
        line(3, {11: 211.0, 15: 215.0}),
        line(3, {16: 216.0}, is_abandoned=True, after=(3, 15)),
        line(5, {21: 321.0}, is_abandoned=True, after=(1, 20)),
        line(7, {16: 416.0, 21: 421.0}),
    ]

    chart = metric_chart("loss", [RunCurve("", lines)])

    assert chart is not None
    assert [(path.attempt, path.is_joined, path.points[0], path.words) for path in chart.paths[1:]] == [
        (1, True, (10, 110.0), ("abandoned attempt 1",)),
        (3, True, (15, 215.0), ("abandoned attempt 3",)),
        (5, True, (20, 120.0), ("abandoned attempt 5",)),
    ]
    assert chart.paths[0].words == ()
    assert [found["steps"] for found in json.loads(crosshair(chart))["lines"]] == [
        [9, 10, 11, 15, 16, 21],
        [15, 20],
        [16],
        [21],
    ], "a joint is a value of another line"


def test_a_log_scale_puts_equal_ratios_at_equal_distances_and_says_what_it_leaves_out() -> None:
    curve = RunCurve("a", [line(1, {1: 1.0, 2: 10.0, 3: 100.0, 4: -1.0, 5: nan, 6: inf, 7: 0.0})])

    chart = metric_chart("loss", [curve], is_log=True)

    assert chart is not None
    heights = [y for _, y in chart.paths[0].places[:3] if y is not None]
    assert heights[0] - heights[1] == pytest.approx(heights[1] - heights[2])
    assert chart.notes == ("Marked at the lower edge instead of drawn: 1 NaN, 1 inf, 2 not positive",)
    assert [tick.text for tick in chart.values] == ["1", "10", "100"]


def test_a_value_that_is_not_finite_interrupts_its_line_and_belongs_to_the_steps() -> None:
    chart = metric_chart("loss", [RunCurve("a", [line(1, {1: 4.0, 2: 3.0, 3: nan, 4: 2.0, 5: 1.0, 9: -inf})])])

    assert chart is not None
    svg = metric_svg(chart)
    assert (chart.first, chart.last) == (1, 9), "the axis ends where the metric does"
    assert svg.count("<polyline") == 2
    assert re.findall(r"step \d+: (?:nan|-inf)", svg) == ["step 3: nan", "step 9: -inf"]
    assert json.loads(crosshair(chart))["lines"][0]["values"] == ["4", "3", "nan", "2", "1", "-inf"]

    silent = metric_chart("loss", [RunCurve("a", [line(1, {1: nan, 2: nan})])], smooth=0.9)
    assert silent is not None
    assert silent.notes == ("Marked at the lower edge instead of drawn: 2 NaN",)
    assert metric_svg(silent).count('class="undrawn"') == 2
    assert metric_chart("loss", [RunCurve("a", [])]) is None


def test_every_value_between_two_that_cannot_be_drawn_is_still_drawn() -> None:
    values = {step: nan if step % 3 == 0 else float(step) for step in range(100_000)}

    chart = metric_chart("loss", [RunCurve("a", [line(1, values)])])

    assert chart is not None
    assert len(chart.paths[0].points) < 2000
    assert chart.notes == ("Marked at the lower edge instead of drawn: 33334 NaN",)
    drawn = {f"{x:.2f}".rstrip("0").rstrip(".") for x, y in chart.paths[0].places if y is not None}
    assert {x for x, _ in re.findall(r"([\d.]+),([\d.]+)", metric_svg(chart))} == drawn


def test_a_smoothed_constant_is_a_straight_line_with_one_label() -> None:
    for value in (0.4, 3.3, 0.01, 12345.678, 1e-9, 0.0, -1e300):
        points = [(step, value) for step in range(1, 30)]
        assert smoothed(points, 0.9, 28) == points
        chart = metric_chart("loss", [RunCurve("a", [line(1, dict(points))])], smooth=0.9)
        assert chart is not None
        assert {y for path in chart.paths for _, y in path.places} == {chart.values[0].at}
        assert len(chart.values) == 1

    noise = metric_chart("loss", [RunCurve("a", [line(1, {1: 0.3, 2: 0.1 + 0.2})])])
    assert noise is not None
    assert [tick.text for tick in noise.values] == ["0.3"], "a difference by rounding is none"


def test_labels_differ_have_room_and_do_not_repeat_a_step() -> None:
    near = metric_chart("loss", [RunCurve("a", [line(1, {1: 12345.1, 2: 12345.9})])])
    huge = metric_chart("loss", [RunCurve("a", [line(1, {1: 1.25e301, 5: -1.25e301})])])
    single = metric_chart("loss", [RunCurve("a", [line(1, {7: 1.0})])])
    wide = metric_chart("loss", [RunCurve("a", [line(1, {1: -1.7e308, 2: 1.7e308})])])

    assert near is not None
    assert huge is not None
    assert single is not None
    assert wide is not None
    assert len({tick.text for tick in near.values}) == len(near.values) > 3
    assert "1e301" in [tick.text for tick in huge.values]
    for chart in (near, huge, single):
        assert chart.left >= 10 + 15 * max(len(tick.text) for tick in chart.values)
    assert [tick.text for tick in near.steps] == ["1", "2"]
    assert [tick.text for tick in huge.steps] == ["1", "2", "3", "4", "5"]
    assert [tick.text for tick in single.steps] == ["7"]
    assert [y for _, y in wide.paths[0].places] == pytest.approx([CHART_HEIGHT - 30, 20])


def test_a_short_time_has_no_label_twice() -> None:
    for length in (0.1, 1.0, 5.0, 9.0, 100.0):
        ticks = timeline_of((attempt(1, 1e9, 1e9 + length),), until=1e9 + length).ticks
        assert len({tick.text for tick in ticks}) == len(ticks)


def test_smoothing_keeps_a_constant_and_is_the_mean_by_decaying_weights() -> None:
    assert smoothed([(step, 3.0) for step in range(5)], 0.9, 1000) == [(step, pytest.approx(3.0)) for step in range(5)]
    assert smoothed([(0, 1.0), (1, 3.0)], 0.5, 1000) == [(0, 1.0), (1, pytest.approx((0.5 * 1 + 3) / 1.5))]

    chart = metric_chart("loss", [RunCurve("a", [line(1, {0: 1.0, 10: 3.0})])], smooth=0.5)

    assert chart is not None
    assert [(path.is_faint, len(path.points)) for path in chart.paths] == [(True, 2), (False, 2)]


def test_a_long_curve_is_drawn_by_few_points_with_its_spike_and_its_last_step() -> None:
    values = dict.fromkeys(range(100_000), 1.0) | {54_321: 99.0}

    chart = metric_chart("loss", [RunCurve("a", [line(1, values)])])

    assert chart is not None
    (path,) = chart.paths
    assert len(path.points) < 1000
    assert (54_321, 99.0) in path.points
    assert path.points[-1] == (99_999, 1.0)


def commit(key: str, at: float) -> Commit:
    return Commit(key=key, step=10, at=at, size_bytes=1, is_head=False, is_by_notice=False, is_rolling=False,
                  is_pinned=False, name=None, damaged=None, metrics={}, scores={})  # fmt: skip


def resumed(restored: str, since_commit_s: float) -> ResumeRecord:
    return ResumeRecord(
        attempt=2, after=1, cause="", restored=restored, step=10, world_size_before=1, world_size=1, lost_steps=None,
        lost_s=None, since_commit_s=since_commit_s, restore_s=5.0, restore_bytes=1, what="all",
    )  # fmt: skip


def attempt(number: int, began_at: float, ended_at: float | None, **more: Any) -> AttemptHistory:
    known: dict[str, Any] = {
        "world_size": 2, "ending": "live" if ended_at is None else "failed", "cause": "", "restored": None,
        "restore_s": None, "start_step": None, "lost_steps": None, "lost_s": None, "commits": (),
        "last_seen_at": began_at,
    }  # fmt: skip
    return AttemptHistory(number=number, began_at=began_at, ended_at=ended_at, **{**known, **more})


def test_a_fresh_start_is_starting_until_its_first_step_and_all_of_it_is_if_nothing_shows_that_it_trained() -> None:
    scale = (WIDTH - LEFT - RIGHT) / 1000

    (begun,) = timeline_of((attempt(1, 0.0, None, first_step_at=300.0),), until=1000.0).bars
    (silent,) = timeline_of((attempt(1, 0.0, None),), until=1000.0).bars
    (older,) = timeline_of((attempt(1, 0.0, None, commits=(commit("step-000000010-a1-s1", 500.0),)),), until=1e3).bars

    assert begun.starting_width == pytest.approx(300 * scale)
    assert silent.starting_width == silent.width == pytest.approx(1000 * scale)
    assert older.starting_width == 0, "an older raycheck wrote no metrics: when training began is unknown"


def test_an_attempt_that_died_before_its_first_save_trained_for_as_long_as_the_next_one_says() -> None:
    after = attempt(2, 500.0, None, lost_s=120.0, lost_steps=9, resume=replace(resumed("", 1.0), restored=None))

    first, _ = timeline_of((attempt(1, 0.0, 500.0), after), until=1000.0).bars

    scale = (WIDTH - LEFT - RIGHT) / 1000
    assert (first.starting_width, first.lost_width) == pytest.approx((380 * scale, 120 * scale))


def test_what_was_lost_is_shown_on_the_attempt_that_trained_it_and_not_on_those_that_never_restored() -> None:
    kept = commit("step-000000010-a1-s1", 400.0)
    trained = attempt(1, 0.0, 500.0, commits=(kept,), first_step_at=10.0, last_seen_at=400.0)
    hopeless = [attempt(number, 300.0 + 100 * number, 400.0 + 100 * number, restored=kept.key) for number in (2, 3)]
    last = attempt(4, 700.0, None, restored=kept.key, start_step=10, lost_s=60.0, lost_steps=7,
                   resume=resumed(kept.key, 350.0))  # fmt: skip
    attempts = (trained, *hopeless, last)

    over_time, over_steps = timeline_of(attempts, until=1000.0), steps_of(attempts)

    scale = (WIDTH - LEFT - RIGHT) / 1000
    assert [bar.lost_width / scale for bar in over_time.bars] == pytest.approx([60, 0, 0, 0])
    assert over_time.bars[0].width == pytest.approx(460 * scale)
    assert [bar.starting_width / scale for bar in over_time.bars] == pytest.approx([10, 100, 100, 50])
    assert [round(bar.lost_width / (WIDTH - LEFT - RIGHT) * 17) for bar in over_steps.bars] == [7, 0, 0, 0]
    assert [bar.x for bar in over_steps.bars[1:]] == pytest.approx([LEFT + (WIDTH - LEFT - RIGHT) * 10 / 17] * 3)


def test_what_the_run_went_back_behind_is_hatched_from_the_last_commit_that_stayed() -> None:
    stayed = replace(commit("step-000000010-a1-s1", 100.0), step=10)
    left = replace(commit("step-000000020-a1-s2", 200.0), step=20, is_abandoned=True)
    all_left = replace(commit("step-000000030-a3-s1", 700.0), step=30, is_abandoned=True)
    attempts = (
        attempt(1, 0.0, 300.0, commits=(stayed, left), first_step_at=10.0, last_seen_at=200.0),
        attempt(2, 300.0, 400.0, world_size=0, ending="by hand", restored=left.key),
        attempt(3, 400.0, 800.0, commits=(all_left,), restored=left.key, start_step=20, first_step_at=500.0),
        attempt(4, 800.0, 900.0, world_size=0, ending="by hand", restored=stayed.key),
        attempt(5, 900.0, None, restored=stayed.key, start_step=10, first_step_at=910.0),
    )

    over_time, over_steps = timeline_of(attempts, until=1000.0), steps_of(attempts)

    scale = (WIDTH - LEFT - RIGHT) / 1000
    assert [bar.lost_width / scale for bar in over_time.bars] == pytest.approx([200, 0, 300, 0, 0])
    assert [round(bar.lost_width / (WIDTH - LEFT - RIGHT) * 30) for bar in over_steps.bars] == [10, 10, 0]


def test_a_row_is_labeled_where_its_bar_begins_so_that_a_part_of_the_timeline_has_its_numbers() -> None:
    timeline = timeline_of((attempt(1, 0.0, 500.0), attempt(2, 500.0, None)), until=1000.0)

    assert [row.x for row in timeline.rows] == [bar.x for bar in timeline.bars]
    assert re.findall(r'class="row" x="([\d.]+)"', timeline_svg(timeline)) == ["76", "476"]


def test_a_storm_of_attempts_shares_few_rows_and_leaves_the_long_ones_theirs() -> None:
    storm = [attempt(number, 4000.0 + 5 * number, 4005.0 + 5 * number) for number in range(2, 52)]
    timeline = timeline_of((attempt(1, 0.0, 4010.0), *storm, attempt(52, 4260.0, None)), until=9000.0)

    numbers = [[item.number for item in row.attempts] for row in timeline.rows]

    assert len(numbers) <= MAX_BAR_ROWS
    assert timeline.height < 400
    assert numbers[0] == [1]
    assert numbers[-1][-1] == 52
    assert [number for row in numbers for number in row] == list(range(1, 53))
    assert len({bar.y for bar in timeline.bars}) == len(numbers)
    assert len(timeline_svg(timeline).split('class="row"')) == 1 + len(numbers)

    many = timeline_of([attempt(number, 5.0 * number, 5.0 * number + 5) for number in range(1, 3000)], until=15_000.0)
    assert len(many.rows) <= MAX_BAR_ROWS


def test_of_very_many_commits_few_are_drawn_and_all_that_are_not_plain() -> None:
    commits = [commit(f"step-{number:09}-a1-s{number}", float(number)) for number in range(1, 10_000)]
    commits[4999] = replace(commits[4999], name="base")

    (bar,) = timeline_of((attempt(1, 0.0, None, commits=tuple(commits)),), until=1e4).bars

    assert len(bar.dots) < 500
    assert commits[4999] in [dot.commit for dot in bar.dots]


def test_a_change_by_hand_is_no_training() -> None:
    by_hand = attempt(2, 500.0, 900.0, world_size=0, ending="by hand")

    _, middle, _ = timeline_of((attempt(1, 0.0, 500.0), by_hand, attempt(3, 900.0, None)), until=1e3).bars

    assert middle.width == 2
    assert middle.dead_width == pytest.approx(400 * (WIDTH - LEFT - RIGHT) / 1000 - 2)


def test_a_dead_drivers_weekend_is_no_training_and_the_next_attempt_starts_and_restores() -> None:
    kept, lost = commit("step-000000010-a1-s1", 100.0), commit("step-000000020-a1-s2", 200.0)
    first = AttemptHistory(
        number=1, world_size=1, began_at=0.0, ended_at=900.0, ending="driver lost", cause="", restored=None,
        restore_s=None, start_step=None, lost_steps=None, lost_s=None, commits=(kept, lost), last_seen_at=200.0,
    )  # fmt: skip
    second = replace(first, number=2, began_at=900.0, ended_at=None, ending="live", restored=kept.key, restore_s=5.0,
                     commits=(), resume=resumed(kept.key, 850.0), last_seen_at=900.0)  # fmt: skip

    before, after = timeline_of((first, second), until=1000.0).bars

    scale = (WIDTH - LEFT - RIGHT) / 1000
    assert before.width == pytest.approx(200 * scale), "until its last sign of life"
    assert before.lost_width == pytest.approx(100 * scale), "from the commit that was restored"
    assert before.dead_width == pytest.approx(700 * scale)
    assert (after.starting_width, after.restore_width) == pytest.approx((45 * scale, 5 * scale))

    known = replace(second, lost_s=30.0)
    ended = timeline_of((replace(first, ending="failed", commits=(kept,), last_seen_at=100.0), known), until=1000.0)
    assert ended.bars[0].width == pytest.approx(130 * scale), "the heartbeats say how long it trained"
    assert ended.bars[0].lost_width == pytest.approx(30 * scale)
