"""Presents what a training engine keeps in its own memory as a module and an optimizer.

An engine that trains 32-bit weights in flat memory has, on each rank, ranges of parameters. A tensor here is this
rank's part of one parameter, and describes itself as that (tensor_parts.py). So a checkpoint has each parameter under
its own name, with its own shape, whatever the engine's memory looks like. The low-precision weights are not saved: a
restore makes them from the 32-bit ones, as the engine itself does at each step.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple, Protocol, cast

import torch
from torch.optim import Optimizer

from raycheck.errors import ConfigError
from raycheck.state.entries.module.module_entry import ModuleEntry
from raycheck.state.entries.optimizer.optimizer_entry import OptimizerEntry
from raycheck.state.entries.saved_entry import Named, SavedEntry
from raycheck.transfer.stage.tensor_parts import describe, described_as, description_of, is_described


class MemoryRange(Protocol):
    """A range of memory that an engine trains, which is a part of a parameter.

    memory: the tensor that the base optimizer trains. at, size: where the range is in it, in elements.
    """

    @property
    def memory(self) -> torch.Tensor: ...

    @property
    def at(self) -> int: ...

    @property
    def size(self) -> int: ...

    def of(self, flat: torch.Tensor) -> torch.Tensor:
        """Return the range's part of the memory, or of optimizer state that is laid out like it, described."""
        ...


def elements_of(item: MemoryRange, flat: torch.Tensor) -> torch.Tensor:
    """Return the range's elements of the memory, or of what is laid out like it.

    A range without elements gets separate memory: in one place, two of them would be tied weights.
    """
    return flat.detach().reshape(-1)[item.at : item.at + item.size] if item.size else flat.new_empty(0)


class _View(NamedTuple):
    """A parameter of an EngineModel, the engine's memory that it shares, and its part and address there."""

    own: torch.nn.Parameter
    memory: torch.Tensor
    part: Callable[[torch.Tensor], torch.Tensor]
    address: int


class EngineModel(torch.nn.Module):
    """A module with the names of the engine's model, whose parameters share the engine's memory.

    of: the range of each parameter that is trained. cure: what to do when the engine has put its memory elsewhere.
    """

    entry: ClassVar[type["EngineModelEntry"]]
    cure: ClassVar[str]

    def __init__(self, path: str) -> None:
        super().__init__()
        self.of: dict[torch.Tensor, MemoryRange] = {}
        self.path = path
        self._views: list[_View] = []
        self._buffers_of: list[tuple[torch.nn.Module, str, torch.nn.Module, str]] = []
        cast("Any", self).register_state_dict_pre_hook(EngineModel._look_again)  # torch gives it no types

    def check(self) -> None:
        """Raise ConfigError if the engine's weights cannot be saved or restored now."""

    def refresh(self) -> None:
        """Make the low-precision weights from the 32-bit ones. It may be a collective."""
        raise NotImplementedError

    def view(self, memory: torch.Tensor, trained: MemoryRange | None, part: Callable[..., Any]) -> torch.nn.Parameter:
        """Return a parameter that shares memory of the engine. part: returns its part of that memory, described."""
        found = part(memory)
        own = describe(torch.nn.Parameter(found, requires_grad=trained is not None), description_of(found))
        self._views.append(_View(own, memory, part, memory.data_ptr()))
        if trained is not None:
            self.of[own] = trained
        return own

    def add_parameter(self, name: str, parameter: torch.nn.Parameter) -> None:
        """Register a parameter under a name with dots."""
        self._place(name).register_parameter(name.rpartition(".")[2], parameter)

    def add_buffer(self, name: str, module: torch.nn.Module, key: str) -> None:
        """Register a buffer of a module of the engine under a name with dots."""
        is_saved = key not in module._non_persistent_buffers_set  # noqa: SLF001
        own = name.rpartition(".")[2]
        self._place(name).register_buffer(own, module._buffers[key], persistent=is_saved)  # noqa: SLF001
        self._buffers_of.append((self._place(name), own, module, key))

    def _look_again(self, *_: object) -> None:
        """Take the buffers and the memory that the engine has now. It runs before each save and restore.

        Raises ConfigError if the engine has put its memory elsewhere.
        """
        self.check()
        for place, own_key, module, key in self._buffers_of:
            place._buffers[own_key] = module._buffers[key]  # noqa: SLF001
        for number, (own, memory, part, address) in enumerate(self._views):
            if memory.data_ptr() == address:
                continue
            view = part(memory)
            if view.shape != own.shape:
                raise ConfigError(f"{self.path}: the engine has put its weights elsewhere, {self.cure} before the save")
            own.data = view
            self._views[number] = _View(own, memory, part, memory.data_ptr())

    def _place(self, name: str) -> torch.nn.Module:
        """Return the module that has this name's last part, and make it if necessary."""
        place: torch.nn.Module = self
        for step in name.split(".")[:-1]:
            if step not in place._modules:  # noqa: SLF001
                place.add_module(step, torch.nn.Module())
            place = place.get_submodule(step)
        return place


