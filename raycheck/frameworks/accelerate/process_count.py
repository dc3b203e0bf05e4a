"""Keeps schedulers right when the number of processes changes.

Accelerate steps a prepared scheduler once for each process at every optimizer step, unless batches are split. So at
optimizer step 100 a scheduler has counted 200 steps on 2 processes, and 400 on 4.
"""

from typing import Any

from accelerate import Accelerator
from torch.optim.lr_scheduler import LambdaLR

from raycheck.errors import StateMismatchError
from raycheck.frameworks.accelerate.state import is_stepped_by_engine


class ProcessCount:
    """The number of processes as an entry of the state, and the rescaling of schedulers when it changes."""

    def __init__(self, accelerator: Accelerator) -> None:
        self._accelerator = accelerator
        self._saved = accelerator.num_processes

    @property
    def _per_process(self) -> list[Any]:
        """Return the schedulers that step once for each process."""
        wrapped = self._accelerator._schedulers
        return [
            own.scheduler
            for own in wrapped
            if own.step_with_optimizer and not own.split_batches and not is_stepped_by_engine(own)
        ]

    def state_dict(self) -> dict[str, Any]:
        return {"num_processes": self._accelerator.num_processes}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._saved = int(state["num_processes"])

    def check_state_dict(self, state: dict[str, Any]) -> None:
        """Raise StateMismatchError for a scheduler that cannot be rescaled to this number of processes."""
        here = self._accelerator.num_processes
        others = sorted({type(own).__name__ for own in self._per_process if not isinstance(own, LambdaLR)})
        if state["num_processes"] != here and others:
            raise StateMismatchError(
                f"a {others[0]} that Accelerate steps once for each process was saved on {state['num_processes']} "
                f"processes, and there are {here}. Use a LambdaLR (as get_scheduler of transformers returns), or make "
                "it step once for all processes: "
                "Accelerator(dataloader_config=DataLoaderConfiguration(split_batches=True))"
            )

    def rescale(self) -> None:
        """Move restored schedulers to their position after as many optimizer steps with this number of processes."""
        here = self._accelerator.num_processes
        if self._saved == here:
            return
        for scheduler in self._per_process:
            scheduler.last_epoch = scheduler.last_epoch * here // self._saved
            scheduler._step_count = scheduler.last_epoch + 1
            scheduler._last_lr = scheduler.get_lr()
            for group, rate in zip(scheduler.optimizer.param_groups, scheduler._last_lr, strict=True):
                group["lr"] = rate
