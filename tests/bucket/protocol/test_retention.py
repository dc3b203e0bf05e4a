"""Tests retention, pins, prune and sweep: what stays, and that nothing is deleted that may still be needed."""

from dataclasses import replace
from uuid import uuid4

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raycheck.bucket.format import object_keys
from raycheck.bucket.format.latest import (
    MAX_METRICS_LISTED,
    Attempt,
    Entry,
    Latest,
    listed_metrics,
)
from raycheck.bucket.format.object_keys import CheckpointName
from raycheck.bucket.protocol.pin_and_evict import evict, pin
from raycheck.bucket.protocol.removal.prune_and_sweep import GRACE_S, plan_prune, plan_sweep, prune, sweep
from raycheck.bucket.protocol.retention import decide_retention, dropped
from raycheck.bucket.protocol.swap import Register
from raycheck.bucket.store import Got, Store, Upload, open_store
from raycheck.bucket.store.interface import MAX_WHOLE_BYTES
from raycheck.errors import ConfigError, CorruptError, NotFoundError, StoreError, SupersededError
from raycheck.settings import Retention, SaveSettings
from tests.bucket.store.test_conformance import begin_upload
from tests.support.histories.invariants import assert_invariants
from tests.support.samples.sample_checkpoints import Around, Driver, everything, write_checkpoint


def keys(entries) -> list[str]:
    return [entry.key for entry in entries]


def body_of(live: list[Entry], head: str) -> Latest:
    attempt = Attempt(
        number=1, owner="ann", coordinator="c", group="g", world_size=1, restore_key=None, last_save=99, claimed_at=0.0
    )
    return Latest(run_id="r", counter=1, newest_owners=("ann",), attempts=(attempt,), head=head, newest=tuple(live))


# --- retention ---


def test_retention_evicts_by_order_of_commit_and_not_of_step(store):
    ann = Driver(store)
    ann.claim("g1")
    saved = [ann.save(1, save, step=step, keep_last=2) for save, step in ((1, 30), (2, 10), (3, 20))]

    body = assert_invariants(store)

    assert keys(body.live) == [saved[1].key, saved[2].key]
    assert keys(body.evicted) == [saved[0].key]
    assert body.head == saved[2].key


def test_a_pinned_checkpoint_is_never_evicted(store):
    ann = Driver(store)
    ann.claim("g1")
    pinned = ann.save(1, 1)
    pin(ann.register, pinned.key)

    newest = [ann.save(1, save, keep_last=1) for save in (2, 3)][-1]

    assert keys(assert_invariants(store).live) == [pinned.key, newest.key]


def test_the_restore_source_of_a_rewind_stays_until_the_first_commit_of_the_attempt(store):
    ann, bob = Driver(store), Driver(store, "bob")
    ann.claim("g1")
    source, _, _ = (ann.save(1, save) for save in (1, 2, 3))
    bob.claim("h1", resume=source.step)
    before = assert_invariants(store)
    assert before.entry(source.key)

    bob.claim("h2")
    assert assert_invariants(store, before).head == source.key
    newest = bob.save(3, 1, keep_last=1)

    assert keys(assert_invariants(store, before).live) == [newest.key]


def test_an_evicted_checkpoint_never_comes_back(store):
    ann = Driver(store)
    ann.claim("g1")
    evicted = ann.save(1, 1)
    ann.save(1, 2, keep_last=1)
    before = assert_invariants(store)

    assert ann.commit(evicted) is None
    ann.claim("g2")
    with pytest.raises(SupersededError):
        ann.commit(evicted)

    after = assert_invariants(store, before)
    assert keys(after.evicted) == [evicted.key]


def entry(save: int, step: int, *, pinned: bool = False, expires_at: float | None = None, **metrics: float) -> Entry:
    return Entry(
        key=str(CheckpointName(attempt=1, save=save, step=step)),
        step=step,
        committed_at=0.0,
        size_bytes=0,
        metrics=metrics,
        manifest_crc32=0,
        pinned=pinned,
        expires_at=expires_at,
    )


