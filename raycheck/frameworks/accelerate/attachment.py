"""Makes an Accelerator save to and restore from a raycheck run, without changes to the training loop.

A step ends when the training loop has finished with the batch on which the optimizer stepped, that is, when it asks the
prepared loader for the next batch. So a save includes schedulers, weight averages, and the script's own counters, in
whatever order the loop updates them. It never includes partly accumulated gradients.
"""

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from accelerate import Accelerator
from accelerate.utils import DistributedType

from raycheck.adapters import Checkpointer, Group, PerRank, SaveSettings
from raycheck.errors import ConfigError
from raycheck.frameworks.accelerate.loaders import FetchedAhead, Loaders
from raycheck.frameworks.accelerate.process_count import ProcessCount
from raycheck.frameworks.accelerate.state import check_supported, state_of, streams_in

RESTORE_FIRST = (
    "raycheck.accelerate: restore before the first step, even in a fresh run: call accelerator.load_state() after "
    "prepare, or iterate over attach(...).epochs(count)"
)
_ATTACHED = "_raycheck_attachment"


def attach(
    accelerator: Accelerator, settings: SaveSettings | None = None, *, group: Group | None = None
) -> "Attachment":
    """Make an Accelerator's save_state and load_state use this raycheck run, and save when `settings` say so.

    Call it before or after `prepare`, on every rank. settings: when to save and what to keep. group: the rank's group
    outside Ray Train; default: Ray Train's worker group.

    After that, accelerator.load_state() restores the newest checkpoint, or starts a new run, and returns a
    RestoreResult. save_state("name") saves the current step when it ends, under that name. Raises ConfigError, with a
    remedy, for training that cannot be saved completely: FSDP1, Megatron-LM, an engine of DeepSpeed that was not tried.
    """
    if hasattr(accelerator, _ATTACHED):
        raise ConfigError("raycheck.accelerate.attach was called before with this Accelerator")
    check_supported(accelerator)
    attachment = Attachment(accelerator, settings, group)
    setattr(accelerator, _ATTACHED, attachment)
    return attachment


