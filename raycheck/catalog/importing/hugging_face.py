"""Reads a Hugging Face directory, or a model in the hub's cache: weights, configuration, tokenizer files.

What the Trainer of transformers adds to a checkpoint is read too: optimizer, scheduler, and the step. Its pickles of
arguments and random state are not.
"""

import re
from collections.abc import Iterator
from typing import Any

import torch

from raycheck.catalog.importing.model_order import parameters_in_order
from raycheck.catalog.importing.safetensors_file import tensors_of
from raycheck.catalog.importing.source_files import SourceFiles
from raycheck.catalog.importing.source_tensors import SourceTensors
from raycheck.catalog.importing.state_in_source import ReadSettings, SourceState, count_in
from raycheck.catalog.importing.torch_file import read_torch_file
from raycheck.errors import ConfigError, CorruptError, NotFoundError
from raycheck.shards.entries.hf_assets import CONFIG, GENERATION_CONFIG, is_safe_file_name

MAX_TEXT_BYTES = 16 * 1024 * 1024
MAX_FILE_BYTES = 256 * 1024 * 1024
SAFETENSORS, BINARY = (
    ("model.safetensors", "model.safetensors.index.json"),
    (
        "pytorch_model.bin",
        "pytorch_model.bin.index.json",
    ),
)
"""The file with all weights, and the index of several such files, by kind."""
_TOKENIZER = re.compile(
    r"(tokenizer|vocab|merges|special_tokens|added_tokens|chat_template|spiece|sentencepiece|preprocessor_config"
    r"|processor_config|image_processor|video_processor|feature_extractor|normalizer|additional_chat_templates)"
    r"[\w./-]*\.?(json|jinja|txt|model|jsonl|tiktoken)?"
)
_REVISION = re.compile(r"[0-9a-f]{40}")


def read_hugging_face(files: SourceFiles, settings: ReadSettings) -> SourceState:
    """Read a directory with the weights of a model, or one such file.

    Raises ConfigError for what is no whole model, such as an adapter alone, CorruptError for files that do not fit.
    """
    files, notes = _snapshot(files)
    tensors = SourceTensors()
    weights = {} if files.only else _weights(files, tensors, settings)
    if files.only:
        weights = {key: tensors.add(found, files.what(key)) for key, found in tensors_of(files, files.only)}
    if not weights:
        raise CorruptError(f"{files}: there are no weights in it")
    tree: dict[str, Any] = {"model": weights}
    is_ordered = not any(name.endswith(".safetensors") for name in files.sizes)
    for file, entry in (("optimizer.pt", "optimizer"), ("scheduler.pt", "scheduler")):
        if file in files.sizes:
            tree[entry] = read_torch_file(files, file, tensors, verify=settings.verify)
    state = files.read_json("trainer_state.json") if "trainer_state.json" in files.sizes else {}
    state = state if isinstance(state, dict) else {}
    epoch = state.get("epoch")
    if "optimizer" in tree and not is_ordered and CONFIG in files.sizes:
        order = parameters_in_order(files.read_json(CONFIG), weights)
        is_ordered = bool(order)
        tree["model"] = {name: weights[name] for name in dict.fromkeys([*order, *weights])}
    extra = {
        name: _bytes(files, name) for name in files.sizes if _TOKENIZER.fullmatch(name) and is_safe_file_name(name)
    }
    texts = {name: _text(files, name) for name in (CONFIG, GENERATION_CONFIG) if name in files.sizes}
    left_out = [name for name in files.sizes if not _is_taken(name, {*extra, *texts})]
    return SourceState(
        kind="huggingface",
        tree=tree,
        tensors=tensors,
        files=extra,
        texts=texts,
        is_ordered=is_ordered,
        step=count_in(state, "global_step"),
        epoch=int(epoch) if isinstance(epoch, int | float) and 0 <= epoch < 10**9 else None,
        left_out=tuple(left_out),
        notes=notes,
    )


def _is_taken(name: str, taken: set[str]) -> bool:
    weights = (".safetensors", ".bin", ".index.json") if not name.startswith("training_args") else ()
    return name in taken or name.endswith(weights) or name in ("optimizer.pt", "scheduler.pt", "trainer_state.json")


