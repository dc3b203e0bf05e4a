"""Tests the history's segments: that a set of facts is the same however it is written, merged, repeated or thinned."""

import math
from collections.abc import Mapping
from itertools import count
from uuid import uuid4

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raycheck.bucket.attempt_records import AttemptRecord
from raycheck.bucket.format.document import FORMAT_VERSION, seal
from raycheck.bucket.format.latest import Attempt
from raycheck.bucket.format.object_keys import HISTORY_PREFIX, segment_key
from raycheck.bucket.history import segments
from raycheck.bucket.history.facts import (
    AttemptFact,
    CommitRecord,
    DropRecord,
    Facts,
    dump_segment,
    facts_in,
    load_segment,
)
from raycheck.bucket.history.metric_rows import TIME, Rows, blocks_of, rows_of
from raycheck.bucket.history.segments import MAX_SEGMENTS, read_facts, record_facts
from raycheck.bucket.store import Store, open_store

RUN = "a-run"
numbers = st.floats(allow_nan=False) | st.just(math.nan) | st.floats(width=32, allow_nan=False)


def value_of(attempt: int, name: str, step: int) -> float:
    """The one value that a metric has after a step of an attempt: what two writers know is equal."""
    return [step / 3, math.nan, -math.inf, float(attempt), 1e300][hash((attempt, name, step)) % 5]


rows = st.builds(
    lambda places, every: Rows(
        series={
            (attempt, name): {step: value_of(attempt, name, step) for a, n, step in places if (a, n) == (attempt, name)}
            for attempt, name, _ in places
        },
        every=every,
    ),
    st.sets(st.tuples(st.integers(1, 3), st.sampled_from(["loss", "eval", TIME]), st.integers(0, 200)), max_size=25),
    st.just(1),
)


def attempt(number: int, last_save: int = 0) -> Attempt:
    return Attempt(
        number=number,
        owner="ann",
        coordinator="c",
        group="g",
        world_size=2,
        restore_key=None,
        last_save=last_save,
        claimed_at=float(number),
    )


def name(save: int) -> str:
    return f"step-{save * 10:09d}-a1-s{save}"


facts = st.builds(
    lambda commits, drops, attempts, ends, its_rows: Facts(
        commits={
            name(save): CommitRecord(
                key=name(save), counter=at, at=float(save), size_bytes=5, scores={"acc": at / 7}, pinned=at % 2 == 0
            )
            for save, at in commits
        },
        drops={name(save): DropRecord(key=name(save), at=float(at), why=f"rule {at}") for save, at in drops},
        attempts={number: AttemptFact(counter=at, attempt=attempt(number, last_save=at)) for number, at in attempts},
        ends={
            number: AttemptRecord(
                attempt=attempt(number), ended_by_attempt=number + 1, ended_at=number + 0.5, cause=f"cause {at}"
            )
            for number, at in ends
        },
        rows=its_rows,
    ),
    *[st.sets(st.tuples(st.integers(1, 9), st.integers(0, 3)), max_size=4)] * 4,
    rows,
)


def alike(one: Facts, other: Facts) -> bool:
    """Compare by bytes: NaN is not equal to itself."""
    return dump_segment(one, RUN) == dump_segment(other, RUN)


def series_of(rows: Rows) -> Mapping[tuple[int, str], dict[int, str]]:
    return {key: {step: value.hex() for step, value in values.items()} for key, values in rows.series.items() if values}


# --- facts are a set ---


@settings(max_examples=60, deadline=None)
@given(facts, facts, facts)
def test_the_union_depends_neither_on_the_order_nor_on_repetition(one, two, three):
    whole = one.joined(two).joined(three)

    assert alike(whole, three.joined(one.joined(two)))
    assert alike(whole, one.joined(two.joined(three)))
    assert alike(whole, whole.joined(two))
    assert alike(one, one.joined(one))
    assert not whole.without(whole)
    assert alike(one.joined(two.without(one)), Facts(rows=one.rows).joined(one).joined(two.without(one)))


@settings(max_examples=60, deadline=None)
@given(facts)
def test_a_segment_returns_exactly_what_was_written(given_facts):
    segment = load_segment(dump_segment(given_facts, RUN), what="it")

    found = facts_in(segment, what="it")
    assert segment.run_id == RUN
    assert alike(found, given_facts)
    assert series_of(found.rows) == series_of(given_facts.rows)


@settings(max_examples=60, deadline=None)
@given(st.dictionaries(st.integers(0, 2**40), numbers, min_size=1, max_size=40))
def test_each_number_is_kept_to_the_last_bit(values):
    found = rows_of(blocks_of(Rows(series={(1, "loss"): values})), every=1, what="it")

    assert series_of(found) == series_of(Rows(series={(1, "loss"): values}))