losses = st.one_of(st.none(), st.sampled_from([0.0, 0.5, 1.0, -2.0]))
entries = st.lists(
    st.tuples(st.integers(0, 60), st.booleans(), losses, st.integers(0, 100)), min_size=1, max_size=12
).map(
    lambda items: [
        replace(entry(save, step, pinned=pinned, **({} if loss is None else {"loss": loss})), committed_at=float(at))
        for save, (step, pinned, loss, at) in enumerate(items)
    ]
)
rules = st.builds(
    Retention,
    keep_last=st.none() | st.integers(1, 12),
    keep_every_steps=st.none() | st.integers(1, 30),
    keep_every_s=st.none() | st.sampled_from([0.5, 7, 30.0]),
    keep_best=st.none()
    | st.fixed_dictionaries(
        {"metric": st.just("loss"), "mode": st.sampled_from(["min", "max"]), "count": st.integers(1, 4)}
    ),
)


def steps_kept(live: list[Entry], given: Retention, *, now: float = 0.0) -> list[int]:
    body = body_of(live, live[-1].key)
    return [verdict.entry.step for verdict in decide_retention(body, given, now=now) if verdict.is_kept]


@settings(max_examples=100, deadline=None)
@given(entries, st.integers(1, 12), st.data())
def test_the_newest_the_head_and_the_pinned_stay_and_the_rest_goes(live, keep_last, data):
    head = data.draw(st.sampled_from(live)).key

    gone = set(dropped(body_of(live, head), Retention(keep_last=keep_last), now=0.0))

    kept = {item.key for item in live if item.pinned or item.key == head} | set(keys(live[-keep_last:]))
    assert gone == set(keys(live)) - kept


@settings(max_examples=200, deadline=None)
@given(entries, rules)
def test_a_second_decision_by_the_same_rules_drops_nothing_more(live, given_rules):
    body = body_of(live, live[-1].key)
    gone = dropped(body, given_rules, now=0.0)

    left = replace(body, newest=tuple(item for item in body.live if item.key not in gone))

    assert dropped(left, given_rules, now=0.0) == {}


@settings(max_examples=200, deadline=None)
@given(entries, rules)
def test_an_entry_goes_only_when_every_rule_lets_it_go(live, given_rules):
    body = body_of(live, live[-1].key)
    given_rules = given_rules if any("loss" in item.metrics for item in live) else replace(given_rules, keep_best=None)
    names = ["keep_last", "keep_every_steps", "keep_every_s", "keep_best"]
    names = [name for name in names if getattr(given_rules, name)]
    alone = [dropped(body, Retention(**{name: getattr(given_rules, name)}), now=0.0) for name in names]

    gone = dropped(body, given_rules, now=0.0)

    assert set(gone) == (set.intersection(*map(set, alone)) if alone else set())


def test_one_checkpoint_stays_per_span_of_steps_the_lowest_at_or_after_its_multiple():
    live = [entry(save, step) for save, step in enumerate([90, 100, 110, 190, 203, 230, 290, 310])]

    assert steps_kept(live, Retention(keep_every_steps=100)) == [100, 203, 310]


