"""Creates entries for optimizers in torch's form, with state by parameter name instead of parameter order.

Tensors in a parameter's slots are saved as tensors. Everything else is saved as values, under four keys (`VALUE_KEYS`
and `own`). parameter_groups.py names the parameters, slot_allocation.py creates the tensors that a restore reads into,
exact_loading.py loads the result into the optimizer, and slot_locations.py finds the slots again at the next save.
"""

from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch.optim import Optimizer

from raycheck.bucket.format.values import decode
from raycheck.errors import ConfigError
from raycheck.state.entries.meta_tensors import ADVICE, is_on_meta
from raycheck.state.entries.module.parameter_names import NamedParameters, ParameterNames
from raycheck.state.entries.optimizer.exact_loading import is_torchs_own, load_exactly, loads_as_torch
from raycheck.state.entries.optimizer.parameter_groups import ParameterGroups, join_ranks
from raycheck.state.entries.optimizer.sharded_slots import (
    cut_of,
    cuts_in,
    is_of_cut,
    new_slot,
    other_cut,
    with_placed,
)
from raycheck.state.entries.optimizer.slot_allocation import inner_tensor, slot_tensor
from raycheck.state.entries.optimizer.slot_locations import SlotLocations, described_slot, is_plain
from raycheck.state.entries.saved_entry import Named, SavedEntry, empty_like
from raycheck.state.entries.state_entry import GatheredEntry, StateEntry, calling
from raycheck.transfer.read.restore_proof import holds
from raycheck.transfer.stage.gather_cache import GatherCache
from raycheck.transfer.stage.stock_torch_names import StockNames
from raycheck.transfer.stage.tensor_parts import is_described, whole_shape

VALUE_KEYS = frozenset({"slots", "state", "other"})
"""Keys of the values that every saved optimizer has: the slots' names in order, by parameter; the slots that are no
tensors, by parameter; and what state_dict() has besides "state". Newer ones also have `own`."""
_NO_SLOTS: Mapping[Any, Any] = {}
Value = TypeVar("Value")
OWN = "own_state"
"""The key in the tree for state of the optimizer as a whole, not of one parameter."""


