"""Optimizers as a part of the train state: keyed by parameter name, allocated from the checkpoint."""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from types import NoneType
from typing import Any, cast

import torch
from torch.optim import Optimizer

from raycheck.bucket.format.index import Tensor as SavedTensor
from raycheck.bucket.format.values import decode
from raycheck.errors import ConfigError
from raycheck.shards.entries.meta_tensors import ADVICE, is_on_meta
from raycheck.shards.entries.module.parameter_names import NamedParameters
from raycheck.shards.entries.saved_entry import Named, SavedEntry, empty_like
from raycheck.shards.entries.state_entry import GatheredEntry, StateEntry
from raycheck.shards.transfer.gather_cache import GatherCache, local_of
from raycheck.shards.transfer.overlapping_tensors import overlaps_itself
from raycheck.shards.transfer.restore_proof import holds
from raycheck.shards.transfer.stock_torch_names import StockNames

OWN = "own_state"
"""What an optimizer keeps as a whole and not for a parameter, in the tree."""
_OWN_WAY = Optimizer.state_dict
_NOTHING: Mapping[Any, Any] = {}


class OptimizerEntry(StateEntry):
    """An optimizer, its state keyed by the names of the parameters and not by their order.

    State that does not exist yet is allocated from the checkpoint: torch's own way is a dummy step, which moves
    parameters and calls hooks.
    """

    may_differ = True

    def __init__(self, name: str, optimizer: Optimizer, named: NamedParameters) -> None:
        """named: those of the state's modules."""
        super().__init__(name)
        self.optimizer = optimizer
        self._named = named
        self.stock_names = StockNames(name, [self])
        self._last: tuple[GatherCache, GatheredEntry] | None = None
        self._known: list[list[torch.Tensor]] = []
        self._names: list[list[str]] = []
        self._parameters: dict[str, torch.Tensor] = {}
        self._look_at_groups()

    def _look_at_groups(self) -> None:
        """Name the parameters anew when the groups hold others than at the last look: `add_param_group` may be called
        at any time."""
        groups = [list(group["params"]) for group in self.optimizer.param_groups]
        if [list(map(id, group)) for group in groups] == [list(map(id, group)) for group in self._known]:
            return
        named = self._named.of(p for group in groups for p in group)
        parts = {named[p][0] for group in groups for p in group if p in named}
        self._last = None
        self.stock_names.changed()
        self._known = groups
        self._names = [
            [
                (named[p][1] if len(parts) == 1 else ".".join(named[p])) if p in named else f"unnamed.{g}.{i}"
                for i, p in enumerate(group)
            ]
            for g, group in enumerate(groups)
        ]
        self._parameters = {
            name: p
            for names, group in zip(self._names, groups, strict=True)
            for name, p in zip(names, group, strict=True)
        }

    @property
    def parameters(self) -> Sequence[Sequence[str]]:
        """The names of the parameters, by group."""
        return self._names

    def gather(self) -> GatheredEntry:
        self._look_at_groups()
        found = self._gather()
        also = self.stock_names.tensors(self, found.tensors)
        leaves = {name: path for name, (path, _) in found.leaves.items()}
        return replace(
            found,
            tensors={**found.tensors, **{also[name][0]: found.tensors[name] for name in also}},
            paths={**found.paths, **dict(also.values())} if also else found.paths,
            also=self.stock_names.leaves(self, leaves),
        )

    def _gather(self) -> GatheredEntry:
        if self._last is not None:
            watch, found = self._last
            tensors = watch.look()
            other = None if tensors is None else self.gather_tree({"param_groups": self._groups()})
            if tensors is not None and other is not None and not other.tensors:
                values = {**found.values, "other": other.values["other"]}
                return replace(found, tensors=tensors, values=values, leaves=other.leaves, is_as_before=True)
        found = super().gather()
        self._last = None
        if _is_plain(self.optimizer) and found.tensors and not (found.values["state"] or found.values["own"]):
            with suppress(LookupError):
                self._last = GatherCache(found.tensors, self._fetcher(found.tensors)), replace(found, tensors={})
        return found

    def _fetcher(self, names: Iterable[str]) -> Callable[[], list[Any]]:
        """Fetches the slots of these names. Raises LookupError when a name is no slot's."""
        optimizer = self.optimizer
        slots = {
            f"{self.name}.state.{name}.{slot}": (p, slot)
            for name, p in self._parameters.items()
            for slot in optimizer.state.get(p, ())
        }
        places = [slots[name] for name in names]

        def fetch() -> list[Any]:
            state = optimizer.state
            is_simple = all(type(slots) is dict for slots in state.values()) and _is_plain(optimizer)
            if not is_simple or sum(map(len, state.values())) != len(places):
                raise LookupError("there are other slots now")
            return [state.get(p, _NOTHING)[slot] for p, slot in places]

        return fetch

    def _groups(self) -> list[dict[str, Any]]:
        """The options of each group, with names for parameters."""
        groups = zip(self.optimizer.param_groups, self._names, strict=True)
        return [
            {key: value for key, value in group.items() if key != "params"} | {"params": list(names)}
            for group, names in groups
        ]

    def tree(self) -> dict[str, Any]:
        packed = self.optimizer.state_dict()
        flat = [name for names in self._names for name in names]
        groups = [{**g, "params": list(n)} for g, n in zip(packed["param_groups"], self._names, strict=True)]
        state, own = {}, {}
        for key, slots in packed["state"].items():
            if type(key) is not int or key not in range(len(flat)):
                own[key] = slots  # of the optimizer as a whole, which torch keeps as it is
            else:
                _refuse_odd_slots(f"{self.name}.state.{flat[key]}", slots)
                state[flat[key]] = slots
        rest = {key: value for key, value in packed.items() if key not in ("state", "param_groups")}
        return {"state": state, "param_groups": groups, **rest, **({OWN: own} if own else {})}

    def values(self, tree: dict[str, Any], tensors: Named) -> Any:
        state = tree.get("state", {})
        other = {key: value for key, value in tree.items() if key not in ("state", OWN)}
        own = tree.get(OWN, {})
        return {
            "slots": {name: list(slots) for name, slots in state.items()},
            "state": {
                name: encoded
                for name, slots in state.items()
                if (encoded := self.encode(_not_tensors(slots), f"{self.name}.state.{name}", tensors))
            },
            "other": self.encode(other, self.name, tensors),
            "own": self.encode(own, f"{self.name}.{OWN}", tensors) if own else None,
        }

    def names(self) -> list[str]:
        self._look_at_groups()
        return list(self._parameters)

    def left_on_meta(self, wanted: Named) -> list[str]:
        """Parameters of the state's modules get their memory there."""
        self._look_at_groups()
        known = self._named.of(self._parameters.values())
        strange = [name for name, p in self._parameters.items() if p not in known and is_on_meta(p)]
        slots = [
            f"{self.name}.state.{name}.{slot}"
            for name, p in self._parameters.items()
            for slot, value in self.optimizer.state.get(p, _NOTHING).items()
            if isinstance(value, torch.Tensor) and is_on_meta(value)
        ]
        return [
            *(f"{self.name}: {name} is on the meta device and in no module of the state; {ADVICE}" for name in strange),
            *(
                f"{name} is on the meta device, and no saved tensor goes into it"
                for name in slots
                if name not in wanted
            ),
        ]

    def not_held(self, tensors: Named) -> list[str]:
        tree = self.tree()
        live = {
            f"{self.name}.state.{name}.{slot}": value
            for name, slots in tree["state"].items()
            for slot, value in slots.items()
            if isinstance(value, torch.Tensor)
        }
        own = (f"{self.name}.state.", f"{self.name}.{OWN}.")  # groups may stand in another order here
        read = {name: tensor for name, tensor in tensors.items() if name.startswith(own)}
        if not read.keys() <= live.keys():
            self.values(tree, live)  # adds those inside of values
        changed = [name for name, tensor in live.items() if name in read and not holds(tensor, read[name])]
        return [*changed, *(name for name in read if name not in live)]

    def may_spread(self, name: str) -> bool:
        del name
        return True

    def match(self, saved: SavedEntry) -> Named:
        self._look_at_groups()
        if saved.values is None:
            saved.missing.append(f"{self.name} (the whole optimizer)")
            return {}
        if not {"slots", "state", "other"} <= saved.values.keys():
            saved.mismatched.append(f"{self.name}: an optimizer here, something else saved")
            return {}
        values = _merged(saved)
        slots: dict[str, list[str]] = values["slots"]
        known = {name for group in values["other"]["param_groups"] for name in group["params"]}
        saved.missing += [f"{self.name}.state.{name}" for name in sorted(set(self._parameters) - known)]
        here = {name for name in self._parameters if name in known}
        saved.record_only_saved(f"{self.name}.state.{name}" for name in sorted(known - set(self._parameters)))
        self._compare_groups(saved, values, here)
        prefix = f"{self.name}.state."
        wanted: Named = {}
        for name in sorted(here):
            parameter = self._parameters[name]
            live = self.optimizer.state.get(parameter, {})
            kept = decode(values["state"].get(name, {}), lambda _name: None)
            for slot in slots.get(name, ()):
                entry = saved.tensors.get(f"{prefix}{name}.{slot}")
                if entry is not None:
                    own = live.get(slot)
                    if isinstance(own, torch.Tensor) and tuple(own.shape) != entry.shape:
                        saved.mismatched.append(f"{entry.name}: {list(own.shape)} here, {list(entry.shape)} saved")
                    wanted[entry.name] = self._slot(saved, parameter, slot, entry)
                elif slot not in kept:
                    saved.missing.append(f"{prefix}{name}.{slot}")
            saved.missing += [
                f"{prefix}{name}.{slot}" for slot in sorted(set(live) - set(slots.get(name, ())), key=str)
            ]
        return wanted | self._nested(saved, values, here)

    def _nested(self, saved: SavedEntry, values: Any, here: set[str]) -> Named:
        """Tensors inside of values, to be read into new ones laid out as the live ones, or as the parameter."""
        live: Named = {}
        with suppress(ConfigError):
            self.values(self.tree(), live)
        names: list[str] = []
        self.compared(saved, [values["other"], values.get("own")], names.append)
        wanted = {name: empty_like(live.get(name), saved.tensors[name]) for name in names}
        for parameter_name in here & values["state"].keys():
            parameter = self._parameters[parameter_name]
            inside: list[str] = []
            self.compared(saved, values["state"][parameter_name], inside.append)
            for name in inside:
                entry, step = saved.tensors[name], name.rpartition(".")[2]
                wanted[name] = empty_like(live.get(name), entry)
                if name not in live and step != "step":  # steps stay on the CPU, as torch has them
                    wanted[name] = _beside(parameter, entry)
        return wanted

    def _compare_groups(self, saved: SavedEntry, values: Any, here: set[str]) -> None:
        """Parameters that share a group share its learning rate: they must be grouped as they were."""
        there = {frozenset(here & set(group["params"])) for group in values["other"]["param_groups"]} - {frozenset()}
        if there != {frozenset(here & set(names)) for names in self._names} - {frozenset()}:
            saved.mismatched.append(f"{self.name}.param_groups: the parameters are grouped in another way")

    def _slot(self, saved: SavedEntry, parameter: torch.Tensor, slot: str, entry: SavedTensor) -> torch.Tensor:
        """Where to read a slot: the live tensor, or a new one laid out as the parameter is."""
        live = self.optimizer.state.get(parameter, {}).get(slot)
        dtype = self._dtype(saved, parameter, slot, entry, live)
        is_there = isinstance(live, torch.Tensor) and not is_on_meta(live) and not overlaps_itself(local_of(live))
        if is_there and (tuple(live.shape), live.dtype) == (entry.shape, dtype):
            return cast("torch.Tensor", live)
        if tuple(parameter.shape) == entry.shape and slot != "step":
            return torch.empty_like(parameter, dtype=dtype, requires_grad=False)
        return torch.empty(entry.shape, dtype=dtype)

    def _dtype(
        self, saved: SavedEntry, parameter: torch.Tensor, slot: str, entry: SavedTensor, live: Any
    ) -> torch.dtype:
        """The saved one. With a cast the live slot's, and where there is none yet the parameter's, if the saved slot
        had its parameter's: so torch's own optimizers make them."""
        dtype: torch.dtype = getattr(torch, entry.dtype)
        if saved.dtypes is None or slot == "step":
            return dtype
        wanted = dtype
        if isinstance(live, torch.Tensor):
            wanted = live.dtype
        elif saved.dtypes.get(".".join(self._named.of([parameter]).get(parameter, ()))) == entry.dtype:
            wanted = parameter.dtype
        if wanted == dtype or not saved.may_cast(entry.dtype, wanted):
            return dtype
        saved.cast.append(f"{entry.name}: {entry.dtype} saved, {str(wanted).removeprefix('torch.')} here")
        return wanted

    def load(self, saved: SavedEntry, tensors: Named) -> None:
        if saved.values is None:
            return
        values = _merged(saved)
        other = self.decoded(values["other"], tensors.__getitem__)
        number = {name: i for i, name in enumerate(name for names in self._names for name in names)}
        state = {
            name: self._restored_slots(name, slots, values["state"].get(name), tensors)
            for name, slots in values["slots"].items()
            if name in number
        }
        saved_group = {name: group for group in other["param_groups"] for name in group["params"]}
        groups = []
        for names, group in zip(self._names, self.optimizer.param_groups, strict=True):
            known = next((saved_group[name] for name in names if name in saved_group), group)
            groups.append({**known, "params": [number[name] for name in names]})
        # A slot that only this optimizer has stays: the checkpoint may come from before an option was turned on.
        packed = dict(self.optimizer.state_dict()["state"])
        for name, slots in state.items():
            own = {key: value for key, value in packed.get(number[name], {}).items() if key not in slots}
            slots.update(own)
            packed[number[name]] = slots
        packed |= self.decoded(values.get("own") or {}, tensors.__getitem__)
        if _loads_as_torch(self.optimizer):
            packed |= {number[name]: _shielded(slots) for name, slots in state.items()}
        self.optimizer.load_state_dict({**other, "state": packed, "param_groups": groups})
        self._put_exactly({self._parameters[name]: slots for name, slots in state.items()})
        if not _loads_as_torch(self.optimizer):
            self._refuse_changed(values)

    def _restored_slots(self, name: str, slots: Iterable[Any], tree: Any, tensors: Named) -> Any:
        """One parameter's slots, in order, in a dict of the kind that they were in."""
        found = {} if tree is None else self.decoded(tree, tensors.__getitem__)
        values = dict(found)
        found.clear()
        for slot in slots:
            tensor = tensors.get(f"{self.name}.state.{name}.{slot}")
            if slot in values:
                found[slot] = values[slot]
            elif tensor is not None:
                found[slot] = tensor
        return found

    def _put_exactly(self, exact: Mapping[torch.Tensor, Any]) -> None:
        """Undo what load_state_dict does to values: it casts tensors to the parameter's dtype (a bf16 parameter may
        well have fp32 state), nested ones too, and makes strings, deques and dicts anew as something else. What an
        optimizer of another way has turned into something of its own is left to it."""
        said = self.optimizer.state_dict()["state"]
        for number, parameter in enumerate(p for group in self.optimizer.param_groups for p in group["params"]):
            here, shown = self.optimizer.state.get(parameter), said.get(number)
            if parameter not in exact or not isinstance(here, dict) or not isinstance(shown, dict):
                continue  # it keeps its state in another way
            for slot, value in exact[parameter].items():
                if slot not in here or not (isinstance(here[slot], _Shield) or shown.get(slot) is here[slot]):
                    continue
                if not isinstance(value, torch.Tensor):
                    here[slot] = value
                elif here[slot].dtype != value.dtype:
                    here[slot] = value.to(here[slot].device)
            if type(exact[parameter]) is not type(here) is dict:
                self.optimizer.state[parameter] = type(exact[parameter])(here)

    def _refuse_changed(self, values: Any) -> None:
        """Raise ConfigError for a value that an optimizer's own load_state_dict has made something else of."""
        found = self.values(self.tree(), {})["state"]
        for name in values["slots"].keys() & self._parameters.keys():
            there, here = (_by_slot(tree.get(name, {})) for tree in (values["state"], found))
            changed = [slot for slot in there if there[slot] != here.get(slot)]
            if changed:
                raise ConfigError(
                    f"{self.name}.state.{name}.{changed[0]} is not what was saved: {type(self.optimizer).__qualname__}"
                    ".load_state_dict made something else of it. Torch's own, which it may call, takes strings and "
                    "containers apart; the state is a mixture now, do not train on it"
                )


