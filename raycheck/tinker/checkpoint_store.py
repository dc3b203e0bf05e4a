"""The checkpoints in the bucket: found, listed, copied, published, deleted. All by raycheck's public interface.

Nothing about a checkpoint is kept elsewhere: one is there when its run's `latest` has its name, and pending while it
has not. Every method talks to the bucket, and is called in a thread.
"""

import json
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from raycheck import Run, StorageSettings, export_hf, list_runs, open_run
from raycheck.catalog import delete_checkpoint, delete_run, fork_run
from raycheck.errors import NotFoundError
from raycheck.tinker.checkpoint_paths import CheckpointPath, below, folder_of, is_borrowed, path_of, run_in_folder
from raycheck.tinker.wire.fields import RefusedRequestError

CHUNK_BYTES = 4 * 1024 * 1024
MAX_NOTES = 4096
PUBLIC = "public"
"""The score that is 1 for a published checkpoint. Scores lie in `latest`, where every commit keeps them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredCheckpoint:
    """Describes a committed checkpoint.

    note: what its save said of it. times: by the store's clock. is_public: somebody has published it.
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

    @property
    def is_copy(self) -> bool:
        """Says that `CheckpointStore.copy` has made it, whose runs have no other checkpoint."""
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


@dataclass(frozen=True, kw_only=True, slots=True)
class AdapterFiles:
    """Holds the files of an exported adapter. sizes: in bytes, by name."""

    run: Run
    place: str
    sizes: Mapping[str, int]

    def chunks(self, name: str) -> Iterator[bytes]:
        """Yield the bytes of a file. Raises NotFoundError, and StoreError."""
        size = self.sizes[name]
        for start in range(0, size, CHUNK_BYTES):
            yield bytes(self.run.store.get_range(f"{self.place}/{name}", start, min(start + CHUNK_BYTES, size)))

    def signed_address(self, name: str, valid_s: int) -> str:
        """Returns an address of a file in the bucket itself. Raises ConfigError where the store signs none."""
        return self.run.store.signed_address(f"{self.place}/{name}", valid_s)


