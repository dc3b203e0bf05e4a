"""Decides the contents of a checkpoint's Hugging Face directory.

These are weights under their names, the configuration, and the files of tokenizers and processors. Everything is
decided from the checkpoint's index alone, before anything is written. The index comes from a bucket and may be hostile:
names that become file names are checked, texts are parsed, and nothing is trusted that an attacker could have forged.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from raycheck.bucket.format.index import Index
from raycheck.bucket.store import open_store
from raycheck.errors import ConfigError, CorruptError, NotFoundError
from raycheck.huggingface.destination import local_path
from raycheck.huggingface.lora import LoraAdapter, adapter_weights, as_saved, merged_weights
from raycheck.huggingface.weight_stream import Weight, WeightSource
from raycheck.settings import ExportOptions
from raycheck.state.entries.hf_assets import ADAPTER_CONFIG, CONFIG, FACTS, GENERATION_CONFIG, is_safe_file_name
from raycheck.state.entries.state_entry import ASSETS, OWN_ENTRIES

MAX_CONFIG_BYTES = 16 * 1024 * 1024
_FLOATS = {
    str(dtype).removeprefix("torch."): dtype for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64)
}
SAFETENSORS_DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.complex64: "C64",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e4m3fnuz: "F8_E4M3FNUZ",
    torch.float8_e5m2: "F8_E5M2",
    torch.float8_e5m2fnuz: "F8_E5M2FNUZ",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Contents:
    """The contents of an export.

    weights: in the natural order of their names. texts, files: by file name. is_adapter: whether it is a PEFT
    directory.
    """

    weights: list[Weight]
    texts: dict[str, str]
    files: dict[str, list[Weight]]
    is_adapter: bool


def contents(
    source: WeightSource,
    index: Index,
    options: ExportOptions,
    *,
    what: str,
) -> Contents:
    """Decide everything in an export. what: names the checkpoint in errors.

    Raises ConfigError for an export that is not possible, CorruptError for an index that raycheck did not write.
    """
    model = _choose_model(index, what, options.entry, options.config_from)
    weights, texts = _weights_and_texts(source, model, merge_lora=options.merge_lora)
    weights, texts = _converted(weights, texts, options.dtype)
    return Contents(
        weights=weights,
        texts=texts,
        files=_extra_files(source, index, options.files, what),
        is_adapter=ADAPTER_CONFIG in texts,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class _Model:
    """The entry that is exported.

    what: names the checkpoint in errors. texts: its configuration files. facts: what raycheck has saved about it.
    merged: the adapters that are merged into the saved weight of a layer, by the layer's path.
    """

    what: str
    entry: str
    texts: Mapping[str, str]
    facts: Mapping[str, Any]
    merged: Mapping[str, Sequence[str]]


def _choose_model(index: Index, what: str, entry: str | None, config_from: str | None) -> _Model:
    """Choose the entry to export. Raises ConfigError that lists the available entries and says what to do."""
    assets = _asset_texts(index, what)
    of_ranks = {name for values in index.rank_values for name, tree in values.items() if isinstance(tree, dict)}
    entries = sorted({*index.values, *of_ranks} - {ASSETS, *OWN_ENTRIES})
    with_config = [name for name in entries if CONFIG in assets.get(name, {})]
    if entry is not None and entry not in entries:
        raise ConfigError(f"{what} has no entry {entry!r}; there are: {', '.join(entries)}")
    if entry is None and len(with_config) > 1:
        raise ConfigError(f"{what} holds several models ({', '.join(with_config)}); choose one with entry=")
    models = [name for name in entries if name.rpartition(".")[2] == "model"]  # that of an engine is ENTRY.model
    if entry is None and not with_config and not (len(models) == 1 and config_from):
        raise ConfigError(
            f"{what} holds no model with a Hugging Face configuration (entries: {', '.join(entries)}). Name the "
            "model's entry with entry=, and a folder with its config.json with config_from="
        )
    entry = entry or (with_config or models)[0]
    texts = {
        name: assets[entry][name]
        for name in (CONFIG, GENERATION_CONFIG, ADAPTER_CONFIG)
        if name in assets.get(entry, {})
    }
    if config_from is not None:
        texts |= _texts_from(config_from)
    if CONFIG not in texts:
        raise ConfigError(f"{what}: {entry!r} has no Hugging Face configuration; name a folder with one: config_from=")
    _refuse_subclasses(index, what, entry)
    facts = _json(assets.get(entry, {}).get(FACTS, "{}"), f"{what}: assets of {entry}")
    return _Model(what=what, entry=entry, texts=texts, facts=facts, merged=_merged(index, what, entry))


def _merged(index: Index, what: str, entry: str) -> dict[str, list[str]]:
    """Return which adapters are merged into the saved weights. Raises CorruptError for anything but names."""
    found: dict[str, list[str]] = {}
    for values in (index.values, *index.rank_values):
        value = values.get(entry)
        merged = value.get("merged", {}) if isinstance(value, dict) else {}
        if not isinstance(merged, dict) or not all(isinstance(names, list) for names in merged.values()):
            raise CorruptError(f"{what}: the record of merged adapters of {entry!r} is invalid")
        found |= {path: [str(name) for name in names] for path, names in merged.items()}
    return found


def _refuse_subclasses(index: Index, what: str, entry: str) -> None:
    """Raise ConfigError if the entry has tensor subclasses.

    No Hugging Face model has the names of their inner tensors.
    """
    for values in (index.values, *index.rank_values):
        value = values.get(entry)
        flattened = value.get("flattened") if isinstance(value, dict) else None
        if flattened:
            first = min(map(str, flattened)) if isinstance(flattened, dict) else ""
            raise ConfigError(
                f"{what}: {entry!r} holds tensor subclasses ({first}), which cannot be exported; save plain weights"
            )


def _asset_texts(index: Index, what: str) -> Mapping[str, Mapping[str, str]]:
    """Return the saved configuration files, by entry and file name. Raises CorruptError for anything but texts."""
    assets: dict[str, Mapping[str, str]] = {}
    for values in (index.values, *index.rank_values):  # each role has those of its own models
        own = values.get(ASSETS, {})
        if not isinstance(own, dict) or not all(
            isinstance(files, dict) and all(isinstance(text, str) for text in files.values()) for files in own.values()
        ):
            raise CorruptError(f"{what}: its assets are not file names and texts")
        assets |= own
    for entry, files in assets.items():
        for file, text in files.items():
            try:
                text.encode()
            except UnicodeEncodeError as error:
                raise CorruptError(f"{what}: assets of {entry!r}: {file!r} is not text: {error.reason}") from None
    return assets


def _texts_from(folder: str) -> dict[str, str]:
    """Return the configuration files in the folder given as config_from. Raises ConfigError without config.json."""
    path = local_path(folder)
    found = {}
    for name in (CONFIG, GENERATION_CONFIG):
        # Local files may be links, as in Hugging Face's cache, and a store does not follow links.
        file = None if path is None else (path / name).resolve()
        store = open_store(folder if file is None else str(file.parent))
        try:
            found[name] = store.get(name if file is None else file.name, MAX_CONFIG_BYTES).data.decode()
        except NotFoundError:
            if name == CONFIG:
                raise ConfigError(f"config_from={folder}: there is no config.json") from None
        except UnicodeDecodeError:
            raise ConfigError(f"config_from={folder}: {name} is not text") from None
    return found


def _weights_and_texts(source: WeightSource, model: _Model, *, merge_lora: bool) -> tuple[list[Weight], dict[str, str]]:
    """Return the entry's weights under their names in the files, and its configuration files, by file name."""
    start = f"{model.entry}."
    names = {name.removeprefix(start): name for name in source.names() if name.startswith(start)}
    names = {name: saved for name, saved in names.items() if "_extra_state" not in name.split(".")}
    texts = dict(model.texts)
    adapter_config = texts.pop(ADAPTER_CONFIG, None)
    if "adapter" in model.facts:
        adapter = LoraAdapter.parse(model.facts["adapter"], what=model.what)
        if adapter.problem:
            raise ConfigError(f"{model.what}: {adapter.problem}")
        if not merge_lora:
            config = _json(adapter_config or "", f"{model.what}: {ADAPTER_CONFIG}")
            weights = adapter_weights(source, names, adapter, config)
            return _ordered(weights, model), {ADAPTER_CONFIG: adapter_config or ""}
        plain = merged_weights(source, names, adapter, model.merged)
    elif merge_lora:
        raise ConfigError(f"{model.what}: {model.entry!r} is not a PEFT model; there is nothing to merge")
    elif any(".lora_A." in name or ".lora_embedding_A." in name for name in names):
        raise ConfigError(f"{model.what}: {model.entry!r} is a PEFT model, saved without its adapter's configuration")
    else:
        plain = {name: as_saved(source, name, saved) for name, saved in names.items()}
    plain, texts[CONFIG] = _untied(plain, model, texts[CONFIG])
    return _ordered(list(plain.values()), model), texts