class OptimizerEntry(StateEntry):
    """The entry of an optimizer whose state_dict() has "state" and "param_groups".

    deferrable: the names of the tensors that the last `match` wants and that may be read after `load`. None of an
    optimizer that is not torch's own: it might use its tensors when it loads them, or step without its `state`.
    """

    may_differ = True
    cure = ""

    def __init__(self, name: str, optimizer: Optimizer, named: NamedParameters) -> None:
        """named: the parameters of the state's modules."""
        super().__init__(name)
        self.optimizer = optimizer
        self.stock_names = StockNames(name, [self])
        self.deferrable: frozenset[str] = frozenset()
        self._groups = ParameterGroups(optimizer, named)
        self._last: tuple[GatherCache, GatheredEntry] | None = None
        self._refresh_groups()

    def _refresh_groups(self) -> None:
        if self._groups.refresh():
            self._last = None
            self.stock_names.changed()

    @property
    def parameters(self) -> Sequence[Sequence[str]]:
        """Return the names of the parameters, by group."""
        return self._groups.names

    def names(self) -> list[str]:
        self._refresh_groups()
        return list(self._groups.parameters)

    def steps(self, name: str) -> bool:
        """Return whether a parameter of this optimizer has this name in the checkpoint."""
        self._refresh_groups()
        named = self._groups.in_modules()
        return any(".".join(named[p]) == name for p in self._groups.parameters.values() if p in named)

    def may_spread(self, name: str) -> bool:
        del name
        return True

    def gather(self) -> GatheredEntry:
        self._refresh_groups()
        found = self._gather_by_cache() or self._gather_anew()
        also = self.stock_names.tensors(self, found.tensors)
        leaves = {name: path for name, (path, _) in found.leaves.items()}
        return replace(
            found,
            tensors={**found.tensors, **{also[name][0]: found.tensors[name] for name in also}},
            paths={**found.paths, **dict(also.values())} if also else found.paths,
            also=self.stock_names.leaves(self, leaves),
        )

    def _gather_by_cache(self) -> GatheredEntry | None:
        """Fetch the slots from where they were last time, and the groups' current options.

        Return None if that may miss something.
        """
        if self._last is None:
            return None
        cache, found = self._last
        tensors = cache.look()
        if tensors is None:
            return None
        options = self.gather_tree({"param_groups": self._groups.live_options()})
        if options.tensors:
            return None
        values = {**found.values, "other": options.values["other"]}
        return replace(found, tensors=tensors, values=values, leaves=options.leaves, is_as_before=True)

    def _gather_anew(self) -> GatheredEntry:
        found = super().gather()
        self._last = None
        is_all_tensors = found.tensors and not (found.values["state"] or found.values["own"])
        if is_all_tensors and is_plain(self.optimizer):
            with suppress(LookupError):
                locations = SlotLocations(self.optimizer, self._live_slots(), found.tensors)
                self._last = GatherCache(found.tensors, locations.fetch), replace(found, tensors={})
        return found

    def slots(self) -> Named:
        """Return the live tensors of the slots, by name."""
        slots = {name: self.optimizer.state[parameter][slot] for name, (parameter, slot) in self._live_slots().items()}
        return {name: value for name, value in slots.items() if isinstance(value, torch.Tensor)}

    def _live_slots(self) -> dict[str, tuple[torch.Tensor, Any]]:
        """Return the parameter and the key of every slot, by the slot's name."""
        return {
            self._live_name(name, slot, value): (parameter, slot)
            for name, parameter in self._groups.parameters.items()
            for slot, value in self.optimizer.state.get(parameter, _NO_SLOTS).items()
        }

    def gather_tree(self, tree: dict[str, Any]) -> GatheredEntry:
        found = super().gather_tree(tree)
        new = {
            self._slot_name(name, slot): self._live_name(name, slot, value)
            for name, slots in tree.get("state", {}).items()
            for slot, value in slots.items()
            if is_of_cut(value, self._groups.parameters[name])
        }
        if not new:
            return found
        tensors = {new.get(name, name): tensor for name, tensor in found.tensors.items()}
        paths = {new.get(name, name): path for name, path in found.paths.items()}
        also = {name: (*paths[name][:-1], name.rpartition(".")[2]) for name in new.values()}
        return replace(found, tensors=tensors, paths=paths | also)

    def tree(self) -> dict[str, Any]:
        with calling(self.name, "state_dict"):
            packed = self.optimizer.state_dict()
        flat = list(self._groups.flat())
        groups = [{**g, "params": list(n)} for g, n in zip(packed["param_groups"], self._groups.names, strict=True)]
        state, own = {}, {}
        for key, slots in packed["state"].items():
            if type(key) is not int or key not in range(len(flat)):
                own[key] = slots  # not a parameter's number: state of the whole optimizer, which torch keeps unchanged
            else:
                _refuse_odd_slots(f"{self.name}.state.{flat[key]}", slots)
                state[flat[key]] = _described_slots(slots, self._groups.parameters[flat[key]])
        rest = {key: value for key, value in packed.items() if key not in ("state", "param_groups")}
        return {"state": state, "param_groups": groups, **rest, **({OWN: own} if own else {})}

    def values(self, tree: dict[str, Any], tensors: Named) -> Any:
        state = tree.get("state", {})
        other = {key: value for key, value in tree.items() if key not in ("state", OWN)}
        own = tree.get(OWN, {})
        values = {
            "slots": {name: list(slots) for name, slots in state.items()},
            "state": {
                name: encoded
                for name, slots in state.items()
                if (encoded := self.encode(_without_tensors(slots), f"{self.name}.state.{name}", tensors))
            },
            "other": self.encode(other, self.name, tensors),
            "own": self.encode(own, f"{self.name}.{OWN}", tensors) if own else None,
        }
        return with_placed(values, state, self._groups.parameters)

    def match(self, saved: SavedEntry) -> Named:
        self._refresh_groups()
        if saved.values is None or saved.was_none(self.name):
            saved.missing.append(f"{self.name} (the whole optimizer)")
            return {}
        if not saved.values.keys() >= VALUE_KEYS:
            saved.mismatched.append(f"{self.name}: an optimizer here, something else saved")
            return {}
        values = join_ranks(saved)
        shared = self._match_parameters(saved, values)
        if not self._groups.are_grouped_as(values["other"]["param_groups"], shared):
            saved.mismatched.append(f"{self.name}.param_groups: the parameters are grouped in another way")
        wanted: Named = {}
        in_modules = self._groups.in_modules()
        for name in sorted(shared):
            wanted |= self._match_slots(saved, values, name, in_modules)
        self.deferrable = frozenset(wanted if is_torchs_own(self.optimizer) else ())
        return wanted | self._match_inner_tensors(saved, values, shared)

    def _match_parameters(self, saved: SavedEntry, values: Any) -> set[str]:
        """Record the parameters that only one side has, and return the names of the others."""
        here = set(self._groups.parameters)
        there = {name for group in values["other"]["param_groups"] for name in group["params"]}
        saved.missing += [f"{self.name}.state.{name}" for name in sorted(here - there)]
        saved.record_only_saved(f"{self.name}.state.{name}" for name in sorted(there - here))
        return here & there

    def _match_slots(self, saved: SavedEntry, values: Any, name: str, in_modules: ParameterNames) -> Named:
        """Compare one parameter's slots, and return the tensors to read them into."""
        parameter = self._groups.parameters[name]
        live, slots = self.optimizer.state.get(parameter, {}), values["slots"].get(name, ())
        not_tensors = decode(values["state"].get(name, {}), lambda _name: None)
        wanted: Named = {}
        placed = values.get("placed", {}).get(name, {})
        for slot in slots:
            path = self._slot_name(name, slot)
            tensor = self._find(saved.tensors, name, slot)
            if tensor is not None:
                here = described_slot(live.get(slot), parameter)
                if isinstance(here, torch.Tensor) and whole_shape(here) != tensor.shape:
                    saved.reshaped.append(tensor.name)
                    saved.mismatched.append(
                        f"{tensor.name}: {list(whole_shape(here))} here, {list(tensor.shape)} saved"
                    )
                try:
                    live_or_new = new_slot(tensor, placed.get(slot), parameter, path=path) if here is None else here
                except ValueError as error:
                    saved.mismatched.append(f"{tensor.name}: {error}")
                    continue
                wanted[tensor.name] = slot_tensor(
                    saved, tensor, slot, live=live_or_new, parameter=parameter, named=in_modules
                )
            elif cuts := cuts_in(saved.tensors, path):
                saved.mismatched.append(f"{path}: {other_cut(cuts, parameter)}")
            elif slot not in not_tensors:
                saved.missing.append(path)
        saved.missing += [self._slot_name(name, slot) for slot in sorted(set(live) - set(slots), key=str)]
        return wanted

    def _match_inner_tensors(self, saved: SavedEntry, values: Any, shared: set[str]) -> Named:
        """Create new tensors to read into, for those that were saved inside values."""
        live: Named = {}
        with suppress(ConfigError):
            self.values(self.tree(), live)
        names: list[str] = []
        self.compared(saved, [values["other"], values.get("own")], names.append)
        wanted = {name: empty_like(live.get(name), saved.tensors[name]) for name in names}
        for parameter_name in shared & values["state"].keys():
            parameter = self._groups.parameters[parameter_name]
            inside: list[str] = []
            self.compared(saved, values["state"][parameter_name], inside.append)
            for name in inside:
                wanted[name] = inner_tensor(saved.tensors[name], live=live.get(name), parameter=parameter)
        return wanted

    def left_on_meta(self, wanted: Named) -> list[str]:
        """Return differences to report. The parameters in the state's modules get their memory from the modules."""
        self._refresh_groups()
        parameters, in_modules = self._groups.parameters, self._groups.in_modules()
        strange = [name for name, p in parameters.items() if p not in in_modules and is_on_meta(p)]
        slots = [
            name
            for name, (parameter, slot) in self._live_slots().items()
            if isinstance(value := self.optimizer.state[parameter][slot], torch.Tensor) and is_on_meta(value)
        ]
        return [
            *(f"{self.name}: {name} is on the meta device and in no module of the state; {ADVICE}" for name in strange),
            *(
                f"{name} is on the meta device, and no saved tensor goes into it"
                for name in slots
                if name not in wanted
            ),
        ]

    def load(self, saved: SavedEntry, tensors: Named) -> None:
        if saved.values is None:
            return
        values = join_ranks(saved)
        state = {
            name: self._restored_slots(name, slots, values["state"].get(name), tensors)
            for name, slots in values["slots"].items()
            if name in self._groups.parameters
        }
        other = self.decoded(values["other"], tensors.__getitem__)
        own = self.decoded(values.get("own") or {}, tensors.__getitem__)
        with calling(self.name, "load_state_dict"):
            load_exactly(self.optimizer, self._groups, other=other, state=state, own=own)
        if not loads_as_torch(self.optimizer):
            self._refuse_changed(values)

    def _restored_slots(self, name: str, slots: Iterable[Any], tree: Any, tensors: Named) -> Any:
        """Return one parameter's slots, in the saved order, in a dict of the saved type."""
        found = {} if tree is None else self.decoded(tree, tensors.__getitem__)
        values = dict(found)
        found.clear()
        for slot in slots:
            tensor = self._find(tensors, name, slot)
            if slot in values:
                found[slot] = values[slot]
            elif tensor is not None:
                found[slot] = tensor
        return found

    def _refuse_changed(self, values: Any) -> None:
        """Raise ConfigError if the optimizer's own load_state_dict changed a value."""
        found = self.values(self.tree(), {})["state"]
        for name in values["slots"].keys() & self._groups.parameters.keys():
            there, here = (_text_by_slot(tree.get(name, {})) for tree in (values["state"], found))
            changed = [slot for slot in there if there[slot] != here.get(slot)]
            if changed:
                raise ConfigError(
                    f"{self._slot_name(name, changed[0])} is not what was saved: {type(self.optimizer).__qualname__}"
                    ".load_state_dict changed it. Torch's own load_state_dict, which it may call, takes strings and "
                    "containers apart. The state is now partly restored; do not train on it"
                )

    def not_held(self, tensors: Named) -> list[str]:
        tree = self.tree()
        live = {
            self._live_name(name, slot, value): value
            for name, slots in tree["state"].items()
            for slot, value in slots.items()
            if isinstance(value, torch.Tensor)
        }
        # Tensors in the groups' options are left out: the groups may be in another order here.
        prefixes = (f"{self.name}.state.", f"{self.name}.{OWN}.")
        read = {name: tensor for name, tensor in tensors.items() if name.startswith(prefixes)}
        if not read.keys() <= live.keys():
            self.values(tree, live)  # adds the tensors inside values
        changed = [name for name, tensor in live.items() if name in read and not holds(tensor, read[name])]
        return [*changed, *(name for name in read if name not in live)]

    def _slot_name(self, parameter: str, slot: Any) -> str:
        return f"{self.name}.state.{parameter}.{slot}"

    def _live_name(self, name: str, slot: Any, value: object) -> str:
        """Return the name under which a live slot of a parameter is saved."""
        parameter = self._groups.parameters[name]
        return self._slot_name(name, slot) + (cut_of(parameter) if is_of_cut(value, parameter) else "")

    def _find(self, tensors: Mapping[str, Value], name: str, slot: Any) -> Value | None:
        """Return a parameter's slot among tensors by name: this rank's own part of it, or the whole slot."""
        path = self._slot_name(name, slot)
        own = path + cut_of(self._groups.parameters[name])
        return tensors[own] if own in tensors else tensors.get(path)


def _refuse_odd_slots(path: str, slots: Any) -> None:
    """Raise ConfigError for slots that are not a dict of named values."""
    if type(slots) not in (dict, OrderedDict):
        raise ConfigError(f"state at {path} is a {type(slots).__qualname__}; an optimizer's slots are kept in a dict")
    for slot in slots:
        if type(slot) not in (str, int):
            raise ConfigError(f"state at {path} has a {type(slot).__qualname__} as a slot's name; use strings")


def _described_slots(slots: Any, parameter: torch.Tensor) -> Any:
    if not is_described(parameter):
        return slots
    return type(slots)((slot, described_slot(value, parameter)) for slot, value in slots.items())


def _without_tensors(slots: Any) -> Any:
    """Return the slots that are not tensors, in a dict of the same type."""
    return type(slots)((slot, value) for slot, value in slots.items() if not isinstance(value, torch.Tensor))


def _text_by_slot(tree: Any) -> dict[Any, str]:
    """Return the encoded value of each slot as text, which distinguishes 1, 1.0 and True."""
    pairs = next(iter(tree.values())) if next(iter(tree), "").startswith("$") else tree.items()
    return {slot: repr(item) for slot, item in pairs}
