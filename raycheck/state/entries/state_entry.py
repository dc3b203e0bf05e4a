"""Defines the contract of a state entry: a named part of the user's state, with tensors and with other values.

For a save, an entry gathers its live tensors and values. For a restore, it returns which tensors to read into, and
loads what was read. The other modules of this folder implement the contract for each kind of object.
"""

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import BrokenExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pickle import PickleError
from typing import Any

import torch
from torch.distributed.checkpoint._nested_dict import flatten_state_dict  # stock tools name tensors with it
from torch.distributed.tensor import DTensor
from torch.nn.parameter import is_lazy

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
"""The entry that an export needs in addition to the tensors; a restore does not use it."""
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
"""What a bug in the program raises. Anything else may have an external cause, which a restart may cure."""
_CURABLE = (OSError, MemoryError, BrokenExecutor, torch.OutOfMemoryError, torch.distributed.DistError)
_CURABLE_TEXT = re.compile(
    r"(?i)\bconnection (reset|closed|refused|aborted|lost|timed out)\b|\bfailed to connect\b|\bconnectFullMesh\b"
    r"|\b(broken pipe|no route to host|network is unreachable)\b"
    r"|\btimed out\b|\b(socket|operation|wait) timeout\b|\btimeout (waiting|after|caused)\b"
    r"|\bnccl \w*error\b|\bnccl\w+error\b|\bNCCL communicator\b"
    r"|\b(cuda|hip|xpu|cudnn|cublas) error\b|\bout of memory\b|\bDataLoader worker \(pid"
)
"""The text of a RuntimeError that a restart may cure: gloo, devices and loaders have no error class for these."""


@dataclass(frozen=True, slots=True)
class GatheredEntry:
    """An entry's live state, gathered for a save.

    tensors: by name. paths: the nested path of each tensor, if known. values: everything that is not a tensor, as a
    lossless tree. leaves: the path and the object of each non-tensor leaf, by name; only stock tools read them. frozen:
    names of tensors that training does not change, as far as the entry knows. also: additional places where stock tools
    look for a leaf. is_as_before: the tensors are known to be in the same memory under the same names as last time, and
    the same ones are frozen.
    """

    tensors: Named
    paths: Mapping[str, tuple[str | int, ...]]
    values: Any
    leaves: Leaves
    frozen: frozenset[str] = frozenset()
    also: Places = field(default_factory=dict)
    is_as_before: bool = False


