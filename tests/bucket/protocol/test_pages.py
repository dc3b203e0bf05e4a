"""Tests pages: that nobody can tell where an entry is listed, and what needs no page when one is lost. Step 40."""

import re
import shlex
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from threading import Event
from uuid import uuid4

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

import raycheck
from raycheck.bucket.format import object_keys
from raycheck.bucket.format.label import Label
from raycheck.bucket.format.latest import Entry, Latest, PagesNeededError, dump_latest
from raycheck.bucket.format.object_keys import CheckpointName
from raycheck.bucket.history.segments import read_facts
from raycheck.bucket.pages import Pages
from raycheck.bucket.protocol import name_and_score
from raycheck.bucket.protocol.damage import go_back
from raycheck.bucket.protocol.paging import fold, sweep_pages
from raycheck.bucket.protocol.pin_and_evict import evict, pin
from raycheck.bucket.protocol.removal.delete import delete_checkpoint
from raycheck.bucket.protocol.removal.prune_and_sweep import prune, sweep
from raycheck.bucket.protocol.repair import repair
from raycheck.bucket.protocol.rewind import rewind
from raycheck.bucket.protocol.swap import Register
from raycheck.bucket.reading import Checkpoint, list_directories, read_latest, read_newest
from raycheck.bucket.store import Store, open_store
from raycheck.catalog.copier import MirrorCopier
from raycheck.cli import app
from raycheck.errors import ConfigError, CorruptError, RaycheckError, StoreError
from raycheck.settings import Retention
from tests.support.histories.invariants import assert_invariants
from tests.support.histories.small_pages import small_pages
from tests.support.samples.sample_checkpoints import Around, Driver, write_checkpoint


@pytest.fixture(autouse=True)
def small() -> Iterator[None]:
    with small_pages():
        yield


def store() -> Store:
    return open_store(f"memory://{uuid4().hex}")


def trained(store: Store, *, saves: int = 8) -> Driver:
    """Make a run that has kept this many checkpoints; all but the newest are in pages."""
    driver = Driver(store)
    driver.claim("g1")
    for save in range(1, saves + 1):
        driver.save(1, save, keep_last=None)
    return driver


def pages_of(store: Store) -> set[str]:
    return {item.key for item in store.list_objects(object_keys.PAGES_PREFIX)}


# --- where entries are listed ---


def entries(count: int) -> tuple[Entry, ...]:
    return tuple(
        Entry(
            key=str(CheckpointName(attempt=1, save=save, step=save)),
            step=save,
            committed_at=float(save),
            size_bytes=1,
            metrics={"loss": float(save)},
            manifest_crc32=save,
        )
        for save in range(1, count + 1)
    )


ACTS = st.lists(
    st.tuples(
        st.sampled_from(
            ["save", "save", "save", "pin", "unpin", "name", "unname", "score", "rewind", "prune", "claim"]
        ),
        st.integers(0, 20),
        st.integers(1, 4),
    ),
    max_size=25,
)


def act(driver: Driver, what: str, pick: int, number: int) -> str:
    """Do one thing to a run as a process that has seen nothing does. Return the error, if it is refused."""
    body = driver.look()
    live = body.live
    key = live[pick % len(live)].key if live else str(CheckpointName(attempt=1, save=1, step=1))
    register = Register(driver.store)
    try:
        match what:
            case "save":
                driver.claim(f"g{body.attempt.number}-{body.counter}") if not body.attempt.world_size else None
                attempt = driver.look().attempt
                driver.save(attempt.number, attempt.last_save + 1, keep_last=number if pick % 3 == 0 else None)
            case "claim":
                driver.claim(f"c{body.attempt.number}")
            case "pin" | "unpin":
                pin(register, key, pinned=what == "pin")
            case "name":
                name_and_score.name(register, key, Label(name=f"n{number}", may_move=bool(pick % 2)))
            case "unname":
                name_and_score.unname(register, f"n{number}")
            case "score":
                name_and_score.score(register, key, {f"s{number}": float(pick)})
            case "rewind":
                rewind(register, key)
                driver.me = replace(driver.me, owner=f"again-{body.counter}")
            case "prune":
                prune(register, Retention(keep_last=number), grace_s=0.0)
    except RaycheckError as error:
        return type(error).__name__
    return ""


