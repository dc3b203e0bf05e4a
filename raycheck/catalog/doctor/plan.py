"""The saves of a training: what they would cost in a bucket, and how often to save.

The requests of a save are those of FORMAT.md's steps, as tests/transfer/test_request_costs.py counts them on the wire.
The interval is Young's and Daly's, by the formula with which SaveSettings(overhead=...) finds it during a training.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

from raycheck.bucket.diagnosis.finding import BucketFinding, ok
from raycheck.bucket.format.object_keys import CheckpointName
from raycheck.bucket.run_status import ago
from raycheck.bucket.store import Store
from raycheck.bucket.store.bucket_rules import BucketRules, Unread
from raycheck.bucket.store.part_sizes import floor_bytes
from raycheck.catalog.doctor.speed import Speed
from raycheck.errors import ConfigError, RaycheckError
from raycheck.group.worker.young_daly import daly_interval_s, mtbf_s
from raycheck.run import read_run
from raycheck.settings import KEEP_LAST
from raycheck.views.history import RunHistory
from raycheck.views.in_words import monthly_cost, size

DAY_S = 86400.0
PUT_PRICE = 0.000005
"""The list price of S3 Standard in its cheapest regions: dollars for a PUT, POST or LIST. Deletes are free."""
_DOCUMENTS = 4
"""`.metadata`, index, manifest, and the swap of `latest`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SavePlan:
    """The saves that a training is to make.

    size_bytes: of one checkpoint. world_size: the number of ranks. every_steps: the steps between two saves; None for
    Young's and Daly's interval. step_s: how long a step takes; without it nothing is said about time. keep_last: how
    many checkpoints stay. failure_every_s: the mean time between failures. blocked_s: how long a save keeps training
    waiting; None to estimate it by how fast this machine copies memory. num_kept: how many checkpoints a run has kept
    by all its rules, which counts instead of keep_last. Raises ConfigError for what cannot be.
    """

    size_bytes: int
    world_size: int = 1
    every_steps: int | None = None
    step_s: float | None = None
    keep_last: int = KEEP_LAST
    failure_every_s: float = DAY_S
    blocked_s: float | None = None
    num_kept: int | None = None

    def __post_init__(self) -> None:
        for name in ("size_bytes", "world_size", "every_steps", "step_s", "keep_last", "failure_every_s", "num_kept"):
            value = getattr(self, name)
            if value is not None and not 0 < value < float("inf"):
                raise ConfigError(f"SavePlan({name}={value!r}): give a number above 0")


