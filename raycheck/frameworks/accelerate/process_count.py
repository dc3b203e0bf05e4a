"""Keeps schedulers right when the number of processes changes.

Accelerate steps a prepared scheduler once for each process at every optimizer step, unless batches are split. So a
scheduler that was saved on 2 processes at optimizer step 100 stands at 200, and on 4 processes it would stand at 400.
"""

from typing import Any

from accelerate import Accelerator
from torch.optim.lr_scheduler import LambdaLR

from raycheck.errors import StateMismatchError


class ProcessCount:
    """Is the number of processes, as an entry of the state, and what follows from another one at a restore."""

    def __init__(self, accelerator: Accelerator) -> None:
        self._accelerator = accelerator
        self._saved = accelerator.num_processes

    @property
    def _per_process(self) -> list[Any]:
        """Returns the schedulers that step once for each process."""
        wrapped = self._accelerator._schedulers
        return [own.scheduler for own in wrapped if own.step_with_optimizer and not own.split_batches]

    def state_dict(self) -> dict[str, Any]:
        return {"num_processes": self._accelerator.num_processes}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._saved = int(state["num_processes"])

    def check_state_dict(self, state: dict[str, Any]) -> None:
        """Raises StateMismatchError for a scheduler that cannot be put where it would be with this many processes."""
        here = self._accelerator.num_processes
        others = sorted({type(own).__name__ for own in self._per_process if not isinstance(own, LambdaLR)})
        if state["num_processes"] != here and others:
            raise StateMismatchError(
                f"a {others[0]} that Accelerate steps once for each process was saved on {state['num_processes']} "
                f"processes, and there are {here}. Use a LambdaLR (as get_scheduler of transformers gives), or let it "
                "step once for all: Accelerator(dataloader_config=DataLoaderConfiguration(split_batches=True))"
            )

    def rescale(self) -> None:
        """After a restore: put schedulers where as many optimizer steps would have put them with these processes."""
        here = self._accelerator.num_processes
        if self._saved == here:
            return
        for scheduler in self._per_process:
            scheduler.last_epoch = scheduler.last_epoch * here // self._saved
            scheduler._step_count = scheduler.last_epoch + 1
            scheduler._last_lr = scheduler.get_lr()
            for group, rate in zip(scheduler.optimizer.param_groups, scheduler._last_lr, strict=True):
                group["lr"] = rate
