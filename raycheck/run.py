"""Opens a run outside of any training: shows what is committed, restores it into live objects, and exports it.

These are the public `open_run`, `open_checkpoint` and `export_hf`. None of them changes the run. What does, also beside
a training, are the methods of `Run` that pin, name and score a checkpoint.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from operator import index
from typing import TYPE_CHECKING, Any

from raycheck.bucket.document_reading import again_if_corrupt
from raycheck.bucket.format.index import Index
from raycheck.bucket.format.label import Label
from raycheck.bucket.format.latest import Entry, Latest
from raycheck.bucket.format.manifest import Manifest
from raycheck.bucket.format.object_keys import LATEST_KEY, CheckpointName
from raycheck.bucket.format.ray_pointer import MAX_BYTES as MAX_POINTER_BYTES
from raycheck.bucket.format.ray_pointer import Pointer, load_pointer
from raycheck.bucket.protocol import name_and_score, pin_and_evict
from raycheck.bucket.protocol.name_and_score import names_in
from raycheck.bucket.protocol.removal.prune_and_sweep import GRACE_S, Deletion, plan_prune, plan_sweep, prune, sweep
from raycheck.bucket.protocol.rewind import check_rewind, rewind
from raycheck.bucket.protocol.swap import Register
from raycheck.bucket.reading import Checkpoint, read_latest_at
from raycheck.bucket.store import Store, open_store
from raycheck.bucket.store.address import is_same_place, shown_uri
from raycheck.bucket.store.ray_filesystem import uri_of
from raycheck.errors import ConfigError, CorruptError, NotFoundError
from raycheck.settings import ExportOptions
from raycheck.show_progress import ShowProgress, show_nothing
from raycheck.storage_settings import StorageSettings

if TYPE_CHECKING:
    import torch

    from raycheck.data.step_samples import StepSamples
    from raycheck.huggingface.export import Exported
    from raycheck.views.difference import CheckpointDifference
    from raycheck.views.history import RunHistory
    from raycheck.views.kept import KeptCheckpoints
    from raycheck.views.tensor_change import TensorChange
    from raycheck.views.tensor_sample import TensorSample
    from raycheck.views.tensors import TensorSummary


MAX_DIGITS = 18
"""A longer number is no step."""


@dataclass(frozen=True, slots=True)
class CommittedCheckpoint(Checkpoint):
    """Describes a committed checkpoint, and restores it into live objects outside of any training."""

    def restore(
        self, *, into: Mapping[str, object], strict: bool = True, skip: Iterable[str] = (), cast: bool = False
    ) -> int:
        """Restore the entries that `into` names into its live objects, and ignore the checkpoint's other entries.

        This needs torch, but neither Ray nor a process group. Tensors on the meta device get memory.

        into: live objects (modules, optimizers and so on), by the name of their entry. strict, skip, cast: as for
        Checkpointer.restore; skip reaches into modules ("model.head"). Returns the step. Raises StateMismatchError when
        an entry of `into` differs, and changes nothing then. Raises NotFoundError when retention has dropped the
        checkpoint.
        """
        from raycheck.state.restore_selection import Selection
        from raycheck.state.train_state import TrainState

        state = TrainState(into, rank=0, world_size=1)
        return state.apply(self, Selection.of(into, skip), strict=strict, cast=cast).manifest.step

    def samples(self, first: int, end: int) -> "list[StepSamples]":
        """Return which samples made the steps from `first` to before `end`, whatever the world size was.

        Steps count from 1, as in logs: those from 401 to before 501 lie between the checkpoints of steps 400 and 500.
        It is known of steps up to this checkpoint's, of a run with raycheck.Batches in its state; this needs torch.
        Raises ConfigError when it is not known, CorruptError for a checkpoint with other values than Batches write.
        """
        from raycheck.data.step_samples import positions_in, samples_of
        from raycheck.state.preview import saved_values
        from raycheck.state.restore_matching import corrupt_if_odd

        with corrupt_if_odd(self.entry.key):
            values = saved_values(self.read_index(self.read_manifest()))
            found = next(positions_in(values), None)
            if found is None:
                raise ConfigError(
                    f"{self.entry.key}: no raycheck.Batches was in the state, so nobody knows which samples a step had"
                )
            return samples_of(found, first, end, step=self.step)

    def _repr_html_(self) -> str:
        from raycheck.views.notebook import checkpoint_html

        return checkpoint_html(self.store.uri, self.entry)

    def manifest(self) -> Manifest:
        """Read the checkpoint's manifest from the bucket. See Checkpoint.read_manifest."""
        return self.read_manifest()

    def index(self, manifest: Manifest, *, values: bool = True) -> Index:
        """Read the checkpoint's index from the bucket. See Checkpoint.read_index."""
        return self.read_index(manifest, values=values)

    def tensors(self) -> "tuple[TensorSummary, ...]":
        """List the checkpoint's tensors: form, place, and which parameter a moment belongs to. Reads no tensor.

        Raises NotFoundError when retention has dropped the checkpoint, DamagedError.
        """
        from raycheck.views.tensors import summarize_tensors

        manifest = self.read_manifest()
        return summarize_tensors(manifest, self.read_index(manifest, values=False))

    def diff(self, other: "Checkpoint") -> "CheckpointDifference":
        """Compare this checkpoint with a later one (`other`) by checksums alone. Reads no tensor.

        Raises NotFoundError when retention has dropped one of them, DamagedError.
        """
        from raycheck.views.difference import compare_indexes

        ours, theirs = (item.read_index(item.read_manifest()) for item in (self, other))
        return compare_indexes(ours, theirs, names=(self.entry.key, other.entry.key))

    def compare_values(self, other: "Checkpoint", tensor: str, *, max_bytes: int | None = None) -> "TensorChange":
        """Read at most `max_bytes` (4 MiB by default) of a tensor here and in a later checkpoint, and compare them.

        other: a checkpoint of the same run. This needs NumPy. Raises NotFoundError when one of them has no such tensor,
        or retention has dropped it; ConfigError for another shape, a type that cannot be compared, and a tensor that
        must be read whole, because it was saved in other boxes, and is larger than that; DamagedError.
        """
        try:
            from raycheck.views.tensor_change import compare_tensor
            from raycheck.views.tensor_sample import MAX_BYTES
        except ImportError:
            raise ConfigError("looking at values needs NumPy, which is not installed: pip install numpy") from None
        if other.store.uri != self.store.uri:
            raise ConfigError(f"{other.entry.key} is of another run, {other.store}: compare checkpoints of one run")
        manifests = [item.read_manifest() for item in (self, other)]
        indexes = [item.read_index(read, values=False) for item, read in zip((self, other), manifests, strict=True)]
        before, after = zip(manifests, indexes, strict=True)
        most = MAX_BYTES if max_bytes is None else max_bytes
        return compare_tensor(self.store, before, after, tensor, max_bytes=most)

    def sample(self, tensor: str, *, max_bytes: int | None = None) -> "TensorSample":
        """Read at most `max_bytes` (4 MiB by default) of a tensor's values, and describe them. This needs NumPy.

        tensor: its name, as `tensors` has it. Raises NotFoundError when there is no such tensor or retention has
        dropped the checkpoint, ConfigError for a type that cannot be shown, DamagedError.
        """
        try:
            from raycheck.views.tensor_sample import MAX_BYTES, sample_tensor
        except ImportError:
            raise ConfigError("looking at values needs NumPy, which is not installed: pip install numpy") from None
        manifest = self.read_manifest()
        index = self.read_index(manifest, values=False)
        most = MAX_BYTES if max_bytes is None else max_bytes
        return sample_tensor(self.store, manifest, index, tensor, max_bytes=most)


