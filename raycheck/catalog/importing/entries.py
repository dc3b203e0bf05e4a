"""Turns the nested state of a source into entries, with the same classes that save live objects.

Each part of the state is wrapped in an object with the interface that the entry expects of a live one. So an import is
always written in the same form as a save.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch

from raycheck.catalog.importing.optimizer_forms import NamedOptimizer, has_names, is_optimizer, named_optimizer
from raycheck.catalog.importing.state_in_source import SourceState
from raycheck.errors import ConfigError
from raycheck.state.entries.hf_assets import FACTS, FilesEntry, assets_of
from raycheck.state.entries.module.module_entry import ModuleEntry
from raycheck.state.entries.module.parameter_names import NamedParameters, ParameterNames
from raycheck.state.entries.object_entry import ObjectEntry
from raycheck.state.entries.optimizer.optimizer_entry import OptimizerEntry
from raycheck.state.entries.plain_value_entry import HeldValue, PlainValueEntry
from raycheck.state.entries.state_entry import ASSETS, OWN_ENTRIES, GatheredEntry, StateEntry

if TYPE_CHECKING:
    from torch.optim import Optimizer

TOKENIZER = "tokenizer"
WEIGHTS_ALONE = "only the weights of such a source are imported, which are tensors by name"
NUMBERS_ALONE = (
    "it is the state of an optimizer whose parameters have numbers and no names; get_optimizer_state_dict of torch "
    "writes names"
)
"""Reasons why a part is left out."""
DDP = "module."
"""The prefix that DistributedDataParallel adds to all names."""
_WRAPPERS = ("_orig_mod", "_checkpoint_wrapped_module")
"""Name components that torch.compile and activation checkpointing add, and that no model has itself."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ImportedEntry:
    """One entry as a save would gather it. kind: module, optimizer, object, value, or files, for people."""

    name: str
    kind: str
    found: GatheredEntry


@dataclass(frozen=True, kw_only=True, slots=True)
class ImportedState:
    """All entries of an import, and the files that an export needs, by entry. left_out, notes: for people."""

    entries: tuple[ImportedEntry, ...]
    assets: Mapping[str, Mapping[str, str]]
    left_out: tuple[str, ...]
    notes: tuple[str, ...]


def imported_state(
    state: SourceState,
    *,
    entries: Mapping[str, str] | None,
    skip_values: bool,
    keep_names: bool = False,
) -> ImportedState:
    """Make the entries of a source's state.

    entries: the key in the source of each entry that is wanted, with dots between levels; None: all that there are.
    skip_values, keep_names: see import_checkpoint. Raise ConfigError, naming the entry, for a value that cannot be
    kept, and for a part that was asked for and is not imported.
    """
    parts, notes, left_out = _chosen(state, entries)
    models = {name: _plain_state_dict(part, keep_names=keep_names) for name, part in parts.items() if _is_module(part)}
    made: list[ImportedEntry] = []
    for name, part in parts.items():
        why = "" if name in models else _why_left_out(state, part)
        if why and entries is not None:
            raise ConfigError(f"{name} cannot be imported: {why}. Name the other entries alone with --entry (entries=)")
        if why:
            left_out.append(name)
            notes += [f"{name} is left out: {why}"] if state.is_whole else []
            continue
        if not name.replace(".", "_").isidentifier() or name in (*OWN_ENTRIES, ASSETS):
            raise ConfigError(f"{name!r} cannot be the name of an entry; give it one with entries=, as NAME=KEY")
        if name in models:
            notes.extend(_renamed(name, part, models[name]))
            made.append(ImportedEntry(name=name, kind="module", found=_module(name, models[name]).gather()))
        elif is_optimizer(part):
            named = named_optimizer(name, part, _plain_in(models, keep_names=keep_names))
            made.append(ImportedEntry(name=name, kind="optimizer", found=_optimizer(name, named).gather()))
        else:
            _keep_value(made, left_out, name, part, skip_values=skip_values)
    if not made:
        why = "; ".join(notes) if state.is_whole else f"{WEIGHTS_ALONE}. Name them with --entry NAME=KEY (entries=)"
        raise ConfigError(f"there is nothing to import: {why}{_has(state)}")
    if left_out and not state.is_whole:
        notes.append(f"{WEIGHTS_ALONE}: optimizers start with an empty state")
    given: dict[str, object] = {}
    if state.files and entries is None and TOKENIZER not in parts:
        given[TOKENIZER] = _GivenFiles(state.files)
        files = FilesEntry(TOKENIZER, given[TOKENIZER]).gather()
        made.append(ImportedEntry(name=TOKENIZER, kind="files", found=files))
    assets: dict[str, Mapping[str, str]] = dict(assets_of(given))
    if state.texts and len(models) == 1:
        facts = json.dumps({"kind": "model", "tied": {}})
        assets[next(iter(models))] = {**state.texts, FACTS: facts}
    return ImportedState(entries=tuple(made), assets=assets, left_out=tuple(left_out), notes=tuple(notes))


