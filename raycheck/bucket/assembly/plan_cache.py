"""Keeps the ranks' plans between saves, with the documents that were made from them.

A plan stays the same from save to save, so a rank sends it once and then only its hash. A restarted coordinator has no
plans, and asks for them. The cache never changes a result: the bytes of a checkpoint are a function of what the ranks
sent and of the newest commit's components, with and without a cache.
"""

import hashlib
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import chain

from raycheck.bucket.assembly.dcp_metadata import dcp_metadata
from raycheck.bucket.assembly.plan_merge import MergedPlan, merge_plans, uncovered
from raycheck.bucket.assembly.replica_comparison import DecodedNames, RankDigests
from raycheck.bucket.format.checksum import crc32
from raycheck.bucket.format.decompression import MAX_DECODED_BYTES
from raycheck.bucket.format.index import Index, Plan
from raycheck.bucket.format.index_codec import IndexParts, join_parts, parts_of
from raycheck.bucket.format.manifest import Blob, Component
from raycheck.bucket.format.plan_codec import CRC_BYTES, MALFORMED, ParsedParts, dump_plan, load_plan
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
    """The merged plan of all ranks, and the documents made from it.

    plan_bytes: the plan, encoded. metadata: `.metadata` by component, with size and checksum. holes: the names of
    tensors that are not covered exactly once.
    """

    plan: MergedPlan
    plan_bytes: bytes
    holes: tuple[str, ...]
    metadata: Mapping[str, tuple[bytes, Blob]]

    def differing_copies(self, sections: Sequence[Section]) -> Iterator[tuple[str, tuple[int, int]]]:
        """Yield the name of each tensor for which two ranks wrote one box with different bytes, and those ranks."""
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
    """The plans of the ranks' last saves, by hash, and the documents made from them.

    Saves to the bucket and memory checkpoints share it: their plans are mostly equal. Each may be assembled in its own
    thread. components: those of the newest commit, as far as they are known. replica_names: those of the ranks'
    replicas at the last save.
    """

    def __init__(self) -> None:
        import numpy  # noqa: F401, ICN001  now: no save waits for its import

        self.components: tuple[Component, ...] = ()
        self.replica_names = DecodedNames()
        self._sent: dict[bytes, bytes] = {}  # plans and names, by hash
        self._parsed: dict[bytes, Plan] = {}  # plans, by hash
        self._parts = ParsedParts()  # of the plans that have come since the last merge
        self._named: dict[object, tuple[bytes, bytes]] = {}  # the hashes in the last section of each sender
        self._merged: dict[bool, tuple[object, CachedPlan]] = {}  # the last one to the bucket, and in memory

    def complete(self, section: Section, sender: object) -> Section | None:
        """Return a section, completed with the plan and names that were sent before. None if one of them is unknown.

        sender: the rank that sends one section after another. A plan that is in no sender's last section is forgotten
        later.
        """
        plan = section.plan or self._sent.get(section.plan_hash, b"")
        names = section.replicas.names or self._sent.get(section.names_hash, b"")
        if not plan or (section.names_hash and not names):
            return None
        self._named[sender] = section.hashes
        self._sent |= {section.plan_hash: plan, section.names_hash: names}
        if len(self._sent) > 4 * len(self._named):  # each names two at most
            in_use = set(chain.from_iterable(self._named.values()))
            self._sent = {digest: data for digest, data in self._sent.items() if digest in in_use}
            self._parsed = {digest: plan for digest, plan in self._parsed.items() if digest in in_use}
        if section.plan and names == section.replicas.names:
            return section
        return replace(section, plan=plan, replicas=replace(section.replicas, names=names))

    def is_parsed(self, section: Section) -> bool:
        """Return whether `parse` has parsed what the section has of what is sent once."""
        return section.plan_hash in self._parsed

    def parse(self, section: Section) -> None:
        """Parse the plan and the names of a complete section, once. Each rank's are parsed when they come, so that few
        are left for the last one. What is wrong with them is found again when they are merged."""
        if self.is_parsed(section):
            return
        with suppress(CorruptError, *MALFORMED):
            self.replica_names.decode(section.replicas.names)
            self._parsed[section.plan_hash] = load_plan(section.plan, what="a report", known=self._parts)

    def forget_senders(self) -> None:
        """Forget what each rank has sent, because other ranks send from now on."""
        self._named = {}

    def merge(
        self, sections: Sequence[Section], components: Sequence[str], *, is_in_memory: bool = False
    ) -> CachedPlan:
        """Merge the ranks' plans, or return what the last save made of equal ones.

        sections: those of all ranks, in order, each of them complete. components: the names of all components.
        is_in_memory: the save is a memory checkpoint. Raises ConfigError when ranks disagree on a tensor.
        """
        form = (tuple(section.plan_hash for section in sections), tuple(components))
        merged = next((merged for known, merged in self._merged.values() if known == form), None)
        if merged is None:
            plans = [
                self._parsed.get(section.plan_hash)
                or load_plan(section.plan, what=f"report of rank {rank}", known=self._parts)
                for rank, section in enumerate(sections)
            ]
            self._parts = ParsedParts()
            merged = _merge(plans, components)
        self._merged = self._merged | {is_in_memory: (form, merged)}
        return merged


def _merge(plans: Sequence[Plan], components: Sequence[str]) -> CachedPlan:
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