def test_one_checkpoint_stays_per_span_of_seconds_the_first_by_the_buckets_clock():
    times = [3599.0, 3600.0, 3900.0, 7199.9, 7200.0, 20000.0, 20001.0]
    live = [replace(entry(save, save), committed_at=at) for save, at in enumerate(times)]

    assert steps_kept(live, Retention(keep_every_s=3600)) == [0, 1, 4, 5, 6]


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(0, 500), min_size=1, max_size=30).map(sorted), st.sampled_from([1, 9.5, 60]))
def test_a_run_that_prunes_at_every_commit_keeps_what_one_that_never_did_would(times, every_s):
    """The choice for a span never changes, so that keep_every_s holds however long a run is."""
    rule, live = Retention(keep_every_s=every_s), []
    commits = [replace(entry(save, save), committed_at=float(at)) for save, at in enumerate(times)]
    for new in commits:
        live.append(new)
        gone = dropped(body_of(live, new.key), rule, now=0.0)
        live = [item for item in live if item.key not in gone]

    assert live == [item for item in commits if item.key not in dropped(body_of(commits, commits[-1].key), rule, now=0)]
    assert {at // every_s for at in times} == {item.committed_at // every_s for item in live}, "no span is without one"


def test_a_span_of_seconds_is_kept_on_the_new_branch_and_of_the_left_one_only_where_nothing_else_is():
    old = [replace(entry(save, 10 * save), committed_at=at) for save, at in ((1, 10.0), (2, 110.0), (3, 210.0))]
    new = replace(entry(1, 20), key="step-000000020-a2-s1", committed_at=250.0)
    body = replace(gone_back([*old, new], to=old[0]), head=new.key)

    kept = [item.entry.key for item in decide_retention(body, Retention(keep_every_s=100), now=0.0) if item.is_kept]

    assert kept == keys([old[0], old[1], new])


def test_of_a_step_that_was_trained_twice_the_newer_branch_stays():
    live = [entry(save, step) for save, step in enumerate([100, 200, 100, 200, 250])]

    kept = [
        item.entry.key
        for item in decide_retention(body_of(live, live[-1].key), Retention(keep_every_steps=100), now=0.0)
        if item.is_kept
    ]

    assert kept == keys([live[2], live[3], live[4]])


@pytest.mark.parametrize(("mode", "kept"), [("min", [30, 50, 60]), ("max", [10, 20, 60])])
def test_the_best_stay_and_of_equals_the_newer(mode, kept):
    live = [
        entry(1, 10, loss=9.0),
        entry(2, 20, loss=3.0),
        entry(3, 30, loss=1.0),
        entry(4, 40, other=0.0),
        entry(5, 50, loss=1.0),
        entry(6, 60, loss=2.0),
    ]

    assert steps_kept(live, Retention(keep_best={"metric": "loss", "mode": mode, "count": 2})) == kept


def test_a_metric_that_no_checkpoint_has_drops_nothing_by_itself():
    live = [entry(save, 10 * save, loss=1.0) for save in range(1, 5)]

    assert steps_kept(live, Retention(keep_best={"metric": "los", "mode": "min", "count": 1})) == [10, 20, 30, 40]
    assert steps_kept(live, Retention(keep_best={"metric": "los", "mode": "min", "count": 1}, keep_last=2)) == [30, 40]


def gone_back(live: list[Entry], *, to: Entry) -> Latest:
    """Make a body in which attempt 1 saved `live`, and attempt 2 went back to one of these and saved further steps."""
    body = body_of(live, live[-1].key)
    second = replace(body.attempt, number=2, restore_key=to.key, last_save=9)
    return replace(body, attempts=(body.attempt, second))


def test_what_a_run_went_back_to_stays_with_the_new_branch_and_not_only_what_it_left():
    old = [entry(save, 10 * save) for save in (3, 4, 5)]
    new = replace(entry(1, 40), key="step-000000040-a2-s1")
    body = replace(gone_back([*old, new], to=old[0]), head=new.key)

    kept = [item.entry.key for item in decide_retention(body, Retention(keep_last=3), now=0.0) if item.is_kept]

    assert kept == keys([*old, new])


def test_a_span_is_kept_on_the_new_branch_although_the_left_one_has_a_lower_step_in_it():
    old = [entry(1, 1003), entry(2, 2004), entry(3, 3001)]
    new = [replace(entry(save, step), key=f"step-{step:09d}-a2-s{save}") for save, step in ((1, 2010), (2, 2500))]
    body = replace(gone_back([*old, *new], to=old[0]), head=new[-1].key)

    kept = [
        item.entry.step for item in decide_retention(body, Retention(keep_every_steps=1000), now=0.0) if item.is_kept
    ]

    assert kept == [1003, 3001, 2010, 2500]


def test_without_a_rule_all_stay_and_only_the_expired_go():
    live = [entry(1, 10, expires_at=100.0), entry(2, 20, expires_at=100.0, pinned=True), entry(3, 30), entry(4, 40)]

    assert steps_kept(live, Retention(), now=99.9) == [10, 20, 30, 40]
    assert steps_kept(live, Retention(), now=100.0) == [20, 30, 40]


def test_what_expired_goes_although_a_rule_would_keep_it_but_never_the_head():
    live = [entry(save, save, expires_at=50.0, loss=0.0) for save in (1, 2, 3)]

    kept = steps_kept(live, Retention(keep_last=3, keep_best={"metric": "loss", "mode": "min", "count": 3}), now=60.0)

    assert kept == [3]


def test_an_entry_carries_when_it_expires_by_the_buckets_clock(store):
    ann = Driver(store)
    ann.claim("g1")
    ann.save(1, 1, rules={"expire_after_s": 1000.0})
    ann.save(1, 2)

    first, second = ann.look().live
    evict(aged(ann, 900), Retention())
    assert keys(ann.look().live) == [first.key, second.key]
    evict(aged(ann, 1100), Retention())

    assert first.expires_at == first.committed_at + 1000.0
    assert second.expires_at is None
    assert keys(assert_invariants(store).live) == [second.key]


def test_a_commit_ranks_by_its_own_metric_too(store):
    ann = Driver(store)
    ann.claim("g1")

    for save in (1, 2, 3):  # helpers: the loss falls with the step
        ann.save(1, save, keep_last=None, rules={"keep_best": {"metric": "loss", "mode": "max", "count": 1}})

    assert [item.step for item in assert_invariants(store).live] == [10, 30]


@pytest.mark.parametrize(
    "wrong",
    [
        {"keep_last": 0},
        {"keep_last": True},
        {"keep_every_steps": 1.5},
        {"keep_every_s": 0},
        {"keep_every_s": float("nan")},
        {"keep_every_s": "3600"},
        {"expire_after_s": -1},
        {"expire_after_s": float("inf")},
        {"expire_after_s": float("nan")},
        {"keep_best": {"metric": "loss", "mode": "least", "count": 3}},
        {"keep_best": {"metric": "loss", "mode": "min", "count": 0}},
        {"keep_best": {"metric": "", "mode": "min", "count": 1}},
        {"keep_best": ("loss", "min")},
        {"keep_best": "loss"},
        {"keep_best": {"metric": "loss", "mode": "min", "count": True}},
        {"keep_best": {"metric": "loss", "mode": "min"}},
        {"keep_best": {"metric": "loss", "mode": "min", "count": 1, "of": 2}},
    ],
)
@pytest.mark.parametrize("kind", [Retention, SaveSettings])
def test_a_rule_that_cannot_work_is_refused_by_name(kind, wrong):
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        kind(**wrong)


# --- pins ---


def test_a_pin_and_its_end_change_nothing_else(store):
    ann = Driver(store)
    ann.claim("g1")
    saved = ann.save(1, 1)
    before = ann.look()

    pinned = pin(Register(store), saved.key)
    same = pin(Register(store), saved.key)
    after = pin(Register(store), saved.key, pinned=False)

    assert pinned.entry(saved.key).pinned
    assert same.counter == pinned.counter
    assert replace(after, counter=before.counter) == before
    ann.save(1, 2)
    assert_invariants(store, before)


def test_what_is_not_live_cannot_be_pinned(store):
    ann = Driver(store)
    with pytest.raises(NotFoundError, match="no run here"):
        pin(Register(store), "step-000000010-a1-s1")
    ann.claim("g1")
    gone = ann.save(1, 1)
    ann.save(1, 2, keep_last=1)

    for key in (gone.key, "step-000000099-a9-s9"):
        with pytest.raises(NotFoundError, match="no longer live"):
            pin(Register(store), key)


# --- names and scores ---


@settings(max_examples=200, deadline=None)
@given(entries, rules, st.data())
def test_what_has_a_name_stays_until_it_expires_and_all_else_is_as_without(live, given_rules, data):
    named = data.draw(st.sampled_from(live[:-1] or live))
    until = data.draw(st.none() | st.sampled_from([50.0, 150.0]))
    with_name = [replace(item, name="x", expires_at=until) if item is named else item for item in live]
    timed = [replace(item, expires_at=until) if item is named else item for item in live]

    gone = set(dropped(body_of(with_name, live[-1].key), given_rules, now=100.0))

    stays = {named.key} if until is None or until > 100.0 else set()
    assert gone == set(dropped(body_of(timed, live[-1].key), given_rules, now=100.0)) - stays


def test_a_name_is_the_reason_why_an_entry_stays():
    live = [replace(entry(1, 10), name="base"), entry(2, 20), entry(3, 30)]

    found = decide_retention(body_of(live, live[-1].key), Retention(keep_last=1), now=0.0)

    assert [item.reason for item in found] == ["named base", "no rule keeps it", "head"]


def test_a_score_counts_more_than_a_metric_of_its_name_and_as_one_where_there_is_none():
    live = [entry(1, 10, loss=1.0), entry(2, 20, loss=2.0), entry(3, 30), entry(4, 40, loss=9.0)]
    rule = Retention(keep_best={"metric": "loss", "mode": "min", "count": 1})

    assert steps_kept(live, rule) == [10, 40]
    assert steps_kept([replace(live[0], scores={"loss": 3.0}), *live[1:]], rule) == [20, 40]
    assert steps_kept([*live[:2], replace(live[2], scores={"loss": 0.5}), live[3]], rule) == [30, 40]


# --- the size of latest ---


def full_body(count: int) -> Latest:
    live = [entry(save, 10 * save, **{f"metric/{i}": 0.123456789 * i for i in range(32)}) for save in range(count)]
    return body_of(live, live[-1].key)


def test_an_entry_lists_the_metric_that_ranks_and_the_first_others():
    metrics = {f"m{i}": float(i) for i in range(100)}

    listed = listed_metrics(metrics, needed="m99")

    assert list(listed) == ["m99", *(f"m{i}" for i in range(MAX_METRICS_LISTED - 1))]


# --- prune ---


class Ages(Around):
    """A store that moves the bucket's clock forward, and lists every deleted key, in order."""

    def __init__(self, inner: Store, seconds: float) -> None:
        super().__init__(inner)
        self.seconds = seconds
        self.deleted: list[str] = []

    def get(self, key: str, max_bytes: int = MAX_WHOLE_BYTES) -> Got:
        got = self.inner.get(key, max_bytes)
        return replace(got, at=got.at + self.seconds)

    def delete(self, key: str) -> None:
        self.deleted.append(key)
        self.inner.delete(key)


def aged(driver: Driver, seconds: float = GRACE_S + 60) -> Register:
    return Register(Ages(driver.store, seconds))


def test_prune_waits_for_the_grace_by_the_buckets_clock(store):
    ann = Driver(store)
    ann.claim("g1")
    gone, kept = ann.save(1, 1), ann.save(1, 2, keep_last=1)
    before = everything(store)

    assert prune(ann.register) == ()
    assert prune(aged(ann, GRACE_S - 120)) == ()
    assert everything(store) == before

    assert prune(aged(ann)) == (gone.key,)

    left = {name.split("/")[1] for name in everything(store) if name.startswith("checkpoints/")}
    assert left == {kept.key}
    assert assert_invariants(store).evicted == ()


def test_prune_deletes_the_manifest_first(store):
    ann = Driver(store)
    ann.claim("g1")
    gone = ann.save(1, 1)
    ann.save(1, 2, keep_last=1)
    register = aged(ann)

    prune(register)

    deleted = register.store.deleted
    assert deleted[0] == object_keys.manifest_key(gone.key)
    assert set(deleted) >= {key for key, _ in gone.objects()}
    assert_invariants(store)


def test_prune_leaves_a_directory_that_a_live_checkpoint_refers_to(store):
    ann = Driver(store)
    ann.claim("g1")
    base = ann.save(1, 1)
    user = ann.save(1, 2, base=base, keep_last=1)

    gone = prune(aged(ann))

    body = assert_invariants(store)
    assert keys(body.live) == [user.key]
    assert keys(body.evicted) == [base.key]
    assert object_keys.shard_key(base.key, "train", 0) in everything(store)
    assert gone == ()


def test_prune_deletes_a_referenced_directory_once_nobody_refers_to_it(store):
    ann = Driver(store)
    ann.claim("g1")
    base = ann.save(1, 1)
    user = ann.save(1, 2, base=base, keep_last=1)
    prune(aged(ann))
    last = ann.save(1, 3, keep_last=1)

    gone = prune(aged(ann))

    assert set(gone) == {base.key, user.key}
    assert assert_invariants(store).evicted == ()
    left = {name.split("/")[1] for name in everything(store) if name.startswith("checkpoints/")}
    assert left == {last.key}


def test_a_prune_that_died_half_way_is_finished_by_the_next_driver(store):
    class Dies(Ages):
        def delete(self, key: str) -> None:
            if len(self.deleted) == 2:
                raise StoreError("the process is gone")
            super().delete(key)

    ann, bob = Driver(store), Driver(store, "bob")
    ann.claim("g1")
    gone, _ = ann.save(1, 1), ann.save(1, 2, keep_last=1)
    with pytest.raises(StoreError):
        prune(Register(Dies(store, GRACE_S + 60)))
    assert keys(assert_invariants(store).evicted) == [gone.key]
    bob.claim("h1")

    assert prune(aged(bob)) == (gone.key,)

    assert assert_invariants(store).evicted == ()
    assert not [name for name in everything(store) if gone.key in name]


def test_a_prune_that_nobody_needs_writes_nothing(store):
    ann = Driver(store)
    ann.claim("g1")
    ann.save(1, 1)
    before = everything(store)

    assert prune(aged(ann)) == ()
    assert prune(Driver(store).register) == ()

    assert everything(store) == before
    assert_invariants(store)


def test_a_prune_that_anybody_makes_leaves_a_running_driver_alone(store):
    ann, bob = Driver(store), Driver(store, "bob")
    ann.claim("g1")
    bob.claim("h1")
    for save in (1, 2, 3):
        bob.save(2, save)

    gone = prune(Register(store), Retention(keep_last=1), grace_s=0)  # also by ann, who is fenced

    assert gone == ("step-000000010-a2-s1", "step-000000020-a2-s2")
    assert bob.save(2, 4)
    assert [item.step for item in assert_invariants(store).live] == [30, 40]


def test_a_dry_run_names_exactly_what_a_prune_then_deletes_and_writes_nothing(store):
    ann = Driver(store)
    ann.claim("g1")
    base = ann.save(1, 1)
    ann.save(1, 2, keep_last=1)
    user = ann.save(1, 3)
    before = everything(store)
    sizes = {key: len(data) for key, data in before.items()}

    now, later = plan_prune(Register(store), Retention(keep_last=1), grace_s=0), plan_prune(ann.register)

    assert everything(store) == before
    assert [(item.name, item.reason, item.wait_s) for item in now] == [
        (base.key, "evicted", 0.0),
        ("step-000000020-a1-s2", "no rule keeps it", 0.0),
    ]
    assert [item.name for item in later] == [base.key]
    assert 0 < later[0].wait_s <= GRACE_S
    assert set(prune(ann.register, Retention(keep_last=1), grace_s=0)) == {item.name for item in now}
    left = everything(store)
    assert sum(item.num_objects for item in now) == len(set(before) - set(left))
    assert sum(item.size_bytes for item in now) == sum(sizes[key] for key in set(before) - set(left))
    assert [item.key for item in assert_invariants(store).live] == [user.key]


def test_a_dry_run_counts_only_the_manifest_of_what_others_refer_to(store):
    ann = Driver(store)
    ann.claim("g1")
    base = ann.save(1, 1)
    ann.save(1, 2, base=base, keep_last=1)

    (waste,) = plan_prune(ann.register, grace_s=0)

    assert (waste.name, waste.num_objects) == (base.key, 1)
    assert waste.size_bytes == len(store.get(object_keys.manifest_key(base.key)).data)
    assert "refer" in waste.reason


def test_one_object_that_cannot_be_deleted_keeps_no_other_from_going(store):
    class Holds(Around):
        def delete(self, key: str) -> None:
            if held in key:
                raise StoreError("object lock")
            self.inner.delete(key)

    ann = Driver(store)
    ann.claim("g1")
    held, other, newest = (ann.save(1, save).key for save in (1, 2, 3))

    with pytest.raises(StoreError, match="object lock"):
        prune(Register(Holds(store)), Retention(keep_last=1), grace_s=0)

    assert keys(assert_invariants(store).evicted) == [held]
    assert directories(store) >= {held, newest}
    assert other not in directories(store)


def test_a_prune_of_many_gives_all_readers_their_grace():
    store = open_store("memory://a-prune-of-many")
    body = full_body(2000)
    ann = Driver(store)
    ann.claim("g1")
    ann.register.swap(lambda old, _: replace(old, newest=body.live, head=body.head), what="fill")

    assert all(item.wait_s for item in plan_prune(ann.register, Retention(keep_last=1)))
    assert prune(ann.register, Retention(keep_last=1)) == ()


def test_pruning_where_no_run_is_says_so(store):
    for call in (prune, plan_prune):
        with pytest.raises(NotFoundError, match="no run here"):
            call(Register(store))


# --- sweep ---


def directories(store: Store) -> set[str]:
    return {name.split("/")[1] for name in everything(store) if name.startswith("checkpoints/")}


def leave_garbage(store: Store) -> tuple[Driver, str, str]:
    """Return the driver of a run of three attempts, and two unlisted saves of attempt 1: incomplete and complete."""
    ann = Driver(store)
    ann.claim("g1")
    ann.save(1, 1)
    whole = write_checkpoint(store, attempt=1, save=2)
    torn = write_checkpoint(store, attempt=1, save=3)
    store.delete(object_keys.manifest_key(torn.key))
    ann.claim("g2")
    base = ann.save(2, 1)
    ann.save(2, 2, base=base)
    evict(ann.register, Retention(keep_last=1))
    ann.claim("g3")
    return ann, torn.key, whole.key


def test_a_sweep_takes_what_earlier_attempts_left_and_nothing_else(store):
    ann, torn, whole = leave_garbage(store)
    pending = write_checkpoint(store, attempt=3, save=1)
    store.put("checkpoints/step-000000010-a1-s9.bak/file", b"not ours")
    store.put("checkpoints/notes.txt", b"not ours")
    store.put("ray/step-000000030-a1-s3/pointer.json", b"{}")
    before, body = everything(store), ann.look()

    planned = plan_sweep(store, also_whole=True)
    assert everything(store) == before
    swept = sweep(store, also_whole=True)

    assert swept == tuple(replace(item, is_deleted=True) for item in planned)
    assert {item.name for item in swept} == {torn, whole}
    gone = set(before) - set(everything(store))
    assert {key.split("/")[1] for key in gone} == {torn, whole}
    assert sum(item.num_objects for item in swept) == len(gone)
    assert sum(item.size_bytes for item in swept) == sum(len(before[key]) for key in gone)
    assert ann.look() == body
    assert ann.commit(pending)
    assert_invariants(store, body)
    assert sweep(store, also_whole=True) == ()


def test_a_sweep_of_torn_saves_leaves_what_is_whole_to_a_person(store):
    _, torn, whole = leave_garbage(store)

    swept = sweep(store)

    assert [item.name for item in swept] == [torn]
    assert whole in directories(store)
    assert_invariants(store)


def test_a_sweep_takes_a_save_of_whose_documents_only_the_manifest_was_written(store):
    """Index and manifest are written at the same time (16), so an interrupted commit may leave only one of them."""
    ann, torn, whole = leave_garbage(store)
    half = write_checkpoint(store, attempt=1, save=4)
    store.delete(object_keys.index_key(half.key))

    swept = sweep(store)

    assert {item.name for item in swept} == {torn, half.key}
    assert whole in directories(store)
    assert_invariants(store, ann.look())


def test_a_sweep_without_a_run_or_under_an_old_latest_deletes_nothing(store):
    leave_garbage(store)
    body = store.get(object_keys.LATEST_KEY).data
    write_checkpoint(store, attempt=4, save=1)
    before = everything(store)

    with pytest.raises(CorruptError, match="does not know the checkpoint step-000000010-a4-s1"):
        sweep(store, also_whole=True)
    store.put(object_keys.LATEST_KEY, b"{")
    with pytest.raises(CorruptError):
        sweep(store, also_whole=True)
    store.delete(object_keys.LATEST_KEY)
    with pytest.raises(NotFoundError, match="no run here"):
        sweep(store, also_whole=True)

    store.put(object_keys.LATEST_KEY, body)
    assert everything(store) == before


def test_a_sweep_that_died_is_finished_by_the_next_and_never_leaves_a_manifest_without_its_shards(store):
    class Dies(Around):
        left = 0

        def delete(self, key: str) -> None:
            if self.left == 0:
                raise StoreError("the process is gone")
            self.left -= 1
            self.inner.delete(key)

    _, torn, whole = leave_garbage(store)

    for left in range(3):
        dying = Dies(store)
        dying.left = left
        with pytest.raises(StoreError):
            sweep(dying, also_whole=True)
        has_manifest = object_keys.manifest_key(whole) in everything(store)
        assert not has_manifest or object_keys.shard_key(whole, "train", 0) in everything(store)
        assert_invariants(store)
    sweep(store, also_whole=True)

    assert not {torn, whole} & directories(store)


@pytest.mark.parametrize("uri", ["file", "s3"], indirect=True)
def test_a_sweep_ends_uploads_of_earlier_attempts_and_leaves_the_live_ones(store):
    ann = Driver(store)
    ann.claim("g1")
    saved = ann.save(1, 1)
    ann.claim("g2")
    begin = begin_local_upload if store.uri.startswith("file") else lambda store, key: begin_upload(store, key)[0]
    torn, again = (
        begin(store, object_keys.shard_key(name, "train", 5)) for name in ("step-000000090-a1-s9", saved.key)
    )
    live = begin(store, object_keys.shard_key("step-000000090-a2-s1", "train", 0))
    foreign = begin(store, "checkpoints/notes/mine")

    planned = plan_sweep(store, also_whole=True)
    swept = sweep(store, also_whole=True)

    assert swept == tuple(replace(item, is_deleted=True) for item in planned)
    assert {item.name for item in swept} == {torn.key, again.key}
    assert set(store.list_uploads("checkpoints/")) == {live, foreign}
    assert_invariants(store)


def begin_local_upload(store: Store, key: str) -> Upload:
    path = (store._root / key).with_name(f".raycheck-{uuid4().hex}")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"half")
    return Upload(path.relative_to(store._root).as_posix(), path.name)


