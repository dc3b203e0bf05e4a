"""What goodput.py is about, without any Ray: a trace of kills, what a rank's story comes to, and the limit beside it."""

import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from raycheck.train.worker.young_daly import daly_interval_s

Event = dict[str, Any]
Row = dict[str, float]


@dataclass(frozen=True, kw_only=True, slots=True)
class Scale:
    """step_s: of one training step, at least. every: steps between saves, for all ways. mtbf_s: seconds of training
    between kills, on average. wall_s: how long each way is watched, from its first step on. width, layers: of the model.
    """

    step_s: float
    every: int
    mtbf_s: float
    wall_s: float
    width: int
    layers: int


FULL = Scale(step_s=0.5, every=20, mtbf_s=120.0, wall_s=1200.0, width=1024, layers=8)
QUICK = Scale(step_s=0.25, every=20, mtbf_s=40.0, wall_s=150.0, width=512, layers=6)


@dataclass(frozen=True, kw_only=True, slots=True)
class Kill:
    """Of `rank`, when its group has trained for `after_s` seconds."""

    after_s: float
    rank: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Watched:
    """What one way came to. saves_s: for how long each save blocked rank 0. restarts_s: from each kill to the first step
    after it. steps: those that stand."""

    wall_s: float
    steps: int
    steps_lost: int
    median_step_s: float
    saves_s: tuple[float, ...]
    restarts_s: tuple[float, ...]


def trace(scale: Scale, *, ranks: int, seed: int) -> list[Kill]:
    """The same for every way; far longer than any of them is watched."""
    chance, kills = random.Random(seed), list[Kill]()
    while sum(kill.after_s for kill in kills) <= 2 * scale.wall_s:
        kills.append(Kill(after_s=chance.expovariate(1 / scale.mtbf_s), rank=chance.randrange(ranks)))
    return kills


def first_step(events: Sequence[Event], *, since: float) -> float | None:
    """When the group that started after `since` had done its first step; None before that."""
    starts = [number for number, event in enumerate(events) if event["kind"] == "start" and event["at"] > since]
    if not starts:
        return None
    return next((event["at"] for event in events[starts[-1] :] if event["kind"] == "step"), None)


def counted(events: Sequence[Event], *, end: float, restarts_s: Sequence[float]) -> Watched:
    """From rank 0's story, up to `end`."""
    told = [event for event in events if event["at"] <= end]
    steps = [event for event in told if event["kind"] == "step"]
    done = lost = 0
    for event in told:
        if event["kind"] == "start":
            lost += max(0, done - event["step"])
        if event["kind"] != "save":
            done = event["step"]
    return Watched(
        wall_s=end - steps[0]["at"] + steps[0]["seconds"],
        steps=done,
        steps_lost=lost,
        median_step_s=statistics.median(event["seconds"] for event in steps),
        saves_s=tuple(event["seconds"] for event in told if event["kind"] == "save"),
        restarts_s=tuple(restarts_s),
    )


def rows(watched: dict[str, Watched], kills: Sequence[Kill], scale: Scale, *, bare: str) -> dict[str, Row]:
    """By way. A step counts for what it takes at best: the least median of all ways. restart_ratio: to the restart of
    `bare`, which restores nothing (R14, but for the raw GET of the state, which would be added to that one)."""
    pace_s = min(found.median_step_s for found in watched.values())
    found_rows = {}
    for way, found in watched.items():
        cost_s = statistics.median(found.saves_s or (0.0,))
        restart_s = statistics.median(found.restarts_s or (0.0,))
        most = limit(kills, interval_s=scale.every * pace_s, cost_s=cost_s, restart_s=restart_s, wall_s=found.wall_s)
        found_rows[way] = {
            "goodput": found.steps * pace_s / found.wall_s,
            "limit": most,
            "steps": found.steps,
            "steps_lost": found.steps_lost,
            "kills": len(found.restarts_s),
            "save_s": cost_s,
            "restart_s": restart_s,
            "restart_ratio": restart_s / max(statistics.median(watched[bare].restarts_s or (0.0,)), 1e-9),
            "median_step_s": found.median_step_s,
            "wall_s": found.wall_s,
            "best_interval_s": daly_interval_s(cost_s, scale.mtbf_s),
        }
    return found_rows


def limit(kills: Sequence[Kill], *, interval_s: float, cost_s: float, restart_s: float, wall_s: float) -> float:
    """Young's and Daly's model replayed over the trace: the share of `wall_s` that stands when a save after each
    `interval_s` costs `cost_s`, a kill costs `restart_s` and what was trained since the last save, and nothing else."""
    at = stands_s = 0.0
    for kill in kills:
        saves, rest_s = divmod(min(kill.after_s, wall_s - at), interval_s + cost_s)
        stands_s += saves * interval_s
        if at + kill.after_s >= wall_s:
            return (stands_s + min(rest_s, interval_s)) / wall_s
        at += kill.after_s + restart_s
        if at >= wall_s:
            return stands_s / at
    raise AssertionError("the trace is longer than what is watched")
