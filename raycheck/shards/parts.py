"""The kinds of thing a train state is made of: modules, and anything with state_dict/load_state_dict.

A part gathers its live tensors and values for a save, and takes them back at a restore. Names are those of the plain
model, without the prefixes of DDP and torch.compile, so that a checkpoint does not know how the model was wrapped.
"""

from abc import ABC, abstractmethod
from typing import Any

import torch
from torch.distributed.checkpoint._nested_dict import flatten_state_dict  # what stock tools name things by
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel

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
        try:
            flat, paths = flatten_state_dict({self.name: tree})
        except ValueError as error:
            raise ConfigError(f"state[{self.name!r}]: two entries have one name in the checkpoint: {error}") from None
        tensors = {name: value for name, value in flat.items() if isinstance(value, torch.Tensor)}
        leaves = {name: (tuple(paths[name]), value) for name, value in flat.items() if name not in tensors}
        values = self.values(tree, tensors)
        for name, tensor in tensors.items():
            if tensor.layout != torch.strided or tensor.is_quantized or tensor.is_meta:
                raise ConfigError(
                    f"state at {name} is a {tensor.layout} tensor on {tensor.device}; only dense ones are saved"
                )
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
            if tensors.setdefault(at, leaf) is not leaf:
                raise ConfigError(f"state at {at}: two tensors have this one name; rename one of their keys")
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
        return self.encode(self._extra(tree), self.name, tensors)

    @staticmethod
    def _extra(tree: dict[str, Any]) -> dict[str, Any]:
        """What set_extra_state takes back: also when it is a tensor, which may be a new one at each call."""
        return {
            key: value
            for key, value in tree.items()
            if not isinstance(value, torch.Tensor) or key.rpartition(".")[2] == "_extra_state"
        }

    def may_spread(self, name: str) -> bool:
        return name in self._parameters

    def prepare(self, saved: SavedPart) -> Named:
        tree = self.tree()
        extra_here = self._extra(tree)
        live = {f"{self.name}.{key}": value for key, value in tree.items() if key not in extra_here}
        extra_names: list[str] = []
        extra_there = decode(saved.values, extra_names.append) or {}
        extra = {name: empty_for(saved.tensors[name]) for name in extra_names if name in saved.tensors}
        saved.compare({**live, **extra})
        saved.missing += [f"{self.name}.{key}" for key in sorted(set(extra_here) - set(extra_there))]
        saved.unexpected += [f"{self.name}.{key}" for key in sorted(set(extra_there) - set(extra_here))]
        return {**live, **extra}

    def finish(self, saved: SavedPart, tensors: Named) -> None:
        extra = decode(saved.values, tensors.__getitem__)
        if extra:
            real = {plain_name(key): key for key in self.module.state_dict()}
            self.module.load_state_dict({real[key]: value for key, value in extra.items()}, strict=False)


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
        check = getattr(self.owner, "check_state_dict", None)
        if callable(check):  # lets an object refuse before anything was changed
            check(decode(saved.values, _no_tensor_yet))
        live: Named = {}
        self.encode(self.tree(), self.name, live)
        return {
            name: torch.empty_like(live[name])
            if name in live and tuple(live[name].shape) == t.shape and str(live[name].dtype) == f"torch.{t.dtype}"
            else empty_for(t)
            for name, t in saved.tensors.items()
        }

    def finish(self, saved: SavedPart, tensors: Named) -> None:
        self.owner.load_state_dict(decode(saved.values, tensors.__getitem__))


def _no_tensor_yet(name: str) -> None:
    """Stands for a tensor that is not read yet."""
    del name


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


def empty_for(entry: SavedTensor) -> torch.Tensor:
    """A plain CPU tensor to read a saved one into."""
    return torch.empty(entry.shape, dtype=getattr(torch, entry.dtype))
