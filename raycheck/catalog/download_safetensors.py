"""Fetches a checkpoint as safetensors files, with the reader and the file format of the Hugging Face export.

Each entry of the state gets its own files, in which tensors have their names in the checkpoint. All other values are in
values.json, in the form of the checkpoint's index. Fetched files are recorded with checksums, so that a repeated
download skips them.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from raycheck.bucket.format.checksum import crc32
from raycheck.bucket.format.document import FORMAT_VERSION, Document, dump, load
from raycheck.bucket.format.index import Index, Tensor
from raycheck.bucket.format.manifest import Manifest
from raycheck.bucket.local_files import appear, check_room, file_crc32, opened_partial, write_file
from raycheck.bucket.reading import Checkpoint
from raycheck.errors import ConfigError, CorruptError
from raycheck.huggingface.export import MAX_FILE_BYTES, safetensors_head, split, weight_map
from raycheck.huggingface.export_contents import SAFETENSORS_DTYPES, json_text
from raycheck.huggingface.weight_stream import BLOCK_BYTES, Weight, WeightSource
from raycheck.show_progress import ShowProgress

RECORD, VALUES = "raycheck-download.json", "values.json"
MAX_RECORD = 4 * 1024 * 1024
_SAFE = re.compile(r"\w[\w.-]{0,99}")


@dataclass(frozen=True, kw_only=True, slots=True)
class DownloadRecord(Document):
    """The record of complete safetensors files. files: name to CRC-32."""

    format_version: int = FORMAT_VERSION
    checkpoint: str
    files: Mapping[str, int]


def fetch_safetensors(
    root: Path, checkpoint: Checkpoint, manifest: Manifest, progress: ShowProgress
) -> tuple[dict[str, int], int]:
    """Fetch what is missing in the folder. Returns the sizes of all files, and the bytes fetched."""
    index = checkpoint.read_index(manifest)
    source = WeightSource(checkpoint, manifest, index)
    files, texts = _lay_out(source, index)
    heads = {name: safetensors_head(weights) for name, weights in files.items()}
    sizes = {name: len(heads[name]) + sum(weight.size_bytes for weight in weights) for name, weights in files.items()}
    record = _read_record(root, manifest.key)
    there = {name for name, crc in record.files.items() if name in sizes and _is_whole(root / name, sizes[name], crc)}
    missing = [name for name in files if name not in there]
    check_room(root, sum(sizes[name] for name in missing))
    total, done = sum(sizes.values()), sum(sizes[name] for name in there)
    fetched = 0
    for name in missing:
        seen = 0
        with opened_partial(root / name) as file:
            for part in source.stream(files[name], heads[name], BLOCK_BYTES):
                seen = crc32(part, seen)
                file.write(part)
                done, fetched = done + len(part), fetched + len(part)
                progress(done, total)
        appear(root / name)
        record = replace(record, files={**record.files, name: seen})
        write_file(root / RECORD, dump(record))
    for name, text in texts.items():
        write_file(root / name, text.encode())
    return {**sizes, **{name: len(text.encode()) for name, text in texts.items()}}, fetched


def _lay_out(source: WeightSource, index: Index) -> tuple[dict[str, list[Weight]], dict[str, str]]:
    """Return the tensors in each file, and the texts of the small files. Raises ConfigError for values that such files
    cannot hold."""
    entries: dict[str, list[Weight]] = {}
    for tensor in index.tensors:
        saved = source.saved(tensor.name)
        if saved.dtype not in SAFETENSORS_DTYPES or tensor.name == "__metadata__":
            raise ConfigError(f"{tensor.name} ({tensor.dtype}) cannot be in a safetensors file; use format='dcp'")
        weight = Weight(name=tensor.name, saved=saved, shape=tensor.shape, dtype=saved.dtype)
        entries.setdefault(_entry_of(tensor), []).append(weight)
    files: dict[str, list[Weight]] = {}
    texts = {VALUES: json_text({"values": index.values, "rank_values": index.rank_values})}
    for entry, weights in sorted(entries.items()):
        groups = split(weights, entry, MAX_FILE_BYTES)
        if len(groups) == 1:
            files[f"{entry}.safetensors"] = _aligned(weights)
            continue
        files |= {name: _aligned(group) for name, group in groups.items()}
        texts[f"{entry}.safetensors.index.json"] = weight_map(groups)
    return files, texts


def _entry_of(tensor: Tensor) -> str:
    """Return a tensor's entry, usable as a file name. For one rank's own tensor, `metric.rank3.total`, it is
    `metric`."""
    entry = re.sub(r"\.rank\d+\..*", "", str(tensor.path[0] if tensor.path else tensor.name))
    if not _SAFE.fullmatch(entry):
        raise ConfigError(f"{entry[:120]!r} cannot be a file's name; use format='dcp'")
    return entry


def _aligned(weights: list[Weight]) -> list[Weight]:
    return sorted(weights, key=lambda weight: (-weight.dtype.itemsize, weight.name))


def _read_record(root: Path, key: str) -> DownloadRecord:
    """Return the record of an earlier download. A record that cannot be read counts as none."""
    try:
        with (root / RECORD).open("rb") as file:
            return load(DownloadRecord, file.read(MAX_RECORD + 1), what=RECORD, max_bytes=MAX_RECORD)
    except (FileNotFoundError, CorruptError):
        return DownloadRecord(checkpoint=key, files={})


def _is_whole(path: Path, size: int, crc: int) -> bool:
    return path.is_file() and not path.is_symlink() and path.stat().st_size == size and file_crc32(path) == crc
