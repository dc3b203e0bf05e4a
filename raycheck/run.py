"""Opens a run outside of training: shows what is committed, restores it into live objects, and exports it.

`open_run`, `open_checkpoint` and `export_hf` are public and do not change the run. The methods of `Run` that pin, name,
score, rewind, prune and sweep do change it, and may be called while it trains.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from raycheck.bucket.attempt_records import read_record
from raycheck.bucket.choice import entry_at
from raycheck.bucket.document_reading import again_if_corrupt
from raycheck.bucket.format.label import Label, NoteValue
from raycheck.bucket.format.latest import Latest, PageRef
from raycheck.bucket.format.object_keys import EXPORTS_PREFIX, LATEST_KEY, checkpoint_prefix
from raycheck.bucket.format.ray_pointer import MAX_BYTES as MAX_POINTER_BYTES
from raycheck.bucket.format.ray_pointer import Pointer, load_pointer
from raycheck.bucket.pages import Pages, again_if_missing, lost_page_text
from raycheck.bucket.protocol import name_and_score, pin_and_evict
from raycheck.bucket.protocol.removal.prune_and_sweep import (
    GRACE_S,
    NO_RULES,
    Deletion,
    plan_prune,
    plan_sweep,
    prune,
    sweep,
)
from raycheck.bucket.protocol.rewind import rewind
from raycheck.bucket.protocol.swap import Register
from raycheck.bucket.reading import Checkpoint, ask_latest, read_newest, read_newest_at, read_readable_at
from raycheck.bucket.run_status import Status, status_of
from raycheck.bucket.store import Store, open_store
from raycheck.bucket.store.address import is_same_place, shown_uri
from raycheck.bucket.store.ray_filesystem import uri_of
from raycheck.bucket.stored_export import StoredExport
from raycheck.bucket.verify import Finding
from raycheck.errors import ConfigError, CorruptError, NotFoundError
from raycheck.settings import ExportOptions, Publish, Retention
from raycheck.show_progress import ProgressTally, ShowProgress, show_nothing
from raycheck.storage_settings import StorageSettings

if TYPE_CHECKING:
    import torch

    from raycheck.bucket.format.index import Index
    from raycheck.bucket.format.manifest import Manifest
    from raycheck.data.step_samples import StepSamples
    from raycheck.huggingface.export import Exported
    from raycheck.published.publish import Published
    from raycheck.published.series import PublishedVersions
    from raycheck.views.details import CheckpointDetails
    from raycheck.views.difference import CheckpointDifference
    from raycheck.views.history import RunHistory
    from raycheck.views.kept import KeptCheckpoints
    from raycheck.views.tensor_change import TensorChange
    from raycheck.views.tensor_sample import TensorSample
    from raycheck.views.tensors import TensorSummary

T = TypeVar("T")
NO_NUMPY = "looking at values needs NumPy, which is not installed: pip install numpy"


@dataclass(frozen=True, slots=True)
class CommittedCheckpoint:
    """A committed checkpoint: what it contains, and its restore into live objects outside of training."""

    _stored: Checkpoint

    @property
    def uri(self) -> str:
        """Return the run's URI."""
        return self._stored.store.uri

    @property
    def key(self) -> str:
        """Return the checkpoint's key, such as "step-000000800-a1-s8". No other checkpoint of the run ever has it."""
        return self._stored.entry.key

    @property
    def address(self) -> str:
        """Return the address of the checkpoint's directory, without settings, for a list that refers to it."""
        return f"{shown_uri(self._stored.store.uri)}/{checkpoint_prefix(self.key)}".removesuffix("/")

    @property
    def digest(self) -> str:
        """Return the checksum of the checkpoint's manifest, which has those of all its objects: "crc32:89abcdef"."""
        return f"crc32:{self._stored.entry.manifest_crc32:08x}"

    @property
    def step(self) -> int:
        """Return the number of optimizer steps completed in the checkpoint."""
        return self._stored.entry.step

    @property
    def name(self) -> str | None:
        """Return the name that a save or a person gave to the checkpoint; None if it has none."""
        return self._stored.entry.name

    @property
    def metrics(self) -> Mapping[str, float]:
        """Return the metrics of the save: the first 32, or fewer for older checkpoints of a run with very many.

        A checkpoint from `open_checkpoint` has all of them.
        """
        return self._stored.entry.metrics

    @property
    def scores(self) -> Mapping[str, float]:
        """Return the scores that were measured after the commit and attached to the checkpoint."""
        return self._stored.entry.scores

    @property
    def size_bytes(self) -> int:
        """Return the size of everything in the checkpoint, including what it shares with other checkpoints."""
        return self._stored.entry.size_bytes

    @property
    def committed_at(self) -> float:
        """Return the time of the commit, in unix seconds by the store's clock."""
        return self._stored.entry.committed_at

    @property
    def expires_at(self) -> float | None:
        """Return when the checkpoint expires, in unix seconds by the store's clock; None for never."""
        return self._stored.entry.expires_at

    @property
    def damaged(self) -> str | None:
        """Return the damage that a restore found in the checkpoint; None if it found none."""
        return self._stored.entry.damaged

    @property
    def is_pinned(self) -> bool:
        """Return whether `Run.pin` keeps the checkpoint."""
        return self._stored.entry.pinned

    @property
    def is_rolling(self) -> bool:
        """Return whether this is a rolling checkpoint, of which only a few are kept."""
        return self._stored.entry.rolling

    @property
    def is_by_notice(self) -> bool:
        """Return whether the checkpoint was saved because a node was about to be taken away."""
        return self._stored.entry.by_notice

    @property
    def is_drifted(self) -> bool:
        """Return whether replicas differed when the checkpoint was saved, with SaveSettings(on_drift="keep_first")."""
        return self._stored.entry.drifted

    @property
    def shares_with(self) -> tuple[str, ...]:
        """Return the keys of checkpoints whose bytes this one uses; one in another run has a path ("../base/...")."""
        return self._stored.entry.refs

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
        return state.apply(self._stored, Selection.of(into, skip), strict=strict, cast=cast).manifest.step

    def samples(self, first: int, end: int) -> "list[StepSamples]":
        """Return the samples that trained the steps from `first` up to, but not including, `end`, at any world size.

        Steps count from 1, as in logs: first=401, end=501 are the steps between the checkpoints of steps 400 and 500.
        The samples are known for steps up to this checkpoint's, if the run has raycheck.Batches in its state. Needs
        torch. Raises ConfigError if the samples are not known, CorruptError if the saved values are not those of
        Batches.
        """
        from raycheck.data.step_samples import positions_in, samples_of
        from raycheck.state.preview import saved_values
        from raycheck.state.restore_matching import corrupt_if_odd

        with corrupt_if_odd(self.key):
            found = next(positions_in(saved_values(self._read()[1])), None)
            if found is None:
                raise ConfigError(
                    f"{self.key}: no raycheck.Batches was in the state, so nobody knows which samples a step had"
                )
            return samples_of(found, first, end, step=self.step)

    def _repr_html_(self) -> str:
        from raycheck.views.notebook import checkpoint_html

        return checkpoint_html(self.uri, self._stored.entry)

    def opened(self) -> "CommittedCheckpoint":
        """Return this checkpoint with its manifest and index already read, so that the other methods need not read
        them.

        Raises NotFoundError when retention has dropped the checkpoint, DamagedError.
        """
        whole = replace(self._stored, documents=self._stored.read_documents()).read_once()
        return replace(self, _stored=replace(whole, documents=None))

    def _read(self, *, values: bool = True) -> "tuple[Manifest, Index]":
        manifest = self._stored.read_manifest()
        return manifest, self._stored.read_index(manifest, values=values)

    def note(self) -> Mapping[str, NoteValue]:
        """Read the note that was attached to the save. Raises the errors of `details`."""
        return self._stored.read_manifest().note

    def details(self, *, values: bool = False) -> "CheckpointDetails":
        """Read how the checkpoint was saved, and what is in it: entries, components, objects. Reads no tensor.

        values: include the values that are not tensors. Raises NotFoundError when retention has dropped the checkpoint,
        DamagedError.
        """
        from raycheck.views.details import details_of

        return details_of(*self._read(values=values))

    def tensors(self) -> "tuple[TensorSummary, ...]":
        """List the checkpoint's tensors: shapes, locations, and the parameter of each optimizer moment. Reads no
        tensor.

        Raises NotFoundError when retention has dropped the checkpoint, DamagedError.
        """
        from raycheck.views.tensors import summarize_tensors

        return summarize_tensors(*self._read(values=False))

    def diff(self, other: "CommittedCheckpoint") -> "CheckpointDifference":
        """Compare this checkpoint with a later one (`other`) by checksums alone. Reads no tensor.

        Raises NotFoundError when retention has dropped one of them, DamagedError.
        """
        from raycheck.views.difference import compare_indexes

        ours, theirs = self._read()[1], other._read()[1]  # noqa: SLF001  of this class
        return compare_indexes(ours, theirs, names=(self.key, other.key))

    def compare_values(
        self, other: "CommittedCheckpoint", tensor: str, *, max_bytes: int | None = None
    ) -> "TensorChange":
        """Read at most `max_bytes` (4 MiB by default) of a tensor in this and a later checkpoint, and compare them.

        other: a checkpoint of the same run. Needs NumPy. Raises NotFoundError if one of them has no such tensor, or if
        retention has dropped it; ConfigError if the shapes differ, if the type cannot be compared, or if the tensor was
        saved in other boxes, so that it must be read whole, and is larger than `max_bytes`; DamagedError.
        """
        try:
            from raycheck.views.tensor_change import compare_tensor
            from raycheck.views.tensor_sample import MAX_BYTES
        except ImportError:
            raise ConfigError(NO_NUMPY) from None
        if other.uri != self.uri:
            place = shown_uri(other.uri)
            raise ConfigError(f"{other.key} is of another run, {place}: compare checkpoints of one run")
        before, after = self._read(values=False), other._read(values=False)  # noqa: SLF001  of this class
        most = MAX_BYTES if max_bytes is None else max_bytes
        return compare_tensor(self._stored.store, before, after, tensor, max_bytes=most)

    def sample(self, tensor: str, *, max_bytes: int | None = None) -> "TensorSample":
        """Read at most `max_bytes` (4 MiB by default) of a tensor's values, and describe them. This needs NumPy.

        tensor: its name, as `tensors` has it. Raises NotFoundError when there is no such tensor or retention has
        dropped the checkpoint, ConfigError for a type that cannot be shown, DamagedError.
        """
        try:
            from raycheck.views.tensor_sample import MAX_BYTES, sample_tensor
        except ImportError:
            raise ConfigError(NO_NUMPY) from None
        most = MAX_BYTES if max_bytes is None else max_bytes
        return sample_tensor(self._stored.store, *self._read(values=False), tensor, max_bytes=most)

    def verify(self, *, reads: bool = True) -> Iterator[Finding]:
        """Read every object of the checkpoint, compare size and checksum, and yield one finding per object.

        reads: False compares sizes only.
        """
        return self._stored.verify(reads=reads)


