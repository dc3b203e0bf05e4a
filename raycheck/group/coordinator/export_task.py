"""The built-in task: write a committed checkpoint as a Hugging Face directory, and delete older ones.

It reads the objects of all ranks from the bucket and writes to a bucket: nothing is gathered, nothing is written to a
disk, and it takes neither memory nor time from the training processes. The index, without which no reader finds the
other files, is written last. If an export fails, `raycheck export-hf` can export its checkpoint again.
"""

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias

from raycheck.bucket.format import object_keys
from raycheck.bucket.format.latest import Entry
from raycheck.bucket.format.progress import Progress
from raycheck.bucket.protocol.removal.exported_directories import prune_exports
from raycheck.bucket.reading import Checkpoint, read_latest
from raycheck.bucket.store import Store, open_store
from raycheck.bucket.store.open import open_near
from raycheck.errors import NotFoundError, RaycheckError
from raycheck.settings import HFExport

if TYPE_CHECKING:  # imports torch, which the coordinator must not
    from raycheck.huggingface.export import ExportFiles

WriteFiles: TypeAlias = "Callable[[ExportFiles, Store, str], Mapping[str, int]]"


@dataclass(frozen=True, kw_only=True, slots=True)
class Note:
    """A line for the coordinator's log about a task. is_problem: it is a warning."""

    text: str
    fields: Mapping[str, Any] = field(default_factory=dict)
    is_problem: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class ExportTask:
    """The export of one checkpoint, as the processes that write it know it. uri: the run's root."""

    uri: str
    entry: Entry
    progress: Progress
    settings: HFExport

    @property
    def prefix(self) -> str:
        """Return the leading part of the keys that the export writes in `dest`."""
        at = self.progress
        name = self.settings.directory(self.entry.key, step=at.step, epoch=at.epoch, epoch_step=at.epoch_step)
        return f"{name}/" if self.settings.to else object_keys.exports_prefix(name)

    @property
    def checkpoint(self) -> Checkpoint:
        """Return the checkpoint, in a newly opened store."""
        return Checkpoint(open_store(self.uri), self.entry)

    @property
    def dest(self) -> Store:
        """Open the store that the files go to."""
        return open_store(self.uri) if self.settings.to is None else open_near(self.settings.to, self.uri)

    def run(self, write: "WriteFiles | None" = None) -> list[Note]:
        """Write the directory unless it is there already, then delete older ones by `keep_last`.

        write: writes the files of weights; None: one after the other in this process.
        """
        checkpoint = self.checkpoint
        dest = checkpoint.store if self.settings.to is None else self.dest
        if self._is_done(dest):
            text = f"did not export to {self.prefix}: it is there already, and stays as it is"
            return [Note(text=text), *self._prune(checkpoint.store, dest)]
        from raycheck.huggingface.export import export_hf, write_all

        done = export_hf(
            checkpoint, dest, self.settings, prefix=self.prefix, write=write or write_all, by_training=True
        )
        return [
            Note(text=f"exported {self.entry.key} to {self.prefix}", fields={"bytes": done.size_bytes}),
            *self._prune(checkpoint.store, dest),
        ]

    def _is_done(self, dest: Store) -> bool:
        """Read `dest`, and return whether the complete export is there."""
        for last in object_keys.EXPORT_ENDS:
            with suppress(NotFoundError):
                dest.head(object_keys.export_key(self.prefix, last))
                return True
        return False

    def _prune(self, store: Store, dest: Store) -> list[Note]:
        """Delete older exports by `keep_last`.

        None of this run's own exports is in progress, since each begins after this task. An export of another run is
        not complete, and is left alone.
        """
        keep_last = self.settings.keep_last
        if keep_last is None:
            return []
        prefix = "" if self.settings.to else object_keys.EXPORTS_PREFIX
        try:
            gone = prune_exports(dest, prefix, read_latest(store), keep_last=keep_last)
        except RaycheckError as error:
            return [Note(text=f"older exports could not be deleted yet: {error}", is_problem=True)]
        return [Note(text=f"deleted the export {place}") for place in gone]
