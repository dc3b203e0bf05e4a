"""Says which samples made which steps, from what a checkpoint holds of its data: for no world size in particular."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from raycheck.data.epoch_order import epoch_order
from raycheck.data.step_history import StepHistory, StepPattern, joined
from raycheck.errors import ConfigError

_KEYS = {"epoch", "consumed", "seed", "shuffle", "global_batch", "length"}


@dataclass(frozen=True, kw_only=True, slots=True)
class StepSamples:
    """Says what one step was trained on, over all ranks.

    step: counted from 1, as in logs: the count of steps when its end_step had ended. epoch. batches: (first, last + 1)
    in the epoch. positions: (first, last + 1) in the epoch's order, in samples. indices: the numbers of the samples in
    the dataset, in that order; empty for a stream, whose samples have no numbers but their positions.
    """

    step: int
    epoch: int
    batches: tuple[int, int]
    positions: tuple[int, int]
    indices: tuple[int, ...]

    def as_skip(self) -> tuple[int, int, int]:
        """Returns this as an item of `Batches(skip=[...])`."""
        return (self.epoch, *self.batches)


def positions_in(value: object, *, depth: int = 4) -> Iterator[Mapping[str, Any]]:
    """Yields the positions of Batches in a saved value, also inside the states of objects that hold Batches."""
    if isinstance(value, Mapping) and value.keys() >= _KEYS:
        yield value
    elif isinstance(value, Mapping) and depth:
        for item in value.values():
            yield from positions_in(item, depth=depth - 1)


def samples_of(state: Mapping[str, Any], first: int, end: int, *, step: int) -> list[StepSamples]:
    """Returns what the steps from `first` to before `end` were trained on. A step that skipped batches comes twice.

    state: the position of Batches in a checkpoint. step: the checkpoint's. Raises ConfigError for steps that it does
    not know of. ValueError, TypeError, KeyError: the state is not one that Batches have written.
    """
    size, history = int(state["global_batch"]), _history(state, step)
    offset = step - history.steps + 1  # the history counts from 0, and may begin in a later step than the run
    known_from = history.known_from + offset
    if not known_from <= first < end <= step + 1:
        raise ConfigError(
            f"steps {first}:{end}: this checkpoint knows the samples of steps {known_from}:{step + 1}; give a range "
            "inside, or --at with a later checkpoint. Steps count from 1, as in logs"
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
    """Returns the `skip` for Batches that leaves these steps' batches out."""
    return joined((item.step, item.epoch, range(*item.batches)) for item in found)


def _history(state: Mapping[str, Any], step: int) -> StepHistory:
    """Returns the saved history. An earlier raycheck kept none: then it is known when each step took one batch, and no
    epoch was left early."""
    if "history" in state:
        return StepHistory.of(state["history"])
    size, epoch, consumed = (int(state[name]) for name in ("global_batch", "epoch", "consumed"))
    whole = int(state["length"]) // size
    if epoch * whole + consumed // size != step or int(state.get("samples", step * size)) != step * size:
        raise ConfigError(
            "this checkpoint was saved by an earlier raycheck, which did not keep which batches a step took, and it "
            "was not one batch a step"
        )
    history = StepHistory()
    for number in range(epoch + 1):
        steps = whole if number < epoch else consumed // size
        history.entries.append(StepPattern(step=number * whole, steps=steps, epoch=number, batch=0, stride=1))
    history.steps = step
    return history