@dataclass(frozen=True, slots=True)
class Run:
    """A run, as its `latest` described it at one moment. Open it again to see later commits.

    The argument `at` selects a checkpoint: by its step (the newest one of that step), by its name or its key, or "best"
    by the `keep_best` of the run's newest save.
    Methods that change the run do not change this object: they return a new one. With dry_run=True, they make every
    check and return the same, but write nothing.

    read_at: when `latest` was read, in unix seconds by the store's clock; None after a change made through this class.
    """

    _store: Store
    _newest: Latest
    read_at: float | None = None
    _pages: Pages | None = field(default=None, compare=False, repr=False)

    @property
    def _latest(self) -> Latest:
        """Return the whole body of `latest`. Its pages are read the first time."""
        return self._ask(lambda body: body if self._pages is None else self._pages.whole(body))

    def _ask(self, question: Callable[[Latest], T]) -> T:
        """Return the answer of `latest` to a question; pages are read if it depends on them."""
        if self._pages is None:
            return question(self._newest)
        return again_if_missing(self._pages, partial(next, self._opened()), partial(self._pages.ask, question=question))

    def _opened(self) -> Iterator[Latest]:
        """Yield `latest` as it was read, again as long as the run still has the same pages."""
        pages = {page.key for page in self._newest.all_pages}
        now = self._newest
        while pages <= {page.key for page in now.all_pages}:
            yield self._newest
            now = read_newest(self._store)
        raise NotFoundError(f"{self._store}: the run has changed since it was opened; open it again")

    def reopened(self) -> "Run":
        """Read the run again over the same connections. Raises NotFoundError if the run is gone."""
        return read_run(self._store)

    @property
    def uri(self) -> str:
        """Return the run's URI, as `open_run` takes it."""
        return self._store.uri

    @property
    def run_id(self) -> str:
        """Return the id that the run got when it first started. A copy has the id of its source."""
        return self._newest.run_id

    @property
    def attempt(self) -> int:
        """Return the number of the newest attempt. Each start of a worker group and each manual rewind counts one."""
        return self._newest.attempt.number

    @property
    def num_writes(self) -> int:
        """Return how many changes were made to the run: commits, starts, pins and so on."""
        return self._newest.counter

    @property
    def head(self) -> CommittedCheckpoint | None:
        """Return the checkpoint that a resume would restore; None if nothing is committed yet."""
        return None if self._newest.head is None else self.at(None)

    @property
    def checkpoints(self) -> tuple[CommittedCheckpoint, ...]:
        """Return the live checkpoints, in the order of their commits."""
        return tuple(CommittedCheckpoint(Checkpoint(self._store, entry)) for entry in self._latest.live)

    @property
    def lent(self) -> dict[str, tuple[str, ...]]:
        """Return the checkpoints whose bytes other runs use, such as forks, by the path to each run ("../other")."""
        own = {hold.holder: hold.directories for hold in self._newest.holds if hold.run_id != self.run_id}
        return {holder: tuple(name for name in names if "/" not in name) for holder, names in own.items()}

    @property
    def borrowed(self) -> dict[str, tuple[str, ...]]:
        """Return the checkpoints of other runs whose bytes this run uses, by the path to each run ("../base")."""
        return {loan.source: loan.directories for loan in self._newest.loans}

    def _repr_html_(self) -> str:
        from raycheck.views.notebook import run_html

        return run_html(self.uri, self._latest)

    def at(self, at: int | str | None) -> CommittedCheckpoint:
        """Return the committed checkpoint with this step, name or key; the head for None.

        If several have this step, the newest is returned. Raises NotFoundError, which lists what exists.
        """
        entry = self._ask(lambda body: entry_at(self._store, body, at))
        return CommittedCheckpoint(Checkpoint(self._store, entry))

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
        return self.at(at).restore(into=into, strict=strict, skip=skip, cast=cast)

    def status(self) -> Status:
        """Read whether the run is training, has finished, or has died, as far as the bucket shows."""
        return status_of(self._newest, read_record(self._store, self.attempt), now=self._now())

    def history(self) -> "RunHistory":
        """Read the run's history: all attempts, why each ended, all commits, what became of them, the metrics of the
        steps (`rows`, `curve`), and its goodput."""
        from raycheck.views.history import read_history

        try:
            body, lost = self._latest, tuple[PageRef, ...]()
        except CorruptError:
            assert self._pages is not None, "a body without pages is whole"
            body, lost = self._pages.readable(self._newest)
        return read_history(self._store, body, now=self._now(), lost=lost)

    def kept(
        self, history: "RunHistory | CheckpointDetails | None" = None, *, rules: Retention | None = None
    ) -> "KeptCheckpoints":
        """Explain why each checkpoint stays, by the rules that training had at its newest commit. Changes nothing.

        history: the result of `history`, or the details of the head, if you have either; they contain the rules, so
        one request fewer is sent. rules: use these rules instead. Raises NotFoundError if the head was dropped after
        the run was opened.
        """
        from raycheck.views.kept import kept_by, why_kept

        if rules is not None:
            return kept_by(self._latest, rules, now=self._now())
        settings = None if history is None else history.settings
        if settings is None:
            settings = () if self.head is None else self.head.details().settings
        return why_kept(self._latest, settings, now=self._now())

    def exports(self) -> tuple[str, ...]:
        """List the names of the directories below `exports/` in the run."""
        return tuple(self._store.list_names(EXPORTS_PREFIX))

    def export(self, name: str) -> StoredExport:
        """List the files of the directory `name` below `exports/`; none if there is no such directory."""
        return StoredExport.at(self._store, name)

    def delete_export(self, name: str, *, dry_run: bool = False) -> StoredExport:
        """Delete a directory below `exports/`, even while someone reads it. Returns what was there."""
        found = self.export(name)
        if not dry_run:
            found.delete()
        return found

    def publish(
        self,
        at: int | str | None = None,
        *,
        to: str | None = None,
        keep_last: int = 4,
        whole_every: int = 16,
        whole: bool = False,
        cache: str | None = None,
        entry: str | None = None,
        files: Sequence[str] | None = None,
        merge_lora: bool = False,
        dtype: str | None = None,
        max_shard_bytes: int | None = None,
    ) -> "Published | None":
        """Publish a checkpoint's model as the next version, for `raycheck.follow`. Needs torch.

        at: its step, name or key; None: the head. whole: write all files and no patch, for when the versions before are
        damaged. Other parameters: as for AfterCommit.publish. Returns None if it is the newest version already. Raises
        NotFoundError if there is no such checkpoint, ConfigError if it cannot be published, ConflictError if somebody
        else publishes at the same time.
        """
        from raycheck.published.publish import publish

        options = Publish(
            to=to,
            keep_last=keep_last,
            whole_every=whole_every,
            whole=whole,
            cache=cache,
            entry=entry,
            files=files,
            merge_lora=merge_lora,
            dtype=dtype,
            max_shard_bytes=max_shard_bytes,
        )
        return publish(self.at(at)._stored, options)  # noqa: SLF001  of a class in this file

    def publish_directory(
        self,
        directory: str | Path,
        *,
        step: int,
        to: str | None = None,
        keep_last: int = 4,
        whole_every: int = 16,
        whole: bool = False,
        cache: str | None = None,
        attempt: int | None = None,
        on_published: "Callable[[Published], None] | None" = None,
    ) -> "Published":
        """Publish a local Hugging Face directory as the next version: an adapter, say, that is in no checkpoint.

        directory: its files are published as they are. Its weights must be in one safetensors file, as PEFT's
        `save_pretrained` writes an adapter's. step: of the training. attempt: of which the caller is a part; None: of
        none. on_published: called as soon as samplers can have the version, before older ones are deleted. Other
        parameters: as for `publish`. Raises ConfigError if it cannot be published, ConflictError if somebody else
        publishes at the same time, FencedError if another attempt has claimed the run.
        """
        from raycheck.published.publish import publish_directory

        options = Publish(to=to, keep_last=keep_last, whole_every=whole_every, whole=whole, cache=cache)
        return publish_directory(
            self._store, Path(directory), options, step=step, attempt=attempt, on_published=on_published
        )

    def published(self) -> "PublishedVersions | None":
        """Read the list of the published versions in the run, and their readers; None if nothing is published."""
        from raycheck.published.series import PublishedVersions

        return PublishedVersions.of(self._store)

    def pin(self, at: int | str, *, dry_run: bool = False) -> "Run":
        """Keep a checkpoint, regardless of retention, until `unpin`. Raises NotFoundError."""
        return self._changed(partial(pin_and_evict.pin, key=self.at(at).key), dry_run=dry_run)

    def unpin(self, at: int | str, *, dry_run: bool = False) -> "Run":
        """Make a pinned checkpoint subject to retention again. Raises NotFoundError."""
        return self._changed(partial(pin_and_evict.pin, key=self.at(at).key, pinned=False), dry_run=dry_run)

    def name_checkpoint(
        self,
        at: int | str,
        name: str,
        *,
        expire_after_s: float | None = None,
        overwrite: bool = False,
        dry_run: bool = False,
    ) -> "Run":
        """Name a checkpoint. The name can be given to a restore, and retention keeps named checkpoints.

        expire_after_s: the checkpoint expires this many seconds from now: neither its name nor any rule keeps it then.
        None: it never expires. overwrite: take the name away from a checkpoint of another step, or replace this
        checkpoint's name. Raises ConfigError if that is needed and overwrite is False, or if the name is not allowed;
        NotFoundError if there is no such checkpoint.
        """
        label = Label(name=name, expire_after_s=expire_after_s, may_move=overwrite)
        return self._changed(partial(name_and_score.name, key=self.at(at).key, label=label), dry_run=dry_run)

    def rename_checkpoint(self, old: str, new: str, *, dry_run: bool = False) -> "Run":
        """Give the checkpoint named `old` the name `new`. Raises ConfigError when `new` is taken, NotFoundError."""
        return self._changed(partial(name_and_score.rename, old=old, new=new), dry_run=dry_run)

    def unname_checkpoint(self, name: str, *, dry_run: bool = False) -> "Run":
        """Remove a name from its checkpoint, which is then subject to retention again. Raises NotFoundError."""
        return self._changed(partial(name_and_score.unname, old=name), dry_run=dry_run)

    def score(self, at: int | str, scores: Mapping[str, float], *, dry_run: bool = False) -> "Run":
        """Attach scores to a checkpoint that were measured after its commit, such as {"mmlu": 0.63}.

        From the next commit on, `keep_best` uses a score in preference to a metric of the same name. Raises ConfigError
        for more than 32 scores and for a value that is not finite; NotFoundError if the checkpoint was dropped.
        """
        return self._changed(partial(name_and_score.score, key=self.at(at).key, scores=scores), dry_run=dry_run)

    def rewind(self, at: int | str, *, dry_run: bool = False, progress: ShowProgress = show_nothing) -> "Run":
        """Make an earlier checkpoint the head: the next start restores it. Training that is still running ends.

        Later checkpoints stay listed until retention drops them. progress: called while a checkpoint that is marked as
        damaged is read again, with the bytes read and their total. Raises NotFoundError, and DamagedError if the
        checkpoint is still damaged.
        """
        return self._changed(partial(rewind, key=self.at(at).key, progress=progress), dry_run=dry_run)

    def _changed(self, change: Callable[[Register], Latest], *, dry_run: bool) -> "Run":
        register = Register(self._store, is_dry=dry_run)
        return Run(self._store, change(register), _pages=register.pages)

    def prune(
        self,
        rules: Retention | None = None,
        *,
        grace_s: float = GRACE_S,
        dry_run: bool = False,
        progress: ShowProgress = show_nothing,
    ) -> tuple[Deletion, ...]:
        """Delete checkpoints that were dropped or have expired, after a grace period for readers. Training may
        continue.

        rules: also drop what these do not keep, such as SaveSettings(keep_last=3).retention; None: drop only what has
        expired. grace_s: seconds from the drop to the delete. progress: called with the number of objects. Returns what
        was deleted, and what will be after the grace period.
        """
        register, chosen = Register(self._store), NO_RULES if rules is None else rules
        found = plan_prune(register, chosen, grace_s=grace_s, tally=ProgressTally(progress))
        if dry_run:
            return found
        tally = ProgressTally(progress, total=sum(item.num_objects for item in found if not item.wait_s))
        gone = prune(register, chosen, grace_s=grace_s, tally=tally, by=pin_and_evict.by_hand())
        return tuple(replace(item, is_deleted=item.name in gone) for item in found)

    def sweep(
        self, *, whole: bool = False, dry_run: bool = False, progress: ShowProgress = show_nothing
    ) -> tuple[Deletion, ...]:
        """Delete what interrupted saves of earlier attempts left, and return it. Training may continue.

        whole: also delete whole checkpoints that the run does not list. progress: called with the number of objects.
        Raises CorruptError, and deletes nothing, if `latest` is older than a directory.
        """
        if dry_run:
            return plan_sweep(self._store, also_whole=whole)
        return sweep(self._store, also_whole=whole, tally=ProgressTally(progress))

    def _now(self) -> float:
        return self._store.get(LATEST_KEY).at if self.read_at is None else self.read_at