def _untied(plain: dict[str, Weight], model: _Model, config: str) -> tuple[dict[str, Weight], str]:
    """Leave out weights that the loader itself ties to others.

    If the two weights of such a pair differ, all weights are written and the configuration says that none are tied.
    """
    declared = model.facts.get("tied", {})
    if not isinstance(declared, dict):
        raise CorruptError(f"{model.what}: its record of tied weights is invalid")
    ties = {alias: str(original) for alias, original in declared.items() if alias in plain and str(original) in plain}
    if all(plain[alias].saved.has_equal_bytes(plain[original].saved) for alias, original in ties.items()):
        return {name: weight for name, weight in plain.items() if name not in ties}, config
    return plain, json_text({**_json(config, model.what), "tie_word_embeddings": False})


def _ordered(weights: list[Weight], model: _Model) -> list[Weight]:
    """Return the weights in the natural order of their names.

    Raises ConfigError if there are none, or if one of them cannot be written.
    """
    for weight in weights:
        if weight.dtype not in SAFETENSORS_DTYPES or weight.name == "__metadata__":
            raise ConfigError(f"{model.what}: {weight.name} ({weight.dtype}) cannot be written to a safetensors file")
    if not weights:
        raise ConfigError(f"{model.what}: there are no weights under {model.entry!r}")
    return sorted(weights, key=_natural)


