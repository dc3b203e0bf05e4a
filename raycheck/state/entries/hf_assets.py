"""Collects what an export to a Hugging Face directory needs besides tensors: a model's configuration, and the files of
a tokenizer or processor. A checkpoint that contains them can be exported without the training script.

Everything is duck-typed: neither transformers nor peft is imported. `module_assets` is called once, at construction. A
model whose configuration it cannot read has no assets; that never stops training.
"""

import json
import re
import tempfile
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from raycheck.bucket.format.object_keys import EXPORT_ENDS
from raycheck.errors import ConfigError
from raycheck.state.entries.deepspeed_engine import ZeroModel
from raycheck.state.entries.module.parameter_names import innermost, plain_names
from raycheck.state.entries.saved_entry import Named, SavedEntry
from raycheck.state.entries.state_entry import StateEntry

CONFIG, GENERATION_CONFIG, ADAPTER_CONFIG = "config.json", "generation_config.json", EXPORT_ENDS[1]
FACTS = "raycheck.json"
"""The asset of each entry with what the exporter must know about the entry. It is not a file of the export."""

MAX_FILES_BYTES = 256 * 1024 * 1024
_SEGMENT = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.+-]{0,199}")
_OURS = re.compile(r"(?i)(config|generation_config|adapter_config|raycheck)\.json|.*\.index\.json")
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".h5", ".msgpack", ".gguf", ".onnx", ".pkl", ".pickle")


def assets_of(state: Mapping[str, object]) -> dict[str, dict[str, str]]:
    """Return the assets, by entry name, of the entries that have any."""
    found: dict[str, dict[str, str]] = {}
    for name, value in state.items():
        if isinstance(value, torch.nn.Module):
            found[name] = module_assets(value)
        elif has_files(value):
            found[name] = {FACTS: json.dumps({"kind": "files"})}
    return {name: assets for name, assets in found.items() if assets}


def module_assets(module: torch.nn.Module) -> dict[str, str]:
    """Return file names and texts for a model with a Hugging Face configuration; {} for any other module.

    A PEFT model has the base model's configuration, the active adapter's, and the scaling of its LoRA layers.
    """
    try:
        inside = innermost(module)
        if isinstance(inside, ZeroModel):
            return _assets(innermost(inside.engine().module), inside)
        return _assets(inside)
    except Exception:  # noqa: BLE001  configs are foreign code: a faulty one must not stop training
        return {}


def has_files(value: object) -> bool:
    """Return whether `value` is saved as the files it writes: a tokenizer or processor, which has no state_dict."""
    return callable(getattr(value, "save_pretrained", None)) and not callable(getattr(value, "state_dict", None))


def is_safe_file_name(name: str) -> bool:
    """Return whether a file of this name may be written next to an exported model. The name comes from a bucket.

    It must be inside the folder, at most one level down, and neither weights nor one of the exporter's own files.
    """
    segments = name.split("/")
    return (
        len(segments) <= 2
        and all(_SEGMENT.fullmatch(segment) for segment in segments)
        and not _OURS.fullmatch(segments[-1])
        and not segments[-1].lower().endswith(_WEIGHTS)
    )


class FilesEntry(StateEntry):
    """An entry for the files of a tokenizer or processor, saved once, as bytes. A restore changes nothing live."""

    def __init__(self, name: str, processor: Any) -> None:
        super().__init__(name)
        with tempfile.TemporaryDirectory(prefix="raycheck-files-") as folder:
            try:
                processor.save_pretrained(folder)
            except Exception as error:
                raise ConfigError(f"state[{name!r}].save_pretrained failed: {type(error).__name__}: {error}") from error
            paths = sorted(path for path in Path(folder).rglob("*") if path.is_file())
            size = sum(path.stat().st_size for path in paths)
            if size > MAX_FILES_BYTES:
                raise ConfigError(
                    f"state[{name!r}].save_pretrained wrote {size} bytes, more than {MAX_FILES_BYTES}: not a "
                    "tokenizer. Make its modules separate entries"
                )
            files = {path.relative_to(folder).as_posix(): path.read_bytes() for path in paths}
        for file in files:
            if not is_safe_file_name(file):
                raise ConfigError(f"state[{name!r}].save_pretrained wrote {file!r}, which a tokenizer does not have")
        self._files = {file: _bytes_tensor(data) for file, data in files.items()}

    def tree(self) -> dict[str, Any]:
        return {"files": dict(self._files)}

    def values(self, tree: dict[str, Any], tensors: Named) -> Any:
        tensors.clear()
        return self.encode(tree, self.name, tensors)

    def match(self, saved: SavedEntry) -> Named:
        del saved
        return {}

    def load(self, saved: SavedEntry, tensors: Named) -> None:
        del saved, tensors


def _bytes_tensor(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)


