"""Creates entries for modules: plain, or under DDP, FSDP2, tensor parallelism, torch.compile or PEFT.

Names are those of the plain model (parameter_names.py). Tensors are restored in place. Only what state_dict() creates
on each call (extra state, the tensors of a hook) is restored through load_state_dict. Buffers and extra state may
differ between ranks, since each rank's forward changes its own: a checkpoint keeps those of the first rank that has
them.
"""

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import replace
from itertools import chain
from typing import Any, cast

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.nn.parameter import is_lazy

from raycheck.errors import ConfigError
from raycheck.state.entries.engines import refuse_parts_of_engines
from raycheck.state.entries.meta_tensors import ADVICE, give_memory, is_on_meta, untied_views
from raycheck.state.entries.module.merged_adapters import adapted_layers, differences, merged_adapters
from raycheck.state.entries.module.parameter_names import plain_names, unwrapped
from raycheck.state.entries.module.tensor_locations import TensorLocations, is_plain
from raycheck.state.entries.saved_entry import Named, SavedEntry, empty_for
from raycheck.state.entries.state_entry import GatheredEntry, StateEntry, calling
from raycheck.state.entries.unsaved_tensors import refuse_unsaved
from raycheck.transfer.read.restore_proof import has_memory, holds
from raycheck.transfer.stage.gather_cache import GatherCache, local_of
from raycheck.transfer.stage.local_box import boxes_of, memory_key
from raycheck.transfer.stage.tensor_parts import described_as, is_described

EXTRA, FLATTENED, BUFFERS = "extra", "flattened", "buffers"
VALUE_KEYS = frozenset({EXTRA, FLATTENED})
"""Keys of the values that every saved module has: its extra state, and how each tensor subclass is composed of its
inner tensors. Newer checkpoints also name its buffers."""
MERGED = "merged"
"""The key for the adapters that are merged into weights. Only modules with such layers save it."""


