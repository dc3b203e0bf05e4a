"""Each rank's part of the index, apart by what changes at a save, and what a coordinator keeps of it between saves.

A plan stays the same from save to save, so a rank sends it once and then only its hash. A coordinator that was started
again has none, and asks. Nothing here is truth: the bytes of a checkpoint are a function of what the ranks sent, and
are the same with and without memory.
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from raycheck.bucket.checksum import crc32
from raycheck.bucket.index import Index
from raycheck.bucket.index_file import Parts, join_parts, parts_of
from raycheck.bucket.manifest import Blob
from raycheck.bucket.merge import Merged, merge_plans, uncovered
from raycheck.bucket.plan_file import Known, dump_plan, load_plan
from raycheck.errors import CorruptError
from raycheck.shards.dcp import dcp_metadata

CRC_BYTES = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class Section:
    """One rank's part of an index, encoded. plan: empty when only its hash is sent. values: those of all ranks, which
    count from rank 0 alone, then the rank's own."""

    plan_hash: bytes
    plan: bytes
    checksums: bytes
    values: tuple[bytes, ...]

    @classmethod
    def of(cls, index: Index) -> "Section":
        parts = parts_of(index)
        digest = hashlib.blake2b(parts.plan, digest_size=16).digest()
        return cls(plan_hash=digest, plan=parts.plan, checksums=parts.checksums, values=parts.values)

    def without_plan(self) -> "Section":
        return replace(self, plan=b"")


@dataclass(frozen=True, kw_only=True, slots=True)
class Whole:
    """What all ranks' plans became together. metadata: `.metadata` by component, with size and checksum. holes: names
    of tensors that are not covered exactly once."""

    plan: bytes
    merged: Merged
    holes: tuple[str, ...]
    metadata: Mapping[str, tuple[bytes, Blob]]

    def index(self, sections: Sequence[Section]) -> bytes:
        """The bytes of the index. Raises CorruptError when a rank gives more or fewer checksums than its plan says."""
        checksums: list[bytes] = []
        for rank, (section, count, cuts) in enumerate(
            zip(sections, self.merged.num_crcs, self.merged.cuts, strict=True)
        ):
            if len(section.checksums) != CRC_BYTES * count:
                raise CorruptError(f"rank {rank} reports {len(section.checksums)} bytes of {count} checksums")
            checksums += (section.checksums[CRC_BYTES * cut.start : CRC_BYTES * cut.stop] for cut in cuts)
        own = [stream for section in sections for stream in section.values[1:]]
        values = (sections[0].values[0], *own)
        return join_parts(Parts(plan=self.plan, checksums=b"".join(checksums), values=values))


class Plans:
    """Those of the ranks' last saves, by hash, and what they became together."""

    def __init__(self) -> None:
        self._known: dict[bytes, bytes] = {}
        self._whole: tuple[object, Whole] | None = None

    def completed(self, section: Section) -> Section | None:
        """With its plan; None when only its hash was sent and it is not known here."""
        if section.plan:
            self._known[section.plan_hash] = section.plan
            return section
        plan = self._known.get(section.plan_hash)
        return None if plan is None else replace(section, plan=plan)

    def whole(self, sections: Sequence[Section], components: Sequence[str]) -> Whole:
        """sections: of all ranks, in order, each with its plan. Raises ConfigError when ranks disagree on a tensor."""
        form = (tuple(section.plan_hash for section in sections), tuple(components))
        before = self._whole
        if before is not None and before[0] == form:
            return before[1]
        known = Known()
        plans = [
            load_plan(section.plan, what=f"report of rank {rank}", known=known) for rank, section in enumerate(sections)
        ]
        merged = merge_plans(plans)
        metadata = {component: dcp_metadata(merged.plan, component) for component in components}
        whole = Whole(
            plan=dump_plan(merged.plan),
            merged=merged,
            holes=tuple(uncovered(merged.plan)),
            metadata={name: (data, Blob(size_bytes=len(data), crc32=crc32(data))) for name, data in metadata.items()},
        )
        self._known = {section.plan_hash: section.plan for section in sections}
        self._whole = (form, whole)
        return whole
