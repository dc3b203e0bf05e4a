"""A checkpoint as a Hugging Face directory, straight from the bucket: no model is built, no process group is asked,
and memory stays bounded however large the model is. Checksums are verified on the way.

The directory is whole or not there (see destination.py): the index of the weights, without which no reader finds them,
is written last, and the weights are always named as parts of it.
"""

import json
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Unpack

from raycheck.bucket.format.document import dump
from raycheck.bucket.format.object_keys import EXPORT_ENDS, EXPORT_RECORD, export_key
from raycheck.bucket.protocol.exported_directories import ExportRecord, check_not_being_pruned
from raycheck.bucket.protocol.write_once import put_once
from raycheck.bucket.reading import Checkpoint, read_latest
from raycheck.bucket.store import Store
from raycheck.bucket.store.address import join_uri, kind_of
from raycheck.bucket.store.interface import MAX_CONDITIONAL_BYTES
from raycheck.errors import ConfigError, RaycheckError, SaveFailedError
from raycheck.shards.entries.hf_assets import ADAPTER_CONFIG
from raycheck.shards.huggingface.destination import check_free, destination
from raycheck.shards.huggingface.export_contents import SAFETENSORS_DTYPES, ContentsOptions, contents, json_text
from raycheck.shards.huggingface.server_side_copy import assembled
from raycheck.shards.huggingface.weight_stream import Weight, WeightSource
from raycheck.storage_settings import StorageSettings

