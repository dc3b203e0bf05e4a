"""What goodput.py is about, without any Ray: traces of kills, the interval of each way, what a rank's story comes to, and
the limit beside it."""

import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from raycheck.group.worker.young_daly import daly_interval_s

Event = dict[str, Any]
Row = dict[str, float | None]
CALIBRATION_EVERY = 8
"""Steps between the saves by which the cost of one is measured."""
WARM_UP_SAVES = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class Scale:
    """step_s: of one training step, at least. mtbf_s: seconds of training between kills, on average. rounds, kills: each
    way is hurt in so many rounds, so often in each. calibrated: how many saves measure what one costs. width, layers: of
    the model.
    """

    step_s: float
    mtbf_s: float
    rounds: int
    kills: int
    calibrated: int
    width: int
    layers: int


FULL = Scale(step_s=0.25, mtbf_s=6.0, rounds=3, kills=10, calibrated=6, width=512, layers=6)
DISTANT = Scale(step_s=0.25, mtbf_s=20.0, rounds=1, kills=10, calibrated=4, width=512, layers=6)
QUICK = Scale(step_s=0.25, mtbf_s=6.0, rounds=1, kills=4, calibrated=4, width=512, layers=6)


@dataclass(frozen=True, kw_only=True, slots=True)
class Kill:
    """Of `rank`, when its group has trained for `after_s` seconds."""

    after_s: float
    rank: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Watched:
    """What one way came to in one round. saves_s: for how long each save blocked rank 0. restarts_s: from each kill to
    the first step of the killed rank after it. pauses_s: to the first step of any rank. steps: those that stand, each as
    the share of the global batch that it was made of. updates: how many updates of the weights those are."""

    wall_s: float
    steps: float
    updates: int
    steps_lost: float
    median_step_s: float
    saves_s: tuple[float, ...]
    restarts_s: tuple[float, ...]
    pauses_s: tuple[float, ...]


def trace(scale: Scale, *, ranks: int, seed: int) -> list[Kill]:
    """The kills of one round, the same for every way. One more than there are: the round ends where it would come."""
    chance = random.Random(seed)
    return [
        Kill(after_s=chance.expovariate(1 / scale.mtbf_s), rank=chance.randrange(ranks)) for _ in range(scale.kills + 1)
    ]


def first_step(events: Sequence[Event], *, since: float) -> float | None:
    """When the group that started after `since` had done its first step; None before that."""
    starts = [number for number, event in enumerate(events) if event["kind"] == "start" and event["at"] > since]
    if not starts:
        return None
    return next((event["at"] for event in events[starts[-1] :] if event["kind"] == "step"), None)


def overlooked(events: Sequence[Event]) -> list[tuple[int, int]]:
    """Returns each memory checkpoint that was listed and not restored by the group that came next, with the step at
    which that one began. Only workers are killed here, and the nodes still have what was listed."""
    found, listed = [], 0
    for event in events:
        if event["kind"] == "listed":
            listed = event["memory_step"]
        elif event["kind"] == "start":
            found += [(listed, event["step"])] if event["step"] < listed else []
            listed = 0
    return found


PIECES = {
    "Ray starts processes": "began",
    "imports, until the script is called": "called",
    "the model": "built",
    "the restore": "start",
    "the first step": "step",
}
"""What a restart is made of, and what ends each piece."""


def pieces(stories: Sequence[Sequence[Event]], *, since: float) -> dict[str, float]:
    """Returns the seconds of each piece of a restart, on the rank that ends it last. stories: of all ranks, from the
    kill at `since` until after their first new step. A process may have been there already: then its piece is short,
    or negative."""
    found, before = {}, since
    for piece, kind in PIECES.items():
        end = max(_end_of(kind, story, since=since) for story in stories)
        found[piece], before = end - before, end
    return found


def _end_of(kind: str, story: Sequence[Event], *, since: float) -> float:
    called = max(number for number, event in enumerate(story) if event["kind"] == "called" and event["at"] > since)
    if kind == "began":
        return float(story[called]["began"])
    return next(float(event["at"]) for event in story[called:] if event["kind"] == kind)


def step_cost(events: Sequence[Event], *, saves: int, pace_s: float) -> float | None:
    """Returns what a save costs, in seconds: how much longer the steps around `saves` of them take than `pace_s` each,
    but at least what a save blocks. The first ones do not count, beside which processes start. None before the last."""
    told = [event for event in events if event["kind"] == "save"][WARM_UP_SAVES : WARM_UP_SAVES + saves + 1]
    if len(told) <= saves:
        return None
    begin, end = told[0]["at"], told[-1]["at"]
    steps = sum(event["kind"] == "step" and begin < event["at"] < end for event in events)
    blocked_s = statistics.median(save["seconds"] for save in told)
    return max(blocked_s, (end - begin - steps * pace_s) / saves)


def steps_between(cost_s: float, *, pace_s: float, scale: Scale) -> int:
    """Daly's interval in steps, at least one."""
    return max(1, round(daly_interval_s(cost_s, scale.mtbf_s) / pace_s))


