"""What a train state is made of: parts, each with a name, tensors, and values that are no tensors.

A part gathers its live tensors and values for a save, and takes them back at a restore. Here stand the contract and
the plainest kind, anything with state_dict/load_state_dict; the other modules of this
folder have the rest.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.distributed.checkpoint._nested_dict import flatten_state_dict  # what stock tools name things by
from torch.distributed.tensor import DTensor
from torch.nn.parameter import UninitializedTensorMixin  # type: ignore[attr-defined]

from raycheck.bucket.format.index import Tensor as SavedTensor
from raycheck.bucket.format.values import decode, encode
from raycheck.errors import ConfigError, StateMismatchError
from raycheck.shards.entries.meta_tensors import is_on_meta
from raycheck.shards.entries.unsaved_tensors import refuse_unsaved
from raycheck.shards.entries.value_classes import KnownClasses
from raycheck.shards.transfer.gather_cache import Form, form_of
from raycheck.shards.transfer.restore_proof import has_memory
from raycheck.shards.transfer.stock_torch_names import Places

Named = dict[str, torch.Tensor]
Leaves = dict[str, tuple[tuple[str | int, ...], object]]
HELD = "$held"
"""The key of a bare value's tree, which may be None or a list by itself. No dict of plain values has it."""

OWN_ENTRIES = ("progress", "rng")
"""Entries that raycheck adds to every state."""
ASSETS = "assets"
"""The entry that an export needs beside the tensors; a restore has no use for it."""


@dataclass(frozen=True, slots=True)
class Gathered:
    """A part's live state: tensors by name, their paths where they are known, values as a lossless tree, and the
    non-tensor leaves (name to path and object) that only stock tools read.

    frozen: names of tensors that training does not change, as far as the part knows. also: further places where stock
    tools look for a leaf. is_as_before: known to be the same
    bytes of memory under the same names as the last time, and frozen as then.
    """

    tensors: Named
    paths: Mapping[str, tuple[str | int, ...]]
    values: Any
    leaves: Leaves
    frozen: frozenset[str] = frozenset()
    also: Places = field(default_factory=dict)
    is_as_before: bool = False