def _natural(weight: Weight) -> list[tuple[int, str]]:
    """Return a sort key that puts layer 2 before layer 10."""
    return [(len(word), word) if word.isdigit() else (0, word) for word in re.split(r"(\d+)", weight.name)]


def _converted(
    weights: list[Weight], texts: dict[str, str], dtype: torch.dtype | str | None
) -> tuple[list[Weight], dict[str, str]]:
    """Convert floating-point weights to `dtype`, and record it in the configuration."""
    if dtype is None:
        return weights, texts
    name = str(dtype).removeprefix("torch.")
    if name not in _FLOATS:
        raise ConfigError(f"dtype={dtype}: weights are converted to {', '.join(_FLOATS)} only")
    if CONFIG in texts:
        config = _json(texts[CONFIG], CONFIG)
        config["torch_dtype" if "torch_dtype" in config else "dtype"] = name
        texts = {**texts, CONFIG: json_text(config)}
    floats = set(_FLOATS.values())
    return [replace(w, dtype=_FLOATS[name]) if w.dtype in floats else w for w in weights], texts


def _extra_files(
    source: WeightSource, index: Index, entries: Sequence[str] | None, what: str
) -> dict[str, list[Weight]]:
    """Return the files of the tokenizers and processors in the checkpoint, by file name.

    Raises ConfigError for two files of one name, CorruptError for a name that must not become a local path.
    """
    assets = _asset_texts(index, what)
    there = [
        name
        for name in sorted(assets)
        if _json(assets[name].get(FACTS, "{}"), f"{what}: assets of {name}").get("kind") == "files"
    ]
    unknown = sorted(set(entries or ()) - set(there))
    if unknown:
        raise ConfigError(
            f"files: {unknown[0]!r} is not a tokenizer or processor of the checkpoint; there are: {there}"
        )
    found: dict[str, list[Weight]] = {}
    for entry in there if entries is None else entries:
        value = index.values.get(entry)
        files = value.get("files") if isinstance(value, dict) else None
        for file, place in files.items() if isinstance(files, dict) else ():
            name = str(place.get("$tensor")) if isinstance(place, dict) else ""
            if not is_safe_file_name(file) or name not in source.names():
                raise CorruptError(f"{what}: entry {entry!r} holds a file {file!r}, which is refused")
            saved = source.saved(name)
            if saved.dtype != torch.uint8 or len(source.shape(name)) != 1:
                raise CorruptError(f"{what}: entry {entry!r}: {file!r} does not contain the bytes of a file")
            weight = Weight(name=file, saved=saved, shape=source.shape(name), dtype=torch.uint8)
            known = found.setdefault(file, [weight])[0]
            if [chunk.crcs for chunk in known.saved.chunks] != [chunk.crcs for chunk in saved.chunks]:
                raise ConfigError(f"two entries hold different files {file!r}; select the entries to use with files=")
    return found


def _json(text: str, what: str) -> dict[str, Any]:
    """Parse a JSON object. what: names it in errors. Raises CorruptError for anything else."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise CorruptError(f"{what} is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise CorruptError(f"{what} is not a JSON object")
    return value


def json_text(value: object) -> str:
    """Return JSON in the layout of Hugging Face's own files: indented, with sorted keys."""
    return json.dumps(value, indent=2, sort_keys=True) + "\n"
