"""Defines the contract of a state entry: a named part of the user's state, with tensors and with other values.

At a save an entry gathers its live tensors and values. At a restore it says which tensors to read into, and takes over
what was read. The other modules of this folder implement the contract for each kind of object.
"""

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import BrokenExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pickle import PickleError
from typing import Any

import torch
from torch.distributed.checkpoint._nested_dict import flatten_state_dict  # stock tools name tensors by it
from torch.distributed.tensor import DTensor
from torch.nn.parameter import UninitializedTensorMixin  # type: ignore[attr-defined]

from raycheck.bucket.assembly.replica_comparison import Cure
from raycheck.bucket.format.values import decode, encode
from raycheck.errors import ConfigError, RaycheckError, StateMismatchError
from raycheck.state.entries.meta_tensors import is_on_meta
from raycheck.state.entries.saved_entry import Named, SavedEntry
from raycheck.state.entries.value_classes import KnownClasses
from raycheck.transfer.read.restore_proof import has_memory
from raycheck.transfer.stage.gather_cache import Form, form_of
from raycheck.transfer.stage.stock_torch_names import Places
from raycheck.transfer.stage.torch_record import record_for

Leaves = dict[str, tuple[tuple[str | int, ...], object]]

OWN_ENTRIES = ("progress", "rng")
"""Entries that raycheck adds to every state."""
ASSETS = "assets"
"""The entry that an export needs beside the tensors; a restore has no use for it."""
_MISTAKES = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    ImportError,
    LookupError,
    NameError,
    PickleError,
    RuntimeError,
    TypeError,
    ValueError,
)
"""What a mistake of the program raises. All else may come from outside of it, and a restart may cure that."""
_CURABLE = (OSError, MemoryError, BrokenExecutor, torch.OutOfMemoryError, torch.distributed.DistError)
_CURABLE_TEXT = re.compile(
    r"(?i)\bconnection (reset|closed|refused|aborted|lost|timed out)\b|\bfailed to connect\b|\bconnectFullMesh\b"
    r"|\b(broken pipe|no route to host|network is unreachable)\b"
    r"|\btimed out\b|\b(socket|operation|wait) timeout\b|\btimeout (waiting|after|caused)\b"
    r"|\bnccl \w*error\b|\bnccl\w+error\b|\bNCCL communicator\b"
    r"|\b(cuda|hip|xpu|cudnn|cublas) error\b|\bout of memory\b|\bDataLoader worker \(pid"
)
"""What a RuntimeError says that a restart may cure: gloo, devices and loaders have no class of their own for it."""


@dataclass(frozen=True, slots=True)
class GatheredEntry:
    """Holds an entry's live state, gathered for a save.

    tensors: by name. paths: the nested path of each tensor, where it is known. values: what is not a tensor, as a
    lossless tree. leaves: the path and the object of each non-tensor leaf, by name; only stock tools read them.
    frozen: names of tensors that training does not change, as far as the entry knows. also: further places where stock
    tools look for a leaf. is_as_before: the tensors are known to lie in the same memory under the same names as at the
    last time, and the same ones are frozen.
    """

    tensors: Named
    paths: Mapping[str, tuple[str | int, ...]]
    values: Any
    leaves: Leaves
    frozen: frozenset[str] = frozenset()
    also: Places = field(default_factory=dict)
    is_as_before: bool = False