def facts(body: Latest) -> object:
    return [replace(entry, committed_at=0.0, expires_at=None) for entry in body.live], body.head, body.attempt.number


@given(ACTS)
def test_a_run_with_pages_is_the_run_that_it_would_be_without(acts: list[tuple[str, int, int]]) -> None:
    """The commits' own evictions are made up for by a prune with the same rules, as it happens in training."""
    runs = []
    for most in (1, 10**6):
        with small_pages(newest=most):
            driver = Driver(store())
            driver.claim("g1")
            for save in range(1, 6):
                driver.save(1, save, keep_last=None)
            told = []
            for what, pick, number in acts:
                told.append(act(driver, what, pick, number))
                if what == "save" and pick % 3 == 0:
                    evict(Register(driver.store), Retention(keep_last=number))
            body = assert_invariants(driver.store)
            runs.append((told, facts(body), sorted(item.key for item in body.evicted)))
            assert most > 1 or len(read_newest(driver.store).newest) <= 3, "at most the head, the restored and one more"
    assert runs[0] == runs[1]


@given(st.integers(1, 60), st.sets(st.integers(1, 60)), st.sets(st.integers(1, 60)), st.integers(1, 60))
@settings(max_examples=2 * settings().max_examples)
def test_a_fold_loses_nothing_and_writes_only_what_changed(
    count: int, gone: set[int], changed: set[int], head: int
) -> None:
    every = entries(count)
    driver = Driver(store())
    driver.claim("g1")
    start = replace(driver.look(), newest=every, head=every[min(head, count) - 1].key, counter=7)
    pages = Pages(driver.store)
    first, written = fold(start, None, pages)
    for key, data in written.items():
        driver.store.put(key, data)
    left = tuple(
        replace(entry, pinned=True) if entry.step in changed else entry
        for entry in every
        if entry.step not in gone or entry.key == start.head
    )

    whole = pages.whole(first)
    second, again = fold(replace(whole, newest=left, counter=8), first, pages)

    assert whole == replace(start, newest=every)
    assert pages.whole(second).live == left
    assert max((page.count for page in first.pages), default=0) <= max(2, count), "pages are bounded"
    assert len(first.pages) <= 3
    assert len(second.pages) <= 3
    assert set(written) == {page.key for page in first.pages}
    assert set(again) == {page.key for page in second.pages} - {page.key for page in first.pages}
    same = {entry.key for entry in every if entry in left}
    for page in first.pages:
        listed = {entry.key for read in pages.read([page]) for entry in read.live}
        if listed <= same:
            assert page in second.pages or len(second.pages) < len(first.pages) or second.head in listed


def test_a_part_of_the_list_cannot_be_taken_for_all_of_it() -> None:
    driver = trained(store())
    oldest = read_latest(driver.store).live[0].key
    name_and_score.name(driver.register, oldest, Label(name="x"))
    body = read_newest(driver.store)

    assert body.pages
    above = CheckpointName(attempt=1, save=9, step=90)
    for question in (
        lambda: body.live,
        body.held,
        lambda: body.named("x"),
        lambda: body.entry(oldest),
        lambda: body.of_step(10),
        lambda: list(body.between(None, above)),
    ):
        with pytest.raises(PagesNeededError):
            question()
    assert body.num_live == len(read_latest(driver.store).live) == 8
    assert body.entry(body.head or "") is not None


@pytest.mark.parametrize("size", [2, 4, 1000])
def test_a_checkpoint_that_an_attempt_restored_is_found_when_it_moves_to_a_page_after_newer_ones(size: int) -> None:
    run = store()
    with small_pages(page=size):
        driver = trained(run, saves=4)
        oldest = driver.look().live[0].key
        rewind(Register(run), oldest)
        bob = Driver(run, "bob")
        for group in ("h1", "h2"):  # the second attempt restores another one, so latest need not list the oldest
            attempt, _ = bob.claim(group)
            for save in (1, 2, 3):
                bob.save(attempt.number, save, keep_last=None)

    assert oldest not in {entry.key for entry in read_newest(run).newest}
    for page in read_newest(run).pages:
        listed = [entry.key for entry in bob.register.pages.read([page])[0].live]
        assert listed == sorted(listed, key=CheckpointName.parse)
        assert (page.first, page.last) == (listed[0], listed[-1])
    pin(Register(run), oldest)
    assert read_latest(run).live[0].pinned


