"""One rank of a training that tests lead step by step: in a thread of theirs, or in a Ray actor's process."""

import dataclasses
import threading
import time
from typing import Any
from uuid import uuid4

import torch

import raycheck
from raycheck.group.worker.group_restore import RestoreResult

OF_COORDINATORS = {"raycheck-records", "raycheck-export"}
"""The threads of a coordinator, which may be in the rank's process. They live as long as it does."""


def train_once(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    model(torch.ones(2, 600)).square().mean().backward()
    optimizer.step()


class Holder:
    """Is one rank that holds a replicated model, and a number of its own."""

    def __init__(
        self,
        place: raycheck.adapters.Group,
        *,
        seed: int = 0,
        is_frozen: bool = False,
        more: dict[str, Any] | None = None,
        **settings: Any,
    ) -> None:
        """settings: further ones of SaveSettings."""
        self._threads_before = set(threading.enumerate())
        torch.manual_seed(seed)
        self.model = torch.nn.Linear(600, 500)
        self.model.bias.requires_grad_(not is_frozen)
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        self.number = raycheck.PerRank({"fresh": place.rank})
        self.place = place
        self.state = {"model": self.model, "optimizer": self.optimizer, "number": self.number, **(more or {})}
        self.ckpt = raycheck.Checkpointer(self.state, raycheck.SaveSettings(every_steps=2, **settings), group=place)

    def restore(self, **options: Any) -> RestoreResult:
        return self.ckpt.restore(**options)

    def make_another(self) -> None:
        raycheck.Checkpointer(self.state, group=self.place)

    def get(self, name: str) -> Any:
        return {"number": self.number.value, "moments": len(self.optimizer.state)}[name]

    def set_number(self, value: Any) -> None:
        self.number.value = {"kept": value}

    def train(self, steps: int) -> None:
        for _ in range(steps):
            train_once(self.model, self.optimizer)
            self.ckpt.end_step({"loss": float("nan"), "step": 1})

    def train_and_save(self, steps: int) -> None:
        self.train(steps)
        self.ckpt.save()

    def train_on(self, steps: int) -> tuple[int, int]:
        """Train on a stream of batches inside a dict. Returns its position, and that of the progress."""
        data = raycheck.Batches(range(40), global_batch=4, rank=0, world_size=1)
        state = {"model": self.model, "data": {"train": data}}
        self.ckpt.close()
        with raycheck.Checkpointer(state, group=dataclasses.replace(self.place, id=uuid4().hex)) as ckpt:
            at = ckpt.restore()
            for _, _ in zip(range(steps), data.loader(at.epoch), strict=False):
                ckpt.end_step()
            return data.state_dict()["consumed"], ckpt._counter.progress.samples

    def wait(self) -> None:
        self.ckpt._live()._queue.wait()

    def doubt(self) -> None:
        """Forget that the ranks have agreed, on this rank alone."""
        queue = self.ckpt._live()._queue
        queue.wait()
        queue._has_agreed = False

    def weights(self) -> torch.Tensor:
        return self.model.weight.detach().clone()

    def wait_until_over(self) -> int:
        """Wait until a thread has found out that the attempt is over. Returns the number of the newest step."""
        deadline = time.monotonic() + 90.0
        while self.ckpt._watch.over is None:
            assert time.monotonic() < deadline, "the attempt is not over"
            time.sleep(0.05)
        return self.ckpt._counter.step

    def fail(self) -> None:
        """Leave training as a script does that has raised an error: nothing more is saved."""
        self.ckpt.__exit__(RuntimeError, RuntimeError("it broke"), None)

    def close(self) -> None:
        self.ckpt.close()

    def threads_left(self) -> list[str]:
        """Returns raycheck's threads that came since this rank was made and are left a moment later.

        Ask it when all ranks of the process are closed."""
        deadline = time.monotonic() + 60.0
        while (left := self._own_threads()) and time.monotonic() < deadline:
            time.sleep(0.05)
        return left

    def _own_threads(self) -> list[str]:
        since = {one.name for one in set(threading.enumerate()) - self._threads_before}
        return [
            name for name in since if name.startswith("raycheck") and name.rpartition("_")[0] not in OF_COORDINATORS
        ]
