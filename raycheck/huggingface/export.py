"""Writes a checkpoint as a Hugging Face directory, straight from the bucket.

No model is built, no process group is needed, and memory stays bounded however large the model is. Checksums are
verified on the way. The directory is complete or absent (see destination.py): the index of the weights, without which
no reader finds them, is written last, and the weight files are always named as parts of it.
"""

import json
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from raycheck.bucket.format.document import dump
from raycheck.bucket.format.object_keys import EXPORT_ENDS, EXPORT_RECORD, export_key
from raycheck.bucket.protocol.removal.exported_directories import ExportRecord
from raycheck.bucket.protocol.write_once import put_once
from raycheck.bucket.reading import Checkpoint, read_newest
from raycheck.bucket.store import Store
from raycheck.bucket.store.address import join_uri, kind_of
from raycheck.bucket.store.interface import MAX_CONDITIONAL_BYTES
from raycheck.errors import ConfigError, RaycheckError, SaveFailedError
from raycheck.huggingface.destination import check_free, destination
from raycheck.huggingface.export_contents import SAFETENSORS_DTYPES, contents, json_text
from raycheck.huggingface.weight_stream import Weight, WeightSource
from raycheck.settings import ExportOptions
from raycheck.show_progress import ProgressTally, ShowProgress, show_nothing
from raycheck.state.entries.hf_assets import ADAPTER_CONFIG
from raycheck.storage_settings import StorageSettings

