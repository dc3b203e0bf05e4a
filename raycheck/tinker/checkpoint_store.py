"""Finds, lists, copies, publishes, and deletes checkpoints in the bucket, through raycheck's public interface only.

Nothing about a checkpoint is stored elsewhere: it exists once its run's `latest` has its name, and is pending until
then. Every method accesses the bucket, so it is called in a thread.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from raycheck import Run, StorageSettings, export_hf
from raycheck.catalog import RunFolder, delete_checkpoint, delete_run, fork_run
from raycheck.errors import NotFoundError
from raycheck.tinker.checkpoint_paths import CheckpointPath, below, folder_of, is_borrowed, path_of, run_in_folder
from raycheck.tinker.wire.fields import RefusedRequestError
from raycheck.values import CommittedCheckpoint, StoredExport

MAX_NOTES = 4096
PUBLIC = "public"
"""The score that is 1 for a published checkpoint. Scores are stored in `latest`, and every commit preserves them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredCheckpoint:
    """A committed checkpoint.

    note: written by its save. times: by the store's clock. is_public: whether it is published. stored_as: what its
    bytes are called in the bucket; a copy has the bytes of its source. run: as it was when the checkpoint was found.
    """

    path: CheckpointPath
    uri: str
    key: str
    note: Mapping[str, Any]
    committed_at: float
    expires_at: float | None
    size_bytes: int
    is_head: bool
    is_public: bool
    stored_as: tuple[str, ...]
    run: Run = field(compare=False)
    stored: CommittedCheckpoint = field(compare=False)

    @property
    def is_copy(self) -> bool:
        """Whether `CheckpointStore.copy` made this checkpoint; a run made that way has no other."""
        return self.is_head and is_borrowed(self.key)

    @property
    def user_metadata(self) -> dict[str, str] | None:
        return _json_in(self.note, "user_metadata")

    @property
    def run_metadata(self) -> dict[str, str] | None:
        return _json_in(self.note, "run_metadata")


def _json_in(note: Mapping[str, Any], name: str) -> dict[str, str] | None:
    text = note.get(name)
    found = json.loads(text) if isinstance(text, str) else None
    return {str(key): str(value) for key, value in found.items()} if isinstance(found, dict) and found else None


