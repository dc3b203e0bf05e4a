"""Saves the values that self.log(..., on_epoch=True) accumulates in an epoch; Lightning's checkpoints leave them out.

Without them, the epoch's mean would cover only the batches after a restart, and a scheduler or EarlyStopping that
monitors it would decide differently than in an uninterrupted run.
"""

import logging
from typing import Any

logger = logging.getLogger("raycheck")


class LoggedValues:
    """One rank's accumulated values, preserved across a restore.

    Lightning creates an accumulator when a value is logged for the first time, so saved values are added after that.
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._pending: dict[str, dict[str, Any]] = {}

    def state_dict(self) -> dict[str, Any]:
        values = {name: _accumulated(metric) for name, metric in self._metrics().items()}
        return {"world_size": self._trainer.world_size, "values": {**self._pending, **values}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load saved values. At another world size they are dropped, because each rank accumulated its own."""
        if state["world_size"] == self._trainer.world_size:
            self._pending = dict(state["values"])
        elif state["values"] and self._trainer.global_rank == 0:
            logger.warning(
                "this epoch's means logged with on_epoch=True (%s) leave out the batches before the restart: they "
                "were accumulated by %d ranks, and now there are %d",
                ", ".join(sorted(state["values"])),
                state["world_size"],
                self._trainer.world_size,
            )

    def add_restored(self) -> None:
        """Add restored values to those accumulators that now exist. Call it after each batch."""
        metrics = self._metrics() if self._pending else {}
        for name in metrics.keys() & self._pending.keys():
            _add(metrics[name], self._pending.pop(name))

    def forget(self) -> None:
        """Drop the values of an epoch that is over."""
        self._pending = {}

    def _metrics(self) -> dict[str, Any]:
        """Return Lightning's accumulators of the current epoch that hold a value."""
        results = self._trainer.fit_loop.epoch_loop._results
        return {
            name: metric
            for name, metric in results.items()
            if metric.is_tensor and metric.meta.on_epoch and not metric.has_reset
        }


def _accumulated(metric: Any) -> dict[str, Any]:
    found = {"value": metric.value.detach().clone()}
    if metric.meta.is_mean_reduction:
        found["size"] = metric.cumulated_batch_size.clone()
    return found


def _add(metric: Any, saved: dict[str, Any]) -> None:
    """Accumulate a saved value as if it had come first. The sum of two numbers is the same in either order."""
    before = saved["value"].to(metric.value.device)
    if metric.meta.is_mean_reduction:
        metric.value = before + metric.value
        metric.cumulated_batch_size = saved["size"].to(before.device) + metric.cumulated_batch_size
    elif metric.meta.is_sum_reduction:
        metric.value = before + metric.value
    elif metric.meta.is_max_reduction or metric.meta.is_min_reduction:
        metric.value = metric.meta.reduce_fx(before, metric.value)
    metric._computed = None
