"""Adds the names under which stock torch looks for an optimizer's state, so that it can load each of its own layouts.

`get_optimizer_state_dict` presents several optimizers as one. With `flatten_optimizer_state_dict=True`, torchtitan's
layout, it repeats a group's options for each parameter. Nothing is written twice: these are additional names for
records that exist already. raycheck itself never reads them.
"""

from collections.abc import Mapping, Sequence
from typing import Protocol

import torch

Path = tuple[str | int, ...]
Places = Mapping[str, Sequence[tuple[str, Path]]]
"""Additional names and paths of leaves, by the name of the leaf."""


class Named(Protocol):
    """An optimizer: an object with a name in the state and with names for its parameters."""

    name: str

    @property
    def parameters(self) -> Sequence[Sequence[str]]:
        """Return the names of the optimizer's parameters, by group."""
        ...


class StockNames:
    """Stock torch's names for the state of one entry's optimizers: a single one, or a list or dict of them."""

    def __init__(self, entry: str, optimizers: Sequence[Named]) -> None:
        self._entry = entry
        self._optimizers = optimizers
        self._first: dict[str, int] | None = None
        self._places: dict[str, tuple[Sequence[str], Places]] = {}

    def changed(self) -> None:
        """Forget what is known about the optimizers' groups, since some have changed."""
        self._first = None
        self._places = {}

    def tensors(self, of: Named, names: Mapping[str, torch.Tensor]) -> dict[str, tuple[str, Path]]:
        """Return another name and path for each tensor of an optimizer that is one of several."""
        if of.name == self._entry or of.name not in self._groups():
            return {}
        start, known = f"{of.name}.state.", {name for group in of.parameters for name in group}
        found = dict[str, tuple[str, Path]]()
        for name in names:
            parameter, _, slot = name.removeprefix(start).rpartition(".")
            if name.startswith(start) and parameter in known:
                found[name] = f"{self._entry}.state.{parameter}.{slot}", (self._entry, "state", parameter, slot)
        return found

    def leaves(self, of: Named, paths: Mapping[str, Path]) -> Places:
        """Return additional names and paths of an optimizer's leaves. paths: their own paths, by name."""
        names = list(paths)
        known = self._places.get(of.name)
        if known is None or known[0] != names:
            known = self._places[of.name] = names, self._leaves(of, paths)
        return known[1]

    def _leaves(self, of: Named, paths: Mapping[str, Path]) -> Places:
        first = self._groups().get(of.name)
        if first is None:
            return {}
        entry, found, taken = self._entry, dict[str, list[tuple[str, Path]]](), set(paths)
        for leaf, path in paths.items():
            match path:
                case (_, "param_groups", int(group), option) if len(path) == 4 and group < len(of.parameters):
                    places = [f"param_groups.{name}.{option}" for name in of.parameters[group] if option != "params"]
                    found[leaf] = [(f"{entry}.{place}", (entry, place)) for place in places]
                    merged = f"{entry}.param_groups.{first + group}.{option}"
                    found[leaf].append((merged, (entry, "param_groups", first + group, option)))
                case (_, "state", parameter, slot):
                    found[leaf] = [(f"{entry}.state.{parameter}.{slot}", (entry, "state", parameter, slot))]
        # A parameter called "0" and group 0 would share a name. The group gets it, as in stock torch's default layout.
        taken |= {place for places in found.values() for place, path in places if len(path) == 4}
        return {
            leaf: [(name, path) for name, path in places if name not in paths and (len(path) == 4 or name not in taken)]
            for leaf, places in found.items()
        }

    def _groups(self) -> Mapping[str, int]:
        """Return, for each optimizer, the number of its first group among the groups of all optimizers.

        Empty when two optimizers have a parameter of the same name, since stock torch cannot present these as one.
        """
        if self._first is None:
            first, groups, names = dict[str, int](), 0, list[str]()
            for optimizer in self._optimizers:
                first[optimizer.name] = groups
                groups += len(optimizer.parameters)
                names += (name for group in optimizer.parameters for name in group)
            self._first = first if len(set(names)) == len(names) else {}
        return self._first