def _why_left_out(state: SourceState, part: Any) -> str:
    """Return why a part that is not a module is not imported; "" if it is imported."""
    if not state.is_whole:
        return WEIGHTS_ALONE
    return NUMBERS_ALONE if is_optimizer(part) and not has_names(part) else ""


def _keep_value(made: list[ImportedEntry], left_out: list[str], name: str, part: Any, *, skip_values: bool) -> None:
    entry: StateEntry
    if type(part) is dict and part:
        kind, entry = "object", ObjectEntry(name, _GivenObject(part))
    else:
        kind, entry = "value", PlainValueEntry(name, HeldValue([part], 0, name), rank=1)
    try:
        made.append(ImportedEntry(name=name, kind=kind, found=entry.gather()))
    except ConfigError as error:
        if not skip_values:
            raise ConfigError(f"{error}. Or leave out all such values: skip_values=True") from None
        left_out.append(name)


def _chosen(state: SourceState, entries: Mapping[str, str] | None) -> tuple[dict[str, Any], list[str], list[str]]:
    """Return the parts that become entries, by name, with notes and what is left out."""
    tree, notes, left_out = dict(state.tree), list(state.notes), list(state.left_out)
    if entries is not None:
        parts = {}
        for name, key in entries.items():
            parts[name] = _at(tree, key, state)
        return parts, notes, [*left_out, *_not_chosen(tree, set(entries.values()))]
    if _is_module(tree):
        return {"model": tree}, notes, left_out
    inner = next(iter(tree.values())) if len(tree) == 1 else None
    is_part = _is_module(inner) or is_optimizer(inner)
    if isinstance(inner, dict) and not is_part and all(isinstance(part, Mapping) for part in inner.values()):
        notes.append(f"the parts of {next(iter(tree))!r} are the entries")
        tree = dict(inner)
    tree.pop("progress", None)  # raycheck's step count, if the directory is one of its components
    return {str(name): part for name, part in tree.items()}, notes, left_out


def _not_chosen(tree: Mapping[Any, Any] | list[Any], keys: set[str], above: str = "") -> Iterator[str]:
    """Yield the keys of the parts of a tree that none of `keys` chooses, with dots between levels."""
    if "" in keys:
        return
    for key, part in tree.items() if isinstance(tree, Mapping) else enumerate(tree):
        path = f"{above}{key}"
        if any(wanted.startswith(f"{path}.") for wanted in keys) and path not in keys:
            yield from _not_chosen(part, keys, f"{path}.")
        elif path not in keys:
            yield path


def _at(tree: Mapping[str, Any], key: str, state: SourceState) -> Any:
    """Return the part of the state at a key such as app.model. "" is the whole state."""
    node: Any = tree
    if key in ("", None):
        return tree
    if key in tree:
        return tree[key]
    for step in key.split("."):
        if isinstance(node, list) and step.isdigit() and int(step) < len(node):
            node = node[int(step)]
        elif isinstance(node, Mapping) and step in node:
            node = node[step]
        else:
            raise ConfigError(f"entries=: the source has nothing at {key!r}{_has(state)}")
    return node


def _has(state: SourceState) -> str:
    return f"; there are: {', '.join(map(str, list(state.tree)[:20]))}"


def _is_module(part: object) -> bool:
    """Return whether this is the state dict of a module: tensors by name, and perhaps extra state."""
    if not isinstance(part, Mapping) or not all(isinstance(name, str) for name in part):
        return False
    tensors = [isinstance(item, torch.Tensor) or name.endswith("_extra_state") for name, item in part.items()]
    is_flat_optimizer = all(name.startswith(("state.", "param_groups.")) for name in part)
    return bool(tensors) and all(tensors) and not is_flat_optimizer


def _plain_state_dict(part: Mapping[str, Any], *, keep_names: bool) -> dict[str, Any]:
    """Return a state dict without the prefixes that DDP and torch.compile add to the plain model's names.

    Each prefix is removed once at most: a second `module.` belongs to the model. keep_names: the first one does, too.
    """
    found = dict(part)
    for wrapper in ("_orig_mod.", DDP, "_orig_mod."):  # either may wrap the other
        if wrapper == DDP and keep_names:
            continue
        if found and all(name.startswith(wrapper) for name in found):
            found = {name.removeprefix(wrapper): item for name, item in found.items()}
    if len({_plain(name) for name in found}) == len(found):
        found = {_plain(name): item for name, item in found.items()}
    return found


