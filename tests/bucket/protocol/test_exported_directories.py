"""Tests the prune of exports: it deletes older exports only if they are proven to be this run's, and never leaves one
half deleted for a reader."""

import json
from dataclasses import replace

import pytest

from raycheck.bucket.format import object_keys
from raycheck.bucket.format.document import NewerFormatError, dump
from raycheck.bucket.format.label import Label
from raycheck.bucket.format.object_keys import EXPORT_ENDS, EXPORT_RECORD, EXPORTS_PREFIX, export_key, exports_prefix
from raycheck.bucket.protocol.name_and_score import name, unname
from raycheck.bucket.protocol.pin_and_evict import pin
from raycheck.bucket.protocol.removal.exported_directories import (
    ExportRecord,
    check_not_being_pruned,
    decide_exports,
    find_exports,
    load_export_record,
    prune_exports,
)
from raycheck.bucket.store import Got, Store, open_store
from raycheck.bucket.store.interface import MAX_WHOLE_BYTES, Written
from raycheck.errors import ConfigError, CorruptError, StoreError
from tests.support.histories.invariants import assert_invariants
from tests.support.samples.sample_checkpoints import Around, Driver, everything, sealed, write_export


def run_of(store: Store, *, saves: int = 3) -> tuple[Driver, list[str]]:
    """Make a run with an export of each of its checkpoints. Returns their places."""
    ann = Driver(store)
    ann.claim("g1")
    places = []
    for save in range(1, saves + 1):
        places.append(exports_prefix(ann.save(1, save, keep_last=None).key))
        write_export(store, places[-1], places[-1].split("/")[1])
    return ann, places


def pruned(store: Store, ann: Driver, *, keep_last: int = 1) -> tuple[str, ...]:
    return prune_exports(store, EXPORTS_PREFIX, ann.look(), keep_last=keep_last)


def reasons(store: Store, ann: Driver, *, keep_last: int = 1) -> dict[str, tuple[bool, str]]:
    verdicts = decide_exports(find_exports(store, EXPORTS_PREFIX), ann.look(), keep_last=keep_last)
    return {verdict.directory.place: (verdict.is_kept, verdict.reason) for verdict in verdicts}


def test_exports_of_the_newest_checkpoints_stay_and_nothing_else_is_touched(store: Store) -> None:
    ann, places = run_of(store)
    store.put(export_key(places[0], "eval.json"), b"a person's")
    others = {key: data for key, data in everything(store).items() if not key.startswith(EXPORTS_PREFIX)}

    assert pruned(store, ann, keep_last=2) == (places[0],)
    assert pruned(store, ann, keep_last=2) == (), "it may be repeated"

    left = everything(store)
    assert {key for key in left if key.startswith(places[0])} == {export_key(places[0], "eval.json")}
    assert all(export_key(place, EXPORT_ENDS[0]) in left for place in places[1:])
    assert {key: data for key, data in left.items() if not key.startswith(EXPORTS_PREFIX)} == others
    assert_invariants(store)


def test_two_directories_of_one_checkpoint_count_once(store: Store) -> None:
    ann, places = run_of(store)
    write_export(store, "exports/best/of-all/", places[2].split("/")[1])

    assert pruned(store, ann, keep_last=2) == (places[0],)


def test_what_an_earlier_prune_left_half_way_is_none_of_the_newest_that_stay(store: Store) -> None:
    ann, places = run_of(store, saves=2)
    key = export_key(places[1], EXPORT_RECORD)
    record = load_export_record(store.get(key).data, what=key)
    store.put(key, dump(replace(record, is_pruned=True)))

    assert pruned(store, ann) == (places[1],)

    assert export_key(places[0], EXPORT_ENDS[0]) in everything(store)


def test_an_export_of_a_pinned_checkpoint_stays(store: Store) -> None:
    ann, places = run_of(store)
    pin(ann.register, places[0].split("/")[1])

    assert pruned(store, ann) == (places[1],)
    assert reasons(store, ann)[places[0]] == (True, "its checkpoint is pinned")