@dataclass(frozen=True, slots=True)
class Run:
    """Describes a run as its pointer `latest` had it at one moment. Open it again to see later commits.

    Methods that say which checkpoint is meant (`at`) take a step, for the newest checkpoint of that step, a name that a
    checkpoint was given, or a checkpoint's key. Those that change the run leave this value as it is, and return the run
    as it is afterwards.

    read_at: when `latest` was read, in unix seconds by the store's clock; None where that is not known.
    """

    store: Store
    latest: Latest
    read_at: float | None = None

    def reopened(self) -> "Run":
        """Read the run anew, by the connections that it has. Raises NotFoundError when it is gone."""
        body, at = read_latest_at(self.store)
        return Run(self.store, body, at)

    @property
    def head(self) -> CommittedCheckpoint | None:
        """Return the checkpoint that a resume would restore; None when nothing was committed yet."""
        return None if self.latest.head is None else self.checkpoint(self.latest.head)

    @property
    def checkpoints(self) -> tuple[CommittedCheckpoint, ...]:
        """Return the live checkpoints, in the order of their commits."""
        return tuple(CommittedCheckpoint(self.store, entry) for entry in self.latest.live)

    @property
    def lent(self) -> dict[str, tuple[str, ...]]:
        """Return the checkpoints whose bytes other runs use, such as forks, by the way to each run ("../other")."""
        own = {hold.holder: hold.directories for hold in self.latest.holds if hold.run_id != self.latest.run_id}
        return {holder: tuple(name for name in names if "/" not in name) for holder, names in own.items()}

    @property
    def borrowed(self) -> dict[str, tuple[str, ...]]:
        """Return the checkpoints of other runs whose bytes this run uses, by the way to each run ("../base")."""
        return {loan.source: loan.directories for loan in self.latest.loans}

    def _repr_html_(self) -> str:
        from raycheck.views.notebook import run_html

        return run_html(self.store.uri, self.latest)

    def at(self, at: int | str) -> CommittedCheckpoint:
        """Return the committed checkpoint with this step, name or key.

        Of several with one step it is the newest. Raises NotFoundError, which says what there is.
        """
        if not isinstance(at, str):
            return self.at_step(index(at))
        if at.isdecimal() and len(at) <= MAX_DIGITS:
            return self.at_step(int(at))
        entry = self.latest.named(at)
        if entry is not None:
            return CommittedCheckpoint(self.store, entry)
        if CheckpointName.parse(at) is not None:
            return self.checkpoint(at)
        raise NotFoundError(
            f"{self.store}: {at!r} is no checkpoint's name. Names given: {names_in(self.latest)}; keys are like "
            f"{self.latest.head or 'step-000000100-a1-s1'}; a step is a whole number"
        )

    def at_step(self, step: int) -> CommittedCheckpoint:
        """Return the newest committed checkpoint of `step`. Raises NotFoundError, which lists the steps there are."""
        found = [entry for entry in self.latest.live if entry.step == step]
        if not found:
            steps = ", ".join(str(entry.step) for entry in self.latest.live) or "none"
            raise NotFoundError(f"{self.store}: no checkpoint of step {step}; there are: {steps}")
        return CommittedCheckpoint(self.store, found[-1])

    def checkpoint(self, key: str) -> CommittedCheckpoint:
        """Return the live checkpoint with this key. Raises NotFoundError, which says why there is none."""
        entry = self.latest.entry(key)
        if entry is not None:
            return CommittedCheckpoint(self.store, entry)
        if CheckpointName.parse(key) is None:
            raise NotFoundError(
                f"{self.store}: {key!r} is no checkpoint's name. Names are like "
                f"{self.latest.head or 'step-000000100-a1-s1'}; a step is a whole number"
            )
        is_dropped = any(item.key == key for item in self.latest.evicted)
        why = "was dropped, by retention or by hand" if is_dropped else "is not listed: never committed, or dropped"
        raise NotFoundError(f"{self.store}: checkpoint {key} {why}. 'raycheck ls' lists those that there are")

    def restore(
        self,
        at: int | str | None = None,
        *,
        into: Mapping[str, object],
        strict: bool = True,
        skip: Iterable[str] = (),
        cast: bool = False,
    ) -> int:
        """Restore entries of a checkpoint (the head, or `at`) into the live objects in `into`.

        See CommittedCheckpoint.restore.
        """
        return self.head_or(at).restore(into=into, strict=strict, skip=skip, cast=cast)

    def head_or(self, at: int | str | None) -> CommittedCheckpoint:
        """Return the checkpoint `at`, or the head for None. Raises NotFoundError when there is none."""
        checkpoint = self.head if at is None else self.at(at)
        if checkpoint is None:
            raise NotFoundError(f"{self.store}: the run has no committed checkpoint")
        return checkpoint

    def history(self) -> "RunHistory":
        """Read what happened to the run until it was opened: its attempts, why each ended, its commits, its goodput."""
        from raycheck.views.history import read_history

        return read_history(self.store, self.latest, now=self._read_at())

    def kept(self, history: "RunHistory | None" = None) -> "KeptCheckpoints":
        """Say why each checkpoint stays, by the rules that the training had at its newest commit. Changes nothing.

        history: what `history` has returned, where that was asked already: it has the rules, and spares a request.
        Raises NotFoundError when the head was dropped since the run was opened.
        """
        from raycheck.views.kept import why_kept

        settings = None if history is None else history.settings
        if settings is None:
            settings = () if self.head is None else self.head.read_manifest().settings
        return why_kept(self.latest, settings, now=self._read_at())

    def _read_at(self) -> float:
        return self.store.get(LATEST_KEY).at if self.read_at is None else self.read_at

    def pin(self, at: int | str) -> "Run":
        """Keep a checkpoint, whatever retention says, until `unpin`. Raises NotFoundError."""
        return Run(self.store, pin_and_evict.pin(self._register, self._key(at)))

    def unpin(self, at: int | str) -> "Run":
        """Leave a pinned checkpoint to retention again. Raises NotFoundError."""
        return Run(self.store, pin_and_evict.pin(self._register, self._key(at), pinned=False))

    def name_checkpoint(
        self, at: int | str, name: str, *, expire_after_s: float | None = None, overwrite: bool = False
    ) -> "Run":
        """Give a checkpoint a name, by which it can be restored, and which keeps it from retention.

        expire_after_s: from now on, after this many seconds, the name keeps it no longer, and neither does any rule;
        None: it never expires. overwrite: take the name from a checkpoint of another step, or another name from this
        one. Raises ConfigError when that is needed and not given, and for a name that cannot be one; NotFoundError when
        there is no such checkpoint.
        """
        label = Label(name=name, expire_after_s=expire_after_s, may_move=overwrite)
        return Run(self.store, name_and_score.name(self._register, self._key(at), label))

    def rename_checkpoint(self, old: str, new: str) -> "Run":
        """Give the checkpoint named `old` the name `new`. Raises ConfigError when `new` is taken, NotFoundError."""
        return Run(self.store, name_and_score.rename(self._register, old, new))

    def unname_checkpoint(self, name: str) -> "Run":
        """Take a name off its checkpoint, which is left to retention again. Raises NotFoundError."""
        return Run(self.store, name_and_score.unname(self._register, name))

    def plan_rewind(self, at: int | str) -> Entry:
        """Return the entry of the checkpoint that `rewind` would make the head. Writes nothing, and raises alike."""
        key = self._key(at)
        check_rewind(self._register, key)
        return self.at(key).entry

    def rewind(self, at: int | str) -> "Run":
        """Make an earlier checkpoint the head: the next start restores it. A training that still runs is ended.

        Later checkpoints stay listed until retention drops them. Raises NotFoundError, and DamagedError for a
        checkpoint that is still damaged.
        """
        return Run(self.store, rewind(self._register, self._key(at)))

    def plan_prune(self, *, grace_s: float = GRACE_S) -> tuple[Deletion, ...]:
        """List what `prune` would delete now, or after the grace. Writes nothing."""
        return plan_prune(self._register, grace_s=grace_s)

    def prune(self, *, grace_s: float = GRACE_S) -> tuple[str, ...]:
        """Delete what was dropped or has expired, once its readers had `grace_s` seconds. Returns the keys that went.

        A running training goes on. What else to drop is said by its settings, or by the options of `raycheck prune`.
        """
        return prune(self._register, grace_s=grace_s)

    def plan_sweep(self) -> tuple[Deletion, ...]:
        """List what `sweep` would delete: what interrupted saves of earlier attempts left. Writes nothing."""
        return plan_sweep(self.store)

    def sweep(self) -> tuple[Deletion, ...]:
        """Delete what interrupted saves of earlier attempts left, and return it. A running training goes on.

        Raises CorruptError when `latest` is older than a directory; nothing is deleted then.
        """
        return sweep(self.store)

    def score(self, at: int | str, scores: Mapping[str, float]) -> "Run":
        """Attach what was measured of a checkpoint after its commit, such as {"mmlu": 0.63}.

        `keep_best` obeys it from the next commit on, and prefers it to a metric of that name. Raises ConfigError for
        more than 32 scores and for a value that is not finite, NotFoundError when the checkpoint was dropped.
        """
        return Run(self.store, name_and_score.score(self._register, self._key(at), scores))

    @property
    def _register(self) -> Register:
        return Register(self.store)

    def _key(self, at: int | str) -> str:
        return self.at(at).entry.key