class Meanwhile(Around):
    """Does something once, before the first page is read."""

    def __init__(self, inner: Store, does: Callable[[], object]) -> None:
        super().__init__(inner)
        self.does: Callable[[], object] | None = does

    def get(self, key: str, max_bytes: int = 1 << 30):
        if key.startswith(object_keys.PAGES_PREFIX) and self.does is not None:
            does, self.does = self.does, None
            does()
        return self.inner.get(key, max_bytes)


def test_two_threads_read_pages_of_different_bodies() -> None:
    """A coordinator's deletes read all pages while a commit continues the last one."""
    run = store()
    driver = trained(run)
    old = read_newest(run)
    evict(driver.register, Retention(keep_last=2))
    new = read_newest(run)
    pages = Pages(Meanwhile(run, lambda: pages.whole(new)))
    pages.read(old.pages[:1])
    pages._store.does = lambda: pages.whole(new)

    found = pages.whole(old)

    assert found.num_live == 8
    assert pages.whole(new) == read_latest(run)


# --- what needs no page ---


class Counted(Around):
    """Lists the pages that are read."""

    def __init__(self, inner: Store) -> None:
        super().__init__(inner)
        self.read: list[str] = []

    def get(self, key: str, max_bytes: int = 1 << 30):
        if key.startswith(object_keys.PAGES_PREFIX):
            self.read.append(key)
        return self.inner.get(key, max_bytes)


class Counting(Around):
    """Counts the bytes of what is read and written, by key, in order."""

    def __init__(self, inner: Store) -> None:
        super().__init__(inner)
        self.gets: dict[str, int] = {}
        self.puts: dict[str, int] = {}

    def get(self, key: str, max_bytes: int = 1 << 30):
        got = self.inner.get(key, max_bytes)
        self.gets[key] = self.gets.get(key, 0) + len(got.data)
        return got

    def put_if_absent(self, key: str, data: bytes):
        self.puts[key] = len(data)
        return self.inner.put_if_absent(key, data)

    def put_if_match(self, key: str, data: bytes, version: str):
        self.puts[key] = len(data)
        return self.inner.put_if_match(key, data, version)


def test_claims_commits_restores_and_the_end_read_no_page_but_the_last_one_to_continue_it() -> None:
    run = store()
    with small_pages(page=1000):
        trained(run)
    counted = Counted(run)

    bob = Driver(counted, "bob")
    attempt, entry = bob.claim("h1")
    assert entry is not None
    Checkpoint(counted, entry).read_manifest()
    assert not counted.read
    with small_pages(page=1000):
        for save in (1, 2, 3, 4):
            bob.save(attempt.number, save, keep_last=2)
        bob.finish("h1")

    assert len(counted.read) <= 1
    assert read_latest(run).is_finished


@pytest.mark.parametrize("harm", ["lost", "damaged"])
@pytest.mark.parametrize(("which", "saves"), [(0, 8), (-1, 8), (-1, 7), (-1, 6)])
def test_a_lost_page_stops_neither_a_claim_nor_a_commit_and_a_repair_lists_its_checkpoints_again(
    harm: str, which: int, saves: int
) -> None:
    run = store()
    trained(run, saves=saves)
    pin(Register(run), "step-000000010-a1-s1")
    live = read_latest(run).live
    page = read_newest(run).pages[which]
    if harm == "lost":
        run.delete(page.key)
    else:
        run.put(page.key, run.get(page.key).data.replace(b'"step": ', b'"stop": ', 1))

    bob = Driver(run, "bob")
    attempt, entry = bob.claim("h1")
    assert entry == live[-1]
    for save in (1, 2, 3):
        bob.save(attempt.number, save, step=100 + save, keep_last=None)
    with pytest.raises(CorruptError, match=f"{page.key}.*raycheck repair"):
        read_latest(run)
    with pytest.raises(CorruptError, match="raycheck repair"):
        prune(Register(run), Retention(keep_last=1), grace_s=0.0)
    repair(run)

    body = assert_invariants(run)
    assert [item.key for item in body.live][:-3] == [item.key for item in live]
    assert body.live[-1].step == 103
    if harm == "lost":
        assert repair_is_refused(run)


