"""Begins a run whose first checkpoint comes from elsewhere: from another run (fork.py) or an archive. Step 30.

Its checkpoint has a name of attempt 0, which no live attempt can have. `latest` is created last, so a crash before that
leaves a run that does not exist yet, and the next try takes the next save number.
"""

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType

from raycheck.bucket.document_reading import again_if_corrupt
from raycheck.bucket.format.checksum import crc32
from raycheck.bucket.format.latest import Attempt, Entry, Latest, Loan, listed_metrics
from raycheck.bucket.format.manifest import Manifest
from raycheck.bucket.format.object_keys import CheckpointName
from raycheck.bucket.protocol.swap import Register, lost_error
from raycheck.bucket.reading import list_directories

NOTHING_BORROWED: Mapping[str, str] = MappingProxyType({})


def look_at_place(register: Register) -> tuple[Latest | None, int]:
    """Look at the place where a run is to begin.

    Returns the body of the run that is there already, or None, and the lowest save number that no directory of a
    checkpoint has. Raises CorruptError when there are checkpoints of trainings, but no `latest`: it was lost.
    """

    def look() -> tuple[Latest | None, list[CheckpointName]]:
        existing = register.read()
        ours = list_directories(register.store)
        if existing is None and ours and ours[-1].attempt > 0:
            raise lost_error(register.store.uri, f"is gone, but there is {ours[-1]}")
        return (existing[0] if existing else None), ours

    existing, ours = again_if_corrupt(look)
    return existing, 1 + max((name.save for name in ours), default=0)


def first_manifest(
    old: Manifest, name: CheckpointName, *, restored_from: str, borrowed: Mapping[str, str] = NOTHING_BORROWED
) -> Manifest:
    """Return the manifest of a new run's checkpoint `name` that has the objects of `old` in its own directory.

    restored_from: where its bytes come from, for people. borrowed: the directories that stay where they are, by the
    names that `old` gives them, with the names that the new run gives them.
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
        name=None,
        expire_after_s=None,
        components=tuple(
            replace(component, checkpoint=borrowed.get(component.checkpoint, str(name))) for component in old.components
        ),
    )


def first_entry(manifest: Manifest, data: bytes, *, of: Entry | None = None) -> Entry:
    """Return the entry of a new run's checkpoint, which nothing pins, names or lets expire.

    data: the manifest's bytes as they lie in the bucket. of: the entry of the checkpoint that it was made of, whose
    metrics and scores it keeps.
    """
    entry = Entry(
        key=manifest.key,
        refs=manifest.refs,
        step=manifest.step,
        committed_at=0.0,  # begin_run has the bucket's time
        size_bytes=manifest.size_bytes,
        metrics=listed_metrics(manifest.metrics, needed=None),
        manifest_crc32=crc32(data),
    )
    return entry if of is None else replace(entry, metrics=of.metrics, scores=of.scores, unknown=of.unknown)


def begin_run(
    register: Register, entry: Entry, manifest: Manifest, *, run_id: str, verb: str, loans: tuple[Loan, ...] = ()
) -> Latest:
    """Create `latest` with the checkpoint `entry` as its head, by a swap. All its objects must be there.

    entry: `committed_at` becomes the bucket's time. manifest: the checkpoint's. verb: what makes the run, for its
    owner's name and for errors. loans: what it uses of other runs, which hold it. Returns the body that is there, which
    is another run's when that was faster.
    """

    def create(existing: Latest | None, now: float) -> Latest | None:
        if existing is not None:
            return None
        body = _first_body(replace(entry, committed_at=now), manifest, run_id, f"{verb}-{run_id[:11]}", now)
        return replace(body, loans=loans)

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
        run_id=run_id, counter=0, proven=0, owners=(owner,), attempts=(attempt,), head=entry.key, live=(entry,)
    )
