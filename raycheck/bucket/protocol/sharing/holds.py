"""Lets one run use directories of another one in its bucket, without copying them. Step 30.

The lending run lists a hold in its `latest`. What a hold names is not deleted, just as what a live entry names is not.
The borrowing run lists the same directories in its `loans`. Both are changed by swaps only, in an order that ensures a
hold for each used directory at every moment: it is given before the directory is used, and returned afterwards.

A record below `holds/` keeps each hold even if `latest` is lost; a repair reads it.
"""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from raycheck.bucket.document_reading import again_if_corrupt, read_document
from raycheck.bucket.format import object_keys
from raycheck.bucket.format.checksum import crc32
from raycheck.bucket.format.document import FORMAT_VERSION, Document, dump, load
from raycheck.bucket.format.latest import Hold, Latest, Loan
from raycheck.bucket.format.object_keys import borrowed_directory, split_directory
from raycheck.bucket.protocol.paging import check_room
from raycheck.bucket.protocol.swap import Register
from raycheck.bucket.protocol.write_once import put_once
from raycheck.bucket.reading import get_latest, list_directories, read_newest
from raycheck.bucket.store import Store
from raycheck.errors import CorruptError, NotFoundError, StoreError

HOLD_GRACE_S = 86400.0
"""How long a hold stays whose run does not exist yet: that run may be about to be created."""
MAX_RECORD = 4 * 1024 * 1024


@dataclass(frozen=True, kw_only=True, slots=True)
class HoldRecord(Document):
    """A hold as it was given, for a repair of the lending run. Its fields are those of a Hold."""

    format_version: int = FORMAT_VERSION
    holder: str
    run_id: str
    directories: tuple[str, ...]
    at: float