def _snapshot(files: SourceFiles) -> tuple[SourceFiles, tuple[str, ...]]:
    """Returns the files of the snapshot that a model's folder in the hub's cache calls main."""
    if "snapshots" not in files.folders():
        return files, ()
    revisions = sorted({name.split("/")[1] for name in files.sizes if name.startswith("snapshots/")})
    revision = files.read("refs/main", 100).decode(errors="replace").strip() if "refs/main" in files.sizes else ""
    if not revision and len(revisions) == 1:
        revision = revisions[0]
    if revision not in revisions or not _REVISION.fullmatch(revision):
        raise NotFoundError(
            f"{files}: its refs/main names no snapshot that is there; name one of its folders snapshots/"
            f"{'/, snapshots/'.join(revisions[:5])}/"
        )
    return files.below(f"snapshots/{revision}/"), (f"snapshot {revision} of the hub's cache",)


def _weights(files: SourceFiles, tensors: SourceTensors, settings: ReadSettings) -> dict[str, torch.Tensor]:
    if any(name.startswith("adapter_model.") for name in files.sizes):
        raise ConfigError(
            f"{files} is a PEFT adapter without its base model. Load both with peft, and save the state dict of "
            "the whole: torch.save({'model': model.state_dict()}, file)"
        )
    found: dict[str, torch.Tensor] = {}
    for name in _weight_files(files):
        for key, tensor in _in_file(files, name, tensors, settings):
            if key in found:
                raise CorruptError(f"{files.what(name)}: {key[:200]!r} is in another file too")
            found[key] = tensor
    return found


def _weight_files(files: SourceFiles) -> list[str]:
    for whole, index in (SAFETENSORS, BINARY):
        if index in files.sizes:
            return _indexed(files, index, whole.rpartition(".")[2])
        if whole in files.sizes:
            return [whole]
    others = [name for name in files.sizes if name.endswith(".safetensors") and "/" not in name]
    if len(others) == 1:
        return others
    raise ConfigError(
        f"{files}: there is neither {SAFETENSORS[0]} nor {BINARY[0]}, nor an index of several such files"
        f"{', but ' + ', '.join(others[:5]) + ': name one of them' if others else ''}"
    )


def _indexed(files: SourceFiles, index: str, suffix: str) -> list[str]:
    """Returns the files that an index names. Each must be one of the source's, in its own folder."""
    document = files.read_json(index)
    places = document.get("weight_map") if isinstance(document, dict) else None
    if not isinstance(places, dict) or not all(isinstance(name, str) for name in places.values()):
        raise CorruptError(f"{files.what(index)} has no weight_map of names")
    named = sorted(set(places.values()))
    for name in named:
        if "/" in name or not name.endswith(f".{suffix}"):
            raise CorruptError(f"{files.what(index)} names {name[:200]!r}, which is no file of weights beside it")
        if name not in files.sizes:
            raise CorruptError(f"{files.what(index)} names {name[:200]!r}, which is missing: is the download complete?")
    return named


def _in_file(
    files: SourceFiles, name: str, tensors: SourceTensors, settings: ReadSettings
) -> Iterator[tuple[str, torch.Tensor]]:
    if name.endswith(".safetensors"):
        for key, found in tensors_of(files, name):
            yield key, tensors.add(found, files.what(key))
        return
    loaded = read_torch_file(files, name, tensors, verify=settings.verify)
    if not isinstance(loaded, dict) or not all(isinstance(item, torch.Tensor) for item in loaded.values()):
        raise ConfigError(f"{files.what(name)} is no state dict of tensors")
    yield from loaded.items()


def _bytes(files: SourceFiles, name: str) -> torch.Tensor:
    data = files.read(name, MAX_FILE_BYTES)
    return torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)


def _text(files: SourceFiles, name: str) -> str:
    if not isinstance(files.read_json(name), dict):
        raise CorruptError(f"{files.what(name)} is no JSON object")
    try:
        return files.read(name, MAX_TEXT_BYTES).decode()
    except UnicodeDecodeError as error:
        raise CorruptError(f"{files.what(name)} is no text: {error.reason}") from None
