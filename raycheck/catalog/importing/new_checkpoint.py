"""Writes the entries of an import as the only checkpoint of a new run, with the code of a save.

The tensors are divided into shards of bounded size. Each in turn is read, staged, and uploaded as if a rank held it, so
a checkpoint may be larger than memory. `latest` is created last (new_run.py), and a crash before that leaves a run that
does not exist yet.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from raycheck.bucket.assembly.assemble import assemble
from raycheck.bucket.assembly.plan_cache import Section
from raycheck.bucket.assembly.save_report import Report
from raycheck.bucket.format.latest import Latest
from raycheck.bucket.format.object_keys import CheckpointName
from raycheck.bucket.format.progress import Progress
from raycheck.bucket.protocol.sharing.new_run import begin_run, first_entry
from raycheck.bucket.protocol.swap import Register
from raycheck.bucket.protocol.write_once import put_all_once
from raycheck.bucket.reading import Checkpoint
from raycheck.catalog.importing.entries import ImportedState
from raycheck.catalog.importing.source_tensors import Box, SourceTensor, SourceTensors
from raycheck.catalog.importing.torch_file import source_tensor
from raycheck.errors import CorruptError, SaveFailedError
from raycheck.show_progress import ShowProgress
from raycheck.state.entries.state_entry import ASSETS, Leaves
from raycheck.transfer.incremental_upload import StagedState, frozen_component
from raycheck.transfer.stage.local_box import TRAIN, LocalBox
from raycheck.transfer.stage.stager import Stager

SHARD_BYTES = 1 << 30
"""The size of a shard, about half of the memory that an import needs. A box of DCP is never split."""
PART_BYTES = 16 << 20


@dataclass(frozen=True, kw_only=True, slots=True)
class Piece:
    """A box to write: its place in the checkpoint, and the source tensor from which it is read."""

    box: LocalBox
    source: SourceTensor

    @property
    def size_bytes(self) -> int:
        return self.box.size_bytes


def planned(state: ImportedState, tensors: SourceTensors) -> list[list[Piece]]:
    """Return the pieces of each shard, which belongs to one component. Tied tensors are one piece with all their names.

    Models without an optimizer become separate components, like modules without gradients, so a run that trains only an
    adapter can use them directly. The first shard belongs to `train` and may have no pieces.
    """
    tied: dict[int, list[tuple[str, tuple[str | int, ...]]]] = {}
    by_id: dict[int, torch.Tensor] = {}
    components: dict[int, str] = {}
    is_trained = any(entry.kind == "optimizer" for entry in state.entries)
    for entry in state.entries:
        component = frozen_component(entry.name) if entry.kind == "module" and not is_trained else TRAIN
        for name, tensor in entry.found.tensors.items():
            at = _identity(tensor)
            by_id[at] = tensor
            components.setdefault(at, component)
            tied.setdefault(at, []).append((name, tuple(entry.found.paths.get(name, (name,)))))
    shards: list[list[Piece]] = [[]]
    room = SHARD_BYTES
    for at, names in sorted(tied.items(), key=lambda item: components[item[0]] != TRAIN):
        tensor, component = by_id[at], components[at]
        source = tensors.of(tensor) if tensor.is_meta else source_tensor(tensor, names[0][0])
        for box in source.pieces(SHARD_BYTES):
            piece = Piece(box=replace(_local_box(source, box, names), component=component), source=source)
            is_full = bool(shards[-1]) and piece.size_bytes > room
            if is_full or component != component_of(shards[-1]):
                shards.append([])
                room = SHARD_BYTES
            shards[-1].append(piece)
            room -= piece.size_bytes
    return shards


def component_of(pieces: Sequence[Piece]) -> str:
    """Return the component of a shard's pieces: `train` if there are none."""
    return pieces[0].box.component if pieces else TRAIN


def _identity(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)  # noqa: SLF001  on the meta device a storage has no address


