"""Creates a run from a checkpoint that another program wrote: the public `import_checkpoint`."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from uuid import uuid4

from raycheck.bucket.format.latest import Latest
from raycheck.bucket.format.object_keys import MAX_STEP
from raycheck.bucket.format.progress import Progress
from raycheck.bucket.protocol.sharing.new_run import Origin, look_at_place, reserve_name
from raycheck.bucket.protocol.swap import Register
from raycheck.bucket.reading import Checkpoint
from raycheck.bucket.store import open_store
from raycheck.bucket.store.address import shown_uri
from raycheck.catalog.importing.detection import read_source
from raycheck.catalog.importing.entries import ImportedState, imported_state
from raycheck.catalog.importing.new_checkpoint import NewCheckpoint, Piece, planned
from raycheck.catalog.importing.source_files import open_source
from raycheck.catalog.importing.state_in_source import ReadSettings
from raycheck.errors import ConfigError
from raycheck.show_progress import ShowProgress, show_nothing
from raycheck.storage_settings import StorageSettings


@dataclass(frozen=True, kw_only=True, slots=True)
class ImportedEntryReport:
    """One entry of an import. kind: module, optimizer, object, value, or files. size_bytes: the size of its tensors."""

    name: str
    kind: str
    num_tensors: int
    size_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Imported:
    """The result of an import, or its preview.

    uri: the run's. checkpoint: its name; "" for a dry run. kind: the source's. left_out: the parts of the source that
    are not imported, by name. notes: what was chosen, and why something is left out. is_new: False for a dry run, and
    if an earlier call had created this run.
    """

    uri: str
    checkpoint: str
    kind: str
    step: int
    entries: tuple[ImportedEntryReport, ...]
    size_bytes: int
    left_out: tuple[str, ...]
    notes: tuple[str, ...]
    is_new: bool


def import_checkpoint(
    source: str,
    to: str,
    *,
    kind: str | None = None,
    entries: Mapping[str, str] | None = None,
    step: int | None = None,
    skip_values: bool = False,
    keep_names: bool = False,
    storage: StorageSettings | None = None,
    dry_run: bool = False,
    progress: ShowProgress = show_nothing,
) -> Imported:
    """Create the run `to` with one checkpoint, made from the source. Training restores it like any other.

    A torch DCP directory is imported completely, except that optimizer state is imported only if its parameters have
    names there. From every other source the weights are imported. The result names what is left out, such as optimizer
    state. This needs torch, about 2 GiB of memory, and disk space for torch.save files in a bucket.

    source: a directory of torch DCP, Hugging Face (also in the hub's cache), Ray Train or FSDP ranks, or a file of
        torch.save, Lightning or safetensors; here or in a bucket.
    to: the URI of the new run.
    kind: dcp, huggingface, torch, lightning or fsdp. None: judge by the files.
    entries: which parts become entries, as {"policy": "app.model"}: the entry's name, and its key in the source, with
        dots between levels. None: every part, under its own name.
    step: the number of completed optimizer steps. None: the number in the source, or 0 if it has none.
    skip_values: leave out values of a DCP directory that only pickle could make, instead of refusing them.
    keep_names: keep a `module.` with which all names of a model begin: it belongs to the model, not to DDP.
    storage: the settings for the buckets. dry_run: write nothing.
    progress: called with the bytes written, and their total.

    Do nothing if an earlier call created this run from the same bytes. Raises ConfigError for a source that cannot be
    imported and if another run exists there, and CorruptError for a damaged source. Then no run is created.
    """
    register = Register(open_store(to, storage))
    existing, save = look_at_place(register)
    with open_source(source, storage) as files:
        found = read_source(files, ReadSettings(verify=not dry_run, skip_values=skip_values), kind=kind)
        state = imported_state(found, entries=entries, skip_values=skip_values, keep_names=keep_names)
        new = NewCheckpoint(
            state=state,
            shards=planned(state, found.tensors),
            progress=Progress(step=_step(step, found.step), epoch=found.epoch or 0),
            restored_from=f"import of {shown_uri(source)} ({found.kind})",
            told=progress,
        )
        is_new = False
        if existing is not None or not dry_run:
            existing, is_new = _written_or_same(register, existing, new, save)
    return Imported(
        uri=register.store.uri,
        checkpoint=(existing.head if existing else None) or "",
        kind=found.kind,
        step=new.progress.step,
        entries=_reports(state, new.shards),
        size_bytes=new.size_bytes,
        left_out=state.left_out,
        notes=state.notes,
        is_new=is_new,
    )


def _written_or_same(register: Register, existing: Latest | None, new: NewCheckpoint, save: int) -> tuple[Latest, bool]:
    """Write the checkpoint and create the run; if there is a run, compare it with the import, which reads the source.

    Return the run's body, and whether this call created it. Raises ConfigError if the existing run differs.
    """
    if existing is None:
        mine = Origin(run_id=uuid4().hex, uri=new.restored_from, source_run_id="", checkpoint="")
        name = reserve_name(register.store, mine, step=new.progress.step, save=save)
        existing = new.write(register, run_id=mine.run_id, name=name)
        if existing.run_id == mine.run_id:  # otherwise another writer was faster
            return existing, True
    head = existing.entry(existing.head or "")
    if head is None or not new.is_same(Checkpoint(register.store, head)):
        raise ConfigError(
            f"{register.store}: there is already a run, and it differs from this import. Import into a new run"
        )
    return existing, False


def _step(given: int | None, said: int | None) -> int:
    step = given if given is not None else said or 0
    if not 0 <= step <= MAX_STEP:
        raise ConfigError(f"step={step}: give a number of optimizer steps from 0 to {MAX_STEP}")
    return step


def _reports(state: ImportedState, shards: Sequence[Sequence[Piece]]) -> tuple[ImportedEntryReport, ...]:
    """Return a report per entry. A tied tensor counts for the first entry that has it."""
    sizes: dict[str, int] = {}
    for shard in shards:
        for piece in shard:
            sizes[piece.box.name] = sizes.get(piece.box.name, 0) + piece.size_bytes
    return tuple(
        ImportedEntryReport(
            name=entry.name,
            kind=entry.kind,
            num_tensors=len(entry.found.tensors),
            size_bytes=sum(sizes.get(name, 0) for name in entry.found.tensors),
        )
        for entry in state.entries
    )