class StateEntry(ABC):
    """One entry of the state.

    may_differ: ranks may hold different names, as those of a pipeline do. compares_values: ranks that hold the same
    names must hold the same values. is_per_rank: every rank keeps its own tensors and values. can_split: a restore may
    take a part of it.
    """

    may_differ = False
    compares_values = True
    is_per_rank = False
    can_split = False

    def __init__(self, name: str) -> None:
        self.name = name
        self._forms: dict[str, Form] | None = None
        self._classes = KnownClasses(self._learn_classes)

    @abstractmethod
    def tree(self) -> dict[str, Any]:
        """Nested live state as stock tools would see it: tensors and values."""

    @abstractmethod
    def values(self, tree: dict[str, Any], tensors: Named) -> Any:
        """What is not a tensor, as a lossless tree. Adds to `tensors` those that only the values refer to."""

    @abstractmethod
    def prepare(self, saved: "SavedEntry") -> Named:
        """Tensors to read into, by name. Differences go to `saved`'s lists."""

    @abstractmethod
    def finish(self, saved: "SavedEntry", tensors: Named) -> None:
        """Take over values and those tensors that were not read in place."""

    def left_on_meta(self, wanted: Named) -> list[str]:
        """Differences to report: what is on the meta device, and would still be once `wanted` was restored."""
        del wanted
        return []

    def lost(self, tensors: Named) -> list[str]:
        """Names of tensors that were read, and that the live objects do not hold after all. What an owner of its own
        kind does with its values is its own affair, but a copy into nothing is never meant."""
        live: Named = {}
        if tensors:
            self.values(self.tree(), live)
        return [name for name, tensor in live.items() if is_on_meta(tensor)]

    def names(self) -> list[str]:
        """Places in it that a rank of a pipeline may hold without the others, and that a restore may name."""
        return [self.name]

    def may_spread(self, name: str) -> bool:
        """Whether a replicated tensor of this part is equal on every rank by construction."""
        del name
        return False

    def is_compared(self, name: str) -> bool:
        """Whether a replicated tensor of this part must be the same on all ranks."""
        del name
        return True

    def gather(self) -> Gathered:
        found = self.gathered(self.tree())
        self._classes.close()
        last, self._forms = self._forms, {name: form_of(tensor) for name, tensor in found.tensors.items()}
        return replace(found, is_as_before=self._forms == last)

    def gathered(self, tree: dict[str, Any]) -> Gathered:
        """What a save takes of this tree."""
        try:
            flat, paths = flatten_state_dict({self.name: tree})
        except ValueError as error:
            raise ConfigError(f"state[{self.name!r}]: two entries have one name in the checkpoint: {error}") from None
        tensors = {name: value for name, value in flat.items() if isinstance(value, torch.Tensor)}
        leaves: Leaves = {name: (tuple(paths[name]), value) for name, value in flat.items() if name not in tensors}
        values = self.values(tree, tensors)
        if self._classes.has_any:  # stock tools need not have them
            leaves = {name: (path, self._without_classes(value, name)) for name, (path, value) in leaves.items()}
        for name, tensor in tensors.items():
            refuse_odd(name, tensor)
        return Gathered(tensors, {name: tuple(path) for name, path in paths.items()}, values, leaves)

    def encode(self, value: object, path: str, tensors: Named) -> Any:
        """`value` as a lossless tree; tensors in it are added to `tensors` under their path."""

        def name_tensor(leaf: object, at: str) -> str | None:
            if not isinstance(leaf, torch.Tensor):
                return None
            if tensors.setdefault(at, leaf) is not leaf:
                raise ConfigError(f"state at {at}: two tensors have this one name; rename one of their keys")
            return at

        return encode(value, path, name_tensor, note=self._classes.note)

    def decoded(self, tree: Any, tensor: Callable[[str], object]) -> Any:
        """The value behind a lossless tree, of the classes that are known here."""
        return decode(tree, tensor, self._classes.find)

    def compared(self, saved: "SavedEntry", tree: Any, tensor: Callable[[str], object]) -> Any:
        """The value that `decoded` will give. A class that is not alike here is recorded: then without classes."""
        try:
            return self.decoded(tree, tensor)
        except StateMismatchError as error:
            saved.mismatched.append(f"{self.name} {error}")
            return decode(tree, tensor)

    def ask(self, owner: object, saved: "SavedEntry", value: object) -> None:
        """Let an object that has check_state_dict refuse the value that it would be given. Its refusal is recorded."""
        check = getattr(owner, "check_state_dict", None)
        if callable(check):
            try:
                check(value)
            except StateMismatchError as error:
                saved.mismatched.append(f"{self.name}: {error}")

    def _learn_classes(self) -> None:
        with suppress(ConfigError):  # what cannot be saved is for a save to say
            self.gathered(self.tree())

    def _without_classes(self, value: object, path: str) -> object:
        tensors: Named = {}
        return decode(self.encode(value, path, tensors), tensors.__getitem__)


class SavedEntry:
    """What a checkpoint holds of one part, and the differences found on the way.

    tensors: those of this part that are to be restored. values: the tree that all ranks share, None when the
    checkpoint has no such entry; apart: the trees of ranks that held other names. place: where a tensor's bytes lie;
    equal for names that were saved tied. takes: whether a tensor's name is to be restored. dtypes: of all saved
    tensors, when floating-point ones may be cast to the live dtype.

    missing: here, but not in the checkpoint. unexpected: the other way round. mismatched: on both sides, but not alike.
    fresh: left as it is by a stated rule. unused: in the checkpoint and, by a stated rule, not for this rank.
    cast: read into another dtype.
    """

    def __init__(
        self,
        tensors: Mapping[str, SavedTensor],
        values: Any,
        *,
        apart: tuple[Any, ...] = (),
        place: Callable[[str], object],
        takes: Callable[[str], bool],
        dtypes: Mapping[str, str] | None = None,
    ) -> None:
        self.tensors = {name: tensor for name, tensor in tensors.items() if takes(name)}
        self.values = values
        self.apart = apart
        self.place = place
        self.takes = takes
        self.dtypes = dtypes
        self.cast: list[str] = []
        self.missing: list[str] = []
        self.unexpected: list[str] = []
        self.mismatched: list[str] = []
        self.fresh: list[str] = []
        self.unused: list[str] = []

    def not_here(self, names: Iterable[str]) -> None:
        """Record what only the checkpoint has. Ranks of a pipeline hold a share each: what its other ranks wrote, no
        rank can call superfluous by itself."""
        (self.unused if self.apart else self.unexpected).extend(names)

    def is_alike(self, name: str, tensor: torch.Tensor) -> bool:
        """Whether the saved tensor can go into the live one; if not, it is recorded."""
        saved = self.tensors[name]
        here = (str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))
        if here == (saved.dtype, saved.shape):
            return True
        if here[1] == saved.shape and self.may_cast(saved.dtype, tensor.dtype):
            self.cast.append(f"{name}: {saved.dtype} saved, {here[0]} here")
            return True
        self.mismatched.append(f"{name}: {here[0]}{list(here[1])} here, {saved.dtype}{list(saved.shape)} saved")
        return False

    def may_cast(self, saved: str, here: torch.dtype) -> bool:
        """Whether the caller wants the one dtype read into the other. Numbers that are no floats are never cast: what
        does not fit would be another number."""
        return self.dtypes is not None and here.is_floating_point and getattr(torch, saved).is_floating_point