def test_an_export_of_a_named_checkpoint_stays_as_long_as_the_name(store: Store) -> None:
    ann, places = run_of(store)
    name(ann.register, places[0].split("/")[1], Label(name="paper"))

    assert pruned(store, ann) == (places[1],)
    assert reasons(store, ann)[places[0]] == (True, "its checkpoint is named paper")

    unname(ann.register, "paper")
    assert pruned(store, ann) == (places[0],)


def damaged_record(store: Store, place: str) -> None:
    store.put(export_key(place, EXPORT_RECORD), b"{")


def huge_record(store: Store, place: str) -> None:
    store.put(export_key(place, EXPORT_RECORD), b" " * (5 << 20))


def other_weights(store: Store, place: str) -> None:
    store.put(export_key(place, "model-00001-of-00001.safetensors"), b"another's")


def of_another_run(store: Store, place: str) -> None:
    write_export(store, place, place.split("/")[1], run_id="f" * 32)


def by_hand(store: Store, place: str) -> None:
    write_export(store, place, place.split("/")[1], by_training=False)


def newer_format(store: Store, place: str) -> None:
    key = export_key(place, EXPORT_RECORD)
    store.put(key, sealed({**json.loads(store.get(key).data), "format_version": 1000}))


def of_another_place(store: Store, place: str) -> None:
    """Write a hostile record, which names a file outside of its directory."""
    key = export_key(place, EXPORT_RECORD)
    tree = json.loads(store.get(key).data)
    store.put(key, sealed({**tree, "files": {**tree["files"], "../../latest": 1}}))


