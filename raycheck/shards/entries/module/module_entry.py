"""Modules as a part of the train state: plain, or under DDP, FSDP2, tensor parallelism, torch.compile or PEFT.

Names are those of the plain model (parameter_names.py). Tensors are restored in place; only what state_dict() makes
anew (extra state, the tensors of a hook) goes back through load_state_dict. Buffers and extra state may differ from
rank to rank, since each rank's forward makes its own: those of the first rank that holds them are kept.
"""

import re
from collections.abc import Callable, Iterable, Mapping, Sized
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.nn.parameter import UninitializedTensorMixin  # type: ignore[attr-defined]

from raycheck.errors import ConfigError
from raycheck.shards.entries.meta_tensors import ADVICE, give_memory, is_on_meta, untied_views
from raycheck.shards.entries.module.parameter_names import plain_names, unwrapped
from raycheck.shards.entries.saved_entry import Named, SavedEntry, empty_for
from raycheck.shards.entries.state_entry import GatheredEntry, StateEntry
from raycheck.shards.entries.unsaved_tensors import refuse_unsaved
from raycheck.shards.transfer.gather_cache import GatherCache, local_of
from raycheck.shards.transfer.local_box import box_of, memory_key
from raycheck.shards.transfer.restore_proof import has_memory, holds

_OWN_WAY = (torch.nn.Module.state_dict, torch.nn.Module._save_to_state_dict, torch.nn.Module.get_extra_state)  # noqa: SLF001


