"""Modules as a part of the train state: plain, or under DDP, FSDP2, tensor parallelism, torch.compile or PEFT.

Names are those of the plain model, so that a checkpoint does not know how the model was wrapped. Restored in place.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from raycheck.bucket.lossless import decode
from raycheck.errors import ConfigError
from raycheck.shards.parts import Named, Part, SavedPart, empty_for
from raycheck.shards.pieces import memory, piece_of


class ModulePart(Part):
    """A module's parameters, buffers and extra state. Non-persistent buffers are not in it, as in torch."""

    may_differ = True
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
        self._parameters = {f"{name}.{self._plain(key)}" for key, _ in self.module.named_parameters()}
        self._forms: dict[str, str] = {}  # how each tensor subclass is made up of its inner tensors

    def tree(self) -> dict[str, Any]:
        tree: dict[str, Any] = {}
        self._forms = {}
        for key, value in self.module.state_dict().items():
            plain = self._plain(key)
            inner = {"": value}
            if _is_wrapper(value):
                names, context = value.__tensor_flatten__()
                inner = {f".{name}": getattr(value, name) for name in names}
                self._forms[plain] = f"{type(value).__qualname__}({context!r})"
            for name, item in inner.items():
                if plain + name in tree:
                    raise ConfigError(f"state at {self.name}.{plain}{name}: two entries of the module have this name")
                tree[plain + name] = item
        return tree

    def values(self, tree: dict[str, Any], tensors: Named) -> Any:
        return {"extra": self.encode(_extra(tree), self.name, tensors), "flattened": self._forms}

    def may_spread(self, name: str) -> bool:
        return name in self._parameters

    def is_compared(self, name: str) -> bool:
        return name in self._parameters  # a buffer (BatchNorm's statistics) is what rank 0's forward made of it

    def prepare(self, saved: SavedPart) -> Named:
        tree = self.tree()
        extra_here = _extra(tree)
        live = {f"{self.name}.{key}": value for key, value in tree.items() if key not in extra_here}
        live = {name: tensor for name, tensor in live.items() if saved.takes(name)}
        extra_there, extra = self._saved_extra(saved)
        tied_to = _ties(live)
        same_here = {mate for name in saved.tensors for mate in tied_to.get(name, ())}
        saved.missing += [name for name in live if name not in saved.tensors and name not in same_here]
        same_there = {saved.place(name) for name in live if name in saved.tensors}
        saved.unexpected += [
            name
            for name in saved.tensors
            if name not in live and name not in extra and saved.place(name) not in same_there
        ]
        for name in sorted(set(extra_here) ^ set(extra_there)):
            if saved.takes(f"{self.name}.{name}"):
                (saved.missing if name in extra_here else saved.unexpected).append(f"{self.name}.{name}")
        self._compare_flattened(saved)
        alike = {name: live[name] for name in live if name in saved.tensors and saved.is_alike(name, live[name])}
        return {**alike, **extra}

    def finish(self, saved: SavedPart, tensors: Named) -> None:
        here = set(_extra(self.tree()))
        extra = {
            key: decode(value, tensors.__getitem__)
            for values in (saved.values or {}, *saved.apart)
            for key, value in values.get("extra", {}).items()
            if key in here and saved.takes(f"{self.name}.{key}")
        }
        if extra:
            real = {self._plain(key): key for key in self.module.state_dict()}
            self.module.load_state_dict({real[key]: value for key, value in extra.items()}, strict=False)

    def _saved_extra(self, saved: SavedPart) -> tuple[set[str], Named]:
        """Keys of the extra state in the checkpoint, and tensors to read for it."""
        keys: set[str] = set()
        names: list[str] = []
        for values in (saved.values or {}, *saved.apart):
            for key, value in values.get("extra", {}).items():
                keys.add(key)
                decode(value, names.append)
        return keys, {name: empty_for(saved.tensors[name]) for name in names if name in saved.tensors}

    def _compare_flattened(self, saved: SavedPart) -> None:
        for values in (saved.values or {}, *saved.apart):
            for key, form in values.get("flattened", {}).items():
                here = self._forms.get(key, form)
                if saved.takes(f"{self.name}.{key}") and here != form:
                    saved.mismatched.append(f"{self.name}.{key}: {here} here, {form} saved")


def unwrapped(module: torch.nn.Module) -> torch.nn.Module:
    """The module inside DDP and torch.compile."""
    while True:
        if isinstance(module, DistributedDataParallel):
            module = module.module
        elif isinstance(getattr(module, "_orig_mod", None), torch.nn.Module):
            module = module._orig_mod  # type: ignore[assignment]  # noqa: SLF001
        else:
            return module


def plain_names(module: torch.nn.Module) -> Callable[[str], str]:
    """From a key of this module to the plain model's: without what torch.compile, activation checkpointing and PEFT
    put in between. LoRA's own tensors keep their place beside the layer that they adapt."""
    is_peft = hasattr(module, "peft_config") and hasattr(module, "base_model")

    def plain(key: str) -> str:
        key = key.replace("_orig_mod.", "").replace("_checkpoint_wrapped_module.", "")
        if is_peft:
            key = key.removeprefix("base_model.model.").replace(".base_layer.", ".").replace(".original_module.", ".")
        return key

    return plain


def _extra(tree: dict[str, Any]) -> dict[str, Any]:
    """What set_extra_state takes back: also when it is a tensor, which may be a new one at each call."""
    return {
        key: value
        for key, value in tree.items()
        if not isinstance(value, torch.Tensor) or key.rpartition(".")[2] == "_extra_state"
    }


def _is_wrapper(value: Any) -> bool:
    """A tensor subclass that names the tensors it is made of. A DTensor is one too, but has a way of its own."""
    return isinstance(value, torch.Tensor) and not isinstance(value, DTensor) and hasattr(value, "__tensor_flatten__")


def _ties(live: Named) -> dict[str, list[str]]:
    """For each tensor that shares its memory with others (tied weights), the names of these."""
    groups: dict[object, list[str]] = {}
    for name, tensor in live.items():
        groups.setdefault(memory(piece_of(name, (name,), tensor, may_spread=False)), []).append(name)
    return {name: group for group in groups.values() if len(group) > 1 for name in group}