def repair_is_refused(run: Store) -> bool:
    with pytest.raises(RaycheckError, match="latest is sound"):
        repair(run)
    return True


def counted_run(saves: int = 11) -> tuple[Counted, list[list[str]]]:
    """Make a run whose checkpoints are in pages of two, but the newest three. Return what each page lists, in order."""
    run = store()
    with small_pages(newest=3, pages=50):
        driver = trained(run, saves=saves)
        listed = [[e.key for e in page.live] for page in driver.register.pages.read(read_newest(run).pages)]
    assert all(len(keys) == 2 for keys in listed)
    return Counted(run), listed


@pytest.mark.parametrize("is_older", [False, True])
@pytest.mark.parametrize(
    "change",
    [
        lambda register, key, step: pin(register, key),
        lambda register, key, step: name_and_score.score(register, key, {"acc": 0.5}),
        lambda register, key, step: name_and_score.name(register, key, Label(name="best-yet")),
        lambda register, key, step: raycheck.run.read_run(register.store).pin(step),
    ],
    ids=["pin", "score", "name", "a step"],
)
def test_a_change_of_one_checkpoint_reads_only_its_page(change: Callable[..., object], is_older: bool) -> None:
    run, listed = counted_run()
    if is_older:  # its pages say neither steps nor names
        body = read_newest(run)
        older = tuple(replace(page, steps=(), is_unnamed=False) for page in body.pages)
        run.put(object_keys.LATEST_KEY, dump_latest(replace(body, pages=older)))
    key = listed[1][0]
    step = CheckpointName.parse(key).step
    of_pages = dict(zip((page.key for page in read_newest(run).pages), listed, strict=True))
    before = read_latest(run.inner)
    run.read.clear()

    with small_pages(newest=3, pages=50):
        change(Register(run), key, step)

    reads = {of_pages[page][0] for page in run.read if page in of_pages}
    assert reads == {listed[1][0]} or (is_older and reads >= {listed[1][0]})
    now = read_latest(run.inner)
    assert [entry.key for entry in now.live] == [entry.key for entry in before.live]
    assert [one.key for one, other in zip(before.live, now.live, strict=True) if one != other] == [key]
    assert [page.first for page in read_newest(run).pages] == [keys[0] for keys in listed], "each page has its place"
    assert_invariants(run.inner)