def open_run(uri: str, storage: StorageSettings | None = None) -> Run:
    """Open the run at `uri`, which is Ray's storage path and the run's name: "s3://bucket/runs/my-run".

    storage: how the bucket is reached, when the environment and the URI do not say it. Raises NotFoundError when there
    is no run.
    """
    store = open_store(uri, storage)
    body, at = read_latest_at(store)
    return Run(store, body, at)


def open_checkpoint(pointer: Any) -> CommittedCheckpoint:
    """Open the checkpoint that a ray.train.Checkpoint of a raycheck run points to.

    pointer: `Result.checkpoint`, the argument of a validation function, or any other ray.train.Checkpoint of the run.
    The answer has `step`, all `metrics` of its save, and `restore(into=)`. Raises ConfigError when `pointer` is not one
    of raycheck's, NotFoundError when retention has dropped the checkpoint.
    """
    found = _pointed_to(pointer)
    here = uri_of(pointer.filesystem, pointer.path.removesuffix(f"/ray/{found.key}"))
    if not is_same_place(found.uri, here):
        # What lies in a bucket must not send us, and our credentials, to another place. For the same reason the
        # settings are those the pointer was read with, not those it holds.
        raise ConfigError(f"{pointer}: it points to {shown_uri(found.uri)}, which is not the run that it lies in")
    checkpoint = open_run(here).checkpoint(found.key)
    entry = replace(
        checkpoint.entry, metrics=checkpoint.read_manifest().metrics
    )  # `latest` may repeat only some of them
    return replace(checkpoint, entry=entry)