def test_a_late_commit_of_a_swept_save_is_refused(store):
    """The delete is safe: nothing of an earlier attempt can become live, however late its process continues."""
    zombie = Driver(store)
    zombie.claim("g1")
    pending = write_checkpoint(store, attempt=1, save=1)
    Driver(store).claim("g2")
    sweep(store, also_whole=True)

    with pytest.raises(SupersededError):
        zombie.commit(pending)

    assert assert_invariants(store).live == ()


# --- rolling ---


def entry_of(save: int, *, is_rolling: bool) -> Entry:
    return Entry(
        key=str(CheckpointName(step=10 * save, attempt=1, save=save)),
        step=10 * save,
        committed_at=float(save),
        size_bytes=1,
        metrics={},
        manifest_crc32=0,
        rolling=is_rolling,
    )


def commits_kept(kinds: str, rules: Retention) -> list[int]:
    """Return the commits that stay. kinds: a letter per commit, k for kept, r for rolling; the last one is the head."""
    live = [entry_of(save, is_rolling=kind == "r") for save, kind in enumerate(kinds, start=1)]
    return [step // 10 for step in steps_kept(live, rules)]


def test_rolling_checkpoints_and_kept_ones_count_apart():
    rules = Retention(keep_last=2, rolling_keep_last=1)

    assert commits_kept("krrkrrkrr", rules) == [4, 7, 9]
    assert commits_kept("rrrr", rules) == [4]
    assert commits_kept("rrrk", rules) == [3, 4]


def test_a_rolling_checkpoint_stands_in_for_no_milestone_and_is_no_best():
    rules = Retention(keep_every_steps=20, keep_best={"metric": "loss", "mode": "min", "count": 1}, rolling_keep_last=1)

    assert commits_kept("rrrrrr", rules) == [6]
    assert commits_kept("rkrkrr", rules) == [2, 4, 6]


def test_without_a_rule_for_them_all_rolling_ones_stay():
    assert commits_kept("rkrkr", Retention(keep_last=1)) == [1, 3, 4, 5]


def test_what_is_rolling_is_so_in_the_bucket_and_its_successor_takes_its_place(store):
    ann = Driver(store)
    ann.claim("g1")
    for save in (1, 2, 3):
        ann.save(1, save, step=save, rolling=save > 1, rules={"rolling_keep_last": 1})

    body = assert_invariants(store)

    assert [(entry.step, entry.rolling) for entry in body.live] == [(1, False), (3, True)]
    assert [item.key for item in body.evicted] == ["step-000000002-a1-s2"]