def _local_box(source: SourceTensor, box: Box, names: Sequence[tuple[str, tuple[str | int, ...]]]) -> LocalBox:
    return LocalBox(
        name=names[0][0],
        path=names[0][1],
        local=torch.empty(box.sizes, dtype=source.dtype, device="meta"),
        shape=source.shape,
        offsets=box.offsets,
        sizes=box.sizes,
        aliases=tuple(names[1:]),
        is_unique=True,
        is_first_replica=True,
        may_spread=False,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class NewCheckpoint:
    """The checkpoint that an import makes.

    shards: see `planned`. progress: the steps and epochs that are done. restored_from: the source of the import, for
    people. told: called with the bytes that are read, and their total.
    """

    state: ImportedState
    shards: Sequence[Sequence[Piece]]
    progress: Progress
    restored_from: str
    told: ShowProgress

    @property
    def size_bytes(self) -> int:
        """Return the bytes of all pieces."""
        return self._bytes_of(self.shards)

    def write(self, register: Register, *, run_id: str, name: CheckpointName) -> Latest:
        """Write the checkpoint and create the run. Returns the body at the place: another run's if that was faster.

        name: the checkpoint's name, which is of attempt 0 and reserved.

        Raises CorruptError when the source's boxes overlap, or its bytes are not what it says.
        """
        reports = []
        for rank in range(len(self.shards)):
            staged = self._staged(rank)
            staged.upload(register.store, str(name))
            reports.append(
                Report(
                    group="import",
                    rank=rank,
                    world_size=len(self.shards),
                    attempt=name.attempt,
                    save=name.save,
                    progress=self.progress,
                    shards=staged.records,
                    section=Section.of(staged.section()),
                    restored_from=self.restored_from,
                )
            )
            del staged  # its buffer is released before the next one is claimed
        try:
            made = assemble(register.store, reports)
        except SaveFailedError as error:
            raise CorruptError(f"{self.restored_from}: {error}") from None
        put_all_once(register.store, made.documents)
        entry = first_entry(made.manifest, made.manifest_bytes)
        body = begin_run(register, entry, made.manifest, run_id=run_id, verb="import")
        self.told(self.size_bytes, self.size_bytes)
        return body

    def is_same(self, checkpoint: Checkpoint) -> bool:
        """Return whether a checkpoint equals what `write` would write, by its names and the checksums of its shards.

        Reads all of the source, whose bytes may have changed since they were imported, and writes nothing.
        """
        manifest = checkpoint.read_manifest()
        index = checkpoint.read_index(manifest)
        boxes = [piece.box for pieces in self.shards for piece in pieces]
        names = {name for box in boxes for name in (box.name, *(name for name, _ in box.aliases))}
        entries = {entry.name for entry in self.state.entries}
        there = {shard.rank: shard for component in manifest.components for shard in component.shards}
        if (
            (manifest.restored_from, manifest.step) != (self.restored_from, self.progress.step)
            or {tensor.name for tensor in index.tensors} != names
            or not entries <= set(index.values)
            or len(there) != len(self.shards)
        ):
            return False
        for rank in range(len(self.shards)):
            staged = self._staged(rank)
            for shard in staged.staged:
                deque(shard.parts(PART_BYTES), maxlen=0)  # computes the checksums
            if list(staged.records) != [there.get(rank)]:
                return False
            del staged
        return True

    def _staged(self, rank: int) -> StagedState:
        """Read the pieces of a shard into its buffer. Rank 0 has all values; no rank has random state."""
        self.told(self._bytes_of(self.shards[:rank]), self.size_bytes)
        pieces = self.shards[rank]
        values: dict[str, Any] = {}
        leaves: Leaves = {}
        also: dict[str, Any] = {}
        if rank == 0:
            assets = {name: dict(files) for name, files in self.state.assets.items()}
            values = {"progress": self.progress.values(), ASSETS: assets}
            for entry in self.state.entries:
                values[entry.name] = entry.found.values
                leaves |= entry.found.leaves
                also |= entry.found.also
            leaves |= {"progress.step": (("progress", "step"), self.progress.step)}
        sources = list(_read(pieces))
        staged = Stager(component_of(pieces), rank).stage([piece.box for piece in pieces], leaves, sources, also)
        return StagedState(staged=[staged], values=values, rank_values={})

    @staticmethod
    def _bytes_of(shards: Sequence[Sequence[Piece]]) -> int:
        return sum(piece.size_bytes for pieces in shards for piece in pieces)


def _read(pieces: Sequence[Piece]) -> Iterator[torch.Tensor]:
    for piece in pieces:
        box = Box(piece.box.offsets, piece.box.sizes)
        found = piece.source.read(box)
        if tuple(found.shape) != box.sizes or found.dtype != piece.source.dtype:
            raise CorruptError(f"{piece.box.name}: the source has {found.dtype}{list(found.shape)} in place of it")
        yield found
