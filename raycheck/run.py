"""A run as people see it: what is in the bucket, putting it into live objects outside of any training, and writing
it as a Hugging Face directory."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from raycheck.bucket.document_reading import again_if_corrupt
from raycheck.bucket.format.index import Index
from raycheck.bucket.format.latest import Latest
from raycheck.bucket.format.manifest import Manifest
from raycheck.bucket.format.object_keys import CheckpointName
from raycheck.bucket.format.ray_pointer import MAX_BYTES as MAX_POINTER_BYTES
from raycheck.bucket.format.ray_pointer import Pointer, load_pointer
from raycheck.bucket.reading import Checkpoint, read_latest
from raycheck.bucket.store import Store, open_store
from raycheck.bucket.store.address import is_same_place
from raycheck.bucket.store.ray_filesystem import uri_of
from raycheck.errors import ConfigError, CorruptError, NotFoundError
from raycheck.storage_settings import StorageSettings

if TYPE_CHECKING:
    import torch

    from raycheck.shards.huggingface.export import Exported


@dataclass(frozen=True, slots=True)
class CommittedCheckpoint(Checkpoint):
    """A committed checkpoint that can be put into live objects, outside of any training."""

    def restore(
        self, *, into: Mapping[str, object], strict: bool = True, skip: Iterable[str] = (), cast: bool = False
    ) -> int:
        """Put the entries that `into` names into its live objects; other entries of the checkpoint are left alone.

        Needs torch, but neither Ray nor a process group. Tensors on the meta device get memory. strict, skip, cast: as
        Checkpointer.restore has them; skip reaches into modules ("model.head"). Returns the step. Raises
        StateMismatchError when an entry of `into` differs; nothing is changed then. Raises NotFoundError when retention
        has dropped the checkpoint.
        """
        from raycheck.shards.state.restore_selection import Selection
        from raycheck.shards.state.train_state import TrainState

        state = TrainState(into, rank=0, world_size=1)
        return state.apply(self, Selection.of(into, skip), strict=strict, cast=cast).manifest.step

    def manifest(self) -> Manifest:
        """Read the checkpoint's manifest from the bucket. See Checkpoint.read_manifest."""
        return self.read_manifest()

    def index(self, manifest: Manifest, *, values: bool = True) -> Index:
        """Read the checkpoint's index from the bucket. See Checkpoint.read_index."""
        return self.read_index(manifest, values=values)


@dataclass(frozen=True, slots=True)
class Run:
    """A run as `latest` had it at one moment."""

    store: Store
    latest: Latest

    @property
    def head(self) -> CommittedCheckpoint | None:
        """What a resume would restore; None when nothing was committed yet."""
        return None if self.latest.head is None else self.checkpoint(self.latest.head)

    @property
    def checkpoints(self) -> tuple[CommittedCheckpoint, ...]:
        """All live checkpoints, oldest commit first."""
        return tuple(CommittedCheckpoint(self.store, entry) for entry in self.latest.live)

    def at_step(self, step: int) -> CommittedCheckpoint:
        """The newest committed checkpoint of `step`. Raises NotFoundError that lists what there is."""
        found = [entry for entry in self.latest.live if entry.step == step]
        if not found:
            steps = ", ".join(str(entry.step) for entry in self.latest.live) or "none"
            raise NotFoundError(f"{self.store.uri}: no checkpoint of step {step}; there are: {steps}")
        return CommittedCheckpoint(self.store, found[-1])

    def checkpoint(self, key: str) -> CommittedCheckpoint:
        """The live checkpoint with this name. Raises NotFoundError that says why there is none."""
        entry = self.latest.entry(key)
        if entry is not None:
            return CommittedCheckpoint(self.store, entry)
        if CheckpointName.parse(key) is None:
            raise NotFoundError(
                f"{self.store.uri}: {key!r} is no checkpoint's name. Names are like "
                f"{self.latest.head or 'step-000000100-a1-s1'}; a step is a whole number"
            )
        is_dropped = any(item.key == key for item in self.latest.evicted)
        why = "was dropped, by retention or by hand" if is_dropped else "is not listed: never committed, or dropped"
        raise NotFoundError(f"{self.store.uri}: checkpoint {key} {why}. 'raycheck ls' lists those that there are")

    def restore(
        self,
        step: int | None = None,
        *,
        into: Mapping[str, object],
        strict: bool = True,
        skip: Iterable[str] = (),
        cast: bool = False,
    ) -> int:
        """Put those entries of a checkpoint (the head, or `step`) that `into` names into its live objects. See
        CommittedCheckpoint.restore."""
        return self.head_or(step).restore(into=into, strict=strict, skip=skip, cast=cast)

    def head_or(self, step: int | None) -> CommittedCheckpoint:
        """The newest checkpoint of `step`, or the head for None. Raises NotFoundError when there is none."""
        checkpoint = self.head if step is None else self.at_step(step)
        if checkpoint is None:
            raise NotFoundError(f"{self.store.uri}: the run has no committed checkpoint")
        return checkpoint