@pytest.mark.parametrize("count", [1000, 10_000])
def test_a_delete_of_one_of_many_checkpoints_reads_the_page_that_lists_it_and_no_other(count: int) -> None:
    """Also for what it writes into the history: whether the checkpoint is gone, and what it was."""
    with small_pages(newest=128, page=100, pages=count // 100):
        run = Counting(store())
        Driver(run).claim("g1")
        live = entries(count)
        attempt = replace(read_newest(run).attempt, last_save=count)
        Register(run).edit(
            lambda body, now: replace(body, newest=live, head=live[-1].key, attempts=(attempt,)), what="fill"
        )
        assert len(read_newest(run).pages) >= count // 100 - 1
        size_of_page = len(run.inner.get(read_newest(run).pages[3].key).data)
        run.gets.clear(), run.puts.clear()

        delete_checkpoint(Register(run), live[350].key)

    assert [key.partition("/")[0] for key in run.gets] == ["latest", "pages"]
    assert [key.partition("/")[0] for key in run.puts] == ["pages", "latest", "history"]
    assert sum(run.gets.values()) + sum(run.puts.values()) < 2 * len(run.inner.get("latest").data) + 3 * size_of_page
    facts, _ = read_facts(run, read_newest(run).run_id)
    assert [*facts.drops] == [*facts.commits] == [live[350].key]
    assert assert_lists(run, [*live[:350], *live[351:]])


def assert_lists(run: Store, live: list[Entry]) -> bool:
    assert [*read_latest(run).live] == live
    return True


class Conflicting(Around):
    """Refuses the first swap of `latest`, after something else was done."""

    def __init__(self, inner: Store, does: Callable[[], object]) -> None:
        super().__init__(inner)
        self.does: Callable[[], object] | None = does

    def put_if_match(self, key: str, data: bytes, version: str):
        if self.does is not None:
            does, self.does = self.does, None
            does()
        return self.inner.put_if_match(key, data, version)


class Losing(Around):
    """Applies the first swap of `latest`, and loses the answer."""

    is_lost = False

    def put_if_match(self, key: str, data: bytes, version: str):
        written = self.inner.put_if_match(key, data, version)
        if not self.is_lost:
            self.is_lost = True
            raise StoreError("the answer is lost")
        return written


def test_what_only_a_refused_try_would_have_dropped_is_not_in_the_history() -> None:
    run, _ = counted_run()
    first, second, *_ = (entry.key for entry in read_latest(run).live)
    late = Conflicting(run, lambda: pin(Register(run.inner), first))

    evict(Register(late), Retention(keep_last=9), by="dropped by hand")

    facts, _ = read_facts(run, read_newest(run).run_id)
    assert [*facts.drops] == [*facts.commits] == [second]


def test_a_drop_whose_answer_was_lost_is_in_the_history() -> None:
    run, listed = counted_run()

    delete_checkpoint(Register(Losing(run)), listed[1][0])

    facts, _ = read_facts(run, read_newest(run).run_id)
    assert [*facts.drops] == [*facts.commits] == [listed[1][0]]
    assert_invariants(run.inner)


def test_a_name_that_a_checkpoint_in_another_page_has_is_not_given_twice() -> None:
    run, listed = counted_run()
    name_and_score.name(Register(run), listed[0][1], Label(name="best-yet"))

    with pytest.raises(ConfigError, match=f"{listed[0][1]}.*has the name best-yet"):
        name_and_score.name(Register(run), listed[2][0], Label(name="best-yet"))
    name_and_score.name(Register(run), listed[2][0], Label(name="best-yet", may_move=True))

    assert [entry.key for entry in read_latest(run).live if entry.name] == [listed[2][0]]


def test_going_back_from_a_damaged_checkpoint_reads_no_page_if_the_one_before_it_is_listed_in_latest() -> None:
    run, _ = counted_run()
    for page in read_newest(run).pages:
        run.delete(page.key)
    bob = Driver(run, "bob")
    bob.claim("h1")

    with small_pages(newest=3, pages=50):
        entry = go_back(bob.register, bob.me, group="h1", key="step-000000110-a1-s11", problem="torn")

    assert entry.key == "step-000000100-a1-s10"


@pytest.mark.parametrize("way", ["repair", "the page is put back"])
def test_going_back_into_a_page_reads_that_page_alone_and_its_loss_has_a_cure(tmp_path: Path, way: str) -> None:
    inner = open_store(f"file://{tmp_path}/run")
    with small_pages(newest=1, pages=50):
        trained(inner, saves=8)
        *others, last = read_newest(inner).pages
        for page in (*others, last):
            inner.put(f"kept/{page.key}", inner.get(page.key).data)
            inner.delete(page.key)
        bob = Driver(inner, "bob")
        _, entry = bob.claim("h1")
        assert entry is not None

        with pytest.raises(CorruptError, match=f"{inner}: {last.key} is missing.*raycheck repair '{inner}'") as told:
            go_back(bob.register, bob.me, group="h1", key=entry.key, problem="torn")
        cure = shlex.split(re.search(r"raycheck (repair '.*')", str(told.value))[1])
        if way == "repair":
            result = CliRunner().invoke(app, cure)
            assert result.exit_code == 0, result.output
            bob = Driver(inner, "cat")
            bob.claim("h1")
        else:
            inner.put(last.key, inner.get(f"kept/{last.key}").data)
        assert go_back(bob.register, bob.me, group="h1", key=entry.key, problem="torn").key == "step-000000070-a1-s7"

    if way == "repair":
        assert [item.step for item in assert_invariants(inner).live] == list(range(10, 81, 10))


def test_a_save_of_before_a_take_over_is_answered_without_pages_that_do_not_list_it() -> None:
    run, listed = counted_run()
    for page in read_newest(run).pages[:-1]:
        run.delete(page.key)
    register = Register(run)

    def is_listed(key: str) -> bool:
        return register.ask(lambda body: body.entry(key)) is not None

    assert is_listed("step-000000110-a1-s11")
    assert not is_listed("step-000000120-a1-s12")
    assert not run.read
    assert is_listed(listed[-1][0])
    assert len(run.read) == 1
    with pytest.raises(CorruptError, match="raycheck repair"):
        is_listed(listed[0][0])


def test_a_run_that_is_open_names_a_page_that_is_lost() -> None:
    run, listed = counted_run()
    opened = raycheck.run.read_run(run)
    (first, *_) = read_newest(run).pages
    run.delete(first.key)

    with pytest.raises(CorruptError, match=f"{first.key} is missing.*raycheck repair"):
        opened.at(listed[0][0])
    assert opened.at(listed[1][0]).key == listed[1][0]
    assert opened.at(None).step == 110


# --- pages that nobody names ---


def test_pages_that_are_no_longer_named_stay_for_some_writes_and_are_then_deleted() -> None:
    run = store()
    driver = trained(run)
    named = {page.key for page in read_newest(run).pages}

    pin(Register(run), "step-000000010-a1-s1")
    sweep(run)
    assert pages_of(run) >= named, "an older latest could still be put back"
    for _ in range(2):
        pin(Register(run), driver.look().head, pinned=not driver.look().live[-1].pinned)
    sweep(run)

    assert pages_of(run) == {page.key for page in (*read_newest(run).pages, *read_newest(run).past_pages)}
    assert not named <= pages_of(run)


def test_a_page_of_a_swap_that_failed_is_deleted_and_one_that_is_about_to_be_named_is_not() -> None:
    run = store()
    trained(run)
    counter = read_newest(run).counter
    late, coming = (object_keys.page_key(counter + more, "0" * 7 + "f") for more in (0, 1))
    for key in (late, coming):
        run.put(key, b"{}")

    sweep(run)

    assert late not in pages_of(run)
    assert coming in pages_of(run)


def test_a_page_that_is_written_while_a_sweep_runs_stays_though_an_older_latest_was_put_back() -> None:
    run = store()
    trained(run)
    older = run.get(object_keys.LATEST_KEY).data
    pin(Register(run), "step-000000010-a1-s1")

    class PutBack(Around):
        """Puts `latest` back after a sweep has read it; another process writes the next body, of the same counter."""

        def get(self, key: str, max_bytes: int = 1 << 30):
            got = self.inner.get(key, max_bytes)
            if key == object_keys.LATEST_KEY:
                run.put(key, older)
                pin(Register(run), "step-000000020-a1-s2")
            return got

    sweep_pages(PutBack(run))

    assert [entry.pinned for entry in read_latest(run).live] == [False, True] + 6 * [False]


def test_a_run_that_drops_its_checkpoints_has_no_pages_left() -> None:
    run = store()
    driver = trained(run)

    prune(driver.register, Retention(keep_last=1), grace_s=0.0)
    for _ in range(3):
        pin(Register(run), driver.look().head, pinned=not driver.look().live[-1].pinned)
    sweep(run)

    assert not read_newest(run).pages
    assert not pages_of(run)
    assert_invariants(run)


def test_a_reader_whose_page_was_deleted_reads_latest_again() -> None:
    run = store()
    trained(run)

    class Overtaken(Around):
        is_late = True

        def get(self, key: str, max_bytes: int = 1 << 30):
            if key.startswith(object_keys.PAGES_PREFIX) and self.is_late:
                self.is_late = False
                for number in range(4):
                    pin(Register(run), "step-000000010-a1-s1", pinned=number % 2 == 0)
                sweep(run)
            return self.inner.get(key, max_bytes)

    assert read_latest(Overtaken(run)) == read_latest(run)
    assert Register(Overtaken(run)).read_existing()[0] == read_latest(run)


def test_an_opened_run_says_so_when_its_list_is_gone() -> None:
    run = store()
    trained(run)
    opened = raycheck.open_run(run.uri)
    for number in range(4):
        pin(Register(run), "step-000000010-a1-s1", pinned=number % 2 == 0)
    sweep(run)

    assert opened.head is not None
    with pytest.raises(raycheck.errors.NotFoundError, match="open it again"):
        print(opened.checkpoints)
    assert len(opened.reopened().checkpoints) == 8


# --- what a swap returns ---


def test_a_commit_that_was_made_long_ago_is_recognized() -> None:
    run = store()
    driver = trained(run, saves=1)
    first = write_checkpoint(run, attempt=1, save=2)
    entry = driver.commit(first, keep_last=None)
    for save in range(3, 7):
        driver.save(1, save, keep_last=None)

    again = Driver(run)  # its coordinator was started again, and a rank repeats its report
    again.me = driver.me
    assert again.commit(first, keep_last=None) == entry is not None


def test_a_checkpoint_is_deleted_at_once_while_the_readers_of_many_others_have_time() -> None:
    run = store()
    trained(run)
    evict(Register(run), Retention(keep_last=3))
    assert read_newest(run).evicted_pages

    key = raycheck.catalog.delete_checkpoint(run.uri, 60, grace_s=0.0)

    there = {str(name) for name in list_directories(run)}
    assert there == {str(CheckpointName(attempt=1, save=save, step=10 * save)) for save in range(1, 9)} - {key}


def test_a_mirror_follows_a_run_that_drops_many_checkpoints() -> None:
    run, copy = store(), store()
    driver = trained(run)
    MirrorCopier(run, copy, stop=Event()).run()
    evict(driver.register, Retention(keep_last=2))

    shown = MirrorCopier(run, copy, stop=Event()).run()

    assert read_newest(copy).evicted_pages
    assert [entry.step for entry in shown.live] == [70, 80]
    assert len(shown.evicted) == 6
    assert_invariants(copy)


# --- sizes ---


def test_many_pages_become_fewer_and_latest_names_no_more_than_it_may() -> None:
    with small_pages(newest=2, page=3, pages=4):
        run = store()
        driver = trained(run, saves=40)
        body = read_newest(run)

    assert len(body.pages) <= 4
    assert sum(page.count for page in body.pages) + len(body.newest) == 40
    assert [entry.step for entry in read_latest(run).live] == [10 * save for save in range(1, 41)]
    assert driver.look() == read_latest(run)


def test_a_run_with_pages_is_deleted_whole() -> None:
    run = store()
    trained(run)

    assert raycheck.catalog.delete_run(run.uri, live=True).is_gone

    assert not list(run.list_objects(""))


def test_what_waits_to_be_deleted_is_in_pages_too_and_is_deleted_in_its_turn() -> None:
    run = store()
    driver = trained(run)
    prune(driver.register, Retention(keep_last=2))  # readers keep their grace period

    newest = read_newest(run)
    assert newest.evicted_pages
    assert len(newest.newest_evicted) <= 1
    assert [item.key for item in read_latest(run).evicted] == [
        str(CheckpointName(attempt=1, save=save, step=10 * save)) for save in range(1, 7)
    ]
    prune(driver.register, Retention(keep_last=2), grace_s=0.0)

    body = assert_invariants(run)
    assert [entry.step for entry in body.live] == [70, 80]
    assert not body.evicted
    assert {str(name) for name in list_directories(run)} == {entry.key for entry in body.live}


def test_what_is_evicted_again_for_its_readers_is_the_newest() -> None:
    """A directory in a page of evicted checkpoints, to which a live one refers, is needed until that one's readers end."""
    run = store()
    driver = Driver(run)
    driver.claim("g1")
    base = driver.save(1, 1, keep_last=None)
    for save in range(2, 6):
        driver.save(1, save, keep_last=None)
    for save in (6, 7):
        driver.save(1, save, keep_last=None, base=base)
    evict(driver.register, Retention(keep_last=2))
    assert read_newest(run).evicted_pages[0].first == base.key
    driver.save(1, 8, keep_last=None)

    evict(driver.register, Retention(keep_last=1))

    keys = [item.key for item in assert_invariants(run).evicted]
    assert keys[-3:] == [base.key, "step-000000060-a1-s6", "step-000000070-a1-s7"]
    assert len(keys) == len(set(keys)) == 7