def open_run(uri: str, storage: StorageSettings | None = None) -> Run:
    """Open the run at `uri`, which is Ray's storage path plus the run's name: "s3://bucket/runs/my-run".

    storage: settings that override those in the URI and the environment. Raises NotFoundError if there is no run.
    """
    return read_run(open_store(uri, storage))


def read_run(store: Store) -> Run:
    """Read the run in a store. Raises NotFoundError if there is none."""
    body, at = read_newest_at(store)
    return Run(store, body, at, Pages(store))


def read_readable_run(store: Store) -> tuple[Run, tuple[str, ...]]:
    """Read a run without what is in pages that cannot be read, and return in words which pages these are.

    For the commands that show a run to people. Raises NotFoundError if there is none.
    """
    body, at, lost = read_readable_at(store)
    return Run(store, body, at), tuple(lost_page_text(store, page) for page in lost)


def open_checkpoint(pointer: Any) -> CommittedCheckpoint:
    """Open the checkpoint that a ray.train.Checkpoint of a raycheck run points to.

    pointer: `Result.checkpoint`, the argument of a validation function, or any other ray.train.Checkpoint of the run.
    The result has `step`, all `metrics` of the save, and `restore(into=)`. Raises ConfigError if raycheck did not
    report `pointer`, NotFoundError if retention has dropped the checkpoint.
    """
    found = _pointed_to(pointer)
    here = uri_of(pointer.filesystem, pointer.path.removesuffix(f"/ray/{found.key}"))
    if not is_same_place(found.uri, here):
        # An object in a bucket must not send us, and our credentials, to another place. For the same reason we use
        # the settings with which the pointer was read, not those in it.
        raise ConfigError(f"{pointer}: it points to {shown_uri(found.uri)}, which is not the run that contains it")
    store = open_store(here)
    stored = Checkpoint(store, ask_latest(store, lambda body: entry_at(store, body, found.key)))
    metrics = stored.read_manifest().metrics  # `latest` may repeat only some of them
    return CommittedCheckpoint(replace(stored, entry=replace(stored.entry, metrics=metrics)))


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
    source: str | CommittedCheckpoint,
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
    dry_run: bool = False,
    progress: ShowProgress = show_nothing,
) -> "Exported":
    """Write the model of a checkpoint as a Hugging Face directory that `from_pretrained` loads.

    This needs torch, but neither Ray, transformers nor an accelerator, and its memory is bounded. The directory is
    either complete or not loadable.

    source: a run's URI, or a checkpoint such as `open_checkpoint` returns. at: which checkpoint of the run, by its
        step, name or key; None: the head.
    to: a new or empty folder, or the URI of an unused prefix in a bucket.
    storage: the settings for the source's bucket, and for a destination in the same kind of store.
    entry: the model's name in the state. None: the one entry that has a Hugging Face configuration.
    files: the tokenizers and processors to include, by their names in the state. None: all of them.
    merge_lora: write a PEFT model as a plain model with its adapter merged. False: write the adapter alone.
    dtype: the type that floating-point weights are converted to, such as torch.bfloat16 or "bfloat16". None: as saved.
    config_from: a folder, or its URI, with the config.json of a model that was saved without one.
    max_shard_bytes: the largest size of a weights file, in bytes. None: 5 GB, and less for a small model.
    dry_run: make every check, and write nothing.
    progress: called with the bytes of weights that are written, and their total.

    Returns the files with their sizes in bytes. Raises NotFoundError if there is no such checkpoint; ConfigError,
    before anything is written, if the export cannot be made; and CorruptError if the bytes differ from those saved.
    """
    from raycheck.huggingface.export import export_hf as export
    from raycheck.huggingface.export import write_all

    if isinstance(source, CommittedCheckpoint) and at is not None:
        raise ConfigError(f"export_hf: at={at} chooses among a run's checkpoints; give the run's URI with it")
    checkpoint = source if isinstance(source, CommittedCheckpoint) else open_run(source, storage).at(at)
    options = ExportOptions(
        entry=entry,
        files=files,
        merge_lora=merge_lora,
        dtype=dtype,
        config_from=config_from,
        max_shard_bytes=max_shard_bytes,
    )
    write = None if dry_run else partial(write_all, progress=progress)
    stored = checkpoint._stored  # noqa: SLF001  of a class in this file
    return export(stored, to, options, storage=storage, write=write)