class EngineModelEntry(ModuleEntry):
    """The entry of an EngineModel."""

    module: EngineModel

    def load(self, saved: SavedEntry, tensors: Named) -> None:
        super().load(saved, tensors)
        self.module.refresh()


class EngineOptimizer(Optimizer):
    """The engine's base optimizers, with their state by parameter of an EngineModel instead of by flat memory.

    placing: options that say on which ranks a group's parameters are, which are not saved.
    """

    placing: ClassVar[frozenset[str]] = frozenset()
    entry: ClassVar[type[OptimizerEntry]] = OptimizerEntry

    def __init__(
        self,
        bases: Sequence[Optimizer],
        model: EngineModel,
        parameters: Sequence[Sequence[torch.Tensor]],
        alike: Sequence[Sequence[int]] | None = None,
    ) -> None:
        """parameters: those of the model, by group of the base optimizers. alike: which numbers of groups are one group
        in the state, since their options are the same; each for itself if None.
        """
        # Torch's own are not set up, since groups and state are the base optimizers'.
        self._optimizer_state_dict_pre_hooks, self._optimizer_state_dict_post_hooks = OrderedDict(), OrderedDict()
        self._bases = bases
        self._ranges = model.of
        self._alike = [[number] for number in range(len(parameters))] if alike is None else alike
        self._parameters = [[item for number in numbers for item in parameters[number]] for numbers in self._alike]

    @property
    def _base_groups(self) -> list[dict[str, Any]]:
        return [group for base in self._bases for group in base.param_groups]

    def _slots(self, item: MemoryRange) -> dict[str, Any] | None:
        """Return the base optimizer's own state of the memory, if there is any."""
        return next((found for base in self._bases if (found := base.state.get(item.memory))), None)

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """Return the base optimizers' groups, with an EngineModel's parameters."""
        groups = self._base_groups
        return [
            {
                **{key: value for key, value in groups[numbers[0]].items() if key not in self.placing},
                "params": list(own),
            }
            for numbers, own in zip(self._alike, self._parameters, strict=True)
        ]

    @property
    def state(self) -> "_Slots":  # type: ignore[override]
        """Return the slots of each parameter: ranges of what is laid out like the flat memory, the rest unchanged."""
        return _Slots(self._ranges, self._slots)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        flat = [parameter for group in self._parameters for parameter in group]
        base_of = {
            id(memory): base for base in self._bases for group in base.param_groups for memory in group["params"]
        }
        shared: dict[tuple[int, str], Any] = {}  # what all parameters of one flat memory have together
        for number, slots in state_dict["state"].items():
            item = self._ranges[flat[number]]
            for slot, value in slots.items():
                if not is_described(value) and shared.setdefault((id(item.memory), slot), value) != value:
                    raise ConfigError(
                        f"the parameters of one group of the engine were saved with different {slot}: "
                        f"{shared[id(item.memory), slot]} and {value}. The engine keeps one for all of them; "
                        "restore into a plain model and optimizer instead"
                    )
                base = base_of.get(id(item.memory), self._bases[0])  # ZeRO 3 lists the memory only during a step
                _load(base.state[item.memory], item, slot, value)
        groups = self._base_groups
        for numbers, saved in zip(self._alike, state_dict["param_groups"], strict=True):
            options = {key: value for key, value in saved.items() if key != "params"}
            for number in numbers:
                groups[number].update(options)


class _Slots(Mapping[torch.Tensor, dict[str, Any]]):
    """The slots of the parameters that have any. Those of one parameter are cut out when they are asked for."""

    def __init__(
        self,
        ranges: Mapping[torch.Tensor, MemoryRange],
        slots_of: Callable[[MemoryRange], dict[str, Any] | None],
    ) -> None:
        """slots_of: returns the base optimizer's own slots of the memory."""
        self._ranges, self._slots_of = ranges, slots_of

    def __getitem__(self, parameter: torch.Tensor) -> dict[str, Any]:
        item = self._ranges[parameter]
        slots = self._slots_of(item)
        if not slots:
            raise KeyError(parameter)
        return {slot: _slot(item, parameter, value) for slot, value in slots.items()}

    def __iter__(self) -> Iterator[torch.Tensor]:
        return (parameter for parameter, item in self._ranges.items() if self._slots_of(item))

    def __len__(self) -> int:
        return sum(1 for _ in self)


def _slot(item: MemoryRange, parameter: torch.Tensor, value: Any) -> Any:
    """Return the range's part of a slot that is laid out like the memory."""
    if not isinstance(value, torch.Tensor) or value.shape != item.memory.shape:
        return value
    return described_as(elements_of(item, value), parameter)


def _load(state: dict[str, Any], item: MemoryRange, slot: str, value: Any) -> None:
    if not is_described(value):
        state[slot] = value
        return
    live = state.get(slot)
    if not isinstance(live, torch.Tensor) or live.shape != item.memory.shape:
        live = state[slot] = torch.zeros_like(item.memory, dtype=value.dtype, requires_grad=False)
    target = elements_of(item, live)
    if target.data_ptr() != value.data_ptr():
        target.copy_(value.detach().reshape(-1))