class Attachment:
    """The connection between an Accelerator and a raycheck run, made by `attach`.

    checkpointer: the run's Checkpointer. metrics: numbers to store with every later save; update it in the loop. The
    last save is made by accelerator.end_training(), by the end of `epochs`, or on leaving this object as a context
    manager.
    """

    def __init__(self, accelerator: Accelerator, settings: SaveSettings | None, group: Group | None) -> None:
        self.checkpointer = Checkpointer({}, settings, group=group)
        self.metrics: dict[str, object] = {}
        self._accelerator = accelerator
        self._result: Any = None
        self._loaders: Loaders | None = None
        self._prepared = 0
        self._stepped: set[int] = set()  # ids of the optimizers that have stepped in the loop body under way
        self._asked: list[Callable[[], object]] = []  # saves requested, to be made when the step ends
        own: Any = accelerator
        self._end_training: Callable[[], None] = own.end_training
        self._backward: Callable[..., None] = own.backward
        self._skip: Callable[..., Any] = own.skip_first_batches
        own.save_state, own.load_state = self.save_state, self.load_state
        own.end_training, own.backward = self._close_and_end_training, self._refuse_backward
        own.skip_first_batches = self._skip_first_batches

    def epochs(self, count: int) -> Iterator[int]:
        """Yield the remaining epochs out of `count`: restore before the first, end each one, and save after the last.

        After leaving the loop with `break`, call `close` or accelerator.end_training().
        """
        if self._result is None:
            self.load_state()
        for epoch in range(self._result.epoch, count):
            yield epoch
            self._end_open_step()
            self.checkpointer.end_epoch()
        self.close()

    def load_state(
        self, input_dir: str | None = None, load_kwargs: Mapping[str, Any] | None = None, **more: Any
    ) -> Any:
        """Restore the newest checkpoint into everything prepared and registered, or start a fresh run.

        Returns a RestoreResult: step, epoch, epoch_step, samples. Raises the errors of Checkpointer.restore, and
        ConfigError if given a folder or if something cannot be saved completely.
        """
        if input_dir is not None or load_kwargs or more:
            raise ConfigError(
                f"accelerator.load_state({input_dir!r}): raycheck restores the run's newest checkpoint; call "
                "load_state() without arguments. To resume from another one, by step or name, use "
                "raycheck.fit(trainer, resume=...). To start from a folder written by Accelerate, call "
                "load_state(folder) before attach"
            )
        if self._result is not None:
            raise ConfigError("accelerator.load_state() was called before; a run restores only once, at its start")
        accelerator: Any = self._accelerator
        check_supported(accelerator)
        state = state_of(accelerator)
        processes = ProcessCount(accelerator)
        for name, value in state.items():
            self.checkpointer.add(name, value)
        self.checkpointer.add("processes", processes)
        if accelerator._dataloaders and not streams_in(state):
            self._loaders = Loaders(accelerator, self._end_open_step)
            self.checkpointer.add("loaders", self._loaders)
            self.checkpointer.add("fetched_ahead", PerRank(FetchedAhead(self._loaders)))
        has_engines = accelerator.distributed_type == DistributedType.DEEPSPEED
        for steps in accelerator._models if has_engines else accelerator._optimizers:
            self._follow(steps)
        self._prepared = self._count_prepared()
        self._result = self.checkpointer.restore()
        processes.rescale()
        accelerator.step = 0  # batches accumulated so far; a step ends when there are none
        accelerator.backward = self._backward
        return self._result

    def save_state(self, output_dir: str | None = None, safe_serialization: bool = True, **more: Any) -> None:
        """Save the current step when the loop has finished with its batch; between epochs, save immediately.

        output_dir: a name for the checkpoint. A named checkpoint can be restored by name and is not deleted by
        retention. If a path is given, only its last component is used. None: no name. safe_serialization is ignored:
        pickles are never written. Raises ConfigError for a folder that exists and for arguments of other ways of
        saving.
        """
        del safe_serialization
        if more:
            raise ConfigError(
                f"accelerator.save_state({next(iter(more))}=...): raycheck has no such argument; leave it out"
            )
        if self._result is None:
            raise ConfigError(RESTORE_FIRST)
        name = None if output_dir is None else _name_of(output_dir)
        metrics = dict(self.metrics)
        self._asked.append(lambda: self.checkpointer.save(metrics, name=name))
        is_looping = self._loaders is not None and self._loaders.is_in_pass
        if self._accelerator.sync_gradients and not is_looping and not self._stepped:
            self._save_what_was_asked_for()

    def end_step(self, metrics: Mapping[str, object] | None = None) -> None:
        """End a step explicitly, at the end of the loop body, when its batch did not come from a prepared loader.

        Does nothing while gradients accumulate. metrics: as for Checkpointer.end_step.
        """
        self.metrics.update(metrics or {})
        self._end_open_step()

    def close(self) -> None:
        """Save the last step, and wait for the commit. See Checkpointer.close."""
        if not self.checkpointer.is_closed:
            self._end_open_step()
            self.checkpointer.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
        else:
            self.checkpointer.__exit__(kind, error, trace)

    def _follow(self, optimizer: Any) -> None:
        """Observe the steps of an optimizer, or of an engine of DeepSpeed, whose optimizer does not step itself."""
        step = optimizer.step

        def followed(*args: Any, **kwargs: Any) -> Any:
            is_stepping = self._accelerator.sync_gradients
            if is_stepping:
                self._check_before_step(optimizer)
                self._stepped.add(id(optimizer))
            return step(*args, **kwargs)

        optimizer.step = followed

    def _check_before_step(self, optimizer: Any) -> None:
        """Raise ConfigError before a step that could not be saved at its end."""
        if self._count_prepared() != self._prepared:
            raise ConfigError(
                "something was prepared or registered after load_state() and would not be saved; prepare everything "
                "before calling it"
            )
        loader = self._accelerator.gradient_state.active_dataloader
        if self._loaders is not None and self._loaders.train_on(loader):
            return
        if id(optimizer) in self._stepped:
            raise ConfigError(
                "an optimizer stepped again before the last step ended: its batch came from no loader that was "
                "prepared and iterated after load_state(). Iterate a prepared loader, or call end_step() of what "
                "attach returned at the end of each step"
            )

    def _end_open_step(self) -> None:
        """End the step if the optimizer has stepped since the last one, and save it if a save is due."""
        if self._stepped:
            self._stepped.clear()
            self.checkpointer.end_step(self.metrics)
            self._save_what_was_asked_for()

    def _save_what_was_asked_for(self) -> None:
        asked, self._asked = self._asked, []
        for save in asked:
            save()

    def _count_prepared(self) -> int:
        own: Any = self._accelerator
        return (
            len(own._models)
            + len(own._optimizers)
            + len(own._schedulers)
            + len(own._dataloaders)
            + len(own._custom_objects)
        )

    def _refuse_backward(self, *_args: Any, **_kwargs: Any) -> None:
        raise ConfigError(RESTORE_FIRST)

    def _close_and_end_training(self) -> None:
        if self._result is not None:
            self.close()
        self._end_training()

    def _skip_first_batches(self, dataloader: Any, num_batches: int = 0) -> Any:
        """Return the loader unchanged if it skips these batches anyway, by resuming at the restored position."""
        own = self._loaders.find(dataloader) if self._loaders else None
        if own is None or not num_batches:
            return self._skip(dataloader, num_batches) if own is None else dataloader
        if num_batches != own.to_skip:
            raise ConfigError(
                f"skip_first_batches(loader, {num_batches}): after load_state() the loader resumes automatically and "
                f"leaves out {own.to_skip} batches; iterate it unchanged"
            )
        return dataloader


def _name_of(path: str) -> str:
    if Path(path).is_dir():
        raise ConfigError(
            f"accelerator.save_state({path!r}) is a folder that exists; raycheck saves to the run's bucket. Give a "
            "name for the checkpoint, or no argument"
        )
    return Path(path).name
