"""Exports a LoRA adapter: under the names that peft expects, or merged into the weights of the plain model.

Saved names are those of the plain model, even if PEFT wrapped it. What a merge needs to know about each layer was saved
with the entry's assets. A layer that does anything but add scaling * B @ A is refused by name.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from raycheck.errors import ConfigError, CorruptError
from raycheck.huggingface.weight_stream import LoraDelta, Weight, WeightSource

_LORA = re.compile(r"(?P<module>.+)\.(?P<kind>lora_\w+)\.(?P<adapter>[^.]+)(?P<rest>\.\w+)?")
_COPY = re.compile(
    r"(?P<module>.+)\.(?:modules_to_save\.(?P<adapter>[^.]+)|(?P<original>original_module))\.(?P<rest>.+)"
)


@dataclass(frozen=True, kw_only=True, slots=True)
class LoraLayer:
    """The change that one LoRA layer makes to its weight. problem: why it cannot be merged; empty if it can."""

    scaling: float
    is_transposed: bool
    problem: str


@dataclass(frozen=True, kw_only=True, slots=True)
class LoraAdapter:
    """The active adapter of an entry.

    others: names of other adapters in the model, which are not exported. problem: why no export is possible; empty if
    it is possible. layers: the LoRA layers, by the path of the module.
    """

    name: str
    others: tuple[str, ...]
    problem: str
    layers: Mapping[str, LoraLayer]

    @classmethod
    def parse(cls, facts: Any, *, what: str) -> "LoraAdapter":
        """Parse what a save recorded about an adapter. Raises CorruptError for any other form."""
        try:
            return cls(
                name=str(facts["name"]),
                others=tuple(map(str, facts["others"])),
                problem=str(facts["problem"]),
                layers={
                    str(path): LoraLayer(
                        scaling=float(layer["scaling"]),
                        is_transposed=bool(layer["is_transposed"]),
                        problem=str(layer["problem"]),
                    )
                    for path, layer in facts["layers"].items()
                },
            )
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise CorruptError(
                f"{what}: its record of the adapter is invalid: {type(error).__name__}: {error}"
            ) from None


def adapter_weights(
    source: WeightSource, names: Mapping[str, str], adapter: LoraAdapter, config: Mapping[str, Any]
) -> list[Weight]:
    """Return the tensors of `adapter_model.safetensors`. names: the tensor's name in the checkpoint, by plain name."""
    if config.get("bias", "none") != "none":
        raise ConfigError(
            f"adapter {adapter.name!r} trains biases (bias={config['bias']!r}), which an adapter's export does not "
            "hold. Export with merge_lora=True"
        )
    found = []
    for plain, saved in names.items():
        lora, copy = _LORA.fullmatch(plain), _COPY.fullmatch(plain)
        if ".token_adapter." in plain:
            raise ConfigError(f"{plain}: trainable tokens cannot be exported")
        if lora and lora["adapter"] == adapter.name:
            # peft's own special case: DoRA's magnitudes are a parameter in the file and a module in the model.
            rest = "" if lora["kind"] == "lora_magnitude_vector" else lora["rest"] or ""
            found.append(as_saved(source, f"base_model.model.{lora['module']}.{lora['kind']}{rest}", saved))
        elif copy and copy["adapter"] == adapter.name:
            found.append(as_saved(source, f"base_model.model.{copy['module']}.{copy['rest']}", saved))
    return found


def merged_weights(
    source: WeightSource, names: Mapping[str, str], adapter: LoraAdapter, merged_before: Mapping[str, Sequence[str]]
) -> dict[str, Weight]:
    """Return the plain model's tensors by name, with the adapter merged.

    names: the tensor's name in the checkpoint, by plain name. merged_before: the adapters that are already in the saved
    weight of a layer, by the layer's path. Raises ConfigError for a merge that is not possible.
    """
    refused = [f"{path} is {layer.problem}" for path, layer in adapter.layers.items() if layer.problem]
    refused += [
        f"{path} already has another adapter merged into it: {', '.join(map(repr, there))}"
        for path, there in merged_before.items()
        if there not in ([], [adapter.name])
    ]
    used: set[str] = set()
    deltas = {}
    for path, layer in adapter.layers.items():
        if not layer.problem:
            a, b = _factors(names, path, adapter.name)
            used |= {a, b}
            if merged_before.get(path):
                continue
            delta = LoraDelta(
                a=source.saved(names[a]),
                b=source.saved(names[b]),
                scaling=layer.scaling,
                is_transposed=layer.is_transposed,
            )
            deltas[f"{path}.weight"] = delta
    merged: dict[str, Weight] = {}
    for plain, saved in names.items():
        lora, copy = _LORA.fullmatch(plain), _COPY.fullmatch(plain)
        if (lora and lora["adapter"] in adapter.others) or (
            copy and (copy["original"] or copy["adapter"] in adapter.others)
        ):
            continue
        if lora and lora["adapter"] == adapter.name:
            if plain not in used:
                refused.append(f"{plain} is not the A or B of a plain LoRA")
        elif ".token_adapter." in plain:
            refused.append(f"{plain} is a trainable token")
        elif copy:
            name = f"{copy['module']}.{copy['rest']}"
            merged[name] = as_saved(source, name, saved)
        elif plain not in merged:  # otherwise the trained copy, which replaces it, is there already
            merged[plain] = as_saved(source, plain, saved)
    refused += [f"{name} is missing" for name in deltas if name not in merged]
    if refused:
        raise ConfigError(f"the adapter {adapter.name!r} cannot be merged: {'; '.join(sorted(refused)[:5])}")
    return merged | {name: _with_delta(source, merged[name], delta) for name, delta in deltas.items()}


def _factors(names: Mapping[str, str], path: str, adapter: str) -> tuple[str, str]:
    """Return the plain names of the adapter's A and B for the module at `path`. Raises ConfigError without them."""
    for a, b in (
        (f"{path}.lora_A.{adapter}.weight", f"{path}.lora_B.{adapter}.weight"),
        (f"{path}.lora_embedding_A.{adapter}", f"{path}.lora_embedding_B.{adapter}"),
    ):
        if a in names and b in names:
            return a, b
    raise ConfigError(f"the checkpoint does not hold the A and B of the adapter {adapter!r} for {path}")


def as_saved(source: WeightSource, name: str, saved_name: str) -> Weight:
    """Return the saved tensor `saved_name` under another name, otherwise unchanged."""
    saved = source.saved(saved_name)
    return Weight(name=name, saved=saved, shape=source.shape(saved_name), dtype=saved.dtype)


def _with_delta(source: WeightSource, weight: Weight, delta: LoraDelta) -> Weight:
    """Return the weight with an adapter to merge. Raises ConfigError if their shapes or dtypes do not fit."""
    a, b = (source.shape(item.tensor.name) for item in (delta.a, delta.b))
    made: Sequence[int] = (*b[:1], *a[1:]) if not delta.is_transposed else (*a[1:], *b[:1])
    fits = len(a) == len(b) == len(weight.shape) == 2 and tuple(made) == weight.shape and a[0] == b[1]
    kinds = (weight.saved.dtype, delta.a.dtype, delta.b.dtype)
    if not fits or not all(dtype.is_floating_point and dtype.itemsize > 1 for dtype in kinds):
        raise ConfigError(
            f"{weight.name} ({weight.saved.tensor.dtype}{list(weight.shape)}) cannot take a LoRA of A {list(a)} and "
            f"B {list(b)}; a quantized model is merged after its weights were restored to floats"
        )
    return Weight(name=weight.name, saved=weight.saved, shape=weight.shape, dtype=weight.dtype, delta=delta)