def test_numbers_of_a_float32_take_four_bytes_each_and_steps_one():
    short = {step: float(step) for step in range(5000, 6000)}
    long = {step: step / 3 for step in range(5000, 6000)}

    sizes = [len(block.metrics["loss"]) for x in (short, long) for block in blocks_of(Rows(series={(1, "loss"): x}))]
    (block,) = blocks_of(Rows(series={(1, "loss"): short}))

    assert sizes == [len("f4:") + 4 * 4000 // 3 + 3, len("f8:") + 4 * 8000 // 3 + 2]
    assert len(block.steps) < 1000 * 4 // 3 + 8


# --- thinning ---


@settings(max_examples=100, deadline=None)
@given(rows, rows, st.integers(3, 60))
def test_it_does_not_matter_whether_rows_are_thinned_before_or_after_they_are_joined(one, two, budget):
    at_once = one.joined(two).thinned(budget)

    assert series_of(at_once) == series_of(one.thinned(budget).joined(two).thinned(budget))
    assert series_of(at_once) == series_of(one.thinned(budget).joined(two.thinned(budget)).thinned(budget))


@settings(max_examples=100, deadline=None)
@given(rows, st.integers(9, 60))
def test_thinned_rows_are_the_first_of_each_span_of_the_shortest_length_that_fits(given_rows, budget):
    def of_spans(every):
        return {
            key: {
                step: values[step].hex()
                for step in values
                if step == min(s for s in values if s // every == step // every)
            }
            for key, values in given_rows.series.items()
        }

    every = next(every for every in (2**k for k in count()) if sum(map(len, of_spans(every).values())) <= budget)

    found = given_rows.thinned(budget)

    assert found.every == every
    assert series_of(found) == of_spans(every)


def test_a_metric_that_few_steps_have_is_not_lost_to_one_that_all_have():
    dense = {step: float(step) for step in range(1, 1001)}
    rare = {step: float(step) for step in range(7, 1001, 100)}

    found = Rows(series={(1, "loss"): dense, (1, "eval"): rare}).thinned(100)

    assert len(found.series[1, "loss"]) == 63
    assert found.series[1, "eval"] == rare


# --- segments in a store ---


def store() -> Store:
    return open_store(f"memory://{uuid4().hex}")


@settings(max_examples=20, deadline=None)
@given(st.lists(facts, max_size=20))
def test_merging_keeps_the_union_and_leaves_few_segments(batches):
    place, whole = store(), Facts()

    for number, batch in enumerate(batches):
        record_facts(place, batch, run_id=RUN, counter=number)
        whole = whole.joined(batch)

    found, problems = read_facts(place, RUN)
    assert alike(found, whole)
    assert not problems
    assert len(list(place.list_objects(HISTORY_PREFIX))) <= MAX_SEGMENTS


@settings(max_examples=30, deadline=None)
@given(st.lists(facts, min_size=1, max_size=6), st.data())
def test_the_loss_of_a_segment_loses_no_more_than_its_own_facts(batches, data):
    place = store()
    for number, batch in enumerate(batches):
        record_facts(place, batch, run_id=RUN, counter=number)
    keys = [item.key for item in place.list_objects(HISTORY_PREFIX)]
    lost = data.draw(st.sampled_from(keys)) if keys else None

    if lost is not None:
        place.delete(lost)

    found, problems = read_facts(place, RUN)
    rest = Facts()
    for key in set(keys) - {lost}:
        rest = rest.joined(facts_in(load_segment(place.get(key).data, what=key), what=key))
    assert not problems
    assert alike(found, rest)


def some(save: int) -> Facts:
    return Facts(
        commits={name(save): CommitRecord(key=name(save), counter=save, at=float(save), size_bytes=5)},
        rows=Rows(series={(1, "loss"): {step: step / 3 for step in range(save * 10 - 9, save * 10 + 1)}}),
    )


def test_a_damaged_segment_is_named_and_neither_merged_nor_deleted():
    place, whole = store(), Facts()
    damaged = segment_key(0, "00000000")
    place.put(damaged, dump_segment(some(99), RUN)[:-30] + b"x" * 30)
    newer = segment_key(0, "11111111")
    place.put(newer, seal(b'{"format_version": %d, "run_id": "a-run"}' % (FORMAT_VERSION + 1)))
    other = segment_key(0, "22222222")
    place.put(other, dump_segment(some(98), "another-run"))
    before = {key: place.get(key).data for key in (damaged, newer, other)}

    for save in range(1, 40):
        record_facts(place, some(save), run_id=RUN, counter=save)
        whole = whole.joined(some(save))

    found, problems = read_facts(place, RUN)
    assert alike(found, whole)
    assert sorted(key for key in before for problem in problems if key in problem) == sorted(before), problems
    assert {key: place.get(key).data for key in before} == before


def test_what_a_newer_writer_added_is_not_lost_in_a_merge():
    place = store()
    data = dump_segment(some(1), RUN).replace(b'"run_id"', b'"added": 5, "run_id"')
    key = segment_key(0, "00000000")
    place.put(key, seal(data[: data.rindex(b'"crc32"')].rstrip().removesuffix(b",") + b"}"))
    kept = place.get(key).data

    for save in range(1, 30):
        record_facts(place, some(save), run_id=RUN, counter=save)

    assert place.get(key).data == kept


def test_two_writers_that_merge_each_others_segments_lose_nothing():
    place, whole = store(), Facts()
    for save in range(1, MAX_SEGMENTS + 1):
        record_facts(place, some(save), run_id=RUN, counter=save)
        whole = whole.joined(some(save))
    inside = place.list_objects

    class Between:
        """The store of a writer that is overtaken by another one after each of its listings."""

        def __getattr__(self, verb):
            return getattr(place, verb)

        def __str__(self):
            return str(place)

        def list_objects(self, prefix):
            listed = list(inside(prefix))
            record_facts(place, some(50), run_id=RUN, counter=50)
            return iter(listed)

    record_facts(Between(), some(60), run_id=RUN, counter=60)

    found, problems = read_facts(place, RUN)
    assert alike(found, whole.joined(some(50)).joined(some(60)))
    assert not problems


def test_a_reader_finds_everything_while_segments_are_merged_under_it():
    place, whole = store(), Facts()
    for save in range(1, MAX_SEGMENTS + 1):
        record_facts(place, some(save), run_id=RUN, counter=save)
        whole = whole.joined(some(save))
    merges = count(50)

    class Merging:
        """The store of a reader: the first two listings are followed by a merge."""

        def __getattr__(self, verb):
            return getattr(place, verb)

        def __str__(self):
            return str(place)

        def list_objects(self, prefix):
            listed = list(place.list_objects(prefix))
            if (save := next(merges)) < 52:
                record_facts(place, some(save), run_id=RUN, counter=save)
            return iter(listed)

    found, problems = read_facts(Merging(), RUN)

    assert not problems
    assert alike(found, found.joined(whole).joined(some(50))), "what was there at the second listing"


class DyingError(Exception):
    """The writer's process ends at this call."""


class Mortal:
    """A store whose process dies at the call with the number `at`, before or after the call is applied."""

    def __init__(self, place: Store, at: int, *, is_applied: bool) -> None:
        self.place, self.at, self.is_applied, self.calls = place, at, is_applied, 0

    def __str__(self) -> str:
        return "a store"

    def __getattr__(self, verb: str):
        def call(*args):
            self.calls += 1
            if self.calls - 1 == self.at and not self.is_applied:
                raise DyingError
            result = getattr(self.place, verb)(*args)
            if self.calls - 1 == self.at:
                raise DyingError
            return result

        return call


@pytest.mark.parametrize("is_applied", [False, True])
def test_a_writer_that_dies_at_any_call_of_a_write_with_a_merge_loses_nothing(is_applied):
    for died in count():
        place, whole = store(), Facts()
        for save in range(1, MAX_SEGMENTS + 1):
            record_facts(place, some(save), run_id=RUN, counter=save)
            whole = whole.joined(some(save))
        try:
            record_facts(Mortal(place, died, is_applied=is_applied), some(60), run_id=RUN, counter=60)
        except DyingError:
            pass
        else:
            break

        found, problems = read_facts(place, RUN)
        assert not problems
        assert alike(found.joined(whole), found), died
        record_facts(place, some(60), run_id=RUN, counter=60)  # by the next writer
        found, problems = read_facts(place, RUN)
        assert not problems
        assert alike(found, whole.joined(some(60)))
        assert len(list(place.list_objects(HISTORY_PREFIX))) <= MAX_SEGMENTS
    assert died >= 5, "the listing, the readings, the write, its check, the deletes"


def test_a_merged_segment_that_cannot_be_read_back_deletes_nothing():
    place, whole = store(), Facts()
    for save in range(1, MAX_SEGMENTS + 1):
        record_facts(place, some(save), run_id=RUN, counter=save)
        whole = whole.joined(some(save))
    before = {item.key for item in place.list_objects(HISTORY_PREFIX)}

    class Lying:
        """A store that has other bytes than were sent."""

        def __getattr__(self, verb):
            return getattr(place, verb)

        def __str__(self):
            return "a store"

        def put_if_absent(self, key, data):
            return place.put_if_absent(key, data[:-9] + b'00000000"}'[-9:])

    record_facts(Lying(), some(60), run_id=RUN, counter=60)

    assert before < {item.key for item in place.list_objects(HISTORY_PREFIX)}
    found, _ = read_facts(place, RUN)
    assert alike(found, whole)


def test_the_bytes_that_are_written_are_a_small_multiple_of_those_of_the_facts(monkeypatch):
    place, written = store(), 0
    inside = place.put_if_absent

    def put(key, data):
        nonlocal written
        written += len(data)
        return inside(key, data)

    monkeypatch.setattr(place, "put_if_absent", put)
    for save in range(1, 401):
        record_facts(place, some(save), run_id=RUN, counter=save)
        assert len(list(place.list_objects(HISTORY_PREFIX))) <= segments.MAX_SEGMENTS

    at_once = len(dump_segment(read_facts(place, RUN)[0], RUN))
    assert written < 10 * at_once, (written, at_once)