CHANGES = {
    "no record": lambda store, place: store.delete(export_key(place, EXPORT_RECORD)),
    "an unreadable record": damaged_record,
    "a huge record": huge_record,
    "a record of a newer raycheck": newer_format,
    "a record that leads elsewhere": of_another_place,
    "an export under way": lambda store, place: store.delete(export_key(place, EXPORT_ENDS[0])),
    "other weights": other_weights,
    "another run's": of_another_run,
    "one by hand": by_hand,
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_is_not_proven_to_be_a_whole_export_of_this_runs_training_stays_as_it_is(change: str) -> None:
    store = open_store(f"memory://{change.replace(' ', '-')}")
    ann, places = run_of(store)
    CHANGES[change](store, places[0])
    before = {key: data for key, data in everything(store).items() if key.startswith(places[0])}

    assert pruned(store, ann) == (places[1],)

    assert {key: data for key, data in everything(store).items() if key.startswith(places[0])} == before
    assert reasons(store, ann)[places[0]][0] is True
    assert_invariants(store)


class Fails(Around):
    """A store that lets a number of writes and deletes pass, and fails all others, before or after applying them."""

    def __init__(self, inner: Store, passes: int, *, is_late: bool) -> None:
        super().__init__(inner)
        self.left, self.is_late = passes, is_late
        self.order: list[str] = []

    def put_if_match(self, key: str, data: bytes, version: str) -> Written:
        self._pass(lambda: self.inner.put_if_match(key, data, version), f"mark {key}")

    def delete(self, key: str) -> None:
        self._pass(lambda: self.inner.delete(key), key)

    def _pass(self, act, what: str) -> None:
        self.left -= 1
        if self.left >= 0 or (self.left == -1 and self.is_late):
            act()
            self.order.append(what)
        if self.left < 0:
            raise StoreError("it is away")


@pytest.mark.parametrize("is_late", [False, True])
@pytest.mark.parametrize("passes", range(5))
def test_after_a_crash_at_any_write_no_reader_finds_half_and_the_next_prune_ends_it(passes: int, is_late: bool) -> None:
    store = open_store(f"memory://crash-{passes}-{is_late}")
    ann, places = run_of(store, saves=2)
    whole = {key for key in everything(store) if key.startswith(places[0])}

    with pytest.raises(StoreError):
        prune_exports(Fails(store, passes, is_late=is_late), EXPORTS_PREFIX, ann.look(), keep_last=1)

    left = {key for key in everything(store) if key.startswith(places[0])}
    has_index = export_key(places[0], EXPORT_ENDS[0]) in left
    assert left == whole if has_index else True, "with an index all files are there"
    is_marked = b'"is_pruned": true' in store.get(export_key(places[0], EXPORT_RECORD)).data if left else False
    if is_marked:
        with pytest.raises(ConfigError, match="prune-exports"):
            check_not_being_pruned(store, places[0])
    pruned(store, ann)
    assert not [key for key in everything(store) if key.startswith(places[0])]
    check_not_being_pruned(store, places[0])


def test_a_mark_is_seen_though_the_first_answer_was_changed_and_so_is_a_newer_formats(store: Store) -> None:
    ann, places = run_of(store, saves=2)
    with pytest.raises(StoreError):
        prune_exports(Fails(store, 1, is_late=False), EXPORTS_PREFIX, ann.look(), keep_last=1)

    class OnceChanged(Around):
        is_changed = False

        def get(self, key: str, max_bytes: int = MAX_WHOLE_BYTES) -> Got:
            got = self.inner.get(key, max_bytes)
            data = got.data if self.is_changed else got.data.replace(b"true", b"tru3")
            self.is_changed = True
            return Got(data, got.version, got.at)

    with pytest.raises(ConfigError, match="being pruned"):
        check_not_being_pruned(OnceChanged(store), places[0])
    newer_format(store, places[0])
    with pytest.raises(NewerFormatError):
        check_not_being_pruned(store, places[0])


def test_the_index_goes_first_and_the_record_last(store: Store) -> None:
    ann, places = run_of(store, saves=2)
    seen = Fails(store, 100, is_late=False)

    prune_exports(seen, EXPORTS_PREFIX, ann.look(), keep_last=1)

    record = export_key(places[0], EXPORT_RECORD)
    assert seen.order[:2] == [f"mark {record}", export_key(places[0], EXPORT_ENDS[0])]
    assert seen.order[-1] == record


def test_a_directory_that_was_exported_anew_meanwhile_is_left_alone(store: Store) -> None:
    ann, places = run_of(store, saves=2)

    class Overtaken(Around):
        def put_if_match(self, key: str, data: bytes, version: str) -> Written:
            write_export(self.inner, places[0], places[1].split("/")[1])
            return self.inner.put_if_match(key, data, version)

    assert prune_exports(Overtaken(store), EXPORTS_PREFIX, ann.look(), keep_last=1) == ()
    assert not any(b"is_pruned" in data for key, data in everything(store).items() if key.endswith(EXPORT_RECORD))


@pytest.mark.parametrize(
    "wrong",
    [
        {"checkpoint": "latest"},
        {"last": "config.json"},
        {"files": {"config.json": 2}},
        {"files": {EXPORT_ENDS[0]: 1, "a/b": 1}},
        {"files": {EXPORT_ENDS[0]: 1, "..": 1}},
        {"files": {EXPORT_ENDS[0]: 1, EXPORT_RECORD: 1}},
        {"files": {EXPORT_ENDS[0]: 1, "a\x1b[2J": 1}},
    ],
)
def test_a_record_that_cannot_be_is_refused(wrong: dict) -> None:
    record = ExportRecord(
        run_id="r", checkpoint="step-000000001-a1-s1", by_training=True, last=EXPORT_ENDS[0], files={EXPORT_ENDS[0]: 1}
    )

    assert dump(record)
    with pytest.raises(CorruptError, match="record"):
        replace(record, **wrong)
    assert object_keys.EXPORT_RECORD not in object_keys.EXPORT_ENDS
