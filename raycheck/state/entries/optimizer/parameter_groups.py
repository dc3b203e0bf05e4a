"""Names the parameters in an optimizer's groups, and joins the groups of a pipeline's ranks."""

from collections.abc import Iterator, Mapping
from typing import Any

from torch.optim import Optimizer

from raycheck.state.entries.module.parameter_names import NamedParameters, ParameterNames
from raycheck.state.entries.saved_entry import Named, SavedEntry


class ParameterGroups:
    """The parameter groups of an optimizer, with a name for each parameter.

    names: the parameters' names, by group. parameters: the parameters by name. A parameter that is in no module of the
    state is called `unnamed.<group>.<number>`.
    """

    def __init__(self, optimizer: Optimizer, named: NamedParameters) -> None:
        """named: the parameters of the state's modules."""
        self.names: list[list[str]] = []
        self.parameters: Named = {}
        self._optimizer = optimizer
        self._named = named
        self._known: list[list[object]] = []

    def refresh(self) -> bool:
        """Name the parameters again if the groups have changed since the last call, and return True if so.

        `add_param_group` may be called at any time.
        """
        groups = [list(group["params"]) for group in self._optimizer.param_groups]
        if [list(map(id, group)) for group in groups] == [list(map(id, group)) for group in self._known]:
            return False
        named = self._named.of(p for group in groups for p in group)
        entries = {named[p][0] for group in groups for p in group if p in named}
        self._known = groups
        self.names = [
            [
                (named[p][1] if len(entries) == 1 else ".".join(named[p])) if p in named else f"unnamed.{g}.{i}"
                for i, p in enumerate(group)
            ]
            for g, group in enumerate(groups)
        ]
        self.parameters = {
            name: p
            for names, group in zip(self.names, groups, strict=True)
            for name, p in zip(names, group, strict=True)
        }
        return True

    def in_modules(self) -> ParameterNames:
        """Return the names of the parameters in the state's modules."""
        return self._named.of(self.parameters.values())

    def flat(self) -> Iterator[str]:
        """Return the names in the order in which torch numbers the parameters."""
        return (name for names in self.names for name in names)

    def live_options(self) -> list[dict[str, Any]]:
        """Return the options of each group, with names in place of parameters."""
        groups = zip(self._optimizer.param_groups, self.names, strict=True)
        return [
            {key: value for key, value in group.items() if key != "params"} | {"params": list(names)}
            for group, names in groups
        ]

    def with_options_of(self, saved: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return the groups in the form for load_state_dict: numbered parameters, and the saved options.

        A group whose parameters were not saved keeps its own options.
        """
        number = {name: i for i, name in enumerate(self.flat())}
        saved_group = {name: group for group in saved for name in group["params"]}
        groups = []
        for names, group in zip(self.names, self._optimizer.param_groups, strict=True):
            options = next((saved_group[name] for name in names if name in saved_group), group)
            groups.append({**options, "params": [number[name] for name in names]})
        return groups

    def are_grouped_as(self, saved: list[Mapping[str, Any]], shared: set[str]) -> bool:
        """Return whether the parameters `shared` with the checkpoint are grouped as they were when saved.

        They must be, since the parameters of one group share its learning rate.
        """
        there = {frozenset(shared & set(group["params"])) for group in saved} - {frozenset()}
        return there == {frozenset(shared & set(names)) for names in self.names} - {frozenset()}


def join_ranks(saved: SavedEntry) -> Any:
    """Return the values of all ranks as those of one optimizer: the ranks of a pipeline have different parameters."""
    slots, state = dict(saved.values["slots"]), dict(saved.values["state"])
    placed = dict(saved.values.get("placed", {}))
    groups = list(saved.values["other"]["param_groups"])
    for values in saved.rank_values:
        slots = values["slots"] | slots
        state = values["state"] | state
        placed = values.get("placed", {}) | placed
        groups = _join_groups(groups, values["other"]["param_groups"])
    found = {"slots": slots, "state": state, "placed": placed}
    return {**saved.values, **found, "other": {**saved.values["other"], "param_groups": groups}}


def _join_groups(groups: list[Any], more: list[Any]) -> list[Any]:
    """Add another rank's groups, each to the first group with equal options that it has not extended yet.

    A process that has the whole model has these parameters in one group.
    """
    joined, free = list(groups), list(range(len(groups)))
    for group in more:
        at = next((i for i in free if {**joined[i], "params": ()} == {**group, "params": ()}), None)
        if at is None:
            joined.append(group)
        else:
            free.remove(at)
            joined[at] = {**group, "params": list(dict.fromkeys([*joined[at]["params"], *group["params"]]))}
    return joined