def _renamed(name: str, given: Mapping[str, Any], kept: Mapping[str, Any]) -> list[str]:
    """Return notes of what the names of module `name` lost: a `module.` that each began with, and wrappers' steps."""
    notes = []
    first = next(iter(kept))
    if f"{DDP}{first}" == _plain(next(iter(given))):
        notes.append(
            f"{name}: all names began with {DDP!r}, as DDP writes them, and are kept without it, as {first!r}. If it "
            "is the model's own, import with --keep-names (keep_names=True)"
        )
    lost = [step for step in _WRAPPERS if any(step in key.split(".") for key in given)]
    if lost and not any(step in key.split(".") for key in kept for step in lost):
        notes.append(
            f"{name}: names are kept without {' and '.join(map(repr, lost))}, which wrappers had put into them"
        )
    return notes


def _plain(name: str) -> str:
    """Return a parameter's name without the components added by torch.compile and activation checkpointing."""
    return ".".join(step for step in name.split(".") if step not in _WRAPPERS)


def _plain_in(models: Mapping[str, Mapping[str, Any]], *, keep_names: bool) -> Callable[[str], str]:
    """Return the function that maps an optimizer's parameter names to the names in these models, if they are there."""
    known = {name for model in models.values() for name in model}

    def plain(name: str) -> str:
        found = _plain(name)
        bare = found if keep_names else found.removeprefix(DDP)
        return bare if not known or (bare in known and found not in known) else found

    return plain


def _module(name: str, state: Mapping[str, Any]) -> ModuleEntry:
    return ModuleEntry(name, _GivenModule(state))


def _optimizer(name: str, given: NamedOptimizer) -> OptimizerEntry:
    stand_in = _GivenOptimizer(given)
    return OptimizerEntry(name, cast("Optimizer", stand_in), _GivenNames(stand_in))


class _GivenModule(torch.nn.Module):
    """A module with a given state dict and no parameters: nothing in it is known to be frozen."""

    def __init__(self, state: Mapping[str, Any]) -> None:
        super().__init__()
        self._given = state

    def state_dict(self, *_: Any, **__: Any) -> dict[str, Any]:  # type: ignore[override]
        return dict(self._given)


class _GivenOptimizer:
    """An object with an optimizer's interface: groups of parameters, and a numbered state_dict."""

    def __init__(self, given: NamedOptimizer) -> None:
        flat = [name for group in given.names for name in group]
        self.by_name = {name: torch.nn.Parameter(torch.empty(0, device="meta")) for name in flat}
        self.param_groups = [
            {"params": [self.by_name[name] for name in names], **options}
            for names, options in zip(given.names, given.options, strict=True)
        ]
        number = {name: at for at, name in enumerate(flat)}
        self._packed = {
            "state": {number[name]: slots for name, slots in given.slots.items()},
            "param_groups": [
                {**options, "params": [number[name] for name in names]}
                for names, options in zip(given.names, given.options, strict=True)
            ],
            **given.rest,
        }
        self.state: dict[torch.Tensor, Any] = {}
        self._optimizer_state_dict_pre_hooks: dict[int, Any] = {}
        self._optimizer_state_dict_post_hooks: dict[int, Any] = {}

    def state_dict(self) -> dict[str, Any]:
        return self._packed


class _GivenNames(NamedParameters):
    """The names of a given optimizer's parameters, which belong to no module."""

    def __init__(self, optimizer: _GivenOptimizer) -> None:
        super().__init__({})
        self._names: dict[torch.Tensor, tuple[str, str]] = {
            parameter: ("", name) for name, parameter in optimizer.by_name.items()
        }

    def of(self, parameters: Any) -> ParameterNames:
        del parameters
        return self._names


class _GivenObject:
    def __init__(self, state: dict[Any, Any]) -> None:
        self._state = state

    def state_dict(self) -> dict[Any, Any]:
        return self._state


class _GivenFiles:
    """An object that writes given files as a tokenizer does."""

    def __init__(self, files: Mapping[str, torch.Tensor]) -> None:
        self._files = files

    def save_pretrained(self, folder: str) -> None:
        for name, data in self._files.items():
            path = Path(folder) / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(bytes(data.numpy()))
