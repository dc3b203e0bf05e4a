"""Tests owners: that a driver which was fenced stays fenced, however many drivers have started the run since. Step 9.

All but the newest owners are in pages (40). test_pages.py tests what owners and checkpoints in pages have in common.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from threading import Event
from uuid import uuid4

import pytest

from raycheck.bucket.format import object_keys
from raycheck.bucket.format.latest import MAX_ATTEMPTS_LISTED, Entry, Latest
from raycheck.bucket.format.object_keys import CheckpointName
from raycheck.bucket.protocol.removal.prune_and_sweep import sweep
from raycheck.bucket.protocol.repair import repair
from raycheck.bucket.protocol.rewind import rewind
from raycheck.bucket.protocol.sharing.fork import fork, is_fork
from raycheck.bucket.protocol.swap import Register
from raycheck.bucket.reading import read_latest, read_newest
from raycheck.bucket.store import Store, open_store
from raycheck.catalog.copier import MirrorCopier
from raycheck.errors import ConfigError, CorruptError, FencedError, StoreError
from tests.support.histories.invariants import assert_invariants
from tests.support.histories.small_pages import small_pages
from tests.support.samples.sample_checkpoints import Around, Driver

LIMIT = 64 * 1024
DRIVERS = tuple(f"driver-{number}" for number in range(9))


@pytest.fixture
def small() -> Iterator[None]:
    with small_pages():
        yield


def store() -> Store:
    return open_store(f"memory://{uuid4().hex}")


def started(run: Store, *, owners: tuple[str, ...] = DRIVERS) -> list[Driver]:
    """Start a run by one driver after the other. Each saves once."""
    drivers = [Driver(run, owner) for owner in owners]
    for driver in drivers:
        attempt, _ = driver.claim(f"group of {driver.me.owner}")
        driver.save(attempt.number, 1, step=10 * attempt.number, keep_last=None)
    return drivers


def claims_again(run: Store, owner: str) -> tuple[object, object]:
    """Claim for a new group, as a coordinator does that has no memory."""
    return Driver(run, owner, "without memory").claim(f"another group of {owner}")


# --- how large `latest` becomes ---


def test_100_000_drivers_leave_latest_small_and_all_of_them_fenced() -> None:
    """Each swap adds 400 owners here, and not one. The lists of checkpoints and attempts
    are as long as they get."""
    run = store()
    driver = Driver(run)
    driver.claim("g0")
    names = [CheckpointName(attempt=1, save=save, step=10 * save) for save in range(1, 3000)]

    def fill(body: Latest, now: float) -> Latest:
        metrics = {"loss": 0.123456, "accuracy": 0.9, "lr": 1e-4}
        live = tuple(
            Entry(
                key=str(name), step=name.step, committed_at=now, size_bytes=1, metrics=metrics, manifest_crc32=2**32 - 1
            )
            for name in names
        )
        mine = replace(body.attempt, last_save=len(names))
        past = tuple(replace(mine, number=0, group=uuid4().hex[:16]) for _ in range(MAX_ATTEMPTS_LISTED - 1))
        return replace(body, newest=live, head=live[-1].key, attempts=(*past, mine))

    Register(run).edit(fill, what="fill")
    register, sizes, added = Register(run), [], ["ann"]
    for _ in range(250):
        batch = [uuid4().hex[:16] for _ in range(400)]
        added += batch
        register.edit(
            lambda body, _, new=batch: replace(body, newest_owners=(*body.newest_owners, *new)), what="owners"
        )
        sizes.append(len(run.get(object_keys.LATEST_KEY).data))
    sweep(run)

    body = read_newest(run)
    assert max(sizes) < LIMIT
    assert max(sizes[125:]) < max(sizes[:125]) + 2048, "it keeps growing"
    assert (body.num_owners, body.first_owner) == (100_001, "ann")
    assert len(body.owner_pages) <= 8
    assert read_latest(run).owners == tuple(added)
    pages = list(run.list_objects(object_keys.PAGES_PREFIX))
    assert sum(item.size_bytes for item in pages) < 100 * 1024 * 1024
    for owner in (added[1], added[50_000], added[-1]):
        with pytest.raises(FencedError):
            claims_again(run, owner)
    assert claims_again(run, "a new one")


def test_a_run_of_very_many_checkpoints_can_be_forked() -> None:
    bucket = f"memory://{uuid4().hex}"
    run, target = (open_store(f"{bucket}/{name}") for name in ("run", "fork"))
    driver = Driver(run)
    driver.claim("g0")
    names = [CheckpointName(attempt=1, save=save, step=10 * save) for save in range(1, 3000)]

    def fill(body: Latest, now: float) -> Latest:
        live = tuple(
            Entry(key=str(name), step=name.step, committed_at=now, size_bytes=1, metrics={}, manifest_crc32=1)
            for name in names
        )
        mine = replace(body.attempt, last_save=len(names))
        return replace(body, newest=live, head=live[-1].key, attempts=(mine,))

    Register(run).edit(fill, what="fill")
    driver.look()
    driver.save(1, 3000, keep_last=None)

    assert fork(run, target, run_id="f" * 32).borrowed_bytes

    assert len(read_newest(run).holds) == 1
    assert is_fork(read_newest(target))


# --- who is fenced ---


def test_every_driver_but_the_last_is_fenced_wherever_it_is_listed(small: None) -> None:
    run = store()
    drivers = started(run)
    body = read_newest(run)
    assert body.newest_owners == DRIVERS[-1:]
    assert len(body.owner_pages) > 1

    for driver in drivers[:-1]:
        with pytest.raises(FencedError):
            claims_again(run, driver.me.owner)
        with pytest.raises(FencedError):
            driver.take_over(f"group of {driver.me.owner}")
        with pytest.raises(FencedError):
            driver.save(9, 2)
    claims_again(run, DRIVERS[-1])
    claims_again(run, "somebody new")

    assert assert_invariants(run).owners == (*DRIVERS, "somebody new")


@pytest.mark.parametrize("harm", ["lost", "damaged"])
@pytest.mark.parametrize("which", [0, -1])
def test_a_lost_page_of_owners_stops_whoever_may_be_in_it_and_nobody_else(small: None, harm: str, which: int) -> None:
    run = store()
    live = started(run)[-1]
    page = read_newest(run).owner_pages[which]
    lost = live.register.pages.read([page])[0].owners
    if harm == "lost":
        run.delete(page.key)
    else:
        run.put(page.key, run.get(page.key).data.replace(b"driver", b"drivel"))
    before = read_newest(run)

    for owner in (*DRIVERS[:-1], "somebody new"):
        with pytest.raises((CorruptError, FencedError), match=r"raycheck repair|taken over"):
            claims_again(run, owner)
    assert read_newest(run) == before, "nobody has claimed"
    with pytest.raises(CorruptError, match=f"{page.key}.*raycheck repair"):
        claims_again(run, "somebody new")
    attempt, _ = Driver(run, DRIVERS[-1], "again").claim("of the last one")
    again = Driver(run, DRIVERS[-1], "again")
    for save in (1, 2, 3):
        again.save(attempt.number, save, step=1000 + save, keep_last=None)
    repair(run)

    body = assert_invariants(run)
    assert body.owners[:-1] == tuple(owner for owner in DRIVERS if owner not in lost)
    for owner in body.owners[:-1]:
        with pytest.raises(FencedError):
            claims_again(run, owner)


class Overtaken(Around):
    """Applies the first swap of `latest` and loses the answer; then other drivers start the run."""

    does: Callable[[], object] | None = None

    def put_if_match(self, key: str, data: bytes, version: str):
        written = self.inner.put_if_match(key, data, version)
        if self.does is not None:
            does, self.does = self.does, None
            does()
            raise StoreError("the answer is lost")
        return written


def test_a_rewind_whose_answer_was_lost_is_known_by_its_owner_in_a_page(small: None) -> None:
    run = Overtaken(store())
    started(run.inner)
    key = read_latest(run).live[2].key
    run.does = lambda: started(run.inner, owners=("zoe", "yan", "xan"))

    rewind(Register(run), key)

    owners = assert_invariants(run.inner).owners
    assert [owner[:6] for owner in owners[-4:]] == ["rewind", "zoe", "yan", "xan"]
    assert owners[-4] not in read_newest(run).newest_owners


def test_a_claim_that_others_have_overtaken_is_fenced_though_its_owner_is_in_a_page_by_then(small: None) -> None:
    run = Overtaken(store())
    started(run.inner)
    run.does = lambda: started(run.inner, owners=("zoe", "yan", "xan"))

    with pytest.raises(FencedError):
        Driver(run, "late").claim("late")

    assert assert_invariants(run.inner).owners == (*DRIVERS, "late", "zoe", "yan", "xan")


# --- copies ---


def test_a_mirror_follows_a_run_of_many_drivers_and_fences_all_of_them(small: None) -> None:
    run, copy = store(), store()
    started(run)
    MirrorCopier(run, copy, stop=Event()).run()
    pages = {page.key for page in read_newest(copy).owner_pages}
    started(run, owners=("zoe", "yan", "xan"))

    shown = MirrorCopier(run, copy, stop=Event()).run()

    assert shown.owners[:-1] == read_latest(run).owners == (*DRIVERS, "zoe", "yan", "xan")
    assert pages & {page.key for page in read_newest(copy).owner_pages}, "what is in a full page stays there"
    for owner in (*DRIVERS, "xan"):
        with pytest.raises(FencedError):
            claims_again(copy, owner)
    claims_again(copy, "somebody new")
    with pytest.raises(ConfigError, match="a separate run"):
        MirrorCopier(run, copy, stop=Event()).run()
    assert_invariants(copy)


def test_a_run_that_has_parted_from_the_copied_one_is_refused_though_pages_alone_show_it(small: None) -> None:
    run, other, copy = store(), store(), store()
    started(run, owners=DRIVERS[:3])
    for item in run.list_objects(""):
        other.put(item.key, run.get(item.key).data)
    started(run, owners=("zoe", *DRIVERS[4:]))
    started(other, owners=("yan", *DRIVERS[4:]))
    MirrorCopier(run, copy, stop=Event()).run()
    assert read_newest(run).newest_owners == read_newest(other).newest_owners
    before = read_latest(copy)

    with pytest.raises(ConfigError, match="another branch of this run"):
        MirrorCopier(other, copy, stop=Event()).run()

    assert read_latest(copy) == before