class ModuleEntry(StateEntry):
    """The entry of a module: its parameters, buffers and extra state.

    As in torch, non-persistent buffers are left out.
    """

    may_differ = True
    compares_values = False
    can_split = True
    cure = "RankZero"

    def __init__(self, name: str, module: torch.nn.Module) -> None:
        super().__init__(name)
        if any(isinstance(child, FullyShardedDataParallel) for child in module.modules()):
            raise ConfigError(
                f"state[{name!r}] uses FullyShardedDataParallel (FSDP1), whose flat parameters cannot be resharded. "
                "Use torch.distributed.fsdp.fully_shard (FSDP2)"
            )
        self._given = module
        self.module = unwrapped(module)
        self._plain = plain_names(self.module)
        self._parameters: set[str] = set()
        self._flattened: dict[str, str] = {}  # how each tensor subclass is composed of its inner tensors
        self._adapted: dict[str, torch.nn.Module] = {}
        self._last: tuple[GatherCache, GatheredEntry] | None = None
        self._last_frozen: frozenset[str] = frozenset()

    def _unwrap(self) -> None:
        """Unwrap the module again: something may have been registered on a wrapper since the last time."""
        inside = unwrapped(self._given)
        if inside is not self.module:
            self.module, self._plain, self._last = inside, plain_names(inside), None

    def tree(self) -> dict[str, Any]:
        self._unwrap()
        parameters = dict(self.module.named_parameters(remove_duplicate=False))
        refuse_parts_of_engines(self.name, self.module, parameters)
        tree: dict[str, Any] = {}
        self._parameters = set(map(self._name, parameters))  # some may have been added since the last time
        self._flattened = {}
        self._adapted = self._adapted_layers()
        with calling(self.name, "state_dict"):
            state = self.module.state_dict()
        if not state:
            refuse_unsaved(self.name, self.module)
        live = self._live()  # a hook of state_dict(), as FSDP2's, may have replaced some
        described = {key for key, tensor in live.items() if is_described(tensor)}
        for key, value in state.items():
            plain = self._plain(key)
            if key in described:
                value = described_as(value, live[key])  # noqa: PLW2901  state_dict() detaches, which drops attributes
            inner = {"": value}
            if _can_be_flattened(value):
                value = live.get(key, value)  # noqa: PLW2901  state_dict() detaches, which may copy the inner ones
                names, context = value.__tensor_flatten__()
                inner = {f".{name}": getattr(value, name) for name in names}
                self._flattened[plain] = f"{type(value).__qualname__}({_without_addresses(repr(context))})"
            for name, item in inner.items():
                if plain + name in tree:
                    path = f"{self.name}.{plain}{name}"
                    raise ConfigError(f"state at {path}: two parts of the module have this name; rename one")
                tree[plain + name] = item
        return tree

    def _adapted_layers(self) -> dict[str, torch.nn.Module]:
        """Return the layers into whose weight an adapter can be merged, by plain path."""
        return adapted_layers(self.module, self._plain)

    def values(self, tree: dict[str, Any], tensors: Named) -> Any:
        extra = _extra_state(tree)
        buffers = {key: True for key in tree if key not in extra and not self.may_spread(f"{self.name}.{key}")}
        found = {EXTRA: self.encode(extra, self.name, tensors), FLATTENED: self._flattened}
        return {**found, **({BUFFERS: buffers} if buffers else {}), **self._merged()}

    def _merged(self) -> dict[str, Any]:
        return {MERGED: merged_adapters(self._adapted)} if self._adapted else {}

    def names(self) -> list[str]:
        return [f"{self.name}.{key}" for key in self.tree()]

    def may_spread(self, name: str) -> bool:
        """Return True for parameters, and for the inner tensors of a parameter that is a tensor subclass."""
        return name in self._parameters or name.rpartition(".")[0] in self._parameters

    def is_compared(self, name: str) -> bool:
        return self.may_spread(name)

    def gather(self) -> GatheredEntry:
        self._unwrap()
        if self._last is not None:
            cache, found = self._last
            tensors = cache.look()
            if tensors is not None and self._frozen(tensors, tensors) == found.frozen:
                values = {**found.values, **self._merged()}  # a merge writes into the same memory
                return replace(found, tensors=tensors, values=values, is_as_before=True)
        found = super().gather()
        live = {self._name(key): tensor for key, tensor in self._live().items()}
        frozen = self._frozen(found.tensors, live)
        found = replace(found, frozen=frozen, is_as_before=found.is_as_before and frozen == self._last_frozen)
        self._last, self._last_frozen = None, frozen
        if not self._flattened and not found.values[EXTRA]:
            with suppress(LookupError):
                locations = TensorLocations(self.module, self._plain, self.name, found.tensors)
                self._last = GatherCache(found.tensors, locations.fetch), replace(found, tensors={})
        return found

    def _frozen(self, names: Iterable[str], live: Mapping[str, torch.Tensor]) -> frozenset[str]:
        """Return the names whose parameter gets no gradient, and the inner tensors of such a parameter."""
        fixed = {name for name in self._parameters if name in live and not live[name].requires_grad}
        return frozenset(name for name in names if fixed and (name in fixed or name.rpartition(".")[0] in fixed))

    def _live(self) -> Named:
        module = self.module
        buffers = module.named_buffers(remove_duplicate=False)
        return {**dict(module.named_parameters(remove_duplicate=False)), **dict(buffers)}

    def persistent_tensors(self) -> Named:
        """Return the module's own parameters and persistent buffers by name, whatever its state_dict() returns."""
        found: Named = {}
        for path, module in self.module.named_modules(remove_duplicate=False):
            start = f"{path}." if path else ""
            left_out = module._non_persistent_buffers_set  # noqa: SLF001
            held = {**module._parameters, **{k: v for k, v in module._buffers.items() if k not in left_out}}  # noqa: SLF001
            found |= {self._name(start + key): tensor for key, tensor in held.items() if tensor is not None}
        return found

    def match(self, saved: SavedEntry) -> Named:
        saved.was_none(self.name)
        tree = self.tree()
        extra_here = _extra_state(tree)
        all_live = {f"{self.name}.{key}": value for key, value in tree.items() if key not in extra_here}
        for name, tensor in all_live.items():
            _refuse_unfillable(name, tensor)
        live = {name: tensor for name, tensor in all_live.items() if saved.takes(name)}
        if saved.values is None and not live:
            saved.missing.append(self.name)
        extra_there, extra = self._match_extra_state(saved)
        unregistered = self._match_unregistered(saved, all_live)
        self._match_names(saved, all_live, live, {**extra, **unregistered}, extra_there)
        for name in sorted(set(extra_here) ^ set(extra_there)):
            if saved.takes(f"{self.name}.{name}"):
                if name in extra_here:
                    saved.missing.append(f"{self.name}.{name}")
                else:
                    saved.record_only_saved([f"{self.name}.{name}"])
        self._compare_flattened(saved)
        if any(MERGED in values for values in (saved.values or {}, *saved.rank_values)):  # older ones do not record it
            there = _by_first_rank(saved, MERGED)
            saved.mismatched += differences(self.name, self._adapted, there, saved.tensors)
        fitting = {name: live[name] for name in live if name in saved.tensors and saved.compare(name, live[name])}
        return {**fitting, **extra, **unregistered}

    def _match_unregistered(self, saved: SavedEntry, all_live: Named) -> Named:
        """Return tensors for saved buffers that a module here may register later.

        A module may register buffers at its first forward, with other initial values. Without `strict`, it gets the
        saved ones now.
        """
        names = [name for name in self._saved_buffers(saved) if name in saved.tensors and name not in all_live]
        places = {name: place for name in names if (place := self._place_for(name)) is not None}
        if saved.strict:
            saved.advice += [
                f"{name} is a buffer that its module has not registered, perhaps because it does so at its first "
                "forward: run that once before restore(), or restore(strict=False), which registers it with the saved "
                f"value. restore(skip=[{name!r}]) leaves it out"
                for name in places
            ]
            return {}
        saved.registered += places
        near = {
            name: next(chain(owner.parameters(), owner.buffers(), self.module.parameters()), None)
            for name, (owner, _) in places.items()
        }
        return {
            name: empty_for(saved.tensors[name]).to("cpu" if at is None or is_on_meta(at) else at.device)
            for name, at in near.items()
        }

    def _saved_buffers(self, saved: SavedEntry) -> list[str]:
        """Return the names of the buffers in the checkpoint; nothing if ranks hold different ones."""
        buffers = {} if saved.rank_values else (saved.values or {}).get(BUFFERS, {})
        return [f"{self.name}.{key}" for key in buffers]

    def _place_for(self, name: str) -> tuple[torch.nn.Module, str] | None:
        """Return the innermost module whose buffer would have this name in the checkpoint, and its name there.

        None if there is no such module, or it has something else of this name, such as a buffer that is not saved.
        """
        leaf = name.rpartition(".")[2]
        found = None
        for path, module in self.module.named_modules():
            if self._name(f"{path}.{leaf}" if path else leaf) == name:
                found = module
        if found is None or leaf in {**found._parameters, **found._modules}:  # noqa: SLF001
            return None
        is_open = found._buffers.get(leaf) is None and leaf not in found._non_persistent_buffers_set  # noqa: SLF001
        return (found, leaf) if is_open and (leaf in found._buffers or not hasattr(found, leaf)) else None  # noqa: SLF001

    def _match_names(self, saved: SavedEntry, all_live: Named, live: Named, extra: Named, extra_keys: set[str]) -> None:
        """Record which tensors only one side has. Tied tensors need only one of their names in the checkpoint.

        live: those of `all_live` that are to be restored. extra: other saved tensors that are read. extra_keys: the
        keys of the saved extra state.
        """
        tied_to = _ties(all_live)
        for name in live:
            saved.mismatched += [
                f"{name} is tied to {mate}, which is not selected: restore both or neither"
                for mate in tied_to.get(name, ())
                if mate not in live
            ]
        filled_by_tie = {mate for name in saved.tensors for mate in tied_to.get(name, ())}
        saved.missing += [name for name in live if name not in saved.tensors and name not in filled_by_tie]
        read = {name for name in (*live, *extra) if name in saved.tensors}
        # Extra state may have additional names, those that stock torch gives to its tensors. They share the place of
        # these tensors. A tensor without elements has no place; the key at the beginning of its name identifies it.
        places = {saved.place(name) for name in read} - {None}
        of_extra = tuple(f"{self.name}.{key}." for key in extra_keys)

        def is_read(name: str) -> bool:
            place = saved.place(name)
            return name in read or (name.startswith(of_extra) if place is None else place in places)

        saved.record_only_saved(name for name in saved.tensors if not is_read(name))

    def _match_extra_state(self, saved: SavedEntry) -> tuple[set[str], Named]:
        """Return the keys of the extra state in the checkpoint, and the tensors to read for it."""
        values = _by_first_rank(saved, EXTRA)
        names: list[str] = []
        self.compared(saved, list(values.values()), names.append)
        return set(values), {name: empty_for(saved.tensors[name]) for name in names if name in saved.tensors}

    def _compare_flattened(self, saved: SavedEntry) -> None:
        for key, form in _by_first_rank(saved, FLATTENED).items():
            here = self._flattened.get(key, form)
            if saved.takes(f"{self.name}.{key}") and here != form:
                saved.mismatched.append(f"{self.name}.{key}: {here} here, {form} saved")

    def _on_meta(self) -> Named:
        """Return the parameters and buffers without memory, including those that are not saved."""
        return {self._name(key): value for key, value in self._live().items() if is_on_meta(value)}

    def left_on_meta(self, wanted: Named) -> list[str]:
        live = self._on_meta()

        def is_filled(name: str, tensor: torch.Tensor) -> bool:
            inner = cast("Any", tensor).__tensor_flatten__()[0] if _can_be_flattened(tensor) else ()
            return all(f"{name}.{own}" in wanted for own in inner) if inner else name in wanted

        filled = {id(tensor) for name, tensor in live.items() if is_filled(name, tensor)}
        left = [name for name, tensor in live.items() if id(tensor) not in filled]
        lines = [
            f"{name} is on the meta device and would stay there: no saved tensor fills it; {ADVICE}" for name in left
        ]
        return [*lines, *untied_views(live)]

    def give_memory(self) -> None:
        """Give the tensors on the meta device memory to read into."""
        if live := self._on_meta():
            give_memory(live, self._live().values())

    def load(self, saved: SavedEntry, tensors: Named) -> None:
        for name in saved.registered:
            if (place := self._place_for(name)) is not None:
                place[0].register_buffer(place[1], tensors[name])
        extra_there = _by_first_rank(saved, EXTRA)
        if not extra_there and all(map(is_plain, self.module.modules())):
            return  # every tensor was read in place
        here = set(_extra_state(self.tree()))
        extra = {
            key: self.decoded(value, tensors.__getitem__)
            for key, value in extra_there.items()
            if key in here and saved.takes(f"{self.name}.{key}")
        }
        live = map(local_of, (*self.module.parameters(), *self.module.buffers()))
        own = {tensor.data_ptr() for tensor in live if type(tensor) in (torch.Tensor, torch.nn.Parameter)}
        given = {}
        for key in self.module.state_dict():
            tensor = tensors.get(self._name(key))
            if self._plain(key) in extra:
                given[key] = extra[self._plain(key)]
            elif tensor is not None and local_of(tensor).numel() and local_of(tensor).data_ptr() not in own:
                given[key] = tensor  # created by a state_dict hook
        if given:
            with calling(self.name, "load_state_dict"):
                self.module.load_state_dict(given, strict=False)

    def not_held(self, tensors: Named) -> list[str]:
        tree = self.tree()
        extra = _extra_state(tree)
        live = {f"{self.name}.{key}": value for key, value in tree.items() if key not in extra}
        return [name for name, read in tensors.items() if name in live and not holds(live[name], read)]

    def _name(self, key: str) -> str:
        """Return the name in the checkpoint for a key of the module."""
        return f"{self.name}.{self._plain(key)}"


