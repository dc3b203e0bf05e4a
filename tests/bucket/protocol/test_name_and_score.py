"""Tests the names and scores of checkpoints: who has a name, how it moves, and what a commit does with both."""

from dataclasses import replace

import pytest

from raycheck.bucket.format import object_keys
from raycheck.bucket.format.label import MAX_NOTE_BYTES, RESERVED, Label, label_of
from raycheck.bucket.protocol import name_and_score
from raycheck.bucket.protocol.name_and_score import name, rename, score, unname
from raycheck.bucket.protocol.pin_and_evict import evict
from raycheck.bucket.protocol.repair import repair
from raycheck.bucket.protocol.sharing.fork import fork
from raycheck.bucket.protocol.swap import Register
from raycheck.bucket.store import open_store
from raycheck.bucket.store.address import join_uri
from raycheck.errors import ConfigError, ConflictError, NotFoundError
from raycheck.run import open_run
from raycheck.settings import Retention
from tests.bucket.protocol.test_retention import aged
from tests.support.histories.invariants import assert_invariants
from tests.support.samples.sample_checkpoints import Around, Driver, write_checkpoint


@pytest.fixture
def ann(store) -> Driver:
    """A driver that has saved steps 10, 20 and 30."""
    ann = Driver(store)
    ann.claim("g1")
    for number in (1, 2, 3):
        ann.save(1, number)
    return ann


def names(ann: Driver) -> dict[int, str]:
    return {entry.step: entry.name for entry in assert_invariants(ann.store).live if entry.name}


def key_of(ann: Driver, step: int) -> str:
    return open_run(ann.store.uri).at(step).key


# --- by hand ---


def test_a_name_and_scores_change_nothing_else_and_a_commit_keeps_them(ann):
    before = ann.look()

    name(Register(ann.store), key_of(ann, 10), Label(name="base"))
    after = score(Register(ann.store), key_of(ann, 10), {"mmlu": 0.5})

    entry = after.live[0]
    assert (entry.name, entry.scores) == ("base", {"mmlu": 0.5})
    assert replace(after.with_entry(before.live[0]), counter=before.counter) == before
    ann.save(1, 4, keep_last=1)
    assert [(item.step, item.name, item.scores) for item in assert_invariants(ann.store).live] == [
        (10, "base", {"mmlu": 0.5}),
        (40, None, {}),
    ]


def test_what_is_so_already_is_not_written_again(ann):
    register, key = Register(ann.store), key_of(ann, 10)
    first = [name(register, key, Label(name="base")), score(register, key, {"mmlu": 0.5})][-1]

    again = [name(register, key, Label(name="base")), score(register, key, {"mmlu": 0.5})]

    assert {body.counter for body in again} == {first.counter}


def test_a_name_of_another_step_is_refused_by_name_and_step_and_moves_only_when_told(ann):
    name(ann.register, key_of(ann, 10), Label(name="base", expire_after_s=60.0))

    with pytest.raises(ConfigError, match=r"step 10 \(step-000000010-a1-s1\) has the name base.*overwrite=True"):
        name(ann.register, key_of(ann, 20), Label(name="base"))
    with pytest.raises(ConfigError, match=r"is named base already"):
        name(ann.register, key_of(ann, 10), Label(name="other"))
    assert names(ann) == {10: "base"}

    name(ann.register, key_of(ann, 20), Label(name="base", may_move=True))
    assert names(ann) == {20: "base"}


def test_a_name_of_the_same_step_moves_and_so_does_one_that_has_expired(ann):
    again = ann.save(1, 4, step=10)
    name(ann.register, key_of(ann, 20), Label(name="old", expire_after_s=60.0))
    name(ann.register, ann.look().live[0].key, Label(name="base"))

    name(ann.register, again.key, Label(name="base"))
    with pytest.raises(ConfigError, match="has the name old"):
        name(aged(ann, 30.0), key_of(ann, 30), Label(name="old"))
    name(aged(ann, 90.0), key_of(ann, 30), Label(name="old"))

    assert [entry.name for entry in assert_invariants(ann.store).live] == [None, None, "old", "base"]


def test_a_rename_keeps_the_expiry_and_unname_leaves_the_checkpoint_to_retention(ann):
    named = name(ann.register, key_of(ann, 10), Label(name="base", expire_after_s=60.0)).live[0]

    renamed = rename(ann.register, "base", "start").live[0]
    assert renamed == replace(named, name="start")
    for call in (lambda: rename(ann.register, "base", "x"), lambda: unname(ann.register, "base")):
        with pytest.raises(NotFoundError, match=r"'base'; there are: start \(step 10\)"):
            call()
    evict(ann.register, Retention(keep_last=1))
    assert names(ann) == {10: "start"}
    unname(ann.register, "start")
    evict(ann.register, Retention(keep_last=1))

    assert [entry.step for entry in assert_invariants(ann.store).live] == [30]