def open_run(uri: str, storage: StorageSettings | None = None) -> Run:
    """The run at `uri` (Ray's storage path and run name). Raises NotFoundError when there is none."""
    store = open_store(uri, storage)
    return Run(store, read_latest(store))


def open_checkpoint(pointer: Any) -> CommittedCheckpoint:
    """What a Ray checkpoint of raycheck points to: `Result.checkpoint`, what a validation function is given, or any
    other ray.train.Checkpoint of the run. It has `step`, all `metrics` of its save, and `restore(into=)`.

    Raises ConfigError when it is not one of raycheck's pointers, NotFoundError when retention has dropped it.
    """
    found = _pointed_to(pointer)
    here = uri_of(pointer.filesystem, pointer.path.removesuffix(f"/ray/{found.key}"))
    if not is_same_place(found.uri, here):
        # What lies in a bucket must not send us, and our credentials, to another place. For the same reason the
        # settings are those the pointer was read with, not those it holds.
        raise ConfigError(f"{pointer}: it points to {found.uri}, which is another run than the one it lies in")
    checkpoint = open_run(here).checkpoint(found.key)
    entry = replace(
        checkpoint.entry, metrics=checkpoint.read_manifest().metrics
    )  # `latest` may repeat only some of them
    return replace(checkpoint, entry=entry)


def _pointed_to(pointer: Any) -> Pointer:
    """What Ray's copy of a pointer says. Raises ConfigError when it cannot be read twice in a row."""
    path = f"{pointer.path}/pointer.json"

    def read() -> Pointer:
        if not pointer.filesystem.get_file_info(path).is_file:  # a pipe would never be read to its end
            raise FileNotFoundError(path)
        with pointer.filesystem.open_input_stream(path) as stream:
            return load_pointer(stream.read(MAX_POINTER_BYTES + 1), what=path)

    try:
        return again_if_corrupt(read)
    except (OSError, ValueError, CorruptError) as error:
        raise ConfigError(f"{pointer}: not a checkpoint that raycheck reported ({error})") from None


def export_hf(
    source: str | Checkpoint,
    dest: str,
    *,
    storage: StorageSettings | None = None,
    step: int | None = None,
    entry: str | None = None,
    files: Sequence[str] | None = None,
    merge_lora: bool = False,
    dtype: "torch.dtype | str | None" = None,
    config_from: str | None = None,
    max_shard_bytes: int | None = None,
) -> "Exported":
    """Write the model of a checkpoint as a Hugging Face directory that `from_pretrained` loads.

    source: a run's URI (its head, or `step`), or a checkpoint, as `open_checkpoint` gives it. dest: a new or empty
    folder, or the URI of a free place in a bucket. storage: how the source's bucket is reached, and a destination of
    the same kind. The rest: see raycheck.shards.huggingface.export. Needs torch, but neither Ray nor transformers nor
    an accelerator, and a bounded amount of memory. Returns the files with their sizes.
    """
    from raycheck.shards.huggingface.export import export_hf as export

    if isinstance(source, Checkpoint) and step is not None:
        raise ConfigError(f"export_hf: step={step} chooses among a run's checkpoints; give the run's URI with it")
    checkpoint = source if isinstance(source, Checkpoint) else open_run(source, storage).head_or(step)
    return export(
        checkpoint,
        dest,
        storage=storage,
        entry=entry,
        files=files,
        merge_lora=merge_lora,
        dtype=dtype,
        config_from=config_from,
        max_shard_bytes=max_shard_bytes,
    )
