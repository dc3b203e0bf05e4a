"""Records which adapters are merged into the weights of a model, since no tensor shows it.

PEFT's `merge_adapter` adds an adapter to the base weight in place, and only a list on each layer records that. A
checkpoint of merged weights, restored into a model whose adapters are not merged, would count the adapter twice. So the
list is saved, and a restore refuses a difference. Layers are recognized by their attributes; neither peft nor loralib
is imported.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import torch

Merged = Mapping[str, Sequence[str]]
"""The names of the adapters that are merged into a layer's weight, by the layer's plain path."""
LORALIB = "lora"
"""The name for the only adapter of a loralib layer, and of layers modeled on loralib."""


def adapted_layers(module: torch.nn.Module, plain: Callable[[str], str]) -> dict[str, torch.nn.Module]:
    """Return the layers into whose weight an adapter can be merged, by plain path."""
    return {plain(path): layer for path, layer in module.named_modules() if _merged_into(layer) is not None}


def merged_adapters(layers: Mapping[str, torch.nn.Module]) -> dict[str, list[str]]:
    """Return which adapters are merged now. Layers without a merged adapter are left out."""
    return {path: merged for path, layer in layers.items() if (merged := _merged_into(layer))}


def differences(
    entry: str, layers: Mapping[str, torch.nn.Module], there: Merged, restored: Iterable[str]
) -> Iterator[str]:
    """Yield one line for each way in which layers here differ from the checkpoint, with the calls that fix it.

    there: the checkpoint's list. restored: the names of the tensors to restore. A layer of which only the adapter is
    restored must have nothing merged.
    """
    directly = {name.rpartition(".")[0] for name in restored}  # an adapter's tensors lie one level below the layer
    places = {place for name in restored for place in _prefixes(name)}
    found: dict[tuple[tuple[str, ...], tuple[str, ...]], list[str]] = {}
    for path, layer in layers.items():
        name = f"{entry}.{path}"
        saved = tuple(there.get(path, ())) if name in directly else ()
        here = tuple(_merged_into(layer) or ())
        if saved != here and name in places:
            found.setdefault((saved, here), []).append(path)
    for (saved, here), paths in found.items():
        more = f" and {len(paths) - 1} more layers" if len(paths) > 1 else ""
        yield (
            f"{entry}.{paths[0]}{more}: the saved weights have {_named(saved)} merged into them, and here "
            f"{_named(here)} is merged: {_cure(layers[paths[0]], saved, here)}"
        )


def _merged_into(layer: torch.nn.Module) -> list[str] | None:
    """Return the adapters that are merged into a layer's weight, or None if the layer cannot have adapters."""
    merged = getattr(layer, "merged_adapters", None)
    if isinstance(merged, list):
        return [str(name) for name in merged]
    is_merged = vars(layer).get("merged")
    if isinstance(is_merged, bool) and any(name.startswith("lora") for name in (*layer._parameters, *layer._modules)):  # noqa: SLF001
        return [LORALIB] if is_merged else []
    return None


def _prefixes(name: str) -> Iterator[str]:
    while name:
        yield name
        name = name.rpartition(".")[0]


def _named(adapters: Sequence[str]) -> str:
    if not adapters:
        return "no adapter"
    return f"the adapter{'s' if len(adapters) > 1 else ''} {', '.join(map(repr, adapters))}"


def _cure(layer: torch.nn.Module, saved: Sequence[str], here: Sequence[str]) -> str:
    if not hasattr(layer, "merged_adapters"):
        return f"call {'eval' if saved else 'train'}() on the model before restore()"
    calls = ["unmerge_adapter()"] if here else []
    calls += [f"merge_adapter({list(saved)})"] if saved else []
    after = "; unmerge_adapter() afterwards removes the adapter again" if saved else ""
    return f"call {' and '.join(calls)} on the model before restore(){after}"