class ModuleEntry(StateEntry):
    """A module's parameters, buffers and extra state. Non-persistent buffers are not in it, as in torch."""

    may_differ = True
    compares_values = False
    can_split = True

    def __init__(self, name: str, module: torch.nn.Module) -> None:
        super().__init__(name)
        self.module = unwrapped(module)
        if any(isinstance(child, FullyShardedDataParallel) for child in self.module.modules()):
            raise ConfigError(
                f"state[{name!r}] uses FullyShardedDataParallel (FSDP1), whose flat parameters cannot be resharded. "
                "Use torch.distributed.fsdp.fully_shard (FSDP2)"
            )
        self._plain = plain_names(self.module)
        self._parameters: set[str] = set()
        self._made_of: dict[str, str] = {}  # how each tensor subclass is made up of its inner tensors
        self._last: tuple[GatherCache, GatheredEntry] | None = None
        self._last_frozen: frozenset[str] = frozenset()

    def tree(self) -> dict[str, Any]:
        tree: dict[str, Any] = {}
        keys = [key for key, _ in self.module.named_parameters(remove_duplicate=False)]
        self._parameters = {f"{self.name}.{self._plain(key)}" for key in keys}  # some may have come since the last look
        self._made_of = {}
        state = self.module.state_dict()
        if not state:
            refuse_unsaved(self.name, self.module)
        live = self._live() if any(map(_is_wrapper, state.values())) else {}
        for key, value in state.items():
            plain = self._plain(key)
            inner = {"": value}
            if _is_wrapper(value):
                value = live.get(key, value)  # noqa: PLW2901  state_dict() detaches, which may copy the inner ones
                names, context = value.__tensor_flatten__()
                inner = {f".{name}": getattr(value, name) for name in names}
                self._made_of[plain] = f"{type(value).__qualname__}({_without_addresses(repr(context))})"
            for name, item in inner.items():
                if plain + name in tree:
                    raise ConfigError(f"state at {self.name}.{plain}{name}: two entries of the module have this name")
                tree[plain + name] = item
        return tree

    def gather(self) -> GatheredEntry:
        if self._last is not None:
            watch, found = self._last
            tensors = watch.look()
            if tensors is not None and self._frozen(tensors, tensors) == found.frozen:
                return replace(found, tensors=tensors, is_as_before=True)
        found = super().gather()
        live = {f"{self.name}.{self._plain(key)}": tensor for key, tensor in self._live().items()}
        frozen = self._frozen(found.tensors, live)
        found = replace(found, frozen=frozen, is_as_before=found.is_as_before and frozen == self._last_frozen)
        self._last, self._last_frozen = None, frozen
        if not self._made_of and not found.values["extra"]:
            with suppress(LookupError):
                watch = GatherCache(found.tensors, _Places(self.module, self._plain, self.name, found.tensors).fetch)
                self._last = watch, replace(found, tensors={})
        return found

    def _frozen(self, names: Iterable[str], live: Mapping[str, torch.Tensor]) -> frozenset[str]:
        """Those of `names` whose parameter gets no gradient, also as what a tensor subclass is made of."""
        fixed = {name for name in self._parameters if name in live and not live[name].requires_grad}
        return frozenset(name for name in names if fixed and (name in fixed or name.rpartition(".")[0] in fixed))

    def _live(self) -> Named:
        module = self.module
        buffers = module.named_buffers(remove_duplicate=False)
        return {**dict(module.named_parameters(remove_duplicate=False)), **dict(buffers)}

    def _on_meta(self) -> Named:
        """Parameters and buffers without memory, those that are not saved included."""
        return {f"{self.name}.{self._plain(key)}": value for key, value in self._live().items() if is_on_meta(value)}

    def left_on_meta(self, wanted: Named) -> list[str]:
        live = self._on_meta()

        def is_filled(name: str, tensor: torch.Tensor) -> bool:
            inner = tensor.__tensor_flatten__()[0] if _is_wrapper(tensor) else ()  # type: ignore[attr-defined]
            return all(f"{name}.{own}" in wanted for own in inner) if inner else name in wanted

        filled = {id(tensor) for name, tensor in live.items() if is_filled(name, tensor)}
        left = [name for name, tensor in live.items() if id(tensor) not in filled]
        lines = [
            f"{name} is on the meta device and would stay there: no saved tensor goes into it; {ADVICE}"
            for name in left
        ]
        return [*lines, *untied_views(live)]

    def give_memory(self) -> None:
        """Give what is on the meta device memory to read into."""
        if live := self._on_meta():
            give_memory(live, self._live().values())

    def not_held(self, tensors: Named) -> list[str]:
        tree = self.tree()
        extra = _extra(tree)
        live = {f"{self.name}.{key}": value for key, value in tree.items() if key not in extra}
        return [name for name, read in tensors.items() if name in live and not holds(live[name], read)]

    def values(self, tree: dict[str, Any], tensors: Named) -> Any:
        return {"extra": self.encode(_extra(tree), self.name, tensors), "flattened": self._made_of}

    def names(self) -> list[str]:
        return [f"{self.name}.{key}" for key in self.tree()]

    def may_spread(self, name: str) -> bool:
        """True for parameters, also for the tensors that a tensor subclass is made of."""
        return name in self._parameters or name.rpartition(".")[0] in self._parameters

    def is_compared(self, name: str) -> bool:
        return self.may_spread(name)

    def match(self, saved: SavedEntry) -> Named:
        tree = self.tree()
        extra_here = _extra(tree)
        whole = {f"{self.name}.{key}": value for key, value in tree.items() if key not in extra_here}
        for name, tensor in whole.items():
            _refuse_formless(name, tensor)
        live = {name: tensor for name, tensor in whole.items() if saved.takes(name)}
        if saved.values is None and not live:
            saved.missing.append(self.name)
        extra_there, extra = self._saved_extra(saved)
        tied_to = _ties(whole)
        for name in live:
            saved.mismatched += [
                f"{name} is tied to {mate}, which is not to be restored: take both or neither"
                for mate in tied_to.get(name, ())
                if mate not in live
            ]
        same_here = {mate for name in saved.tensors for mate in tied_to.get(name, ())}
        saved.missing += [name for name in live if name not in saved.tensors and name not in same_here]
        same_there = {saved.place(name) for name in live if name in saved.tensors} - {None}
        saved.record_only_saved(
            name
            for name in saved.tensors
            if name not in live and name not in extra and saved.place(name) not in same_there
        )
        for name in sorted(set(extra_here) ^ set(extra_there)):
            if saved.takes(f"{self.name}.{name}"):
                if name in extra_here:
                    saved.missing.append(f"{self.name}.{name}")
                else:
                    saved.record_only_saved([f"{self.name}.{name}"])
        self._compare_flattened(saved)
        alike = {name: live[name] for name in live if name in saved.tensors and saved.compare(name, live[name])}
        return {**alike, **extra}

    def load(self, saved: SavedEntry, tensors: Named) -> None:
        extra_there = _saved_values(saved, "extra")
        if not extra_there and all(map(_is_plain, self.module.modules())):
            return  # every tensor was read in place
        here = set(_extra(self.tree()))
        extra = {
            key: self.decoded(value, tensors.__getitem__)
            for key, value in extra_there.items()
            if key in here and saved.takes(f"{self.name}.{key}")
        }
        live = map(local_of, (*self.module.parameters(), *self.module.buffers()))
        own = {tensor.data_ptr() for tensor in live if type(tensor) in (torch.Tensor, torch.nn.Parameter)}
        given = {}
        for key in self.module.state_dict():
            tensor = tensors.get(f"{self.name}.{self._plain(key)}")
            if self._plain(key) in extra:
                given[key] = extra[self._plain(key)]
            elif tensor is not None and local_of(tensor).numel() and local_of(tensor).data_ptr() not in own:
                given[key] = tensor  # a hook of state_dict made it
        if given:
            self.module.load_state_dict(given, strict=False)

    def _saved_extra(self, saved: SavedEntry) -> tuple[set[str], Named]:
        """Keys of the extra state in the checkpoint, and tensors to read for it."""
        values = _saved_values(saved, "extra")
        names: list[str] = []
        self.compared(saved, list(values.values()), names.append)
        return set(values), {name: empty_for(saved.tensors[name]) for name in names if name in saved.tensors}

    def _compare_flattened(self, saved: SavedEntry) -> None:
        for key, form in _saved_values(saved, "flattened").items():
            here = self._made_of.get(key, form)
            if saved.takes(f"{self.name}.{key}") and here != form:
                saved.mismatched.append(f"{self.name}.{key}: {here} here, {form} saved")