class StateEntry(ABC):
    """Saves and restores one entry of the state.

    may_differ: ranks may hold different names, as those of a pipeline do. compares_values: ranks that hold the same
    names must hold the same values. is_per_rank: every rank keeps its own tensors and values. can_split: a restore may
    take some of the entry's names and leave others. cure: the wrappers that an entry of this kind may be given in.
    """

    may_differ = False
    compares_values = True
    is_per_rank = False
    can_split = False
    cure: Cure = "RankZero or PerRank"

    def __init__(self, name: str) -> None:
        self.name = name
        self._forms: dict[str, Form] | None = None
        self._classes = KnownClasses(self._learn_classes)

    @abstractmethod
    def tree(self) -> dict[str, Any]:
        """Returns the live state, tensors and values, nested as stock tools would see it."""

    @abstractmethod
    def values(self, tree: dict[str, Any], tensors: Named) -> Any:
        """Returns what is not a tensor, as a lossless tree. Adds to `tensors` those that only the values refer to."""

    @abstractmethod
    def match(self, saved: SavedEntry) -> Named:
        """Compare the live state with the saved one. Returns the tensors to read into, by name; records differences in
        `saved`."""

    @abstractmethod
    def load(self, saved: SavedEntry, tensors: Named) -> None:
        """Put the values, and those tensors that were not read in place, into the live object."""

    def left_on_meta(self, wanted: Named) -> list[str]:
        """Returns differences to report: what is on the meta device, and would still be after `wanted` is restored."""
        del wanted
        return []

    def not_held(self, tensors: Named) -> list[str]:
        """Returns the names of tensors that were read, and that the live object does not hold after all.

        Only tensors on the meta device count here. A user's object may do with its values what it likes, but nobody
        means to copy into a tensor without memory.
        """
        live: Named = {}
        if tensors:
            self.values(self.tree(), live)
        return [name for name, tensor in live.items() if is_on_meta(tensor)]

    def names(self) -> list[str]:
        """Returns the places in the entry that one rank of a pipeline may hold alone, and that a restore may name."""
        return [self.name]

    def may_spread(self, name: str) -> bool:
        """Returns whether a replicated tensor of this entry is equal on every rank by construction."""
        del name
        return False

    def is_compared(self, name: str) -> bool:
        """Returns whether a replicated tensor of this entry must be equal on all ranks."""
        del name
        return True

    def gather(self) -> GatheredEntry:
        """Collect the live state for a save. Raises ConfigError, naming the path, for what cannot be saved."""
        found = self.gather_tree(self.tree())
        self._classes.close()
        last, self._forms = self._forms, {name: form_of(tensor) for name, tensor in found.tensors.items()}
        return replace(found, is_as_before=self._forms == last)

    def gather_tree(self, tree: dict[str, Any]) -> GatheredEntry:
        """Collect what a save takes of this tree."""
        try:
            flat, paths = flatten_state_dict({self.name: tree})
        except ValueError as error:
            raise ConfigError(f"state[{self.name!r}]: two entries have one name in the checkpoint: {error}") from None
        tensors = {name: value for name, value in flat.items() if isinstance(value, torch.Tensor)}
        leaves: Leaves = {name: (tuple(paths[name]), value) for name, value in flat.items() if name not in tensors}
        values = self.values(tree, tensors)
        if self._classes.has_any:  # a stock tool that reads the leaves may not have these classes
            leaves = {name: (path, self._without_classes(value, name)) for name, (path, value) in leaves.items()}
        for name, tensor in tensors.items():
            _refuse_unsavable(name, tensor)
        return GatheredEntry(tensors, {name: tuple(path) for name, path in paths.items()}, values, leaves)

    def encode(self, value: object, path: str, tensors: Named) -> Any:
        """Returns `value` as a lossless tree. Tensors in it are added to `tensors` under their path."""

        def name_tensor(leaf: object, at: str) -> str | None:
            if not isinstance(leaf, torch.Tensor):
                return None
            if tensors.setdefault(at, leaf) is not leaf:
                raise ConfigError(f"state at {at}: two tensors have this name; rename one of their keys")
            return at

        return encode(value, path, name_tensor, note=self._classes.note)

    def decoded(self, tree: Any, tensor: Callable[[str], object]) -> Any:
        """Returns the value of a lossless tree, with the classes that are known here."""
        return decode(tree, tensor, self._classes.find)

    def compared(self, saved: SavedEntry, tree: Any, tensor: Callable[[str], object]) -> Any:
        """Returns the value that `decoded` will give. When one of its classes does not fit what is here, that is
        recorded in `saved`, and the value comes without classes."""
        try:
            return self.decoded(tree, tensor)
        except StateMismatchError as error:
            saved.mismatched.append(f"{self.name} {error}")
            return decode(tree, tensor)

    def check_by_object(self, obj: object, saved: SavedEntry, value: object) -> None:
        """Let an object that has check_state_dict refuse the value that it would be given. A refusal is recorded."""
        check = getattr(obj, "check_state_dict", None)
        if callable(check):
            try:
                with calling(self.name, "check_state_dict"):
                    check(value)
            except StateMismatchError as error:
                saved.mismatched.append(f"{self.name}: {error}")

    def _learn_classes(self) -> None:
        with suppress(ConfigError):  # the next save will report what cannot be saved
            self.gather_tree(self.tree())

    def _without_classes(self, value: object, path: str) -> object:
        tensors: Named = {}
        return decode(self.encode(value, path, tensors), tensors.__getitem__)


@contextmanager
def calling(name: str, method: str) -> Iterator[None]:
    """Raise ConfigError, naming the entry, for an error that the user's own method raises in the block.

    The same program would raise a mistake again, so it is not retried. What a restart may cure is raised as it is: a
    lost connection to another rank, a full device or disk, an error class of the libraries that the method uses.
    """
    try:
        yield
    except (RaycheckError, *_CURABLE):
        raise
    except _MISTAKES as error:
        is_rays = any(base.__module__ == "ray.exceptions" for base in type(error).__mro__)  # an actor was asked
        if is_rays or (isinstance(error, RuntimeError) and _CURABLE_TEXT.search(str(error))):
            raise
        raise ConfigError(f"state[{name!r}].{method}() raised {type(error).__name__}: {error}") from error


def _refuse_unsavable(name: str, tensor: torch.Tensor) -> None:
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
    try:
        record_for(local.dtype, ())
    except KeyError:
        raise ConfigError(
            f"state at {name} is of {local.dtype}, which torch.save cannot write; keep its bytes, .view(torch.uint8)"
        ) from None
    if not local.is_meta and not has_memory(local):  # a tensor on the meta device may still get memory by the restore
        raise ConfigError(f"state at {name} has no memory on {tensor.device}: its storage was freed")
