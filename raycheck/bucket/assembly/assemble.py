"""Makes a checkpoint's manifest, index and `.metadata` from all ranks' reports. Step 16.

Every byte made here is a pure function of the reports sorted by rank, and of the newest commit's components for what
they did not upload: no clock, no chance, no host. A coordinator that died halfway and its successor write equal bytes.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from raycheck.bucket.assembly.plan_cache import PlanCache
from raycheck.bucket.assembly.replica_comparison import (
    Difference,
    described,
    differences,
    labels,
    refusal,
    with_copies,
)
from raycheck.bucket.assembly.save_report import SAVE_ALIKE, Report
from raycheck.bucket.format import object_keys
from raycheck.bucket.format.checksum import crc32
from raycheck.bucket.format.document import dump
from raycheck.bucket.format.manifest import Blob, Component, Manifest, RankRecord
from raycheck.bucket.protocol.object_copy import Job, copy_objects
from raycheck.bucket.reading import Checkpoint, read_newest
from raycheck.bucket.store import Store
from raycheck.errors import CorruptError, SaveFailedError


@dataclass(frozen=True, kw_only=True, slots=True)
class Assembled:
    """The documents that turn the ranks' shards into a checkpoint.

    documents: the bytes of manifest, index and `.metadata` by key, all to be written before the commit. has_copies:
    ranks wrote a box twice, or digested it in two ways, so they should agree on it again. drift: which replicas
    differ; "" for none.
    """

    manifest: Manifest
    documents: Mapping[str, bytes]
    has_copies: bool
    drift: str = ""

    @property
    def manifest_bytes(self) -> bytes:
        """Return the bytes of the manifest, whose checksum the commit records."""
        return self.documents[object_keys.manifest_key(self.manifest.key)]


def assemble(store: Store, reports: Sequence[Report], plans: PlanCache | None = None) -> Assembled:
    """Make index, `.metadata` and manifest from the reports, and copy the shards that must be in this checkpoint's own
    directory. Step 16.

    A rank reports a shard once it is durable, so the manifest names only durable shards (I1). reports: those of all
    ranks, in order of rank, with complete sections. plans: the plans of earlier saves. Raises SaveFailedError when
    replicas differ, when the shards leave a hole or overlap, when the reports are of different saves, or when a shard
    that was not uploaded again differs from its record; ConfigError when ranks disagree on a tensor.
    """
    try:
        return _assemble(store, reports, plans or PlanCache())
    except CorruptError as error:  # passed on, it would say that the run is damaged
        raise SaveFailedError(f"{reports[0].checkpoint}: {error}") from error


def _assemble(store: Store, reports: Sequence[Report], plans: PlanCache) -> Assembled:
    first, name = reports[0], reports[0].checkpoint
    _refuse_other_saves(reports)
    sections = [report.section for report in reports if report.section is not None]
    assert len(sections) == len(reports), "a report without a failure has a section"
    replicas = [section.replicas for section in sections]
    whole = _whole_components(reports)
    in_shards = {shard.component for report in reports for shard in report.shards}
    merged = plans.merge(sections, sorted(in_shards | whole.keys()), is_in_memory=first.is_in_memory)
    names = plans.replica_names
    found = with_copies(differences(replicas, names), merged.differing_copies(sections), replicas, names)
    _refuse_drift(reports, found)
    _refuse_holes(name, merged.holes)
    components = [
        whole.get(component) or _component(store, reports, component, blob, plans)
        for component, (_, blob) in merged.metadata.items()
    ]
    index = merged.index_bytes(sections)
    manifest = Manifest(
        key=name,
        step=first.progress.step,
        attempt=first.attempt,
        save=first.save,
        epoch=first.progress.epoch,
        samples=first.progress.samples,
        world_size=len(reports),
        restored_from=first.restored_from,
        partial=first.partial,
        trained_s=first.trained_s,
        began_at=first.began_at,
        rolling=first.is_rolling,
        by_notice=first.is_by_notice,
        drifted=labels(found),
        settings=first.settings,
        name=first.label.name,
        note=dict(first.label.note),
        expire_after_s=first.label.expire_after_s,
        replaces=first.replaces,
        metrics=first.metrics,
        index=Blob(size_bytes=len(index), crc32=crc32(index)),
        components=tuple(components),
        ranks=tuple(
            RankRecord(
                rank=report.rank,
                blocked_s=report.blocked_s,
                staged_s=report.staged_s,
                upload_s=report.upload_s,
                size_bytes=sum(shard.size_bytes for shard in report.written),
            )
            for report in reports
        ),
    )
    documents = {object_keys.index_key(name): index}
    here = [component.name for component in components if component.checkpoint == name]
    documents |= {object_keys.metadata_key(name, component): merged.metadata[component][0] for component in here}
    documents[object_keys.manifest_key(name)] = dump(manifest)  # the last one where they are written one by one
    drift = described(found) if found else ""
    has_copies = merged.plan.has_copies or names.are_of_two_kinds(replicas)
    return Assembled(manifest=manifest, documents=documents, has_copies=has_copies, drift=drift)


def _refuse_other_saves(reports: Sequence[Report]) -> None:
    first, name = reports[0], reports[0].checkpoint
    if [report.rank for report in reports] != list(range(first.world_size)):
        raise SaveFailedError(f"{name}: reports came from ranks {[report.rank for report in reports]}")
    for report in reports:
        if (report.progress.step, report.attempt, report.save) != (first.progress.step, first.attempt, first.save):
            raise SaveFailedError(
                f"rank 0 saved {name} while rank {report.rank} saved {report.checkpoint}: {SAVE_ALIKE}"
            )
        if report.label != first.label:
            raise SaveFailedError(
                f"{name}: rank 0 called save with {first.label} and rank {report.rank} with {report.label}: pass the "
                "same name, note, expire_after_s and overwrite on every rank"
            )


def _refuse_drift(reports: Sequence[Report], found: Sequence[Difference]) -> None:
    """Keep ranks that differ out of one checkpoint (I11), unless all of them want the first holder's."""
    if found and not all(report.keeps_drift for report in reports):
        raise SaveFailedError(f"{reports[0].checkpoint}: {refusal(found)}")