def _refuse_formless(name: str, tensor: torch.Tensor) -> None:
    """Raise ConfigError for a tensor that nothing can be read into, and that would not say so."""
    if isinstance(tensor, UninitializedTensorMixin):
        raise ConfigError(f"{name} has no shape yet (a lazy module); run the module once before it is restored")
    local = local_of(tensor)
    if isinstance(local, FakeTensor):
        raise ConfigError(f"{name} is a FakeTensor, which has no memory; build the module outside of FakeTensorMode")
    if type(local) in (torch.Tensor, torch.nn.Parameter) and not local.is_meta and not has_memory(local):
        raise ConfigError(f"{name} has no memory on {local.device}: its storage was freed")


def _saved_values(saved: SavedEntry, kind: str) -> dict[str, Any]:
    """By key, of the first rank that held it."""
    found: dict[str, Any] = {}
    for values in (saved.values or {}, *saved.rank_values):
        found = values.get(kind, {}) | found
    return found


def _extra(tree: dict[str, Any]) -> dict[str, Any]:
    """What set_extra_state takes back: also when it is a tensor, which may be a new one at each call."""
    return {
        key: value
        for key, value in tree.items()
        if not isinstance(value, torch.Tensor) or key.rpartition(".")[2] == "_extra_state"
    }


class _Places:
    """Where the parameters and buffers of a module live, its children's included. Raises LookupError for a module whose
    state_dict() is more than these."""

    def __init__(self, root: torch.nn.Module, plain: Callable[[str], str], prefix: str, names: Iterable[str]) -> None:
        places: dict[str, tuple[dict[str, Any], str]] = {}
        self._sizes: list[tuple[Sized, int]] = []
        self._attributes: list[dict[str, Any]] = []
        self._nothing: list[tuple[dict[str, Any], str]] = []  # registered, but None so far
        self._left_out: list[tuple[set[str], frozenset[str]]] = []
        self._children: list[tuple[dict[str, Any], str, object]] = []
        self._before: list[Callable[[], object]] = []
        for path, module in root.named_modules(remove_duplicate=False):
            if not _is_plain(module):
                raise LookupError(f"{path} has a state_dict of its own")
            start = f"{path}." if path else ""
            parameters, buffers, children = module._parameters, module._buffers, module._modules  # noqa: SLF001
            for held in (parameters, buffers):
                places.update({f"{prefix}.{plain(start + key)}": (held, key) for key in held})
            hooks = module._state_dict_pre_hooks, module._state_dict_hooks  # noqa: SLF001
            self._attributes.append(vars(module))
            self._sizes += [(held, len(held)) for held in (parameters, buffers, children, *hooks)]
            self._nothing += [(held, key) for held in (parameters, buffers) for key in held if held[key] is None]
            self._left_out.append((module._non_persistent_buffers_set, frozenset(module._non_persistent_buffers_set)))  # noqa: SLF001
            self._children += [(children, key, child) for key, child in children.items()]
            self._before += [partial(hook, module, start, False) for hook in hooks[0].values()]
        self._places = [places[name] for name in names]

    def fetch(self) -> list[Any]:
        for hook in self._before:
            hook()
        is_as_before = (
            all(len(held) == size for held, size in self._sizes)
            and all(held[key] is None for held, key in self._nothing)
            and all(held == names for held, names in self._left_out)
            and all(held.get(key) is child for held, key, child in self._children)
            and not any("state_dict" in attributes for attributes in self._attributes)
        )
        if not is_as_before:
            raise LookupError("the module was built differently when it was looked at last")
        return [held[key] for held, key in self._places]


def _is_plain(module: torch.nn.Module) -> bool:
    """Whether it says its state in torch's own way. FSDP2 does: its hook before only puts sharded parameters back."""
    kind = type(module)
    way = (kind.state_dict, kind._save_to_state_dict, kind.get_extra_state)  # noqa: SLF001
    is_own = {"state_dict", "_save_to_state_dict", "get_extra_state"} & vars(module).keys()
    return way == _OWN_WAY and not is_own and not module._state_dict_hooks  # noqa: SLF001


def _is_wrapper(value: Any) -> bool:
    """A tensor subclass that names the tensors it is made of. A DTensor is one too, but has a way of its own."""
    return isinstance(value, torch.Tensor) and not isinstance(value, DTensor) and hasattr(value, "__tensor_flatten__")


def _without_addresses(text: str) -> str:
    """An object without a repr of its own is compared by its type: its address is another one in each process."""
    return re.sub(r" at 0x[0-9a-fA-F]+", "", text)


def _ties(live: Named) -> dict[str, list[str]]:
    """For each tensor that shares its memory with others (tied weights), the names of these."""
    groups: dict[object, list[str]] = {}
    for name, tensor in live.items():
        groups.setdefault(memory_key(box_of(name, (name,), tensor, may_spread=False)), []).append(name)
    return {name: group for group in groups.values() if len(group) > 1 for name in group}
