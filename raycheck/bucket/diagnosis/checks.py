"""Checks a place for runs: can it be reached, and does it do what the protocol needs?

Each check works on scratch objects below `probes/`, which it removes, and returns findings. A check
raises an error when it cannot continue: `found` turns the error into a finding, and `refuse_unfit_place` lets it
propagate. So `raycheck doctor` and a training that refuses to start report the same text.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from uuid import uuid4

from raycheck.bucket.diagnosis.finding import BucketFinding, ok, refuse
from raycheck.bucket.diagnosis.race import ROUNDS, by_threads, race
from raycheck.bucket.diagnosis.rules import judge
from raycheck.bucket.format import object_keys
from raycheck.bucket.format.checksum import crc32
from raycheck.bucket.protocol.preflight import probe, rights_on
from raycheck.bucket.store import Store
from raycheck.bucket.store.address import kind_of
from raycheck.bucket.store.bucket_rules import BucketRules
from raycheck.bucket.store.interface import Buffer, Range
from raycheck.errors import ConfigError, DeniedError, NotFoundError, RaycheckError, StoreError

CLOCK_WRONG_S, CLOCK_ADVICE_S = 600.0, 10.0
"""S3 and Azure refuse requests whose time differs from theirs by 15 minutes, and a clock that has drifted so far drifts
on."""
CONDITIONS = "conditional writes"
Check = Callable[[Store], Iterator[BucketFinding]]


def refuse_unfit_place(store: Store, *, node: str) -> None:
    """Raise the first thing that makes the place unfit for a run: what `raycheck doctor` calls wrong.

    node: the name of this one, for errors. Costs some 90 small requests and an upload of two parts. In a bucket, most
    checks run at the same time. Raises ConfigError, and StoreError when the store or the network fails.
    """
    refuse(store, check_endpoint(store))
    refuse(store, check_rights(store, node=node))
    checks: tuple[Check, ...] = (
        check_clock,
        check_conditions,
        check_race,
        check_parts,
        check_rules,
    )
    store.together(*(partial(_refuse_by, check, store) for check in checks))


def _refuse_by(check: Check, store: Store) -> None:
    refuse(store, check(store))


def check_endpoint(store: Store) -> Iterator[BucketFinding]:
    """Check that the place answers at all."""
    try:
        next(store.list_folders(""), None)
    except DeniedError:  # check_rights says it
        pass
    except NotFoundError:
        what = f"nothing is there, says {store.endpoint}" if store.endpoint else "this is a file, or lies below one"
        raise ConfigError(f"{store}: {what}; give the address of a bucket or of a folder") from None
    if store.endpoint:
        yield ok("endpoint", f"{store.endpoint} answers")
    elif kind_of(store.uri) == "memory":
        yield BucketFinding(
            name="endpoint",
            state="advice",
            text="the memory of this process: no other process sees what is saved there, and it ends with this one",
            cure="Give a folder or a bucket for what is to stay",
        )
    elif not Path(f"/{store.root_path}").exists():
        yield BucketFinding(
            name="endpoint",
            state="advice",
            text="this folder does not exist yet: the first write creates it, and this examination writes",
            cure="If it should exist, mount what is missing, or correct the address and remove the new folder",
        )
    else:
        yield ok("endpoint", "a folder, which all nodes have to share (with --address, every node is asked)")


def check_clock(store: Store, *, now: Callable[[], float] = time.time) -> Iterator[BucketFinding]:
    """Compare this machine's clock with the store's. now: this machine's, in unix seconds."""
    if not store.endpoint:  # its times are this machine's
        return
    with _scratch(store) as key:
        store.put(key, b"clock")
        before = now()
        at = store.get(key).at
        after = now()
    off_s = (before + after) / 2 - at
    unsure_s = (after - before) / 2 + 1.0  # a store states whole seconds
    text = f"this machine's is {abs(off_s):.0f} s {'ahead of' if off_s > 0 else 'behind'} the store's"
    if abs(off_s) - unsure_s > CLOCK_WRONG_S:
        yield BucketFinding(
            name="clock",
            state="wrong",
            text=f"{text}: stores refuse requests that were signed 15 minutes off, and tokens expire early",
            cure="Set this machine's clock, as by NTP",
        )
    elif abs(off_s) - unsure_s > CLOCK_ADVICE_S:
        yield BucketFinding(name="clock", state="advice", text=text, cure="Set this machine's clock, as by NTP")
    else:
        yield ok("clock", f"within {abs(off_s) + unsure_s:.0f} s of the store's")


def check_rights(store: Store, *, node: str) -> Iterator[BucketFinding]:
    """Check each thing that a node must be allowed to do, as every node does before the first step.

    A store that allows a conditional write and ignores its condition lacks no right, and is a finding of that name.
    """
    rights = rights_on(store, object_keys.probe_key(uuid4().hex), node=node)
    ignored: list[BucketFinding] = []
    try:
        for verb, call in rights.items():
            try:
                call()
            except ConfigError as error:
                if verb != "conditional put" or not isinstance(error.__cause__, ConfigError):
                    raise
                ignored.append(BucketFinding(name=CONDITIONS, state="wrong", text=str(error)))
            else:
                yield ok(f"right to {verb}", "granted")
    except RaycheckError:
        with suppress(RaycheckError):  # the first error is more informative
            rights["delete"]()
        raise
    yield from ignored  # after the delete: whoever refuses it asks for no more