class StateEntry(ABC):
    """One entry of the state, which it saves and restores.

    may_differ: ranks may have different names, as those of a pipeline do. compares_values: ranks that have the same
    names must have the same values. is_per_rank: every rank keeps its own tensors and values. can_split: a restore may
    select some of the entry's names. cure: the wrappers that may be used for an entry of this kind.
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
        """Return the live state, tensors and values, nested as stock tools expect it."""

    @abstractmethod
    def values(self, tree: dict[str, Any], tensors: Named) -> Any:
        """Return all values that are not tensors, as a lossless tree.

        Add to `tensors` the tensors that are found only while the values are made.
        """

    @abstractmethod
    def match(self, saved: SavedEntry) -> Named:
        """Compare the live state with the saved one. Return the tensors to read into, by name.

        Differences are recorded in `saved`.
        """

    @abstractmethod
    def load(self, saved: SavedEntry, tensors: Named) -> None:
        """Load the values, and the tensors that were not read in place, into the live object."""

    def left_on_meta(self, wanted: Named) -> list[str]:
        """Return differences to report: what would still be on the meta device after `wanted` is restored."""
        del wanted
        return []

    def not_held(self, tensors: Named) -> list[str]:
        """Return the names of tensors that were read, but that the live object does not contain afterwards.

        Only tensors on the meta device count here. A user's object may use its values in any way, but a copy into a
        tensor without memory is never intended.
        """
        live: Named = {}
        if tensors:
            self.values(self.tree(), live)
        return [name for name, tensor in live.items() if is_on_meta(tensor)]

    def names(self) -> list[str]:
        """Return the places in the entry that one rank of a pipeline may have alone, and that a restore may select."""
        return [self.name]

    def random_rank(self, states: Sequence[Any]) -> int | None:
        """Return the number of the saved rank whose random state this rank takes, if that is not the rank's own number.

        states: what the entry saved for each rank that had it.
        """
        del states
        return None

    def may_spread(self, name: str) -> bool:
        """Return whether a replicated tensor of this entry is equal on every rank by construction."""
        del name
        return False

    def is_compared(self, name: str) -> bool:
        """Return whether a replicated tensor of this entry must be equal on all ranks."""
        del name
        return True

    def gather(self) -> GatheredEntry:
        """Collect the live state for a save. Raises ConfigError, naming the path, for values that cannot be saved."""
        found = self.gather_tree(self.tree())
        self._classes.close()
        last, self._forms = self._forms, {name: form_of(tensor) for name, tensor in found.tensors.items()}
        return replace(found, is_as_before=self._forms == last)

    def gather_tree(self, tree: dict[str, Any]) -> GatheredEntry:
        """Collect what a save takes from this tree."""
        try:
            flat, paths = flatten_state_dict({self.name: tree})
        except ValueError as error:
            raise ConfigError(f"state[{self.name!r}]: two entries have one name in the checkpoint: {error}") from None
        tensors = {name: value for name, value in flat.items() if isinstance(value, torch.Tensor)}
        leaves: Leaves = {name: (tuple(paths[name]), value) for name, value in flat.items() if name not in tensors}
        values = self.values(tree, tensors)
        if self._classes.has_any:  # a stock tool that reads the leaves may lack these classes
            leaves = {name: (path, self._without_classes(value, name)) for name, (path, value) in leaves.items()}
        for name, tensor in tensors.items():
            _refuse_unsavable(name, tensor)
        return GatheredEntry(tensors, {name: tuple(path) for name, path in paths.items()}, values, leaves)

    def encode(self, value: object, path: str, tensors: Named) -> Any:
        """Return `value` as a lossless tree. Add tensors in it to `tensors` under their path."""

        def name_tensor(leaf: object, at: str) -> str | None:
            if not isinstance(leaf, torch.Tensor):
                return None
            if tensors.setdefault(at, leaf) is not leaf:
                raise ConfigError(f"state at {at}: two tensors have this name; rename one of their keys")
            return at

        return encode(value, path, name_tensor, note=self._classes.note)

    def decoded(self, tree: Any, tensor: Callable[[str], object]) -> Any:
        """Return the value of a lossless tree, with the classes that are known here."""
        return decode(tree, tensor, self._classes.find)

    def compared(self, saved: SavedEntry, tree: Any, tensor: Callable[[str], object]) -> Any:
        """Return the value that `decoded` will return.

        If one of its classes does not fit the live state, record that in `saved`, and return the value without classes.
        """
        try:
            return self.decoded(tree, tensor)
        except StateMismatchError as error:
            saved.mismatched.append(f"{self.name} {error}")
            return decode(tree, tensor)

    def check_by_object(self, obj: object, saved: SavedEntry, value: object) -> None:
        """Let an object that has check_state_dict refuse the value that it would get.

        A refusal is recorded in `saved`.
        """
        check = getattr(obj, "check_state_dict", None)
        if callable(check):
            try:
                with calling(self.name, "check_state_dict"):
                    check(value)
            except StateMismatchError as error:
                saved.mismatched.append(f"{self.name}: {error}")

    def _learn_classes(self) -> None:
        with suppress(ConfigError):  # the next save will report it
            self.gather_tree(self.tree())

    def _without_classes(self, value: object, path: str) -> object:
        tensors: Named = {}
        return decode(self.encode(value, path, tensors), tensors.__getitem__)


@contextmanager
def calling(name: str, method: str) -> Iterator[None]:
    """Raise ConfigError, naming the entry, for an error that the user's own method raises in the block.

    The same program would fail with the same bug again, so it is not retried. An error that a restart may cure is
    raised unchanged: a lost connection to another rank, a full device or disk, an error class of the libraries that the
    method uses.
    """
    try:
        yield
    except (RaycheckError, *_CURABLE):
        raise
    except _MISTAKES as error:
        is_rays = any(base.__module__ == "ray.exceptions" for base in type(error).__mro__)  # from a call to an actor
        if is_rays or (isinstance(error, RuntimeError) and _CURABLE_TEXT.search(str(error))):
            raise
        raise ConfigError(f"state[{name!r}].{method}() raised {type(error).__name__}: {error}") from error


def _refuse_unsavable(name: str, tensor: torch.Tensor) -> None:
    """Raise ConfigError for a tensor whose value is not its own bytes."""
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    kind = type(local)
    if is_lazy(local):
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
    if not local.is_meta and not has_memory(local):  # the restore may still give memory to a tensor on the meta device
        raise ConfigError(f"state at {name} has no memory on {tensor.device}: its storage was freed")
