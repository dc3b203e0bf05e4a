"""The kinds of thing a train state is made of: modules, optimizers, and anything with state_dict/load_state_dict.

A part gathers its live tensors and values for a save, and takes them back at a restore. Names are those of the plain
model, without the prefixes of DDP and torch.compile, so that a checkpoint does not know how the model was wrapped.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

import torch
from torch.distributed.checkpoint._nested_dict import flatten_state_dict  # what stock tools name things by
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from raycheck.bucket.index import Index
from raycheck.bucket.index import Tensor as SavedTensor
from raycheck.bucket.lossless import decode, encode
from raycheck.errors import ConfigError
from raycheck.shards.pieces import Piece, piece_of

Named = dict[str, torch.Tensor]


class Part(ABC):
    """One top-level entry of the state."""

    def __init__(self, name: str) -> None:
        self.name = name

    @abstractmethod
    def tree(self) -> dict[str, Any]:
        """Nested live state as stock tools would see it: tensors and values."""

    @abstractmethod
    def values(self, tree: dict[str, Any], tensors: Named) -> Any:
        """What is not a tensor, as a lossless tree. Adds to `tensors` those that only the values refer to."""

    @abstractmethod
    def prepare(self, saved: "SavedPart") -> Named:
        """Tensors to read into, by name. Differences go to `saved.missing` and `saved.unexpected`."""

    @abstractmethod
    def finish(self, saved: "SavedPart", tensors: Named) -> None:
        """Take over values and those tensors that were not read in place."""

    def may_spread(self, name: str) -> bool:
        """Whether a replicated tensor of this part is equal on every rank by construction."""
        del name
        return False

    def gather(self) -> tuple[list[Piece], Any, dict[str, tuple[tuple[str | int, ...], object]]]:
        """Pieces, values, and the non-tensor leaves (name to path and object) that only stock tools read."""
        tree = self.tree()
        flat, paths = flatten_state_dict({self.name: tree})
        tensors = {name: value for name, value in flat.items() if isinstance(value, torch.Tensor)}
        leaves = {name: (tuple(paths[name]), value) for name, value in flat.items() if name not in tensors}
        values = self.values(tree, tensors)
        pieces = [
            piece_of(name, tuple(paths.get(name, (name,))), tensor, may_spread=self.may_spread(name))
            for name, tensor in tensors.items()
        ]
        return pieces, values, leaves

    def encode(self, value: object, path: str, tensors: Named) -> Any:
        """`value` as a lossless tree; tensors in it are added to `tensors` under their path."""

        def name_tensor(leaf: object, at: str) -> str | None:
            if not isinstance(leaf, torch.Tensor):
                return None
            tensors[at] = leaf
            return at

        return encode(value, path, name_tensor)


class SavedPart:
    """What a checkpoint holds of one part, and the differences found on the way."""

    def __init__(self, name: str, index: Index) -> None:
        self.name = name
        self.tensors = {t.name: t for t in index.tensors if t.name.startswith(f"{name}.")}
        self.values = index.values.get(name)
        self.missing: list[str] = []
        self.unexpected: list[str] = []

    def compare(self, live: Named) -> None:
        """Record every difference in names, shapes and dtypes between what is here and what was saved."""
        for name, tensor in live.items():
            saved = self.tensors.get(name)
            here = (str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))
            if saved is None:
                self.missing.append(f"{name} {here[0]}{list(here[1])}")
            elif here != (saved.dtype, saved.shape):
                self.missing.append(f"{name} {here[0]}{list(here[1])} (saved: {saved.dtype}{list(saved.shape)})")
        self.unexpected += [f"{t.name} {t.dtype}{list(t.shape)}" for t in self.tensors.values() if t.name not in live]


class ModulePart(Part):
    """A module, plain or under DDP, FSDP2 or torch.compile. Restored in place."""

    def __init__(self, name: str, module: torch.nn.Module) -> None:
        super().__init__(name)
        self.module = unwrapped(module)
        if any(isinstance(child, FullyShardedDataParallel) for child in self.module.modules()):
            raise ConfigError(
                f"state[{name!r}] uses FullyShardedDataParallel (FSDP1), whose flat parameters cannot be resharded. "
                "Use torch.distributed.fsdp.fully_shard (FSDP2)"
            )
        self._parameters = {f"{name}.{plain_name(key)}" for key, _ in self.module.named_parameters()}

    def tree(self) -> dict[str, Any]:
        return {plain_name(key): value for key, value in self.module.state_dict().items()}

    def values(self, tree: dict[str, Any], tensors: Named) -> Any:
        extra = {key: value for key, value in tree.items() if not isinstance(value, torch.Tensor)}
        return self.encode(extra, self.name, tensors)

    def may_spread(self, name: str) -> bool:
        return name in self._parameters

    def prepare(self, saved: SavedPart) -> Named:
        live = {f"{self.name}.{key}": value for key, value in self.tree().items() if isinstance(value, torch.Tensor)}
        extra_names: list[str] = []
        decode(saved.values, extra_names.append)
        extra = {name: _empty(saved.tensors[name]) for name in extra_names if name in saved.tensors}
        saved.compare({**live, **extra})
        return {**live, **extra}

    def finish(self, saved: SavedPart, tensors: Named) -> None:
        extra = decode(saved.values, tensors.__getitem__)
        if extra:
            real = {plain_name(key): key for key in self.module.state_dict()}
            self.module.load_state_dict({real[key]: value for key, value in extra.items()}, strict=False)


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
        wanted: Named = {}
        for name, there in slots.items():
            parameter = self._parameters.get(name)
            for slot in there if parameter is not None else ():
                entry = saved.tensors.get(f"{prefix}{name}.{slot}")
                if entry is not None:
                    wanted[entry.name] = self._slot(parameter, slot, entry)
                elif slot not in saved.values["state"].get(name, {}):
                    saved.missing.append(f"{prefix}{name}.{slot}")
        for name, parameter in self._parameters.items():
            lost = set(self.optimizer.state.get(parameter, {})) - set(slots.get(name, ()))
            saved.missing += [f"{prefix}{name}.{slot}" for slot in sorted(lost) if name in known]
        wanted |= {t.name: _empty(t) for t in saved.tensors.values() if not t.name.startswith(prefix)}
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
        return _empty(entry)

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


class ObjectPart(Part):
    """Anything with state_dict/load_state_dict: schedulers, scalers, data, the user's own."""

    def __init__(self, name: str, owner: Any) -> None:
        super().__init__(name)
        self.owner = owner

    def tree(self) -> dict[str, Any]:
        state = self.owner.state_dict()
        if not isinstance(state, dict):
            raise ConfigError(f"state[{self.name!r}].state_dict() is a {type(state).__name__}, not a dict")
        return state

    def values(self, tree: dict[str, Any], tensors: Named) -> Any:
        tensors.clear()  # the tree may hold tensors inside tuples, which DCP's flattening does not name
        return self.encode(tree, self.name, tensors)

    def prepare(self, saved: SavedPart) -> Named:
        if saved.values is None:
            saved.missing.append(self.name)
            return {}
        live: Named = {}
        self.encode(self.tree(), self.name, live)
        return {
            name: torch.empty_like(live[name])
            if name in live and tuple(live[name].shape) == t.shape and str(live[name].dtype) == f"torch.{t.dtype}"
            else _empty(t)
            for name, t in saved.tensors.items()
        }

    def finish(self, saved: SavedPart, tensors: Named) -> None:
        self.owner.load_state_dict(decode(saved.values, tensors.__getitem__))