def test_what_was_dropped_is_neither_named_nor_scored(ann):
    gone = key_of(ann, 10)
    evict(ann.register, Retention(keep_last=1))

    for call in (
        lambda: name(ann.register, gone, Label(name="late")),
        lambda: score(ann.register, gone, {"mmlu": 1.0}),
    ):
        with pytest.raises(NotFoundError, match="no longer live"):
            call()
    with pytest.raises(NotFoundError, match="was dropped"):
        open_run(ann.store.uri).score(gone, {"mmlu": 1.0})


@pytest.mark.parametrize(
    "bad", ["", "7", "0" * 9, "a/b", "-x", ".x", "é", "y" * 101, "step-000000010-a1-s1", *RESERVED]
)
def test_what_could_be_taken_for_something_else_is_no_name(bad):
    with pytest.raises(ConfigError, match="cannot be a checkpoint's name"):
        Label(name=bad)


@pytest.mark.parametrize(
    ("given", "match"),
    [
        ({"note": {"deep": {}}}, "nothing nested"),
        ({"note": {"a": None}}, "nothing nested"),
        ({"note": {1: "a"}}, "nothing nested"),
        ({"note": ["a"]}, "nothing nested"),
        ({"note": {"a": float("nan")}}, "finite"),
        ({"note": {"a": 1 << 63}}, "64 bits"),
        ({"note": {"a": "x" * MAX_NOTE_BYTES}}, "4096"),
        ({"expire_after_s": 0}, "above 0"),
        ({"expire_after_s": float("inf")}, "above 0"),
        ({"expire_after_s": True}, "above 0"),
        ({"overwrite": True}, "name="),
    ],
)
def test_a_label_that_cannot_be_kept_is_refused_at_the_call(given, match):
    arguments = {"name": None, "note": None, "expire_after_s": None, "overwrite": False} | given
    with pytest.raises(ConfigError, match=match):
        label_of(**arguments)


@pytest.mark.parametrize(
    "scores", [{}, {"": 1.0}, {"a": float("nan")}, {"a": float("inf")}, {"a": 10**400}, {"a": "1"}, {"x" * 101: 1.0}]
)
def test_a_score_that_is_none_is_refused(ann, scores):
    with pytest.raises(ConfigError, match="scores"):
        score(ann.register, key_of(ann, 10), scores)


def test_a_checkpoint_has_at_most_32_scores(ann):
    key = key_of(ann, 10)
    score(ann.register, key, {f"m{number}": 0.5 for number in range(32)})
    score(ann.register, key, {"m0": 0.7})

    with pytest.raises(ConfigError, match="33 scores"):
        score(ann.register, key, {"one more": 1.0})


# --- races ---


class Meanwhile(Around):
    """A store that lets somebody else act once, just before the next swap of `latest` is sent."""

    def __init__(self, inner, act) -> None:
        super().__init__(inner)
        self.acts = [act]

    def put_if_match(self, key, data, version):
        if key == object_keys.LATEST_KEY and self.acts:
            self.acts.pop()()
        return self.inner.put_if_match(key, data, version)


def test_of_two_who_give_one_name_at_a_time_one_is_refused(ann):
    first, second = key_of(ann, 10), key_of(ann, 20)
    racing = Meanwhile(ann.store, lambda: name(Register(ann.store), second, Label(name="base")))

    with pytest.raises(ConfigError, match="step 20"):
        name(Register(racing), first, Label(name="base"))

    assert names(ann) == {20: "base"}


def test_a_rename_whose_name_was_taken_away_meanwhile_touches_nobody(ann):
    name(ann.register, key_of(ann, 10), Label(name="base"))
    moves = Label(name="base", may_move=True)
    racing = Meanwhile(ann.store, lambda: name(Register(ann.store), key_of(ann, 20), moves))

    with pytest.raises(NotFoundError, match="somebody else"):
        rename(Register(racing), "base", "other")

    assert names(ann) == {20: "base"}


class LosesAnswer(Around):
    """A store that applies the first swap of `latest`, and reports that it was refused."""

    is_done = False

    def put_if_match(self, key, data, version):
        answer = self.inner.put_if_match(key, data, version)
        if key == object_keys.LATEST_KEY and not self.is_done:
            self.is_done = True
            raise ConflictError("lost")
        return answer