class CheckpointStore:
    """Reads and changes the runs below `root`."""

    def __init__(self, root: str, storage: StorageSettings | None = None) -> None:
        self.root = root
        self._storage = storage
        self._notes: dict[tuple[str, str], Mapping[str, Any]] = {}

    def uri_of(self, run: str) -> str:
        return below(self.root, folder_of(run))

    def find(self, path: CheckpointPath) -> StoredCheckpoint:
        """Returns a checkpoint that is there and has not expired. Raises RefusedRequestError (404) otherwise."""
        for found in self.of_run(path.run, only=path):
            return found
        raise RefusedRequestError(f"{path.text}: there is no such checkpoint", 404)

    def find_or_none(self, path: CheckpointPath) -> StoredCheckpoint | None:
        return next(iter(self.of_run(path.run, only=path)), None)

    def of_run(self, run: str, *, only: CheckpointPath | None = None) -> list[StoredCheckpoint]:
        """Returns the checkpoints of a run, the oldest first; none for a run that is not in the bucket."""
        uri = self.uri_of(run)
        try:
            opened = open_run(uri, self._storage)
        except NotFoundError:
            return []
        return list(self._checkpoints(run, uri, opened, only))

    def _checkpoints(self, run: str, uri: str, opened: Run, only: CheckpointPath | None) -> Iterator[StoredCheckpoint]:
        now: float | None = None
        for item in opened.checkpoints:
            entry, path = item.entry, path_of(run, item.name)
            if path is None or (only is not None and path != only):
                continue
            if entry.expires_at is not None:
                now = opened.store.get("latest").at if now is None else now
                if now >= entry.expires_at:
                    continue
            cached = self._notes.get((run, entry.key))
            if cached is None:
                try:
                    cached = dict(item.manifest().note)
                except NotFoundError:  # deleted since the run was opened
                    continue
                if len(self._notes) >= MAX_NOTES:
                    self._notes.clear()
                self._notes[run, entry.key] = cached
            yield StoredCheckpoint(
                path=path,
                uri=uri,
                key=entry.key,
                note=cached,
                committed_at=entry.committed_at,
                expires_at=entry.expires_at,
                size_bytes=entry.size_bytes,
                is_head=entry.key == opened.latest.head,
                is_public=_is_public(item.scores),
            )

    def head_of(self, run: str) -> tuple[str, Mapping[str, Any]]:
        """Returns key and note of a run's newest checkpoint; both empty for a run without one."""
        head = open_run(self.uri_of(run), self._storage).head
        return ("", {}) if head is None else (head.entry.key, dict(head.manifest().note))

    def runs(self) -> list[str]:
        """Returns the ids of all training runs in the bucket, that with the newest commit first."""
        found = list_runs(self.root, self._storage, depth=1)
        return [run for item in found if item.name and (run := run_in_folder(item.name)) is not None]

    def export_adapter(self, found: StoredCheckpoint) -> None:
        """Write the adapter of a checkpoint as a Hugging Face directory, unless that is there and whole."""
        place = self._export(found)
        store = open_run(found.uri, self._storage).store
        with suppress(NotFoundError):
            store.head(f"{place}/adapter_config.json")  # the last file of such a directory
            return
        export_hf(found.uri, below(found.uri, *place.split("/")), at=found.key, storage=self._storage)
        self._clear_exports(found.path.run)

    def adapter_files(self, found: StoredCheckpoint) -> AdapterFiles:
        """Returns the files of a checkpoint's adapter, after `export_adapter`."""
        place = self._export(found)
        run = open_run(found.uri, self._storage)
        listed = {item.key.removeprefix(f"{place}/"): item.size_bytes for item in run.store.list_objects(f"{place}/")}
        return AdapterFiles(run=run, place=place, sizes=dict(sorted(listed.items())))

    def _clear_exports(self, run: str) -> None:
        """Delete the adapters of checkpoints of a run that have expired or are gone."""
        kept = {self._export(found) for found in self.of_run(run)}
        opened = open_run(self.uri_of(run), self._storage)
        for name in opened.store.list_names("exports/"):
            if f"exports/{name}" not in kept:
                _delete_export(opened, f"exports/{name}")

    def adapter_uri(self, found: StoredCheckpoint) -> str:
        return below(found.uri, *self._export(found).split("/"))

    def _export(self, found: StoredCheckpoint) -> str:
        return f"exports/{found.path.raycheck_name}-{found.key}"

    def copy(self, source: CheckpointPath, run: str, ttl_s: int | None) -> CheckpointPath:
        """Make the new run `run` of a checkpoint, which has its kind and name there. Within one bucket no tensor is
        copied. Returns its path. The copy is not public. Raises RefusedRequestError (404).

        A repetition for the same `run` goes on where a killed one was, also when the source was deleted since. The copy
        is listed when it has its name, which it gets last.
        """
        uri = self.uri_of(run)
        try:
            copied = open_run(uri, self._storage)
        except NotFoundError:
            found = self.find(source)
            fork_run(found.uri, uri, found.key, storage=self._storage)
            copied = open_run(uri, self._storage)
        target = replace(source, run=run)
        if (head := copied.head) is not None and head.name is None:
            if _is_public(head.scores):
                copied.score(head.entry.key, {PUBLIC: 0.0})
            copied.name_checkpoint(head.entry.key, target.raycheck_name, expire_after_s=ttl_s)
        return target

    def delete(self, path: CheckpointPath) -> None:
        """Delete a checkpoint. It is gone at once; its objects go some minutes later. Raises RefusedRequestError (404).

        The head of a run, from which a live model would be rebuilt, only loses its name, and goes with the next commit.
        With a copy its run goes, too.
        """
        found = self.find(path)
        if found.is_copy:
            delete_run(found.uri, keep_shared=True, storage=self._storage)
            return
        if found.is_head:
            open_run(found.uri, self._storage).unname_checkpoint(path.raycheck_name)
        else:
            delete_checkpoint(found.uri, found.key, storage=self._storage)
        _delete_export(open_run(found.uri, self._storage), self._export(found))

    def set_public(self, path: CheckpointPath, is_public: bool) -> None:
        """Mark a checkpoint as public, or as not. Raises RefusedRequestError (404)."""
        found = self.find(path)
        if found.is_public != is_public:
            open_run(found.uri, self._storage).score(found.key, {PUBLIC: float(is_public)})

    def set_ttl(self, path: CheckpointPath, ttl_s: int | None) -> None:
        """Let a checkpoint expire `ttl_s` seconds from now; None: never. Raises RefusedRequestError (404)."""
        found = self.find(path)
        run = open_run(found.uri, self._storage)
        run.name_checkpoint(found.key, path.raycheck_name, expire_after_s=ttl_s, overwrite=True)


def _is_public(scores: Mapping[str, float]) -> bool:
    return scores.get(PUBLIC) == 1.0


def _delete_export(run: Run, place: str) -> None:
    store = run.store
    store.delete(f"{place}/adapter_config.json")  # first, as no reader starts without it
    for item in list(store.list_objects(f"{place}/")):
        store.delete(item.key)