def counted(events: Sequence[Event], *, end: float, restarts_s: Sequence[float]) -> Watched:
    """From rank 0's story, up to `end`."""
    told = [event for event in events if event["at"] <= end]
    steps = [event for event in told if event["kind"] == "step"]
    done = lost = 0
    for event in told:
        if event["kind"] == "start":
            lost += max(0, done - event["step"])
        done = event.get("step", done)
    return Watched(
        wall_s=end - steps[0]["at"] + steps[0]["seconds"],
        steps=done,
        updates=done,
        steps_lost=lost,
        median_step_s=statistics.median(event["seconds"] for event in steps),
        saves_s=tuple(event["seconds"] for event in told if event["kind"] == "save"),
        restarts_s=tuple(restarts_s),
        pauses_s=tuple(restarts_s),
    )


def counted_replicas(
    stories: Sequence[Sequence[Event]], *, end: float, kills_at: Sequence[float], restarts_s: Sequence[float]
) -> Watched:
    """From the stories of all replicas, from when each has done a step, up to `end`.

    What the quorum committed stands, whoever tells it, since a new replica takes it over. `batches` counts one for each
    replica in each committed step, so a step of one replica of two counts half. Lost are the batches of steps that were
    dropped; and all batches when a replica tells fewer than before, as it does when nobody was left who had the state.
    """
    begin = max(next(event["at"] for event in story if event["kind"] == "step") for story in stories)
    told = [(event, rank) for rank, story in enumerate(stories) for event in story if event["at"] <= end]
    told.sort(key=lambda each: each[0]["at"])
    done = base = {"step": 0, "batches": 0}
    newest: dict[int, int] = {}
    lost = 0
    for event, rank in told:
        if event["kind"] == "dropped" and event["at"] > begin:
            lost += 1
        if event["kind"] != "step":
            continue
        if event["batches"] < newest.get(rank, 0):
            lost += done["batches"] - base["batches"]
            done = base = {"step": 0, "batches": 0}
            newest.clear()
        newest[rank] = event["batches"]
        done = max(done, event, key=lambda each: each["batches"])
        if event["at"] <= begin:
            base = done
    steps = [event for event, _ in told if event["kind"] == "step"]
    return Watched(
        wall_s=end - begin,
        steps=(done["batches"] - base["batches"]) / len(stories),
        updates=done["step"] - base["step"],
        steps_lost=lost / len(stories),
        median_step_s=statistics.median(event["seconds"] for event in steps),
        saves_s=(),
        restarts_s=tuple(restarts_s),
        pauses_s=tuple(next(event["at"] - at for event in steps if event["at"] > at) for at in kills_at),
    )


def rows(
    watched: dict[str, list[Watched]],
    traces: Sequence[Sequence[Kill]],
    every: dict[str, int],
    *,
    pace_s: float,
    bare_s: float,
    raw_get_s: float,
) -> dict[str, Row]:
    """By way. watched, traces: one per round. every: steps between saves, of the ways that save; the others have no limit.
    pace_s: what a step takes at best, for which each one counts. bare_s: the median restart that restores nothing;
    restart_ratio is to that and a raw GET (R14). goodput_of_updates counts each update of the weights as a whole step."""
    found_rows = {}
    for way, rounds in watched.items():
        saves_s = [save_s for found in rounds for save_s in found.saves_s]
        restarts_s = [restart_s for found in rounds for restart_s in found.restarts_s]
        cost_s, restart_s = statistics.median(saves_s or (0.0,)), statistics.median(restarts_s)
        wall_s, steps = sum(found.wall_s for found in rounds), sum(found.steps for found in rounds)
        lost = sum(found.steps_lost for found in rounds)
        found_rows[way] = {
            "goodput": steps * pace_s / wall_s,
            "goodput_of_updates": sum(found.updates for found in rounds) * pace_s / wall_s,
            "limit": None if way not in every else _mean_limit(traces, every[way] * pace_s, cost_s, restart_s),
            "every": every.get(way),
            "steps": steps,
            "steps_lost": lost,
            "kills": len(restarts_s),
            "lost_per_kill": lost / len(restarts_s),
            "save_s": cost_s,
            "restart_s": restart_s,
            "restart_ratio": restart_s / (bare_s + raw_get_s),
            "pause_s": statistics.median(pause_s for found in rounds for pause_s in found.pauses_s),
            "median_step_s": statistics.median(found.median_step_s for found in rounds),
            "wall_s": wall_s,
        }
    return found_rows


def _mean_limit(traces: Sequence[Sequence[Kill]], interval_s: float, cost_s: float, restart_s: float) -> float:
    return statistics.fmean(limit(kills, interval_s=interval_s, cost_s=cost_s, restart_s=restart_s) for kills in traces)


def limit(kills: Sequence[Kill], *, interval_s: float, cost_s: float, restart_s: float) -> float:
    """Young's and Daly's model replayed over one round: the share of its time that stands when a save after each
    `interval_s` costs `cost_s`, a kill costs `restart_s` and what was trained since the last save, and nothing else."""
    wall_s = stands_s = 0.0
    for number, kill in enumerate(kills):
        saves, rest_s = divmod(kill.after_s, interval_s + cost_s)
        stands_s += saves * interval_s
        wall_s += kill.after_s
        if number < len(kills) - 1:
            wall_s += restart_s
        else:
            stands_s += min(rest_s, interval_s)  # nobody is killed at the end
    return stands_s / wall_s
