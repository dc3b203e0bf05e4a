"""Reads a Hugging Face directory, or a model in the Hub's cache: weights, configuration, tokenizer files.

Of the files that the transformers Trainer adds to a checkpoint, only the step and the epoch are read.
"""

import re
from collections.abc import Iterator, Mapping

import torch

from raycheck.catalog.importing.safetensors_file import tensors_of
from raycheck.catalog.importing.source_files import SourceFiles
from raycheck.catalog.importing.source_tensors import SourceTensors
from raycheck.catalog.importing.state_in_source import ReadSettings, SourceState, count_in
from raycheck.catalog.importing.torch_file import read_torch_file
from raycheck.errors import ConfigError, CorruptError, NotFoundError
from raycheck.state.entries.hf_assets import CONFIG, GENERATION_CONFIG, is_safe_file_name

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
_NUMBERED = re.compile(r"(.+)-(\d+)-of-(\d+)\.\w+")
MAX_NAMED = 3
"""The maximum number of tensors named in an error."""


def read_hugging_face(files: SourceFiles, settings: ReadSettings) -> SourceState:
    """Read a directory with a model's weights, or one such file.

    Raises ConfigError for anything but a complete model, such as an adapter alone; CorruptError for files that do not
    fit together.
    """
    files, notes = _snapshot(files)
    tensors = SourceTensors()
    read: list[str] = []  # the files of weights
    weights = {} if files.only else _weights(files, tensors, settings, read)
    if files.only:
        weights = {key: tensors.add(found, files.what(key)) for key, found in tensors_of(files, files.only)}
    if not weights:
        raise CorruptError(f"{files}: it contains no weights")
    state = files.read_json("trainer_state.json") if "trainer_state.json" in files.sizes else {}
    state = state if isinstance(state, dict) else {}
    epoch = state.get("epoch")
    extra = {
        name: _bytes(files, name) for name in files.sizes if _TOKENIZER.fullmatch(name) and is_safe_file_name(name)
    }
    texts = {name: _text(files, name) for name in (CONFIG, GENERATION_CONFIG) if name in files.sizes}
    left_out = [name for name in files.sizes if not _is_taken(name, {*extra, *texts, *read})]
    return SourceState(
        kind="huggingface",
        tree={"model": weights},
        tensors=tensors,
        files=extra,
        texts=texts,
        step=count_in(state, "global_step"),
        epoch=int(epoch) if isinstance(epoch, int | float) and 0 <= epoch < 10**9 else None,
        left_out=tuple(left_out),
        notes=notes,
    )


def _is_taken(name: str, taken: set[str]) -> bool:
    return name in taken or name.endswith(".index.json") or name == "trainer_state.json"


def _snapshot(files: SourceFiles) -> tuple[SourceFiles, tuple[str, ...]]:
    """Return the files of the main snapshot in a model's folder in the Hub's cache."""
    if "snapshots" not in files.folders():
        return files, ()
    revisions = sorted({name.split("/")[1] for name in files.sizes if name.startswith("snapshots/")})
    revision = files.read("refs/main", 100).decode(errors="replace").strip() if "refs/main" in files.sizes else ""
    if not revision and len(revisions) == 1:
        revision = revisions[0]
    if revision not in revisions or not _REVISION.fullmatch(revision):
        raise NotFoundError(
            f"{files}: its refs/main names a snapshot that does not exist; name one of its folders snapshots/"
            f"{'/, snapshots/'.join(revisions[:5])}/"
        )
    return files.below(f"snapshots/{revision}/"), (f"snapshot {revision} of the hub's cache",)


def _weights(
    files: SourceFiles, tensors: SourceTensors, settings: ReadSettings, read: list[str]
) -> dict[str, torch.Tensor]:
    """Return the tensors of a model by name. read: gets the names of the files that have them."""
    if any(name.startswith("adapter_model.") for name in files.sizes):
        raise ConfigError(
            f"{files} is a PEFT adapter without its base model. Load both with peft, and save the state dict of "
            "the whole: torch.save({'model': model.state_dict()}, file)"
        )
    index = _index(files)
    named = _indexed(files, index) if index else {}
    read += sorted(set(named.values())) if index else [_whole(files)]
    found: dict[str, torch.Tensor] = {}
    place: dict[str, str] = {}
    for name in read:
        for key, tensor in _in_file(files, name, tensors, settings):
            if key in found:
                raise CorruptError(f"{files.what(name)}: {key[:200]!r} is in {place[key]} too")
            found[key], place[key] = tensor, name
    if index:
        _refuse_other_places(files.what(index), named, place)
    return found