class CheckpointStore:
    """The runs under `root`, and operations on their checkpoints.

    All that is asked often goes through one client. URIs contain the settings in `storage`, so that they are enough for
    the engine.
    """

    def __init__(self, root: str, storage: StorageSettings | None = None) -> None:
        self._folder = RunFolder(root, storage)
        self.root = self._folder.uri
        self._notes: dict[tuple[str, str], Mapping[str, Any]] = {}

    def uri_of(self, run: str) -> str:
        return below(self.root, folder_of(run))

    def find(self, path: CheckpointPath) -> StoredCheckpoint:
        """Return a checkpoint that exists and has not expired. Raises RefusedRequestError (404) otherwise."""
        for found in self.of_run(path.run, only=path):
            return found
        raise RefusedRequestError(f"{path.text}: there is no such checkpoint", 404)

    def find_or_none(self, path: CheckpointPath) -> StoredCheckpoint | None:
        return next(iter(self.of_run(path.run, only=path)), None)

    def of_run(self, run: str, *, only: CheckpointPath | None = None) -> list[StoredCheckpoint]:
        """Return a run's checkpoints, oldest first; none for a run that is not in the bucket."""
        try:
            opened = self._open(run)
        except NotFoundError:
            return []
        return list(self._checkpoints(run, opened, only))

    def _open(self, run: str) -> Run:
        """Read a run as it is now. Raises NotFoundError."""
        return self._folder.run(folder_of(run))

    def _checkpoints(self, run: str, opened: Run, only: CheckpointPath | None) -> Iterator[StoredCheckpoint]:
        head = opened.head
        for path, item in _listed(run, opened):
            if only is not None and path != only:
                continue
            cached = self._notes.get((run, item.key))
            if cached is None:
                try:
                    cached = dict(item.note())
                except NotFoundError:  # deleted since the run was opened
                    continue
                if len(self._notes) >= MAX_NOTES:
                    self._notes.clear()
                self._notes[run, item.key] = cached
            yield StoredCheckpoint(
                path=path,
                uri=opened.uri,
                key=item.key,
                note=cached,
                committed_at=item.committed_at,
                expires_at=item.expires_at,
                size_bytes=item.size_bytes,
                is_head=item == head,
                is_public=_is_public(item.scores),
                stored_as=_stored_as(run, item),
                run=opened,
                stored=item,
            )

    def runs(self) -> list[str]:
        """Return the ids of all training runs in the bucket, most recent commit first."""
        found = self._folder.runs(depth=1)
        return [run for item in found if item.name and (run := run_in_folder(item.name)) is not None]

    def all(self) -> list[StoredCheckpoint]:
        """Return the checkpoints of all training runs in the bucket, newest first."""
        found = [item for run in self.runs() for item in self.of_run(run)]
        return sorted(found, key=lambda item: -item.committed_at)

    def export_adapter(self, found: StoredCheckpoint) -> None:
        """Write a checkpoint's adapter as a Hugging Face directory, unless a complete one exists."""
        if self.adapter_files(found).is_complete:
            return
        export_hf(found.stored, below(found.uri, "exports", _export(found.path, found.key)))
        self._clear_exports(found)

    def adapter_files(self, found: StoredCheckpoint) -> StoredExport:
        """Return the files of a checkpoint's adapter. Call `export_adapter` first."""
        return found.run.export(_export(found.path, found.key))

    def _clear_exports(self, found: StoredCheckpoint) -> None:
        """Delete exported adapters of the run whose checkpoints have expired or are gone."""
        run = found.path.run
        names = set(found.run.exports()) - _exports_of(run, found.run)
        if not names:
            return
        opened = self._open(run)  # after the listing: a checkpoint that was committed since has its export in it
        for name in names - _exports_of(run, opened):
            opened.delete_export(name)

    def copy(self, source: CheckpointPath, run: str, ttl_s: int | None) -> CheckpointPath:
        """Create the new run `run` from a checkpoint, which keeps its kind and name. Within one bucket no tensor is
        copied. Returns the copy's path. The copy is not public. Raises RefusedRequestError (404).

        A repeated call for the same `run` resumes where a killed one stopped, even if the source was deleted since. The
        copy is listed once it has its name, which is set last.
        """
        uri = self.uri_of(run)
        try:
            copied = self._open(run)
        except NotFoundError:
            found = self.find(source)
            fork_run(found.uri, uri, found.key)
            copied = self._open(run)
        target = replace(source, run=run)
        if (head := copied.head) is not None and head.name is None:
            if _is_public(head.scores):
                copied.score(head.key, {PUBLIC: 0.0})
            copied.name_checkpoint(head.key, target.raycheck_name, expire_after_s=ttl_s)
        return target

    def delete(self, path: CheckpointPath) -> None:
        """Delete a checkpoint. It disappears at once, its objects minutes later. Raises RefusedRequestError (404).

        The head of a run, from which a live model would be rebuilt, only loses its name and is deleted with the next
        commit. Deleting a copy also deletes its run.
        """
        found = self.find(path)
        if found.is_copy:
            delete_run(found.uri, keep_shared=True)
            return
        if found.is_head:
            found.run.unname_checkpoint(path.raycheck_name)
        else:
            delete_checkpoint(found.uri, found.key)
        found.run.delete_export(_export(path, found.key))

    def set_public(self, path: CheckpointPath, is_public: bool) -> None:
        """Mark a checkpoint as public or not public. Raises RefusedRequestError (404)."""
        found = self.find(path)
        if found.is_public != is_public:
            found.run.score(found.key, {PUBLIC: float(is_public)})

    def set_ttl(self, path: CheckpointPath, ttl_s: int | None) -> None:
        """Set a checkpoint to expire in `ttl_s` seconds; None: never. Raises RefusedRequestError (404)."""
        found = self.find(path)
        found.run.name_checkpoint(found.key, path.raycheck_name, expire_after_s=ttl_s, overwrite=True)


def _stored_as(run: str, item: CommittedCheckpoint) -> tuple[str, ...]:
    if not is_borrowed(item.key):
        return (f"{folder_of(run)}/{item.key}",)
    return tuple(sorted(way.removeprefix("../") for way in item.shares_with))


def _is_public(scores: Mapping[str, float]) -> bool:
    return scores.get(PUBLIC) == 1.0


def _export(path: CheckpointPath, key: str) -> str:
    """Return the name of the directory of a checkpoint's adapter below exports/."""
    return f"{path.raycheck_name}-{key}"


def _listed(run: str, opened: Run) -> Iterator[tuple[CheckpointPath, CommittedCheckpoint]]:
    """Yield the checkpoints of a run that the API shows: those with a name that have not expired."""
    for item in opened.checkpoints:
        path = path_of(run, item.name)
        if path is not None and (item.expires_at is None or (opened.read_at or 0.0) < item.expires_at):
            yield path, item


def _exports_of(run: str, opened: Run) -> set[str]:
    return {_export(path, item.key) for path, item in _listed(run, opened)}