def _refuse_holes(name: str, holes: Sequence[str]) -> None:
    if holes:
        raise SaveFailedError(
            f"{name}: the ranks' shards do not cover {', '.join(holes[:5])}"
            f"{' and more' if len(holes) > 5 else ''} exactly once; do all ranks hold the same state?"
        )


def _whole_components(reports: Sequence[Report]) -> dict[str, Component]:
    """Return the components to which all ranks refer, and that were saved in boxes other than theirs, by name.

    Rank 0 has their rows. Raises SaveFailedError when another rank refers to one that rank 0 does not, or has shards of
    one: a change on a rank must never be replaced by the old contents of the component.
    """
    first = reports[0].references
    found = {reference.name: reference.record for reference in first if reference.record is not None}
    for report in reports:
        odd = {shard.component for shard in report.shards} & found.keys()
        odd |= {other.name for other in report.references if other.record is not None and other not in first}
        if odd:
            raise SaveFailedError(
                f"{report.checkpoint}: {min(odd)} has changed on some ranks only since it was found in the bucket; the "
                "next save uploads it"
            )
    return found


def _component(store: Store, reports: Sequence[Report], name: str, metadata: Blob, plans: PlanCache) -> Component:
    """Make the manifest's record of a component that was saved in the ranks' own boxes. metadata: that of its
    `.metadata`.

    If all ranks refer to it, and the head's manifest has exactly this component, the record refers to it too. Otherwise
    the shards of the ranks that refer to it are copied next to those that the other ranks wrote. When these ranks
    staged, they could not know that it had changed elsewhere, and a save may take from them only what they staged then.
    """
    checkpoint = reports[0].checkpoint
    held = {report.rank: (report, shard) for report in reports for shard in report.shards if shard.component == name}
    here = Component(
        name=name, checkpoint=checkpoint, metadata=metadata, shards=tuple(shard for _, shard in held.values())
    )
    places = {rank: report.place_of(name) if report.references else checkpoint for rank, (report, _) in held.items()}
    there = replace(here, checkpoint=min(places.values()))
    if len(set(places.values())) == 1 and there != here and _is_in_head(store, there, plans):
        return there
    elsewhere = {rank: place for rank, place in places.items() if place != checkpoint}
    if elsewhere and reports[0].is_in_memory:
        raise SaveFailedError(f"{checkpoint}: {name} is not what the bucket's newest checkpoint has")
    jobs = []
    for rank, place in elsewhere.items():
        key, new_key = (object_keys.shard_key(at, name, rank) for at in (place, checkpoint))
        jobs.append(Job(key=key, new_key=new_key, record=held[rank][1]))
    copy_objects(store, store, there.checkpoint, jobs)
    return here


def _is_in_head(store: Store, component: Component, plans: PlanCache) -> bool:
    """Return whether the newest commit has this component.

    The ranks know it from that commit; a coordinator that was started again has not seen it, and reads the head.
    """
    if component in plans.components:
        return True
    body = read_newest(store)
    head = body.entry(body.head or "")
    return head is not None and component in Checkpoint(store, head).read_manifest().components