def _index(files: SourceFiles) -> str:
    """Return the name of the index of the files; "" for one file without an index.

    Raise ConfigError for an index next to a file of all weights that it does not name.
    """
    for whole, index in (SAFETENSORS, BINARY):
        if index in files.sizes and whole in files.sizes and whole not in _weight_map(files, index).values():
            raise ConfigError(
                f"{files} has both {whole} and {index}, and the index does not name that file, so the two may come "
                "from different saves: import a copy of the directory with only the newer one"
            )
        if {index, whole} & files.sizes.keys():
            return index if index in files.sizes else ""
    return ""


def _whole(files: SourceFiles) -> str:
    """Return the name of the single file with all weights."""
    others = [name for name in files.sizes if name.endswith(".safetensors") and "/" not in name]
    whole = [name for name, _ in (SAFETENSORS, BINARY) if name in files.sizes] or others
    if whole and (whole != others or len(others) == 1):
        return whole[0]
    raise ConfigError(
        f"{files}: there is neither {SAFETENSORS[0]} nor {BINARY[0]}, nor an index of several such files"
        f"{', but ' + ', '.join(others[:5]) + ': name one of them' if others else ''}"
    )


def _weight_map(files: SourceFiles, index: str) -> dict[str, str]:
    """Return the file that an index names for each tensor, as it is written there."""
    document = files.read_json(index)
    places = document.get("weight_map") if isinstance(document, dict) else None
    if not isinstance(places, dict) or not all(isinstance(name, str) for name in places.values()):
        raise CorruptError(f"{files.what(index)} has no weight_map of names")
    return places


def _indexed(files: SourceFiles, index: str) -> dict[str, str]:
    """Return the file that an index names for each tensor. Each must be one of the source's files, in its folder."""
    what, suffix = files.what(index), index.removesuffix(".index.json").rpartition(".")[2]
    places = _weight_map(files, index)
    named = sorted(set(places.values()))
    for name in named:
        if "/" in name or not name.endswith(f".{suffix}"):
            raise CorruptError(f"{what} names {name[:200]!r}, which is not a file of weights next to it")
        if name not in files.sizes:
            raise CorruptError(f"{what} names {name[:200]!r}, which is missing: is the download complete?")
    numbered = [found.groups() for name in named if (found := _NUMBERED.fullmatch(name))]
    for first, _, count in numbered:
        if sum(item[::2] == (first, count) for item in numbered) != int(count):
            raise CorruptError(
                f"{what} does not name all {int(count)} files {first}-...-of-{count}.{suffix}: fetch the model again"
            )
    return places


def _refuse_other_places(what: str, named: Mapping[str, str], place: Mapping[str, str]) -> None:
    """Raise CorruptError unless each tensor is in the file that the index names for it, and there are no others.

    what: names the index. named: the file of each tensor, as the index has it. place: the file in which it is.
    """
    wrong = sorted(key for key in {*named, *place} if named.get(key) != place.get(key))
    if not wrong:
        return
    told = []
    for key in wrong[:MAX_NAMED]:
        here = f"which is in {place[key]}" if key in place else "which is in none of the files"
        says = f"it names {named[key]} for" if key in named else "it does not name"
        told.append(f"{says} {key[:200]!r}, {here}")
    more = f", and {len(wrong) - MAX_NAMED} more tensors" if len(wrong) > MAX_NAMED else ""
    raise CorruptError(
        f"{what} does not fit its files: {'; '.join(told)}{more}. Fetch the model again, all files of one version; if "
        "you know that the files are correct, fix the weight_map"
    )


def _in_file(
    files: SourceFiles, name: str, tensors: SourceTensors, settings: ReadSettings
) -> Iterator[tuple[str, torch.Tensor]]:
    if name.endswith(".safetensors"):
        for key, found in tensors_of(files, name):
            yield key, tensors.add(found, files.what(key))
        return
    loaded = read_torch_file(files, name, tensors, verify=settings.verify)
    if not isinstance(loaded, dict) or not all(isinstance(item, torch.Tensor) for item in loaded.values()):
        raise ConfigError(f"{files.what(name)} is not a state dict of tensors")
    yield from loaded.items()


def _bytes(files: SourceFiles, name: str) -> torch.Tensor:
    data = files.read(name, MAX_FILE_BYTES)
    return torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)


def _text(files: SourceFiles, name: str) -> str:
    if not isinstance(files.read_json(name), dict):
        raise CorruptError(f"{files.what(name)} is not a JSON object")
    try:
        return files.read(name, MAX_TEXT_BYTES).decode()
    except UnicodeDecodeError as error:
        raise CorruptError(f"{files.what(name)} is not text: {error.reason}") from None