INDEX_FILE = EXPORT_ENDS[0]
MAX_FILE_BYTES, MIN_FILE_BYTES, SHARES = 5_000_000_000, 256_000_000, 16
"""Files of weights where nothing is said: not larger, not smaller, and in between so many of them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Exported:
    """What was written: file name to size in bytes."""

    uri: str
    files: Mapping[str, int]

    @property
    def size_bytes(self) -> int:
        return sum(self.files.values())


@dataclass(frozen=True, kw_only=True, slots=True)
class Planned:
    """What an export will write. files: in any order and by anybody, the weights in `heads` with that many bytes before
    them; texts: after them, `last` at the very end."""

    files: Mapping[str, Sequence[Weight]]
    heads: Mapping[str, bytes]
    texts: Mapping[str, str]
    last: str
    source: WeightSource

    @property
    def sizes(self) -> dict[str, int]:
        """Of the files, in bytes."""
        return {
            file: len(self.heads.get(file, b"")) + sum(weight.size_bytes for weight in group)
            for file, group in self.files.items()
        }

    def write(self, store: Store, place: str, files: Iterable[str]) -> dict[str, int]:
        """Some of the files, below `place`; returns their sizes in bytes."""
        sizes = self.sizes
        for file in files:
            key, weights, head = export_key(place, file), self.files[file], self.heads.get(file, b"")
            parts = assembled(self.source, weights, head) if store.uri == self.source.store.uri else None
            if parts is None or not store.put_assembled(key, parts, sizes[file]):
                stream = self.source.stream(weights, head, store.part_bytes(sizes[file]))
                _put(store, key, self.source, stream, sizes[file])
        return {file: sizes[file] for file in files}

    def write_texts(self, store: Store, place: str) -> dict[str, int]:
        """What makes a model of the files, once all of them are there."""
        return {
            file: _put_text(store, export_key(place, file), self.texts[file], is_last=file == self.last)
            for file in sorted(self.texts, key=lambda file: file == self.last)
        }


def plan(checkpoint: Checkpoint, *, max_shard_bytes: int | None = None, **options: Unpack[ContentsOptions]) -> Planned:
    """The same for everybody who asks with the same options. max_shard_bytes: of a file of weights; default 5 GB, and
    less for a small model, so that there are some to share."""
    manifest = checkpoint.read_manifest()
    index = checkpoint.read_index(manifest)
    source = WeightSource(checkpoint, manifest, index)
    made = contents(
        source,
        index,
        what=f"{checkpoint.store.uri}: checkpoint {checkpoint.entry.key}",
        **options,
    )
    parts = {"adapter_model.safetensors": made.weights} if made.is_adapter else _split(made.weights, max_shard_bytes)
    # By size of an element, so that each weight is aligned; the small ones together, between which no range is copied.
    parts = {file: sorted(group, key=lambda w: (-w.dtype.itemsize, w.size_bytes)) for file, group in parts.items()}
    return Planned(
        files={**parts, **made.files},
        heads={file: _header(group) for file, group in parts.items()},
        texts=made.texts if made.is_adapter else {**made.texts, INDEX_FILE: _weight_map(parts)},
        last=ADAPTER_CONFIG if made.is_adapter else INDEX_FILE,
        source=source,
    )


def write_all(planned: Planned, store: Store, place: str) -> dict[str, int]:
    """One file after the other."""
    return planned.write(store, place, planned.files)


def export_hf(
    checkpoint: Checkpoint,
    dest: Store | str,
    *,
    prefix: str = "",
    storage: StorageSettings | None = None,
    write: Callable[[Planned, Store, str], Mapping[str, int]] = write_all,
    max_shard_bytes: int | None = None,
    by_training: bool = False,
    **options: Unpack[ContentsOptions],
) -> Exported:
    """Write the model of a checkpoint to `dest` (a folder, a URI, or a store and a prefix in it).

    storage: the settings the checkpoint's store was opened with; a `dest` of the same kind of store is opened with them
    too. write: how the files come there. by_training: by its ExportSettings; a prune leaves others alone.
    max_shard_bytes, options: see plan and ContentsOptions.
    Raises ConfigError, before anything was written, for what cannot be done.
    """
    planned = plan(checkpoint, max_shard_bytes=max_shard_bytes, **options)
    planned = _with_record(planned, checkpoint, by_training=by_training)
    is_alike = isinstance(dest, str) and kind_of(dest) == kind_of(checkpoint.store.uri)
    with destination(dest, prefix, storage if is_alike else None) as (store, place):
        check_not_being_pruned(store, place)
        check_free(store, place, [*planned.files, *planned.texts], planned.last)
        written = {**write(planned, store, place), **planned.write_texts(store, place)}
    base = dest.uri if isinstance(dest, Store) else dest
    return Exported(uri=join_uri(base, prefix.strip("/")) if prefix else base, files=written)


def _with_record(planned: Planned, checkpoint: Checkpoint, *, by_training: bool) -> Planned:
    """With what proves to a later prune whose the directory is, and which files belong to it."""
    if EXPORT_RECORD in planned.files or EXPORT_RECORD in planned.texts:
        raise ConfigError(f"the export has a file named {EXPORT_RECORD}, as raycheck's own record; rename it")
    record = ExportRecord(
        run_id=read_latest(checkpoint.store).run_id,
        checkpoint=checkpoint.entry.key,
        by_training=by_training,
        last=planned.last,
        files={**planned.sizes, **{name: len(text.encode()) for name, text in planned.texts.items()}},
    )
    return replace(planned, texts={EXPORT_RECORD: dump(record).decode(), **planned.texts})


def _split(weights: Sequence[Weight], max_bytes: int | None) -> dict[str, list[Weight]]:
    """File name to weights. A weight that is larger than a file may be has one of its own."""
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
    return {f"model-{number:05d}-of-{count:05d}.safetensors": group for number, group in enumerate(groups, 1)}


def _weight_map(parts: Mapping[str, Sequence[Weight]]) -> str:
    total = sum(weight.size_bytes for group in parts.values() for weight in group)
    names = {weight.name: file for file, group in parts.items() for weight in group}
    return json_text({"metadata": {"total_size": total}, "weight_map": names})


def _header(weights: Sequence[Weight]) -> bytes:
    """The head of a safetensors file whose data are the weights in this order, padded to a multiple of 8 bytes."""
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


def _put(store: Store, key: str, source: WeightSource, stream: Iterator[memoryview], size: int) -> None:
    try:
        store.put_parts(key, stream, size)
    except RaycheckError:
        if source.failure is not None:  # the upload failed since its parts could not be read
            raise source.failure from None
        raise


def _put_text(store: Store, key: str, text: str, *, is_last: bool) -> int:
    data = text.encode()
    if not is_last or len(data) > MAX_CONDITIONAL_BYTES:
        store.put(key, data)
        return len(data)
    try:
        put_once(store, key, data)
    except SaveFailedError:
        raise ConfigError(
            f"{store.uri}: {key} came into being meanwhile: two exports were written to one place"
        ) from None
    return len(data)