class ObjectEntry(StateEntry):
    """Anything with state_dict/load_state_dict: schedulers, scalers, data, the user's own."""

    def __init__(self, name: str, owner: Any) -> None:
        super().__init__(name)
        self.owner = owner

    def tree(self) -> dict[str, Any]:
        state = self.owner.state_dict()
        if not isinstance(state, dict):
            raise ConfigError(f"state[{self.name!r}].state_dict() is a {type(state).__name__}, not a dict")
        if not state:
            refuse_unsaved(self.name, self.owner)
        return state

    def values(self, tree: dict[str, Any], tensors: Named) -> Any:
        tensors.clear()  # the tree may hold tensors inside tuples, which DCP's flattening does not name
        return self.encode(tree, self.name, tensors)

    def prepare(self, saved: SavedEntry) -> Named:
        if saved.values is None:
            saved.missing.append(self.name)
            return {}
        if isinstance(saved.values, dict) and HELD in saved.values:
            saved.mismatched.append(f"{self.name}: an object or dict here, a bare value saved")
            return {}
        names: list[str] = []
        value = self.compared(saved, saved.values, names.append)
        if saved.tensors.keys() - names:  # which a module or an optimizer keeps beside its values
            saved.mismatched.append(f"{self.name}: an object or dict here, a module or an optimizer saved")
            return {}
        self.ask(self.owner, saved, value)
        return self.targets(saved)

    def targets(self, saved: SavedEntry) -> Named:
        """Tensors to read into, laid out as the live ones of the same form. One that is trained must have it, since an
        optimizer would go on with the live one."""
        live: Named = {}
        self.encode(self.tree(), self.name, live)
        for name in live.keys() & saved.tensors.keys():
            if live[name].requires_grad:
                saved.is_alike(name, live[name])
        return {name: empty_like(live.get(name), t) for name, t in saved.tensors.items()}

    def finish(self, saved: SavedEntry, tensors: Named) -> None:
        if saved.values is not None:
            self.owner.load_state_dict(self.decoded(saved.values, tensors.__getitem__))


def refuse_odd(name: str, tensor: torch.Tensor) -> None:
    """Raise ConfigError for a tensor whose own bytes are not its value."""
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    kind = type(local)
    if isinstance(local, UninitializedTensorMixin):
        raise ConfigError(f"state at {name} has no shape yet (a lazy module); run the module once before")
    if local.layout != torch.strided or local.is_quantized:
        raise ConfigError(f"state at {name} is a {tensor.layout} tensor on {tensor.device}; only dense ones are saved")
    if kind not in (torch.Tensor, torch.nn.Parameter):
        raise ConfigError(
            f"state at {name} is a {kind.__module__}.{kind.__qualname__}, a tensor subclass that raycheck cannot take "
            "apart here (__tensor_flatten__, in modules only); keep it as plain tensors"
        )
    if not local.is_meta and not has_memory(local):  # on the meta device it may be until the restore
        raise ConfigError(f"state at {name} has no memory on {tensor.device}: its storage was freed")


def empty_like(live: torch.Tensor | None, entry: SavedTensor) -> torch.Tensor:
    """A tensor to read a saved one into: laid out as the live one of the same form, where there is one."""
    form = entry.shape, f"torch.{entry.dtype}"
    if live is None or is_on_meta(live) or (tuple(live.shape), str(live.dtype)) != form:
        return empty_for(entry)
    return torch.empty_like(live, requires_grad=False)


def empty_for(entry: SavedTensor) -> torch.Tensor:
    """A plain CPU tensor to read a saved one into."""
    return torch.empty(entry.shape, dtype=getattr(torch, entry.dtype))