def _refuse_unfillable(name: str, tensor: torch.Tensor) -> None:
    """Raise ConfigError for a tensor that cannot be filled, where torch itself would not complain."""
    if is_lazy(tensor):
        raise ConfigError(f"{name} has no shape yet (a lazy module); run the module once before you restore it")
    local = local_of(tensor)
    if isinstance(local, FakeTensor):
        raise ConfigError(f"{name} is a FakeTensor, which has no memory; build the module outside of FakeTensorMode")
    if type(local) in (torch.Tensor, torch.nn.Parameter) and not local.is_meta and not has_memory(local):
        raise ConfigError(f"{name} has no memory on {local.device}: its storage was freed")


def _by_first_rank(saved: SavedEntry, kind: str) -> dict[str, Any]:
    """Return the saved values of one kind, by key. If several ranks saved a key, the first one's value counts."""
    found: dict[str, Any] = {}
    for values in (saved.values or {}, *saved.rank_values):
        found = values.get(kind, {}) | found
    return found


def _extra_state(tree: dict[str, Any]) -> dict[str, Any]:
    """Return the values to pass to set_extra_state. One may be a tensor, and may be a new object at each call."""
    return {
        key: value
        for key, value in tree.items()
        if not isinstance(value, torch.Tensor) or key.rpartition(".")[2] == "_extra_state"
    }


def _can_be_flattened(value: Any) -> bool:
    """Return whether `value` is a tensor subclass that names its inner tensors.

    A DTensor is one too, but is saved differently, so it does not count.
    """
    return isinstance(value, torch.Tensor) and not isinstance(value, DTensor) and hasattr(value, "__tensor_flatten__")


def _without_addresses(text: str) -> str:
    """Remove addresses from a repr.

    They differ between processes, so an object with the default repr is compared by its type.
    """
    return re.sub(r" at 0x[0-9a-fA-F]+", "", text)


def _ties(live: Named) -> dict[str, list[str]]:
    """Return the tied weights: for each tensor that shares its memory with others, the names of all of them."""
    groups: dict[object, list[str]] = {}
    addresses = Counter(local_of(tensor).data_ptr() for tensor in live.values())
    for name, tensor in live.items():
        if addresses[local_of(tensor).data_ptr()] > 1:  # otherwise it shares its memory with none
            key = tuple(memory_key(box) for box in boxes_of(name, (name,), tensor, may_spread=False))
            groups.setdefault(key, []).append(name)
    return {name: group for group in groups.values() if len(group) > 1 for name in group}