def _beside(parameter: torch.Tensor, entry: SavedTensor) -> torch.Tensor:
    """A new tensor on the parameter's device, and laid out as it is where the shape is the same."""
    dtype = getattr(torch, entry.dtype)
    if tuple(parameter.shape) == entry.shape:
        return torch.empty_like(parameter, dtype=dtype, requires_grad=False)
    return torch.empty(entry.shape, dtype=dtype, device=parameter.device)


def _refuse_odd_slots(path: str, slots: Any) -> None:
    """Raise ConfigError for slots that are no dict of named values."""
    if type(slots) not in (dict, OrderedDict):
        raise ConfigError(f"state at {path} is a {type(slots).__qualname__}; an optimizer's slots are kept in a dict")
    for slot in slots:
        if type(slot) not in (str, int):
            raise ConfigError(f"state at {path} has a {type(slot).__qualname__} as a slot's name; use strings")


def _not_tensors(slots: Any) -> Any:
    """The slots without tensors of their own, in a dict of the same kind."""
    return type(slots)((slot, value) for slot, value in slots.items() if not isinstance(value, torch.Tensor))


def _by_slot(tree: Any) -> dict[Any, str]:
    """What a tree of slots says, as text by slot: 1, 1.0 and True are different."""
    pairs = next(iter(tree.values())) if next(iter(tree), "").startswith("$") else tree.items()
    return {slot: repr(item) for slot, item in pairs}