def plan_of_run(store: Store) -> SavePlan | None:
    """Return the plan by which the run at this place has saved so far; None if there is no checkpoint."""
    try:
        run = read_run(store)
        if run.head is None:
            return None
        details, history = run.head.details(), run.history()
    except RaycheckError:  # no run, or not a readable one: the doctor examines the bucket
        return None
    trained = run.head.step - _first_step(history)
    steps = sorted({item.step for item in run.checkpoints})
    gaps = sorted(after - before for before, after in pairwise(steps))
    return SavePlan(
        size_bytes=max(run.head.size_bytes, 1),
        world_size=max(details.world_size, 1),
        every_steps=gaps[len(gaps) // 2] if gaps else None,
        step_s=details.trained_s / trained if details.trained_s > 0 and trained > 0 else None,
        num_kept=len(run.checkpoints),
        failure_every_s=_failures_of(history),
        blocked_s=details.blocked_s or None,
    )


def with_given(plan: SavePlan, given: Mapping[str, Any]) -> SavePlan:
    """Return the plan of a run with what a user assumes instead. What was measured under another assumption is void."""
    void = {"keep_last": "num_kept", "world_size": "blocked_s"}
    return replace(plan, **({void[name]: None for name in given if name in void} | dict(given)))


def _first_step(history: RunHistory) -> int:
    """Return the step at which the run itself began to train: after that of the checkpoint of a fork or an import."""
    for item in reversed(history.attempts):
        name = CheckpointName.parse(item.restored or "")
        if name is not None and name.attempt == 0:
            return name.step if item.start_step is None else item.start_step
    return 0


def _failures_of(history: RunHistory) -> float:
    claims = [item.began_at for item in history.attempts if item.world_size]
    return mtbf_s(claims, max(claims[-1], history.status.at or 0.0)) if claims else DAY_S


@dataclass(frozen=True, kw_only=True, slots=True)
class SaveRequests:
    """The requests of a save and of the later deletion of its checkpoint. puts: all that are priced as a PUT."""

    puts: int
    deletes: int


def requests_of(plan: SavePlan, part_bytes: int) -> SaveRequests:
    """Return how many requests a save sends if every rank writes an equal share of the bytes."""
    share = -(-plan.size_bytes // plan.world_size)
    parts = -(-share // part_bytes)
    per_rank = 1 if parts == 1 else parts + 2  # an upload in parts is begun and ended
    return SaveRequests(puts=plan.world_size * per_rank + _DOCUMENTS + 1, deletes=plan.world_size + 3)


def cost_of_saves(plan: SavePlan, store: Store, rules: BucketRules, *, price: float) -> Iterator[BucketFinding]:
    """Say what the saves cost in requests and storage. price: dollars for a GiB and month."""
    kept = (plan.num_kept or plan.keep_last) * plan.size_bytes
    occupied = f"keep_last={plan.keep_last} occupies {size(kept)}"
    if plan.num_kept is not None:
        occupied = f"what this run keeps (checkpoints: {plan.num_kept}) occupies {size(kept)}"
    if not store.endpoint:
        yield ok("cost of saves", f"{occupied}, and nobody bills requests")
        return
    share = -(-plan.size_bytes // plan.world_size)
    sent = requests_of(plan, max(store.part_bytes(share), floor_bytes(plan.world_size)))
    text = (
        f"a save of {size(plan.size_bytes)} by {plan.world_size} ranks sends {sent.puts} PUTs, POSTs and LISTs, and "
        f"{sent.deletes} DELETEs later; {occupied}, "
        f"{monthly_cost(kept, price):.2f} a month at {price:g} per GiB"
    )
    if plan.every_steps is not None and plan.step_s is not None:
        a_day = DAY_S / (plan.every_steps * plan.step_s)
        text += f"; a save every {plan.every_steps} steps is {a_day:.0f} a day, whose requests cost "
        text += f"{a_day * sent.puts * PUT_PRICE:.2f} a day at S3's list price"
        text += _versions(plan, rules, a_day, price=price)
    yield ok("cost of saves", text)


def _versions(plan: SavePlan, rules: BucketRules, a_day: float, *, price: float) -> str:
    """Return what deleted checkpoints still cost where the bucket keeps them."""
    days = 0.0 if isinstance(rules.kept_days, Unread) else rules.kept_days
    life = () if isinstance(rules.lifecycle, Unread) else rules.lifecycle
    ends = [rule.days for rule in life if rule.deed == "delete versions" and rule.days is not None]
    if rules.versioning is True and not ends:
        return f"; versioning keeps all of them, {size(a_day * plan.size_bytes)} more every day"
    days += min(ends) if rules.versioning is True else 0.0
    if not days:
        return ""
    more = days * a_day * plan.size_bytes
    return f"; what is deleted is kept for {days:g} days, {size(more)} more, {monthly_cost(more, price):.2f} a month"


def interval(plan: SavePlan, speed: Speed) -> Iterator[BucketFinding]:
    """Say how often to save, by Young and Daly, and whether the uploads keep up with the plan."""
    share = plan.size_bytes / plan.world_size
    upload_s, estimated_s = share / speed.up, share / speed.copy
    blocked_s = plan.blocked_s or estimated_s
    best_s = max(daly_interval_s(blocked_s, plan.failure_every_s), upload_s)
    steps = "" if plan.step_s is None else f", {max(1, round(best_s / plan.step_s))} steps"
    how = "as in this run" if plan.blocked_s else "as fast as this machine copies memory"
    text = (
        f"with a failure every {ago(plan.failure_every_s)}, and a save that keeps training waiting for {blocked_s:.2g} "
        f"s ({how}) and is uploaded in {upload_s:.2g} s by {plan.world_size} ranks at a time, the best interval by "
        f"Young and Daly is {ago(best_s)}{steps}"
    )
    every_s = None if plan.every_steps is None or plan.step_s is None else plan.every_steps * plan.step_s
    if every_s is not None and upload_s > every_s:
        yield BucketFinding(
            name="interval",
            state="slow",
            text=f"{text}; a save every {plan.every_steps} steps is due after {every_s:.2g} s, before the last is "
            "uploaded",
            cure=f"Save every {max(1, round(best_s / (plan.step_s or 1.0)))} steps, or let "
            "SaveSettings(overhead=...) find the interval",
        )
    else:
        yield ok("interval", f"{text}; SaveSettings(overhead=...) measures it during the training")


def with_interval(plan: SavePlan, speed: Speed) -> SavePlan:
    """Return the plan with Young's and Daly's interval, if it says none and how long a step takes is known."""
    if plan.every_steps is not None or plan.step_s is None:
        return plan
    share = plan.size_bytes / plan.world_size
    best_s = daly_interval_s(plan.blocked_s or share / speed.copy, plan.failure_every_s)
    return replace(plan, every_steps=max(1, round(max(best_s, share / speed.up) / plan.step_s)))
