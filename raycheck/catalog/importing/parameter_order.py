"""Finds the names of an optimizer's parameters where the source only has numbers, as torch's own state_dict() does.

Numbers follow the parameter groups. Within a group the parameters are taken to be in the order of the model, as
`model.parameters()` gives them; which of them are in which group is concluded from the shapes of the slots. An answer
counts only when no other one is possible.
"""

from collections.abc import Mapping, Sequence

import torch

Shape = tuple[int, ...]
MAX_STATES = 50_000
_ALIKE = ("exp_avg", "exp_avg_sq", "momentum_buffer", "square_avg", "sum", "acc_delta", "exp_inf", "max_exp_avg_sq")
"""Slots that have the shape of their parameter."""
_BUFFERS = (
    "running_mean",
    "running_var",
    "num_batches_tracked",
    "inv_freq",
    "position_ids",
    "attn.bias",
    "masked_bias",
)


def shape_of_parameter(slots: Mapping[object, object]) -> Shape | None:
    """Returns the shape of the parameter with these slots, or None when they do not tell."""
    found = (slots.get(name) for name in _ALIKE)
    return next((tuple(slot.shape) for slot in found if isinstance(slot, torch.Tensor)), None)


def trainable(model: Mapping[str, object]) -> list[tuple[str, Shape]]:
    """Returns name and shape of what may be a parameter in a state dict: tied ones once, and no known buffers."""
    found: dict[int, tuple[str, Shape]] = {}
    for name, tensor in model.items():
        if isinstance(tensor, torch.Tensor) and tensor.is_floating_point() and not name.endswith(_BUFFERS):
            found.setdefault(id(tensor), (name, tuple(tensor.shape)))
    return list(found.values())


def names_by_order(
    model: Sequence[tuple[str, Shape]], groups: Sequence[Sequence[Shape | None]]
) -> list[list[str]] | None:
    """Returns the names of each group's parameters, or None when there is no way, or more than one.

    model: name and shape of each possible parameter, in order. groups: the shape of each parameter, where it is known.
    Names that are in no group are taken for frozen parameters or buffers.
    """
    total = sum(map(len, groups))
    start = (0,) * len(groups)
    states: dict[tuple[int, ...], int] = {start: 1}
    steps: list[dict[tuple[int, ...], int | None]] = []
    for at, (_, shape) in enumerate(model):
        following: dict[tuple[int, ...], int] = {}
        chosen: dict[tuple[int, ...], int | None] = {}
        for taken, ways in states.items():
            left = total - sum(taken)
            if left < len(model) - at:  # this one may be in no group
                _add(following, chosen, taken, None, ways)
            for number, group in enumerate(groups):
                if taken[number] < len(group) and group[taken[number]] in (None, shape):
                    after = (*taken[:number], taken[number] + 1, *taken[number + 1 :])
                    _add(following, chosen, after, number, ways)
        states = following
        steps.append(chosen)
        if len(states) > MAX_STATES:
            return None
    end = tuple(map(len, groups))
    if states.get(end) != 1:
        return None
    names: list[list[str]] = [[] for _ in groups]
    for (name, _), last in zip(reversed(model), reversed(steps), strict=True):
        into = last[end]
        if into is not None:
            names[into].insert(0, name)
            end = (*end[:into], end[into] - 1, *end[into + 1 :])
    return names


def _add(
    states: dict[tuple[int, ...], int],
    chosen: dict[tuple[int, ...], int | None],
    after: tuple[int, ...],
    number: int | None,
    ways: int,
) -> None:
    states[after] = min(states.get(after, 0) + ways, 2)
    chosen[after] = number