@pytest.mark.parametrize(
    ("act", "left"),
    [
        (lambda it, key: name(it, key, Label(name="new", may_move=True, expire_after_s=60.0)), {10: "new"}),
        (lambda it, key: rename(it, "base", "new"), {10: "new"}),
        (lambda it, key: unname(it, "base"), {}),
        (lambda it, key: score(it, key, {"mmlu": 1.0}), {10: "base"}),
    ],
    ids=["name", "rename", "unname", "score"],
)
def test_a_swap_whose_answer_was_lost_knows_its_own_effect(ann, act, left):
    key = key_of(ann, 10)
    before = name(ann.register, key, Label(name="base")).counter

    body = act(Register(LosesAnswer(ann.store)), key)

    assert body.counter == before + 1
    assert names(ann) == left


# --- by a save ---


def test_a_save_gives_its_name_and_only_its_own_expiry_counts_then(ann):
    rules = {"expire_after_s": 100.0}
    ann.save(1, 4, name="kept", rules=rules)
    ann.save(1, 6, name="for-a-time", expire_after_s=7.0, rules=rules)
    ann.save(1, 7, expire_after_s=8.0, rules=rules)
    ann.save(1, 8, rules=rules)

    found = [(item.name, item.expires_at and round(item.expires_at - item.committed_at)) for item in ann.look().live]

    assert found[-4:] == [("kept", None), ("for-a-time", 7), (None, 8), (None, 100)]
    assert_invariants(ann.store)


def test_training_that_repeats_a_step_takes_the_name_over_and_another_step_does_not(ann):
    first = ann.save(1, 4, step=40, name="kept")
    ann.claim("g2")
    again = ann.save(2, 1, step=40, name="kept", keep_last=2)
    other = ann.save(2, 2, step=50, name="kept", keep_last=1)
    ann.save(2, 3, step=60, keep_last=1)

    body = assert_invariants(ann.store)

    assert body.entry(first.key) is None
    assert (body.entry(again.key).name, body.entry(again.key).pinned) == ("kept", False)
    assert (body.entry(other.key).name, body.entry(other.key).pinned) == (None, True), "nothing is lost"


def test_a_save_that_may_move_a_name_does(ann):
    ann.save(1, 4, name="newest-good")
    newer = write_checkpoint(ann.store, attempt=1, save=6, name="newest-good")

    entry = ann.commit(newer, may_move_name=True)

    assert entry.name == "newest-good"
    assert names(ann) == {60: "newest-good"}


# --- resume, repair and fork ---


def test_a_driver_goes_back_to_a_name_or_a_key_and_not_to_one_that_nobody_has(ann):
    name(ann.register, key_of(ann, 10), Label(name="base"))
    by_key = key_of(ann, 20)

    with pytest.raises(ConfigError, match=r"no checkpoint has that name; there are: base \(step 10\)"):
        Driver(ann.store, "zoe").claim("z1", resume="bas")
    by_name, by_its_key = (
        Driver(ann.store, owner).claim(owner, resume=resume)[0].restore_key
        for owner, resume in (("bob", "base"), ("eve", by_key))
    )

    assert (by_name, by_its_key) == (ann.look().live[0].key, by_key)
    assert_invariants(ann.store)


def test_a_repair_takes_names_from_the_manifests_the_newest_first(ann):
    ann.save(1, 4, step=40, name="kept")
    newer = ann.save(1, 5, step=40, name="kept", expire_after_s=1e6)
    ann.store.delete(object_keys.LATEST_KEY)

    body = repair(ann.store).latest

    assert [(item.key, item.name) for item in body.live if item.name] == [(newer.key, "kept")]
    assert body.entry(newer.key).expires_at is not None
    assert_invariants(ann.store)


def test_a_repair_obeys_a_body_that_can_be_read(ann):
    ann.save(1, 4, name="by-save")
    rename(ann.register, "by-save", "by-hand")
    score(ann.register, key_of(ann, 10), {"mmlu": 0.5})
    old = ann.store.get(object_keys.LATEST_KEY).data
    ann.claim("g2")
    lost = ann.save(2, 1, name="by-hand", step=40)
    ann.store.put(object_keys.LATEST_KEY, old)

    body = repair(ann.store).latest

    assert {item.step: item.name for item in body.live if item.name} == {40: "by-hand"}
    assert body.entry(lost.key).name is None, "the old body says whose the name is"
    assert body.live[0].scores == {"mmlu": 0.5}


def test_a_fork_begins_without_the_name_of_its_source(ann):
    ann.save(1, 4, name="kept", expire_after_s=60.0)
    target = open_store(join_uri(ann.store.uri, "fork"))

    fork(ann.store, target, run_id="a-forked-run")

    entry = assert_invariants(target).live[0]
    assert (entry.name, entry.expires_at) == (None, None)
    assert name_and_score.names_near(assert_invariants(ann.store), "kept") == "kept (step 40)"