INDEX_FILE = EXPORT_ENDS[0]
MAX_FILE_BYTES, MIN_FILE_BYTES, SHARES = 5_000_000_000, 256_000_000, 16
"""Without max_shard_bytes: the most and the fewest bytes of a weight file, and the number of files in between."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Exported:
    """An export that was written. uri: where it is. files: sizes in bytes, by file name."""

    uri: str
    files: Mapping[str, int]

    @property
    def size_bytes(self) -> int:
        return sum(self.files.values())


@dataclass(frozen=True, kw_only=True, slots=True)
class ExportFiles:
    """All files that an export writes.

    files: the weights in each file, by file name. They may be written in any order and by several processes.
    heads: the bytes before the weights, by file name, for files that have such a head.
    texts: the text of the small files, by file name; they are written after all of `files`.
    last: the one of `texts` that is written at the very end.
    """

    files: Mapping[str, Sequence[Weight]]
    heads: Mapping[str, bytes]
    texts: Mapping[str, str]
    last: str
    source: WeightSource

    @property
    def sizes(self) -> dict[str, int]:
        """Return the size of each of `files`, in bytes."""
        return {
            file: len(self.heads.get(file, b"")) + sum(weight.size_bytes for weight in group)
            for file, group in self.files.items()
        }

    def write(
        self, store: Store, place: str, files: Sequence[str], progress: ShowProgress = show_nothing
    ) -> dict[str, int]:
        """Write these files under `place`. Return their sizes in bytes."""
        sizes = self.sizes
        tally = ProgressTally(progress, total=sum(sizes[file] for file in files))
        for file in files:
            key, weights, head = export_key(place, file), self.files[file], self.heads.get(file, b"")
            stream = self.source.stream(weights, head, store.part_bytes(sizes[file]))
            _put(store, key, self.source, _counted(stream, tally), sizes[file])
        return {file: sizes[file] for file in files}

    def write_texts(self, store: Store, place: str) -> dict[str, int]:
        """Write the small files, without which the weights are not a model. Call it once all of `files` are written."""
        return {
            file: _put_text(store, export_key(place, file), self.texts[file], is_last=file == self.last)
            for file in sorted(self.texts, key=lambda file: file == self.last)
        }


def lay_out(checkpoint: Checkpoint, options: ExportOptions, stem: str = "model") -> ExportFiles:
    """Decide which files make up an export. Equal options give an equal result in every process.

    stem: the beginning of the names of a model's files of weights.
    """
    manifest = checkpoint.read_manifest()
    index = checkpoint.read_index(manifest)
    source = WeightSource(checkpoint, manifest, index)
    made = contents(source, index, options, what=f"{checkpoint.store}: checkpoint {checkpoint.entry.key}")
    if made.is_adapter:
        groups = {"adapter_model.safetensors": made.weights}
    else:
        groups = split(made.weights, stem, options.max_shard_bytes)
    # Sorted by element size, so that each weight is aligned.
    groups = {file: sorted(group, key=lambda weight: -weight.dtype.itemsize) for file, group in groups.items()}
    return ExportFiles(
        files={**groups, **made.files},
        heads={file: safetensors_head(group) for file, group in groups.items()},
        texts=made.texts if made.is_adapter else {**made.texts, INDEX_FILE: weight_map(groups)},
        last=ADAPTER_CONFIG if made.is_adapter else INDEX_FILE,
        source=source,
    )


def write_all(files: ExportFiles, store: Store, place: str, progress: ShowProgress = show_nothing) -> dict[str, int]:
    """Write all files in this process, one after the other. Return their sizes in bytes."""
    return files.write(store, place, list(files.files), progress)


def export_hf(
    checkpoint: Checkpoint,
    dest: Store | str,
    options: ExportOptions | None = None,
    *,
    prefix: str = "",
    storage: StorageSettings | None = None,
    write: Callable[[ExportFiles, Store, str], Mapping[str, int]] | None = write_all,
    by_training: bool = False,
    stem: str = "model",
) -> Exported:
    """Write the model of a checkpoint to `dest`: a folder, a URI, or a store and a prefix in it.

    storage: the settings that the checkpoint's store was opened with; a `dest` in the same kind of store is opened with
    them too. write: writes the weight files, and returns their sizes in bytes; None: make every check, and write
    nothing. by_training: whether the settings of a training run requested the export; a prune of exports deletes no
    others. stem: see lay_out. Raises ConfigError, before anything was written, for an export that is not possible.
    """
    laid_out = lay_out(checkpoint, options or ExportOptions(), stem)
    laid_out = _with_record(laid_out, checkpoint, by_training=by_training)
    is_alike = isinstance(dest, str) and kind_of(dest) == kind_of(checkpoint.store.uri)
    given = storage if is_alike else None
    with destination(dest, prefix, given, source=checkpoint.store, is_dry=write is None) as (store, place):
        check_free(store, place, [*laid_out.files, *laid_out.texts], laid_out.last)
        if write is None:
            written = {**laid_out.sizes, **{name: len(text.encode()) for name, text in laid_out.texts.items()}}
        else:
            written = {**write(laid_out, store, place), **laid_out.write_texts(store, place)}
    base = dest.uri if isinstance(dest, Store) else dest
    return Exported(uri=join_uri(base, prefix.strip("/")) if prefix else base, files=written)


def _with_record(laid_out: ExportFiles, checkpoint: Checkpoint, *, by_training: bool) -> ExportFiles:
    """Add the record that shows a later prune to which run the directory belongs, and which files are part of it."""
    if EXPORT_RECORD in laid_out.files or EXPORT_RECORD in laid_out.texts:
        raise ConfigError(f"the export has a file named {EXPORT_RECORD}, the name of raycheck's own record; rename it")
    record = ExportRecord(
        run_id=read_newest(checkpoint.store).run_id,
        checkpoint=checkpoint.entry.key,
        by_training=by_training,
        last=laid_out.last,
        files={**laid_out.sizes, **{name: len(text.encode()) for name, text in laid_out.texts.items()}},
    )
    return replace(laid_out, texts={EXPORT_RECORD: dump(record).decode(), **laid_out.texts})


def split(weights: Sequence[Weight], name: str, max_bytes: int | None) -> dict[str, list[Weight]]:
    """Distribute the weights among files, by file name. A weight that exceeds the limit gets a separate file.

    name: the beginning of all file names.
    """
    if max_bytes is None:
        total = sum(weight.size_bytes for weight in weights)
        max_bytes = min(MAX_FILE_BYTES, max(MIN_FILE_BYTES, -(-total // SHARES)))
    groups: list[list[Weight]] = [[]]
    size = 0
    for weight in weights:
        if groups[-1] and size + weight.size_bytes > max_bytes:
            groups.append([])
            size = 0
        groups[-1].append(weight)
        size += weight.size_bytes
    count = len(groups)
    return {f"{name}-{number:05d}-of-{count:05d}.safetensors": group for number, group in enumerate(groups, 1)}


def weight_map(groups: Mapping[str, Sequence[Weight]]) -> str:
    """Return the text of the index of the weights, which maps each weight to its file."""
    total = sum(weight.size_bytes for group in groups.values() for weight in group)
    names = {weight.name: file for file, group in groups.items() for weight in group}
    return json_text({"metadata": {"total_size": total}, "weight_map": names})


def safetensors_head(weights: Sequence[Weight]) -> bytes:
    """Return the head of a safetensors file with the weights in this order, padded to a multiple of 8 bytes."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for weight in weights:
        end = at + weight.size_bytes
        header[weight.name] = {
            "dtype": SAFETENSORS_DTYPES[weight.dtype],
            "shape": list(weight.shape),
            "data_offsets": [at, end],
        }
        at = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


def _counted(stream: Iterator[memoryview], tally: ProgressTally) -> Iterator[memoryview]:
    for part in stream:
        yield part
        tally.add(len(part))  # when the next part is asked for, or the stream ends


def _put(store: Store, key: str, source: WeightSource, stream: Iterator[memoryview], size: int) -> None:
    try:
        store.put_parts(key, stream, size)
    except RaycheckError:
        if source.failure is not None:  # the upload failed because reading its parts failed
            raise source.failure from None
        raise


def _put_text(store: Store, key: str, text: str, *, is_last: bool) -> int:
    """Write a small file. Return its size.

    The last one is written only if it is absent, unless it is too large for that: this decides which of two exports to
    the same place is complete.
    """
    data = text.encode()
    if not is_last or len(data) > MAX_CONDITIONAL_BYTES:
        store.put(key, data)
        return len(data)
    try:
        put_once(store, key, data)
    except SaveFailedError:
        raise ConfigError(
            f"{store}: {key} appeared in the meantime: two exports were written to the same place"
        ) from None
    return len(data)
