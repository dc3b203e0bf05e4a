"""Starts a run whose first checkpoint comes from elsewhere: another run, an archive, or foreign files. Step 30.

Its checkpoint has a name of attempt 0, which no live attempt can have. The name is reserved before anything is written
below it, so two processes that start a run in one place at the same time never write to one key (I2). `latest` is
created last: after a crash before that, the run does not exist yet, and the next try takes the next save number.
"""

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import islice
from types import MappingProxyType

from raycheck.bucket.document_reading import again_if_corrupt
from raycheck.bucket.format import object_keys
from raycheck.bucket.format.checksum import crc32
from raycheck.bucket.format.document import FORMAT_VERSION, Document, dump
from raycheck.bucket.format.latest import Attempt, Entry, Latest, Loan, listed_metrics
from raycheck.bucket.format.manifest import Manifest
from raycheck.bucket.format.object_keys import CheckpointName
from raycheck.bucket.protocol.swap import Register, lost_error
from raycheck.bucket.protocol.write_once import put_once
from raycheck.bucket.reading import list_directories
from raycheck.bucket.store import Store
from raycheck.errors import ConfigError, CorruptError, NotFoundError, SaveFailedError

MOST_FOLDERS_ASKED = 20
"""The number of folders in a place that are checked for being runs: in a folder of runs, the first one is a run."""
MAX_URI = 1000
"""How much of the origin's URI `latest` of a fork states."""
NOTHING_BORROWED: Mapping[str, str] = MappingProxyType({})


@dataclass(frozen=True, kw_only=True, slots=True)
class Origin(Document):
    """The `origin.json` of a new run's first checkpoint: where it comes from, for people. It also reserves the name.

    run_id: the new run's id, if the name belongs to it alone; "" if the name belongs to all copies of that checkpoint,
    since they write the same bytes. uri: the run, archive or files. source_run_id, checkpoint: the id of the source run
    and the checkpoint's name there, "" for foreign files.
    """

    format_version: int = FORMAT_VERSION
    run_id: str
    uri: str
    source_run_id: str
    checkpoint: str


def look_at_place(register: Register) -> tuple[Latest | None, int]:
    """Look at the place where a run is to start.

    Return the body of the run that already exists there, or None, and the lowest save number that no checkpoint
    directory has. Raises CorruptError when there are checkpoints of training runs but no `latest`, so it was lost; and
    ConfigError when the place is a folder that contains other runs.
    """

    def look() -> tuple[Latest | None, list[CheckpointName]]:
        existing = register.read()
        ours = list_directories(register.store)
        if existing is None and ours and ours[-1].attempt > 0:
            raise lost_error(register.store.uri, f"is gone, but there is {ours[-1]}")
        return (existing[0] if existing else None), ours

    existing, ours = again_if_corrupt(look)
    if existing is None:
        refuse_folder_of_runs(register.store)
    return existing, 1 + max((name.save for name in ours), default=0)


def refuse_folder_of_runs(store: Store) -> None:
    """Raise ConfigError when the store's folder contains runs: a run there would have them inside it."""
    for name in islice(store.list_folders(""), MOST_FOLDERS_ASKED):
        with suppress(NotFoundError, CorruptError):  # the latter: a link or folder of that name, not raycheck's
            store.head(f"{name}/{object_keys.LATEST_KEY}")
            folder = str(store).rstrip("/")
            raise ConfigError(
                f"{folder}: this is a folder of runs, and {name} is one of them. Give the new run a name in it, such "
                f"as {folder}/my-run"
            )


def reserve_name(store: Store, origin: Origin, *, step: int, save: int) -> CheckpointName:
    """Reserve a name for the first checkpoint of a new run, before anything else is written below it.

    Its save number is the first one from `save` on that is free, or that the same origin has already reserved. Raises
    StoreError.
    """
    data = dump(origin)
    while True:
        name = CheckpointName(step=step, attempt=0, save=save)
        try:
            put_once(store, object_keys.origin_key(str(name)), data)
        except SaveFailedError:  # another process is starting a run here, too
            save += 1
        else:
            return name


def first_manifest(
    old: Manifest, name: CheckpointName, *, restored_from: str, borrowed: Mapping[str, str] = NOTHING_BORROWED
) -> Manifest:
    """Return the manifest of a new run's checkpoint `name` that has the objects of `old` in its own directory.

    restored_from: where its bytes come from, for people. borrowed: the directories that stay where they are: the names
    in `old`, mapped to the names in the new run.
    """
    return replace(
        old,
        key=str(name),
        attempt=name.attempt,
        save=name.save,
        restored_from=restored_from,
        partial=(),
        trained_s=0.0,
        began_at=None,
        rolling=False,
        by_notice=False,
        name=None,
        expire_after_s=None,
        replaces=None,
        components=tuple(
            replace(component, checkpoint=borrowed.get(component.checkpoint, str(name))) for component in old.components
        ),
    )


def first_entry(manifest: Manifest, data: bytes, *, of: Entry | None = None) -> Entry:
    """Return the entry of a new run's checkpoint, without pin, name or expiry.

    data: the manifest's bytes as they are in the bucket. of: the entry of the source checkpoint, whose metrics and
    scores are kept.
    """
    entry = Entry(
        key=manifest.key,
        refs=manifest.refs,
        step=manifest.step,
        committed_at=0.0,  # begin_run has the bucket's time
        size_bytes=manifest.size_bytes,
        metrics=listed_metrics(manifest.metrics, needed=None),
        manifest_crc32=crc32(data),
        drifted=bool(manifest.drifted),
    )
    return entry if of is None else replace(entry, metrics=of.metrics, scores=of.scores, unknown=of.unknown)


def begin_run(
    register: Register, entry: Entry, manifest: Manifest, *, run_id: str, verb: str, loans: tuple[Loan, ...] = ()
) -> Latest:
    """Create `latest` with the checkpoint `entry` as its head, by a swap. All its objects must exist.

    entry: `committed_at` becomes the bucket's time. manifest: the checkpoint's. verb: what makes the run, for its
    owner's name and for errors. loans: what it uses of other runs, which hold it. Returns the body that is there, which
    is another run's if that one was faster.
    """

    def create(existing: Latest | None, now: float) -> Latest | None:
        if existing is not None:
            return None
        body = _first_body(replace(entry, committed_at=now), manifest, run_id, f"{verb}-{run_id[:11]}", now)
        origin = (manifest.restored_from or "").rpartition(" ")[0]
        return replace(body, loans=loans, forked_from=origin[:MAX_URI] if verb == "fork" else "")

    return register.swap(create, what=f"{verb} into a new run")


def _first_body(entry: Entry, manifest: Manifest, run_id: str, owner: str, now: float) -> Latest:
    attempt = Attempt(
        number=0,
        owner=owner,
        coordinator=owner,
        group=owner,
        world_size=manifest.world_size,
        restore_key=None,
        last_save=manifest.save,
        claimed_at=now,
    )
    return Latest(
        run_id=run_id, counter=0, proven=0, newest_owners=(owner,), attempts=(attempt,), head=entry.key, newest=(entry,)
    )