def parts_of(state: Mapping[str, object]) -> list[Part]:
    """One part per entry. Raises ConfigError, naming the entry, for what cannot be saved; before any step runs."""
    modules = {name: value for name, value in state.items() if isinstance(value, torch.nn.Module)}
    return [_part(name, value, modules) for name, value in state.items()]


def _part(name: str, value: object, modules: Mapping[str, torch.nn.Module]) -> Part:
    if not name.isidentifier() or name in ("rng", "progress"):
        raise ConfigError(f"state[{name!r}]: use a plain name; 'rng' and 'progress' are raycheck's own")
    if isinstance(value, torch.nn.Module):
        return ModulePart(name, value)
    if isinstance(value, Optimizer):
        return OptimizerPart(name, value, modules)
    if isinstance(value, torch.utils.data.DataLoader):
        raise ConfigError(
            f"state[{name!r}] is a torch DataLoader, which cannot say where it stands. Use "
            "raycheck.Batches(dataset, global_batch=..., seed=...) and iterate over its loader(epoch)"
        )
    if callable(getattr(value, "state_dict", None)) and callable(getattr(value, "load_state_dict", None)):
        return ObjectPart(name, value)
    raise ConfigError(f"state[{name!r}] is a {type(value).__qualname__} without state_dict and load_state_dict")


def unwrapped(module: torch.nn.Module) -> torch.nn.Module:
    """The plain module inside DDP and torch.compile."""
    while True:
        if isinstance(module, DistributedDataParallel):
            module = module.module
        elif isinstance(getattr(module, "_orig_mod", None), torch.nn.Module):
            module = module._orig_mod  # type: ignore[assignment]  # noqa: SLF001
        else:
            return module


def plain_name(key: str) -> str:
    return key.replace("_orig_mod.", "")


def _empty(entry: SavedTensor) -> torch.Tensor:
    return torch.empty(entry.shape, dtype=getattr(torch, entry.dtype))
