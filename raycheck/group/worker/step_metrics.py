"""Keeps the metrics of steps on rank 0 until a save's report takes them to the history.

A step must not wait for the device, so a tensor is copied on its device, and all copies are read together: when a save
takes them, or when there are many. What is not a number is left out: the history must never fail a step.
"""

import time
from array import array
from collections.abc import Mapping

import torch

MOST_UNREAD = 1024
"""More tensors than this are read, since each takes memory of the device."""
MOST_VALUES = 200_000
"""Above this number of values, the oldest half is given up: no save has come for very long."""
Columns = Mapping[str, tuple["array[int]", "array[float]"]]
"""For each metric, steps and values. The name "" has the time of each step, by this host's clock."""


class StepMetrics:
    """The metrics of the steps since the newest save."""

    def __init__(self) -> None:
        self._values: dict[str, dict[int, float]] = {}
        self._unread: list[tuple[str, int, torch.Tensor]] = []

    def add(self, step: int, metrics: Mapping[str, object]) -> None:
        """Keep the metrics of a step."""
        has_any = False
        for name, value in metrics.items():
            if not isinstance(name, str) or not name:
                continue
            if type(value) is torch.Tensor and value.numel() == 1 and not value.is_complex() and not value.is_meta:
                has_any = True
                if value.device.type == "cpu":
                    self._keep(name, step, value.item())
                else:  # the script may change it in place, and a part of a large tensor would keep all of it
                    self._unread.append((name, step, value.detach().clone().reshape(())))
            elif isinstance(value, int | float):
                has_any = True
                self._keep(name, step, value)
        if has_any:
            self._keep("", step, time.time())
        if len(self._unread) > MOST_UNREAD:
            self._read()
        if sum(map(len, self._values.values())) > MOST_VALUES:
            self._values = {name: dict(list(one.items())[len(one) // 2 :]) for name, one in self._values.items()}

    def take(self) -> Columns:
        """Return everything that was kept, and keep nothing more of it."""
        self._read()
        taken = {
            name: (array("q", values), array("d", values.values())) for name, values in self._values.items() if values
        }
        self._values = {}
        return taken

    def give_back(self, taken: Columns) -> None:
        """Keep again what was taken for a save that has failed."""
        for name, (steps, values) in taken.items():
            self._values[name] = {**dict(zip(steps, values, strict=True)), **self._values.get(name, {})}

    def _keep(self, name: str, step: int, value: float) -> None:
        try:
            self._values.setdefault(name, {})[step] = float(value)
        except OverflowError:  # an integer that no float can hold
            return

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
                    self._keep(name, step, number)