class _Shield:
    """Stands for a value that torch's load_state_dict would take apart; it hands this on as it is."""


def _shielded(slots: Any) -> Any:
    whole = (torch.Tensor, bool, int, float, NoneType)
    return {slot: value if isinstance(value, whole) else _Shield() for slot, value in slots.items()}


def _loads_as_torch(optimizer: Optimizer) -> bool:
    """Whether it takes its state back in torch's own way."""
    return type(optimizer).load_state_dict is Optimizer.load_state_dict and "load_state_dict" not in vars(optimizer)


def _is_plain(optimizer: Optimizer) -> bool:
    """Whether it says its state in torch's own way."""
    hooks = optimizer._optimizer_state_dict_pre_hooks, optimizer._optimizer_state_dict_post_hooks  # noqa: SLF001
    return type(optimizer).state_dict is _OWN_WAY and "state_dict" not in vars(optimizer) and not any(hooks)


def _merged(saved: SavedEntry) -> Any:
    """The values of all ranks as one: ranks of a pipeline hold different parameters."""
    slots, state = dict(saved.values["slots"]), dict(saved.values["state"])
    groups = list(saved.values["other"]["param_groups"])
    for values in saved.rank_values:
        slots = values["slots"] | slots
        state = values["state"] | state
        groups = _joined(groups, values["other"]["param_groups"])
    return {**saved.values, "slots": slots, "state": state, "other": {**saved.values["other"], "param_groups": groups}}


def _joined(groups: list[Any], more: list[Any]) -> list[Any]:
    """Another rank's groups, each added to the first one with the same options that it has not extended yet: one
    process that holds the whole model has them as one group."""
    joined, free = list(groups), list(range(len(groups)))
    for group in more:
        at = next((i for i in free if {**joined[i], "params": ()} == {**group, "params": ()}), None)
        if at is None:
            joined.append(group)
        else:
            free.remove(at)
            joined[at] = {**group, "params": list(dict.fromkeys([*joined[at]["params"], *group["params"]]))}
    return joined
