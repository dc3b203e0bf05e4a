"""Keeps the ranks' plans between saves, with the documents that were made of them.

A plan stays the same from save to save, so a rank sends it once and then only its hash. A coordinator that was started
again has none, and asks. The cache holds no truth: the bytes of a checkpoint are a function of what the ranks sent and
of the newest commit's components, with and without a cache.
"""

import hashlib
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from threading import Lock

from raycheck.bucket.assembly.dcp_metadata import dcp_metadata
from raycheck.bucket.assembly.plan_merge import MergedPlan, merge_plans, uncovered
from raycheck.bucket.assembly.replica_comparison import DecodedNames, RankDigests
from raycheck.bucket.format.checksum import crc32
from raycheck.bucket.format.decompression import MAX_DECODED_BYTES
from raycheck.bucket.format.index import Index, Plan
from raycheck.bucket.format.index_codec import IndexParts, join_parts, parts_of
from raycheck.bucket.format.manifest import Blob, Component
from raycheck.bucket.format.plan_codec import CRC_BYTES, ParsedParts, dump_plan, load_plan
from raycheck.errors import ConfigError, CorruptError

NOTHING_SHARED = RankDigests(names=b"", digests=b"")


@dataclass(frozen=True, kw_only=True, slots=True)
class Section:
    """One rank's part of an index, encoded, with the part that changes at every save apart from the plan.

    plan: empty when only its hash is sent. values: the values that all ranks share, of which rank 0's count, then the
    rank's own. decoded_bytes: the size of all values as JSON. replicas: the digests of what other ranks may hold too;
    its names are sent like the plan. names_hash: the hash of these names.
    """

    plan_hash: bytes
    plan: bytes
    checksums: bytes
    values: tuple[bytes, ...]
    decoded_bytes: int
    replicas: RankDigests = NOTHING_SHARED
    names_hash: bytes = b""

    @classmethod
    def of(cls, index: Index, replicas: RankDigests = NOTHING_SHARED) -> "Section":
        parts = parts_of(index)
        decoded = sum(len(zlib.decompress(stream)) for stream in parts.values)
        return cls(
            plan_hash=_hash(parts.plan),
            plan=parts.plan,
            checksums=parts.checksums,
            values=parts.values,
            decoded_bytes=decoded,
            replicas=replicas,
            names_hash=_hash(replicas.names) if replicas.names else b"",
        )

    @property
    def hashes(self) -> tuple[bytes, bytes]:
        """Return the hashes of what is sent once."""
        return self.plan_hash, self.names_hash

    def without_plan(self) -> "Section":
        return replace(self, plan=b"", replicas=replace(self.replicas, names=b""))


def _hash(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=16).digest()


@dataclass(frozen=True, kw_only=True, slots=True)
class CachedPlan:
    """The merged plan of all ranks, and what was made of it.

    plan_bytes: the plan, encoded. metadata: `.metadata` by component, with size and checksum. holes: the names of
    tensors that are not covered exactly once.
    """

    plan: MergedPlan
    plan_bytes: bytes
    holes: tuple[str, ...]
    metadata: Mapping[str, tuple[bytes, Blob]]

    def differing_copies(self, sections: Sequence[Section]) -> Iterator[tuple[str, tuple[int, int]]]:
        """Yield the name of each tensor of which two ranks wrote the same box with other bytes, and these ranks."""
        for copy in self.plan.copies:
            kept, other = (
                sections[rank].checksums[CRC_BYTES * own.start : CRC_BYTES * own.stop]
                for rank, own in zip(copy.ranks, copy.crcs, strict=True)
            )
            if kept != other:
                yield copy.tensor, copy.ranks

    def index_bytes(self, sections: Sequence[Section]) -> bytes:
        """Return the bytes of the index. sections: those of all ranks, in order of rank.

        Raises CorruptError when the number of a rank's checksums differs from its plan, and ConfigError when the values
        are larger than readers allow.
        """
        decoded = sum(section.decoded_bytes for section in sections)
        if decoded > MAX_DECODED_BYTES:
            raise ConfigError(
                f"the values of {len(sections)} ranks have {decoded} bytes as JSON, and readers take "
                f"{MAX_DECODED_BYTES}: keep what is large as tensors"
            )
        checksums: list[bytes] = []
        for rank, (section, count, cuts) in enumerate(zip(sections, self.plan.num_crcs, self.plan.cuts, strict=True)):
            if len(section.checksums) != CRC_BYTES * count:
                raise CorruptError(f"rank {rank} reports {len(section.checksums)} bytes of {count} checksums")
            checksums += (section.checksums[CRC_BYTES * cut.start : CRC_BYTES * cut.stop] for cut in cuts)
        own = [stream for section in sections for stream in section.values[1:]]
        values = (sections[0].values[0], *own)
        return join_parts(IndexParts(plan=self.plan_bytes, checksums=b"".join(checksums), values=values))


