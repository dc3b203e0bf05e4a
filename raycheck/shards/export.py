"""A checkpoint as a Hugging Face directory, straight from the bucket: no model is built, no process group is asked,
and memory stays bounded however large the model is. Checksums are verified on the way.

The directory is whole or not there (see folder.py): the index of the weights, without which no reader finds them, is
written last, and the weights are always named as parts of it.
"""

import json
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from raycheck.bucket.catalog import Checkpoint
from raycheck.bucket.commit import put_once
from raycheck.bucket.layout import export_key
from raycheck.bucket.store import Store
from raycheck.bucket.store.base import MAX_CONDITIONAL_BYTES
from raycheck.bucket.store.uri import join_uri
from raycheck.errors import ConfigError, RaycheckError, SaveFailedError
from raycheck.shards.assets import ADAPTER_CONFIG
from raycheck.shards.contents import SAFETENSORS_DTYPES, contents, json_text
from raycheck.shards.folder import check_free, destination
from raycheck.shards.weights import Source, Weight
from raycheck.storage_settings import StorageSettings, kind_of

if TYPE_CHECKING:
    import torch

INDEX_FILE = "model.safetensors.index.json"


@dataclass(frozen=True, kw_only=True, slots=True)
class Exported:
    """What was written: file name to size in bytes."""

    uri: str
    files: Mapping[str, int]

    @property
    def size_bytes(self) -> int:
        return sum(self.files.values())


def export_hf(
    checkpoint: Checkpoint,
    dest: Store | str,
    *,
    prefix: str = "",
    entry: str | None = None,
    files: Sequence[str] | None = None,
    merge_lora: bool = False,
    dtype: "torch.dtype | str | None" = None,
    config_from: str | None = None,
    max_shard_bytes: int = 5_000_000_000,
    storage: StorageSettings | None = None,
) -> Exported:
    """Write the model of a checkpoint to `dest` (a folder, a URI, or a store and a prefix in it).

    entry: the model's name in the state, when several have a configuration. files: the tokenizer and processor
    entries that go along; default all. merge_lora: a PEFT model as a plain one, instead of its adapter alone. dtype:
    what floating-point weights are converted to. config_from: a folder with the config.json of a model that had none.
    storage: the settings the checkpoint's store was opened with; a `dest` of the same kind of store is opened with them
    too.
    Raises ConfigError, before anything was written, for what cannot be done.
    """
    manifest = checkpoint.manifest()
    index = checkpoint.index(manifest)
    source = Source(checkpoint, manifest, index)
    made = contents(
        source,
        index,
        what=f"{checkpoint.store.uri}: checkpoint {checkpoint.entry.key}",
        entry=entry,
        files=files,
        merge_lora=merge_lora,
        dtype=dtype,
        config_from=config_from,
    )
    parts = {"adapter_model.safetensors": made.weights} if made.is_adapter else _split(made.weights, max_shard_bytes)
    texts = made.texts if made.is_adapter else {**made.texts, INDEX_FILE: _weight_map(parts)}
    last = ADAPTER_CONFIG if made.is_adapter else INDEX_FILE
    written: dict[str, int] = {}
    is_alike = isinstance(dest, str) and kind_of(dest) == kind_of(checkpoint.store.uri)
    with destination(dest, prefix, storage if is_alike else None) as (store, place):
        check_free(store, place, [*parts, *made.files, *texts], last)
        for file, group in {**parts, **made.files}.items():
            ordered = sorted(group, key=lambda weight: -weight.dtype.itemsize)
            head = _header(ordered) if file in parts else b""
            written[file] = _put(store, export_key(place, file), source, ordered, head)
        for file in sorted(texts, key=lambda file: file == last):
            written[file] = _put_text(store, export_key(place, file), texts[file], is_last=file == last)
    base = dest.uri if isinstance(dest, Store) else dest
    return Exported(uri=join_uri(base, prefix.strip("/")) if prefix else base, files=written)


def _split(weights: Sequence[Weight], max_bytes: int) -> dict[str, list[Weight]]:
    """File name to weights. A weight that is larger than a file may be has one of its own."""
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


def _put(store: Store, key: str, source: Source, weights: Sequence[Weight], head: bytes) -> int:
    size = len(head) + sum(weight.size_bytes for weight in weights)
    try:
        store.put_parts(key, source.stream(weights, head, store.part_bytes(size)), size)
    except RaycheckError:
        if source.failure is not None:  # the upload failed since its parts could not be read
            raise source.failure from None
        raise
    return size


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