class Lenders:
    """The runs from which a new run borrows: each `latest` is read once, and the body last read or written is swapped.

    If someone else has written since, the swap is refused and reads again.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._read: dict[str, tuple[Register, Latest, float]] = {}

    def read(self, way: str) -> tuple[Register, Latest, float]:
        """Return the register of the run at `way`, its body, and the time of that body, all as first read.

        Raises NotFoundError when there is no run.
        """
        if way not in self._read:
            register = Register(self._store.beside(way))
            body, got = register.read_existing()
            self._read[way] = register, body, got.at
        return self._read[way]


def borrow(
    store: Store,
    way: str,
    directories: Iterable[str],
    *,
    run_id: str,
    renews: bool = False,
    lenders: Lenders | None = None,
) -> tuple[Loan, ...]:
    """Take holds on directories that the run at `store` is about to use. Return the loans that its `latest` must list.

    way: the path to the run that names the directories, both its own ones and those that it has borrowed. All of them
    are first held there, so that it does not return the borrowed ones in the meantime, and then in the runs that have
    them. renews: the run at `store` already exists, and its prunes may be returning holds right now, so each hold is
    renewed. lenders: the runs as just read, for a run that does not exist yet. Raises NotFoundError when a directory is
    no longer held, ConfigError when a `latest` is too full for a hold.
    """
    wanted = frozenset(directories)
    source_ids = {way: _take(store, way, wanted, run_id=run_id, renews=renews, lenders=lenders)}
    owners: dict[str, set[str]] = {}
    for owner, name in (split_directory(directory_from(store, way, directory)) for directory in wanted):
        owners.setdefault(owner, set()).add(name)
    for owner, names in sorted(owners.items()):
        if owner != way:
            source_ids[owner] = _take(store, owner, frozenset(names), run_id=run_id, renews=renews, lenders=lenders)
    return tuple(
        Loan(source=owner, run_id=source_ids[owner], directories=tuple(sorted(names)))
        for owner, names in sorted(owners.items())
    )


def borrow_again(store: Store, refs: Iterable[str], loans: tuple[Loan, ...], *, run_id: str) -> tuple[Loan, ...]:
    """Take holds on the directories of other runs among `refs`, for a repair. Return `loans` with these added.

    Raises NotFoundError when one is no longer held.
    """
    wanted: dict[str, set[str]] = {}
    for owner, name in map(split_directory, refs):
        if owner:
            wanted.setdefault(owner, set()).add(name)
    by_source = {loan.source: loan for loan in loans}
    for owner, names in wanted.items():
        source_id = _take(store, owner, frozenset(names), run_id=run_id)
        before = set(by_source[owner].directories) if owner in by_source else set()
        by_source[owner] = Loan(source=owner, run_id=source_id, directories=tuple(sorted(names | before)))
    return tuple(by_source[owner] for owner in sorted(by_source))


def directory_from(store: Store, way: str, directory: str) -> str:
    """Return the name that the run at `store` uses for a directory that the run at `way` calls `directory`."""
    further, name = split_directory(directory)
    return borrowed_directory(_way_over(store, way, further), name)


def _way_over(store: Store, way: str, further: str) -> str:
    """Return the path from `store` to the run that is at `further` as seen from the run at `way`."""
    if not further:
        return way
    over = store.way_to(store.beside(way).beside(further))
    if over is None:
        raise NotFoundError(f"{store}: {further}, as {way} names it, is not another run in this bucket")
    return over


def _take(
    store: Store,
    way: str,
    directories: frozenset[str],
    *,
    run_id: str,
    renews: bool = False,
    lenders: Lenders | None = None,
) -> str:
    """Make the run at `way` hold these directories for the run at `store`. Return its run id. See `borrow`."""
    source, holder = _lender(store, way)

    def change(body: Latest, now: float) -> Latest | None:
        before = _hold_of(body, holder)
        if before and before.run_id == run_id and directories <= set(before.directories) and not renews:
            return None
        missing = directories - body.held()
        if missing:
            raise NotFoundError(f"{source}: checkpoint {min(missing)} was dropped by retention; open the run again")
        every = directories | set(before.directories if before else ())
        hold = Hold(
            holder=holder,
            run_id=run_id,
            directories=tuple(sorted(every)),
            at=now,
            renewals=(before.renewals if before else 0) + int(renews),
        )
        new = _with_hold(body, hold)
        check_room(new)
        return new

    if lenders is None:
        register = Register(source, is_crowded=renews)
        body, got = register.read_existing()
        at = got.at
    else:
        register, body, at = lenders.read(way)
    if change(body, at) is None:
        return body.run_id
    data = dump(HoldRecord(holder=holder, run_id=run_id, directories=tuple(sorted(directories)), at=at))
    put_once(source, object_keys.hold_key(run_id, f"{crc32(data):08x}"), data)
    return register.edit(change, what=f"hold for {store}", at=at).run_id


def _lender(store: Store, way: str) -> tuple[Store, str]:
    """Return the store of the lending run at `way`, and the path from there back to `store`, which names the holder."""
    source = store.beside(way)
    holder = source.way_to(store)
    assert holder is not None, "a run in the same bucket has a path back"
    return source, holder


def confirm(store: Store, body: Latest, lenders: Lenders | None = None) -> None:
    """Confirm the holds with which the run at `store` was created, and return what it does not use.

    body: its `latest`. lenders: the object with which the holds were taken. Raises CorruptError when a hold is gone:
    more than a day has passed, and it was swept.
    """
    for loan in body.loans:
        _confirm(store, loan, run_id=body.run_id, renews=False, lenders=lenders)


def confirm_loans(store: Store, loans: Iterable[Loan], *, run_id: str, renews: bool = False) -> None:
    """Confirm the holds for these loans, which the `latest` at `store` lists. Raises CorruptError as `confirm` does.

    renews: each hold is renewed, and keeps everything that it names. So a prune of the run at `store` that saw the
    hold, but not yet the loan, can no longer end it.
    """
    for loan in loans:
        _confirm(store, loan, run_id=run_id, renews=renews)


def check_holds(store: Store, loans: Iterable[Loan]) -> None:
    """Check that the holds for loans, which the `latest` at `store` lists, exist and will stay.

    This is enough for a run whose prunes cannot have seen such a loan before. Then only a sweep could end the hold, and
    a sweep that finds a hold younger than HOLD_GRACE_S now also finds the loan. Raises CorruptError when a hold is
    gone, or too old.
    """
    for loan in loans:
        source, holder = _lender(store, loan.source)
        body, got = Register(source).read_existing()
        hold = _hold_of(body, holder)
        if hold is None or not set(loan.directories) <= set(hold.directories) or got.at - hold.at > HOLD_GRACE_S / 2:
            raise CorruptError(f"{source}: the hold for {holder} is gone: its checkpoints may be deleted")


def _confirm(store: Store, loan: Loan, *, run_id: str, renews: bool, lenders: Lenders | None = None) -> None:
    source, holder = _lender(store, loan.source)
    wanted = set(loan.directories)

    def change(body: Latest, now: float) -> Latest | None:
        del now
        hold = _hold_of(body, holder)
        if hold is None or not wanted <= set(hold.directories):
            raise CorruptError(f"{source}: the hold for {holder} is gone: its checkpoints may be deleted")
        left = hold.directories if renews else tuple(name for name in hold.directories if name in wanted)
        changed = replace(
            hold, run_id=run_id, directories=left, is_confirmed=True, renewals=hold.renewals + int(renews)
        )
        return None if changed == hold else _with_hold(body, changed)

    what = f"confirmation of the hold for {holder}"
    if lenders is None:
        Register(source, is_crowded=renews).edit(change, what=what)
    else:
        register, _, at = lenders.read(loan.source)
        register.edit(change, what=what, at=at)  # the body is the one with the hold, which does not depend on `at`


def settle(register: Register) -> None:
    """Give back the directories that the run no longer uses. May be repeated; after a crash the next call continues.

    A directory is returned to the lending run first, and removed from `loans` after that. What no body of this run
    needs is needed again only after its hold was renewed (base_run.py), and a hold that was renewed in the meantime is
    left alone.
    """
    store = register.store
    for loan in register.read_existing()[0].loans:
        seen = _hold_seen(store, loan.source)  # before the body that says what is needed
        body = register.read_existing()[0]
        needed = body.borrowed(loan.source)
        if needed >= {name for own in body.loans if own.source == loan.source for name in own.directories}:
            continue
        if seen is not None:
            _reduce(store, loan.source, frozenset(needed), run_id=body.run_id, seen=seen)
        _end_loan(register, loan.source)


def _hold_seen(store: Store, way: str) -> Hold | None:
    """Return the hold of the run at `way` for the run at `store`; None if there is none, or the run no longer
    exists."""
    source, holder = _lender(store, way)
    try:
        return _hold_of(read_newest(source), holder)
    except NotFoundError:
        return None


def _end_loan(register: Register, source: str) -> None:
    """Remove what is not needed from the loan from `source`, and the loan itself when nothing is left."""

    def change(body: Latest, now: float) -> Latest | None:
        del now
        needed = body.borrowed(source)
        mine = next((loan for loan in body.loans if loan.source == source), None)
        left = tuple(name for name in mine.directories if name in needed) if mine else ()
        if mine is None or left == mine.directories:
            return None
        others = tuple(loan for loan in body.loans if loan.source != source)
        return replace(body, loans=(*others, replace(mine, directories=left)) if left else others)

    register.edit(change, what="end of a loan")


def _reduce(store: Store, way: str, directories: frozenset[str], *, run_id: str, seen: Hold) -> None:
    """Reduce what the run at `way` holds for the run at `store` to `directories`, or remove a hold that has none left.

    seen: the hold as it was before it was known what is needed. A hold that has changed since is left as it is. A run
    that no longer exists holds nothing.
    """
    source, holder = _lender(store, way)

    def change(body: Latest, now: float) -> Latest | None:
        del now
        hold = _hold_of(body, holder)
        if hold != seen:
            return None
        left = tuple(name for name in hold.directories if name in directories)
        changed = replace(hold, run_id=run_id, directories=left, is_confirmed=True)
        return None if changed == hold else _with_hold(body, changed)

    register = Register(source)
    try:
        body = register.edit(change, what=f"end of the hold for {holder}")
    except NotFoundError:
        return
    if _hold_of(body, holder) is None:
        _forget_records(source, run_id, until=seen.at)


def drop_orphans(register: Register) -> tuple[Hold, ...]:
    """Drop the holds whose runs no longer exist, or were never created, and return them. Step 30.

    A run that cannot be read keeps its hold, and so does one that has lost its `latest`. Records without a hold are
    deleted when they are as old as a hold without a run.
    """
    store = register.store
    body, got = register.read_existing()
    held = {hold.run_id for hold in body.holds}
    for run_id in store.list_names(object_keys.HOLDS_PREFIX):
        if run_id not in held and all(got.at - record.at > HOLD_GRACE_S for record in _records(store, f"{run_id}/")):
            _forget_records(store, run_id)
    gone = tuple(hold for hold in body.holds if _is_orphan(store, hold, age_s=got.at - hold.at))
    if not gone:
        return ()

    def change(body: Latest, now: float) -> Latest | None:
        del now
        left = tuple(hold for hold in body.holds if hold not in gone)  # one that was confirmed since differs
        return None if left == body.holds else replace(body, holds=left)

    after = register.edit(change, what="end of holds without a run")
    dropped = tuple(hold for hold in gone if _hold_of(after, hold.holder) is None)
    for hold in dropped:
        _forget_records(store, hold.run_id, until=hold.at)
    return dropped


def _is_orphan(store: Store, hold: Hold, *, age_s: float) -> bool:
    if age_s < HOLD_GRACE_S and not hold.is_confirmed:
        return False
    holder = store.beside(hold.holder)
    try:
        body = _body_or_none(holder)
        if body is None:
            return not list_directories(holder)
    except (CorruptError, StoreError):  # also without permission to read there, which a sweep must not need
        return False
    back = holder.way_to(store)
    return all(loan.source != back for loan in body.loans)


def _body_or_none(store: Store) -> Latest | None:
    try:
        return again_if_corrupt(lambda: get_latest(store))[0]
    except NotFoundError:
        return None


def recorded_holds(store: Store, *, now: float) -> tuple[Hold, ...]:
    """Return the holds in the records, for a repair that has no old body. They count as confirmed."""
    found: dict[str, Hold] = {}
    for record in _records(store):
        before = found.get(record.holder)
        every = tuple(sorted({*record.directories, *(before.directories if before else ())}))
        found[record.holder] = Hold(
            holder=record.holder, run_id=record.run_id, directories=every, at=now, is_confirmed=True
        )
    return tuple(found[holder] for holder in sorted(found))


def _records(store: Store, below: str = "") -> Iterator[HoldRecord]:
    for item in store.list_objects(f"{object_keys.HOLDS_PREFIX}{below}"):
        yield _record_at(store, item.key)


def _record_at(store: Store, key: str) -> HoldRecord:
    return read_document(store, key, _load_record, max_bytes=MAX_RECORD)[0]


def _load_record(data: bytes, *, what: str) -> HoldRecord:
    return load(HoldRecord, data, what=what, max_bytes=MAX_RECORD)


def _forget_records(store: Store, run_id: str, *, until: float = math.inf) -> None:
    """Delete the records of a run's hold that ended. until: when it was given; a later hold has its own records."""
    for item in list(store.list_objects(f"{object_keys.HOLDS_PREFIX}{run_id}/")):
        if until == math.inf or _record_at(store, item.key).at <= until:
            store.delete(item.key)


def _hold_of(body: Latest, holder: str) -> Hold | None:
    return next((hold for hold in body.holds if hold.holder == holder), None)


def _with_hold(body: Latest, hold: Hold) -> Latest:
    others = tuple(item for item in body.holds if item.holder != hold.holder)
    return replace(body, holds=(*others, hold) if hold.directories else others)