class PlanCache:
    """Remembers the plans of the ranks' last saves, by hash, and what was made of them.

    A plan that no report has named since the save before the last is forgotten. components: those of the newest commit,
    as far as they are known. replica_names: those of the ranks' replicas at the last save.
    """

    def __init__(self) -> None:
        self.components: tuple[Component, ...] = ()
        self.replica_names = DecodedNames()
        self._lock = Lock()  # reports come in while a save is concluded in a thread
        self._named: dict[bytes, bytes] = {}  # since the last save was concluded
        self._known: dict[bytes, bytes] = {}
        self._merged: tuple[object, CachedPlan] | None = None

    def remember(self, section: Section) -> bool:
        """Keep the plan, and the names, of a rank's section for this save. Returns False when one of them is unknown
        and was not sent."""
        sent = {section.plan_hash: section.plan}
        if section.names_hash:
            sent[section.names_hash] = section.replicas.names
        with self._lock:
            found = {digest: data or self._plan(digest) for digest, data in sent.items()}
            self._named |= {digest: data for digest, data in found.items() if data}
            return all(found.values())

    def replicas(self, sections: Sequence[Section]) -> list[RankDigests]:
        """Return what the ranks report of their replicas, with names. sections: each of them remembered."""
        with self._lock:
            return [replace(own.replicas, names=own.replicas.names or self._plan(own.names_hash)) for own in sections]

    def _plan(self, digest: bytes) -> bytes:
        return self._named.get(digest) or self._known.get(digest, b"")

    def merge(self, sections: Sequence[Section], components: Sequence[str]) -> CachedPlan:
        """Merge the ranks' plans, or return what the last save made of equal ones. Forgets plans that are out of use.

        sections: those of all ranks, in order, each of them remembered. components: the names of all components. Raises
        ConfigError when ranks disagree on a tensor.
        """
        form = (tuple(section.plan_hash for section in sections), tuple(components))
        before = self._merged
        if before is None or before[0] != form:
            with self._lock:
                plans = [section.plan or self._plan(section.plan_hash) for section in sections]
            before = (form, _merge(plans, components))
            self._merged = before
        with self._lock:
            self._known, self._named = self._named, {}
        return before[1]


def _merge(encoded: Sequence[bytes], components: Sequence[str]) -> CachedPlan:
    known = ParsedParts()
    plans = [load_plan(data, what=f"report of rank {rank}", known=known) for rank, data in enumerate(encoded)]
    merged = merge_plans(plans)
    if len(components) > 1:
        _refuse_split(merged.plan)
    metadata = {component: dcp_metadata(merged.plan, component) for component in components}
    return CachedPlan(
        plan=merged,
        plan_bytes=dump_plan(merged.plan),
        holes=tuple(uncovered(merged.plan)),
        metadata={name: (data, Blob(size_bytes=len(data), crc32=crc32(data))) for name, data in metadata.items()},
    )


def _refuse_split(plan: Plan) -> None:
    """Refuse a tensor that ranks put into different components: stock tools would find it in none.

    Raises ConfigError.
    """
    for tensor, (first, end) in zip(plan.tensors, plan.rows(), strict=True):
        if len({plan.objects[number].component for number in set(plan.object[first:end])}) > 1:
            raise ConfigError(
                f"tensor {tensor.name} is frozen on some ranks only; set requires_grad alike on all of them"
            )