def _assets(module: torch.nn.Module, saved: torch.nn.Module | None = None) -> dict[str, str]:
    """saved: what is saved of the module; None: its own parameters."""
    base = _base_model(module)
    config = json.loads(base.config.to_json_string())
    dtype = next((p.dtype for p in (saved or base).parameters() if p.is_floating_point()), None)
    if dtype is not None:
        config["torch_dtype" if "torch_dtype" in config else "dtype"] = str(dtype).removeprefix("torch.")
    config["architectures"] = [type(base).__name__.removeprefix("FSDP")]  # fully_shard derives its own class
    facts: dict[str, Any] = {"kind": "model", "tied": _declared_ties(base)}
    assets = {CONFIG: _text(config)}
    generation = getattr(base, "generation_config", None)
    if generation is not None and base.can_generate():
        assets[GENERATION_CONFIG] = _text(json.loads(generation.to_json_string()))
    adapters = getattr(module, "peft_config", None)
    if isinstance(adapters, Mapping) and adapters:
        facts["adapter"] = _adapter(module, base, adapters)
        adapter_config = adapters[facts["adapter"]["name"]].to_dict()
        adapter_config["inference_mode"] = True  # as peft writes it
        assets[ADAPTER_CONFIG] = _text({key: _listed(value) for key, value in adapter_config.items()})
    return {**assets, FACTS: json.dumps(facts)}


def _base_model(module: Any) -> Any:
    get_base_model = getattr(module, "get_base_model", None) if hasattr(module, "peft_config") else None
    return get_base_model() if callable(get_base_model) else module


def _declared_ties(base: Any) -> dict[str, str]:
    """Return the source of each alias that the model and its configuration declare: the loader ties these itself."""
    plain = plain_names(base)
    expanded = getattr(base, "get_expanded_tied_weights_keys", None)
    if callable(expanded):  # transformers 5
        return {plain(alias): plain(source) for alias, source in expanded(all_submodels=True).items()}
    patterns = getattr(base, "_tied_weights_keys", None) or ()
    if not getattr(base.config, "tie_word_embeddings", True):
        return {}
    names: dict[int, list[str]] = {}
    for name, parameter in base.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(plain(name))
    ties: dict[str, str] = {}
    for group in names.values():
        declared = {name for name in group if any(re.search(pattern, name) for pattern in patterns)}
        source = next((name for name in group if name not in declared), group[0])
        ties |= {alias: source for alias in group if alias in declared and alias != source}
    return ties


def _adapter(module: Any, base: Any, adapters: Mapping[str, Any]) -> dict[str, Any]:
    active = module.active_adapters
    active = list(active() if callable(active) else active)
    name = active[0] if active else next(iter(adapters))
    config = adapters[name]
    problem = ""
    if len(active) != 1:
        problem = f"{len(active)} adapters are active ({', '.join(active)}); one at a time can be exported"
    kind = str(getattr(config.peft_type, "value", config.peft_type))
    if kind != "LORA":
        problem = f"the adapter {name!r} is of type {kind}; only LORA can be exported"
    plain = plain_names(base)
    uses = Counter(id(parameter) for _, parameter in base.named_parameters(remove_duplicate=False))
    layers = {
        plain(path): _lora_layer(layer, name, uses)
        for path, layer in base.named_modules()
        if hasattr(layer, "lora_A") and name in getattr(layer, "scaling", {})
    }
    return {
        "name": name,
        "others": [other for other in adapters if other != name],
        "problem": problem,
        "layers": layers,
    }


def _lora_layer(layer: Any, adapter: str, uses: Counter[int]) -> dict[str, Any]:
    """Describe how the layer adds B @ A to its weight.

    If it does something else, `problem` is why it cannot be merged.
    """
    kinds = {kind.__name__ for kind in type(layer).__mro__ if kind.__module__ == "peft.tuners.lora.layer"}
    is_embedding = "Embedding" in kinds
    weight = layer.get_base_layer().weight
    problem = ""
    if not is_embedding and "Linear" not in kinds:
        problem = f"a {type(layer).__name__} layer"
    elif getattr(layer, "lora_variant", {}).get(adapter) or getattr(layer, "use_dora", {}).get(adapter):
        problem = "a variant of LoRA (DoRA or such)"
    elif getattr(layer, "lora_bias", {}).get(adapter):
        problem = "a LoRA with lora_bias"
    elif uses[id(weight)] > 1:
        problem = "a LoRA on a weight that is tied to another"
    return {
        "scaling": float(layer.scaling[adapter]),
        "is_transposed": is_embedding or bool(getattr(layer, "fan_in_fan_out", False)),
        "problem": problem,
    }


def _listed(value: object) -> object:
    return sorted(value) if isinstance(value, set | frozenset) else value


def _text(value: object) -> str:
    return json.dumps(value, indent=2, sort_keys=True) + "\n"