def _pointed_to(pointer: Any) -> Pointer:
    """Read the pointer behind a ray.train.Checkpoint. Raises ConfigError when that fails twice in a row."""
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
    to: str,
    *,
    storage: StorageSettings | None = None,
    at: int | str | None = None,
    entry: str | None = None,
    files: Sequence[str] | None = None,
    merge_lora: bool = False,
    dtype: "torch.dtype | str | None" = None,
    config_from: str | None = None,
    max_shard_bytes: int | None = None,
    progress: ShowProgress = show_nothing,
) -> "Exported":
    """Write the model of a checkpoint as a Hugging Face directory that `from_pretrained` loads.

    This needs torch, but neither Ray nor transformers nor an accelerator, and a bounded amount of memory. The directory
    is whole or not there.

    source: a run's URI, or a checkpoint such as `open_checkpoint` returns. at: which checkpoint of the run, by its
        step, name or key; None: the head.
    to: a new or empty folder, or the URI of a free place in a bucket.
    storage: how the source's bucket is reached, and a destination of the same kind of store.
    entry: the model's name in the state. None: the one entry that has a Hugging Face configuration.
    files: the tokenizers and processors that are written too, by their names in the state. None: all of them.
    merge_lora: write a PEFT model as a plain model with its adapter merged. False: write the adapter alone.
    dtype: the type that floating-point weights are converted to, such as torch.bfloat16 or "bfloat16". None: as saved.
    config_from: a folder, or its URI, with the config.json of a model that was saved without one.
    max_shard_bytes: how large a file of weights may be, in bytes. None: 5 GB, and less for a small model.
    progress: called with the bytes of weights that are written, and all.

    Returns the files with their sizes in bytes. Raises NotFoundError when there is no such checkpoint, ConfigError,
    before anything was written, for what cannot be done, and CorruptError for bytes that are not those saved.
    """
    from raycheck.huggingface.export import export_hf as export
    from raycheck.huggingface.export import write_all

    if isinstance(source, Checkpoint) and at is not None:
        raise ConfigError(f"export_hf: at={at} chooses among a run's checkpoints; give the run's URI with it")
    checkpoint = source if isinstance(source, Checkpoint) else open_run(source, storage).head_or(at)
    options = ExportOptions(
        entry=entry,
        files=files,
        merge_lora=merge_lora,
        dtype=dtype,
        config_from=config_from,
        max_shard_bytes=max_shard_bytes,
    )
    return export(checkpoint, to, options, storage=storage, write=partial(write_all, progress=progress))
