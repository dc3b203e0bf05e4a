"""Digests, at every save, everything that other ranks may hold too, so that the coordinator can compare it.

For what this rank copies to host memory, the checksums of the upload serve as the digest. The rest is on this rank, but
another rank writes it: it is digested while training waits for that copy. So each rank digests everything it shares,
and a replica that differs in one bit is found, whichever rank writes it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from raycheck.bucket.assembly.replica_comparison import (
    RankDigests,
    Replica,
    digest_of,
    digest_of_values,
    dump_names,
)
from raycheck.transfer.stage.local_box import TRAIN, LocalBox, box_name, without_memory
from raycheck.transfer.stage.shard import Shard
from raycheck.transfer.tensor_digest import Digest, PendingDigests, digests

Digested = Literal["upload", "save", "copy", "here"]


@dataclass(frozen=True, kw_only=True, slots=True)
class SharedBox:
    """A box that other ranks may hold too. box: without its memory.

    replicas: the names under which it is compared, one for each of its own names.

    digested: where its digest comes from. "upload": its bytes are copied to the host for this save, or are already on
    the host and in the bucket. "save": it is on a device, and the save digests it there to find out whether it has
    changed. "copy": it is on a device, and a copy of it on the host is digested. "here": it is digested in place.
    """

    box: LocalBox
    replicas: tuple[Replica, ...]
    digested: Digested

    @classmethod
    def of(cls, box: LocalBox, replicas: Sequence[Replica], *, is_written: bool, is_by_crc: bool) -> "SharedBox":
        """is_written: this rank writes the box. is_by_crc: not all ranks have it on a device."""
        is_on_host = box.local.device.type == "cpu"
        digested: Digested = "here"
        if is_written and (is_on_host or (is_by_crc and box.component == TRAIN)):
            digested = "upload"
        elif is_by_crc and not is_on_host:
            digested = "copy"
        elif is_written and box.component != TRAIN:
            digested = "save"
        return cls(box=without_memory(box), replicas=tuple(replicas), digested=digested)


class EncodedNames:
    """A cache of the encoded names of the last save's replicas, which hardly ever change."""

    def __init__(self) -> None:
        self._last: tuple[tuple[Replica, ...], bytes] = ((), b"")

    def of(self, replicas: Sequence[Replica]) -> bytes:
        """Return the encoded names of these replicas."""
        last = self._last
        if last[0] != tuple(replicas):
            last = self._last = tuple(replicas), dump_names(replicas)
        return last[1]


class ReplicaDigests:
    """The digests of the replicas that this rank holds, for one save.

    The live tensors must not change before `release` has returned; on a device, this holds for work enqueued before
    that. After `wait` the object can be sent to another process.
    """

    def __init__(
        self,
        boxes: Sequence[SharedBox] = (),
        sources: Sequence[torch.Tensor] = (),
        values: Sequence[tuple[Replica, object]] = (),
        names: EncodedNames | None = None,
    ) -> None:
        """sources: the live tensor of each box. values: the entries' values, which must not change until `wait`."""
        both = list(zip(boxes, sources, strict=True))
        here = [
            source.cpu() if box.digested == "copy" else source
            for box, source in both
            if box.digested in ("copy", "here")
        ]
        self._by_save = {shared.box.box_name: source for shared, source in both if shared.digested == "save"}
        self._pending: PendingDigests | None = PendingDigests(here)
        self._boxes = boxes
        self._values = values
        self._encoded: EncodedNames | None = names
        self._digested: Mapping[str, Digest] = {}
        self._names = b""
        self._digests: list[bytes | str] = []  # a box's name where the upload's checksums are the digest

    def release(self, digested: Mapping[str, Digest]) -> None:
        """Wait until the live tensors may change. digested: the digests that the save itself has computed since, by box
        name."""
        missing = {name: source for name, source in self._by_save.items() if name not in digested}  # it had no memory
        self._digested = {**digested, **dict(zip(missing, digests(list(missing.values())), strict=True))}
        self._by_save = {}
        if self._pending is not None:
            self._pending.release()

    def wait(self) -> None:
        """Wait until this object has computed all of its digests."""
        if self._pending is None:
            return
        found = iter(self._pending.result())
        for shared in self._boxes:
            name = shared.box.box_name
            digest = next(found) if shared.digested in ("copy", "here") else self._digested.get(name)
            self._digests += [name if digest is None else digest_of(digest)] * len(shared.replicas)
        self._digests += [digest_of_values(values) for _, values in self._values]
        if self._encoded is not None:
            self._names = self._encoded.of([*(item for box in self._boxes for item in box.replicas), *self._keys()])
        self._pending, self._encoded, self._boxes, self._values, self._digested = None, None, (), (), {}

    def report(self, shards: Sequence[Shard]) -> RankDigests:
        """Return the digests that the coordinator compares. shards: the shards of this save. Call it only after the
        upload."""
        if not self._digests:
            return RankDigests(names=self._names, digests=b"")
        crcs = {
            box_name(shard.tensors[chunk.tensor].name, chunk.offsets): chunk.crcs
            for shard in shards
            for chunk in shard.chunks
        }
        digests = (digest_of(crcs[found]) if isinstance(found, str) else found for found in self._digests)
        return RankDigests(names=self._names, digests=b"".join(digests))

    def _keys(self) -> list[Replica]:
        return [replica for replica, _ in self._values]


NO_REPLICAS = ReplicaDigests()
