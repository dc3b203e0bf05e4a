"""Keeps the metrics of steps on rank 0 until a save's report takes them to the history.

A step must not wait for the device, so a tensor is copied on its device, and all copies are read together: when a save
takes them, or when there are many. What is not a number was refused before (metric_values.py).
"""

import time
from array import array
from collections.abc import Mapping, Sequence

import torch

MOST_UNREAD = 1024
"""More tensors than this are read, since each takes memory of the device."""
MANY_VALUES = 200_000
"""Above this number of values, they are written into the history before the next save, which may come very late."""
Columns = Mapping[str, tuple[Sequence[int], Sequence[float]]]
"""For each metric, steps and values. The name "" has the time of each step, by this host's clock."""


class StepMetrics:
    """The metrics of the steps since the newest save."""

    def __init__(self) -> None:
        self._values: dict[str, dict[int, float]] = {}
        self._unread: list[tuple[str, int, torch.Tensor]] = []

    @property
    def are_many(self) -> bool:
        """Return whether it is time to write them, although no save takes them."""
        return sum(map(len, self._values.values())) > MANY_VALUES

    def add(self, step: int, metrics: Mapping[str, float | torch.Tensor]) -> None:
        """Keep the metrics of a step."""
        for name, value in metrics.items():
            if not isinstance(value, torch.Tensor):
                self._keep(name, step, value)
            elif value.device.type == "cpu":
                self._keep(name, step, float(value))
            else:  # the script may change it in place, and a part of a large tensor would keep all of it
                self._unread.append((name, step, value.clone().reshape(())))
        if metrics:
            self._keep("", step, time.time())
        if len(self._unread) > MOST_UNREAD:
            self._read()

    def take(self) -> Columns:
        """Return everything that was kept, and keep nothing more of it."""
        self._read()
        taken = {
            name: (array("q", values), array("d", values.values())) for name, values in self._values.items() if values
        }
        self._values = {}
        return taken

    def give_back(self, taken: Columns) -> None:
        """Keep what was taken for a save that has failed, or what another process has kept."""
        for name, (steps, values) in taken.items():
            self._values[name] = {**dict(zip(steps, values, strict=True)), **self._values.get(name, {})}

    def _keep(self, name: str, step: int, value: float) -> None:
        self._values.setdefault(name, {})[step] = value

    def _read(self) -> None:
        """Read all tensors from their devices, with one wait for each device."""
        unread, self._unread = self._unread, []
        by_device: dict[torch.device, list[tuple[str, int, torch.Tensor]]] = {}
        for item in unread:
            by_device.setdefault(item[2].device, []).append(item)
        for items in by_device.values():
            for dtype in {tensor.dtype for _, _, tensor in items}:
                alike = [item for item in items if item[2].dtype == dtype]
                numbers = torch.stack([tensor for _, _, tensor in alike]).cpu().tolist()
                for (name, step, _), number in zip(alike, numbers, strict=True):
                    self._keep(name, step, float(number))
