"""Computes which samples a step was trained on, from what a checkpoint stores about its data, whatever
the world size.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from raycheck.data.epoch_order import epoch_order
from raycheck.data.step_history import StepHistory, StepPattern, joined
from raycheck.errors import ConfigError

_KEYS = {"epoch", "consumed", "seed", "shuffle", "global_batch", "length"}


@dataclass(frozen=True, kw_only=True, slots=True)
class StepSamples:
    """The samples that one step was trained on, over all ranks.

    step: counted from 1, as in logs: the number of steps completed once its end_step returned. epoch: its epoch.
    batches: (first, last + 1) in the epoch. positions: (first, last + 1) in the epoch's order, in samples. indices: the
    numbers of the samples in the dataset, in that order; empty for a stream, whose samples have only positions.
    """

    step: int
    epoch: int
    batches: tuple[int, int]
    positions: tuple[int, int]
    indices: tuple[int, ...]


def positions_in(value: object, *, depth: int = 4) -> Iterator[Mapping[str, Any]]:
    """Yield the positions of Batches in a saved value, also inside the states of objects that hold Batches."""
    if isinstance(value, Mapping) and value.keys() >= _KEYS:
        yield value
    elif isinstance(value, Mapping) and depth:
        for item in value.values():
            yield from positions_in(item, depth=depth - 1)


def samples_of(state: Mapping[str, Any], first: int, end: int, *, step: int) -> list[StepSamples]:
    """Return the samples of the steps from `first` to before `end`.

    A step that skipped batches appears more than once.

    state: the position of Batches in a checkpoint. step: the checkpoint's step. Raises ConfigError for steps that the
    state does not cover. Raises ValueError, TypeError or KeyError for a state that Batches did not write.
    """
    size, history = int(state["global_batch"]), _history(state, step)
    offset = step - history.steps + 1  # the history counts from 0, and may begin at a later step than the run
    known_from = history.known_from + offset
    if not known_from <= first < end <= step + 1:
        raise ConfigError(
            f"steps {first}:{end}: this checkpoint records the samples of steps {known_from}:{step + 1}; choose a "
            "range within these, or a later checkpoint with --at. Steps count from 1, as in logs"
        )
    length, orders = state["length"], dict[int, list[int]]()
    found = []
    for number, epoch, batches in history.batches(first - offset, end - offset):
        if length is not None and epoch not in orders:
            orders = {
                epoch: epoch_order(int(length), seed=int(state["seed"]), epoch=epoch, shuffle=bool(state["shuffle"]))
            }
        low, high = batches.start * size, batches.stop * size
        found.append(
            StepSamples(
                step=number + offset,
                epoch=epoch,
                batches=(batches.start, batches.stop),
                positions=(low, high),
                indices=() if length is None else tuple(orders[epoch][low:high]),
            )
        )
    return found


def skip_of(found: list[StepSamples]) -> list[tuple[int, int, int]]:
    """Return the `skip` argument for Batches that leaves out these steps' batches."""
    return joined((item.step, item.epoch, range(*item.batches)) for item in found)


def _history(state: Mapping[str, Any], step: int) -> StepHistory:
    """Return the saved history.

    An earlier raycheck stored none: then the history is known only if each step took one batch and no epoch ended
    early.
    """
    if "history" in state:
        return StepHistory.of(state["history"])
    size, epoch, consumed = (int(state[name]) for name in ("global_batch", "epoch", "consumed"))
    whole = int(state["length"]) // size
    if epoch * whole + consumed // size != step or int(state.get("samples", step * size)) != step * size:
        raise ConfigError(
            "this checkpoint was saved by an earlier raycheck that did not record each step's batches, and its steps "
            "were not all one batch long"
        )
    history = StepHistory()
    for number in range(epoch + 1):
        steps = whole if number < epoch else consumed // size
        history.entries.append(StepPattern(step=number * whole, steps=steps, epoch=number, batch=0, stride=1))
    history.steps = step
    return history