def check_conditions(store: Store) -> Iterator[BucketFinding]:
    """Check that conditional writes are conditional, as every coordinator does."""
    probe(store)
    yield ok(CONDITIONS, "a second create and a stale replacement are refused")


def check_race(store: Store) -> Iterator[BucketFinding]:
    """Check that conditional writes are atomic, by threads that race."""
    yield raced(race(store, by_threads(store)), "threads", rounds=ROUNDS)


def raced(count: int, kind: str, *, rounds: int) -> BucketFinding:
    """Return the finding about a race that nobody won twice."""
    return ok("atomicity", f"{count} {kind} raced for {rounds} objects, twice each, and never did two of them win")


def check_parts(store: Store) -> Iterator[BucketFinding]:
    """Check that an object of two parts is written and read back, also across their border."""
    part = store.part_bytes(0)
    data = memoryview(uuid4().bytes * (part // 16 + 1))[: part + 1]
    with _scratch(store) as key:
        store.put_parts(key, iter((data[:part], data[part:])), len(data))
        border = max(0, part - 8), part + 1
        if store.head(key) != len(data) or bytes(store.get_range(key, *border)) != data[slice(*border)]:
            raise ConfigError(f"{store}: an object of two parts is read back as other bytes than were written")
        is_stated = store.states_checksum(key)
    stated = "; the store states a checksum of the whole" if is_stated else ""
    yield ok("objects in parts", f"{len(data)} bytes in two parts are read back unchanged{stated}")


def check_rules(store: Store) -> Iterator[BucketFinding]:
    """Check what the bucket does on its own."""
    if store.endpoint:
        yield from judge(rules_of(store), store.root_path)


def rules_of(store: Store) -> BucketRules:
    """Return what the bucket does on its own, as far as it can be read."""
    with _scratch(store) as key:
        return store.bucket_rules(key)


def check_uploads(store: Store) -> Iterator[BucketFinding]:
    """Check that an upload that nobody finishes is found and ended. A run works without, but pays for its parts."""
    cure = "or set a lifecycle rule that aborts incomplete multipart uploads: else their parts are billed for ever"
    with _scratch(store) as key:
        upload = store.begin_upload(key)
        if upload is None:
            return
        for name, call in (
            ("right to list uploads", lambda: list(store.list_uploads(key))),
            ("right to count their parts", lambda: store.upload_bytes(upload)),
            ("right to abort uploads", lambda: store.abort_upload(upload)),
        ):
            try:
                call()
            except StoreError as error:
                yield BucketFinding(name=name, state="advice", text=str(error), cure=f"Grant it, {cure}")
            else:
                yield ok(name, "granted")


def check_checksums(store: Store) -> Iterator[BucketFinding]:
    """Check that the store refuses bytes that do not have the checksum that is sent along."""
    if not store.endpoint:
        return
    with _scratch(store) as key:
        unchecked = store.unchecked_writes(key)
    if not unchecked:
        yield ok("checksums", "objects and parts whose bytes do not have the checksum sent along are refused")
        return
    yield BucketFinding(
        name="checksums",
        state="advice",
        text=f"the store does not compare {' and '.join(unchecked)} with a checksum: bytes that change on the way are "
        "stored",
        cure="raycheck's own checksums find that at a restore; raycheck verify finds it earlier",
    )


def check_copies(store: Store) -> Iterator[BucketFinding]:
    """Check whether the store copies objects itself, and proves what it has copied."""
    if not store.endpoint:
        return
    part = store.part_bytes(0)
    data = memoryview(uuid4().bytes * (part // 16 + 1))[: part + 1]

    def parts() -> Iterator[Buffer]:
        yield store.get_range(key, 0, len(data))

    with _scratch(store) as key, _scratch(store) as copy:
        store.put_parts(key, iter((data[:part], data[part:])), len(data))
        is_copied = store.put_assembled(copy, iter([Range(key, 0, len(data))]), len(data), crc32(data), source=store)
        is_copied = is_copied or store.put_copied(copy, parts(), len(data), source=store, source_key=key)
        if is_copied and store.head(copy) != len(data):
            raise ConfigError(f"{store}: the store's own copy of an object has another size")
    if is_copied:
        yield ok("server-side copies", "forks and copies inside this bucket transfer no bytes")
        return
    yield BucketFinding(
        name="server-side copies",
        state="advice",
        text="not possible here, or not proven by a checksum: raycheck cp and forks transfer the bytes themselves",
    )


@contextmanager
def _scratch(store: Store) -> Iterator[str]:
    """Yield the key of a scratch object that is deleted afterwards."""
    key = object_keys.probe_key(uuid4().hex)
    try:
        yield key
    except RaycheckError:
        with suppress(RaycheckError):  # the first error is more informative
            store.delete(key)
        raise
    store.delete(key)
