"""Optimizers as a part of the train state: keyed by parameter name, allocated from the checkpoint."""

from collections.abc import Mapping
from typing import Any

import torch
from torch.optim import Optimizer

from raycheck.bucket.index import Tensor as SavedTensor
from raycheck.bucket.lossless import decode
from raycheck.shards.parts import Named, Part, SavedPart, empty_for, plain_name, unwrapped


class OptimizerPart(Part):
    """An optimizer, its state keyed by the names of the parameters and not by their order.

    State that does not exist yet is allocated from the checkpoint: torch's own way is a dummy step, which moves
    parameters and calls hooks.
    """

    def __init__(self, name: str, optimizer: Optimizer, modules: Mapping[str, torch.nn.Module]) -> None:
        super().__init__(name)
        self.optimizer = optimizer
        named = {
            parameter: (part, plain_name(key))
            for part, module in modules.items()
            for key, parameter in unwrapped(module).named_parameters()
        }
        groups = [group["params"] for group in optimizer.param_groups]
        parts = {named[p][0] for group in groups for p in group if p in named}
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

    def tree(self) -> dict[str, Any]:
        packed = self.optimizer.state_dict()
        flat = [name for names in self._names for name in names]
        groups = [{**g, "params": list(n)} for g, n in zip(packed["param_groups"], self._names, strict=True)]
        state = {flat[number]: dict(slots) for number, slots in packed["state"].items()}
        rest = {key: value for key, value in packed.items() if key not in ("state", "param_groups")}
        return {"state": state, "param_groups": groups, **rest}

    def values(self, tree: dict[str, Any], tensors: Named) -> Any:
        slots = {
            name: {slot: value for slot, value in slots.items() if not isinstance(value, torch.Tensor)}
            for name, slots in tree["state"].items()
        }
        other = {key: value for key, value in tree.items() if key != "state"}
        return {
            "slots": {name: list(slots) for name, slots in tree["state"].items()},
            "state": self.encode({k: v for k, v in slots.items() if v}, f"{self.name}.state", tensors),
            "other": self.encode(other, self.name, tensors),
        }

    def may_spread(self, name: str) -> bool:
        del name
        return True

    def prepare(self, saved: SavedPart) -> Named:
        if saved.values is None:
            saved.missing.append(f"{self.name} (the whole optimizer)")
            return {}
        slots: dict[str, list[str]] = saved.values["slots"]
        known = {name for group in saved.values["other"]["param_groups"] for name in group["params"]}
        saved.missing += [f"{self.name}.state.{name}" for name in sorted(set(self._parameters) - known)]
        saved.unexpected += [f"{self.name}.state.{name}" for name in sorted(known - set(self._parameters))]
        prefix = f"{self.name}.state."
        saved_groups = {frozenset(group["params"]) for group in saved.values["other"]["param_groups"]}
        if known == set(self._parameters) and saved_groups != {frozenset(names) for names in self._names}:
            saved.missing.append(f"{self.name}.param_groups: the parameters are grouped in another way")
        wanted: Named = {}
        for name, there in slots.items():
            parameter = self._parameters.get(name)
            for slot in there if parameter is not None else ():
                entry = saved.tensors.get(f"{prefix}{name}.{slot}")
                if entry is not None:
                    here = self.optimizer.state.get(self._parameters[name], {}).get(slot)
                    if isinstance(here, torch.Tensor) and tuple(here.shape) != entry.shape:
                        saved.missing.append(f"{entry.name} {list(here.shape)} (saved: {list(entry.shape)})")
                    wanted[entry.name] = self._slot(parameter, slot, entry)
                elif slot not in saved.values["state"].get(name, {}):
                    saved.missing.append(f"{prefix}{name}.{slot}")
        for name, parameter in self._parameters.items():
            lost = set(self.optimizer.state.get(parameter, {})) - set(slots.get(name, ()))
            saved.missing += [f"{prefix}{name}.{slot}" for slot in sorted(lost) if name in known]
        nested: list[str] = []
        decode([saved.values["state"], saved.values["other"]], nested.append)
        wanted |= {name: empty_for(saved.tensors[name]) for name in nested if name in saved.tensors}
        return wanted

    def _slot(self, parameter: torch.Tensor | None, slot: str, entry: SavedTensor) -> torch.Tensor:
        """Where to read a slot: the live tensor, or a new one laid out as the parameter is."""
        assert parameter is not None, "the caller has looked it up"
        dtype = getattr(torch, entry.dtype)
        live = self.optimizer.state.get(parameter, {}).get(slot)
        if isinstance(live, torch.Tensor) and tuple(live.shape) == entry.shape and live.dtype == dtype:
            return live
        if tuple(parameter.shape) == entry.shape and slot != "step":
            return torch.empty_like(parameter, dtype=dtype, requires_grad=False)
        return empty_for(entry)

    def finish(self, saved: SavedPart, tensors: Named) -> None:
        values = decode(saved.values, tensors.__getitem__)
        state = {
            name: {
                slot: tensors.get(f"{self.name}.state.{name}.{slot}", values["state"].get(name, {}).get(slot))
                for slot in slots
            }
            for name, slots in values["slots"].items()
        }
        number = {name: i for i, name in enumerate(name for names in self._names for name in names)}
        saved_group = {name: group for group in values["other"]["param_groups"] for name in group["params"]}
        groups = [
            {**(saved_group[names[0]] if names else group), "params": [number[name] for name in names]}
            for names, group in zip(self._names, self.optimizer.param_groups, strict=True)
        ]
        packed = {number[name]: slots for name, slots in state.items()}
        self.optimizer.load_state_dict({**values["other"], "state": packed, "param_groups": groups})
        for name, slots in state.items():
            here = self.optimizer.state[self._parameters[name]]
            for slot, value in slots.items():
                # load_state_dict casts to the parameter's dtype; a bf16 parameter may well have fp32 state.
                if isinstance(value, torch.Tensor) and here[slot].dtype != value.dtype:
                    here[slot] = value.to(here[slot].device)
