"""Runs raycheck's part of one Trainer.fit(): restores where Lightning would read its file, and saves between steps.

Lightning has no hook that runs after a batch's validation and before the next batch is fetched, and none that runs
after everything at the end of an epoch. So a fit wraps methods of the Trainer's loops and of its checkpoint connector,
on these instances only, and unwraps them when it ends. A restore follows Lightning's own order: the values of loops,
callbacks, and hooks before the strategy is set up, the tensors after it.
"""

import logging
from collections.abc import Callable
from typing import Any

import torch

from raycheck.adapters import Checkpointer, Group, PerRank, SaveSettings, open_run
from raycheck.errors import ConfigError, DamagedError
from raycheck.frameworks.lightning.lightning_state import LightningState, weight_averagings
from raycheck.frameworks.lightning.logged_values import LoggedValues
from raycheck.frameworks.lightning.packages import named, package_of
from raycheck.frameworks.lightning.refusals import check_data, check_optimizers, check_trainer
from raycheck.frameworks.lightning.strategies import engine_of, is_sharded
from raycheck.frameworks.lightning.training_data import ConvertedSource, LoaderConversion
from raycheck.frameworks.shaped_module import ShapedModule

logger = logging.getLogger("raycheck")


class FitSession:
    """raycheck's part of one fit, from the Callback's setup to the end of the fit.

    Its constructor raises ConfigError for unsupported parts of the Trainer.
    """

    def __init__(
        self, trainer: Any, settings: SaveSettings, *, group: Group | None, keeps_position: bool, world_size: int
    ) -> None:
        self._trainer = trainer
        self._package = package_of(trainer)
        check_trainer(trainer, self._package, world_size=world_size)
        if keeps_position:
            check_data(trainer)
        self._checkpointer = Checkpointer(None, settings, group=group)
        self._start = self._checkpointer.peek()
        self._state = LightningState(trainer, self._package, self._own_values)
        self._early: dict[str, Any] | None = None
        self._damage: DamagedError | None = None
        self._logged = LoggedValues(trainer)
        self._data = LoaderConversion(trainer, self._start.values.get("data", {}))
        self._keeps_position = keeps_position
        self._global_step = 0
        self._metrics_before: dict[str, Any] = {}
        self._is_epoch_over = False  # Lightning has ended the epoch, but raycheck has not counted it yet
        self._has_unended_step = False  # the epoch's last step, which ends with the epoch
        self._has_run_ended = False
        self._undo: list[Callable[[], None]] = []
        self._install()

    def _install(self) -> None:
        """Wrap Lightning's methods until the end of this fit."""
        trainer = self._trainer
        connector, loop = trainer._checkpoint_connector, trainer.fit_loop
        self._read_user_file = self._wrap(connector, "resume_start", self._resume_start)
        self._restore_training_state = self._wrap(connector, "restore_training_state", self._restore)
        self._end_batch_of_lightning = self._wrap(loop.epoch_loop, "on_advance_end", self._end_batch)
        self._end_epoch_of_lightning = self._wrap(loop, "on_advance_end", self._end_epoch)
        self._end_run_of_lightning = self._wrap(loop, "on_run_end", self._end_run)
        if self._keeps_position:
            source = loop._data_source
            loop._data_source = ConvertedSource(source, self._data.convert)
            self._undo.append(lambda: setattr(loop, "_data_source", source))

    def _wrap(self, obj: Any, name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        """Replace a method. Returns the original."""
        original: Callable[..., Any] = getattr(obj, name)
        setattr(obj, name, method)
        self._undo.append(lambda: delattr(obj, name))
        return original

    def end(self) -> None:
        """End a fit that has completed: save the last step and wait for its commit."""
        try:
            self._checkpointer.close()
            if not self._start.is_fresh and not self._has_run_ended:
                self._average_as_at_the_end()
        finally:
            self._uninstall()

    def abandon(self, error: BaseException) -> None:
        """End a fit that has raised, without a new save."""
        self._uninstall()
        self._checkpointer.__exit__(type(error), error, error.__traceback__)

    def _uninstall(self) -> None:
        while self._undo:
            self._undo.pop()()

    # Restoring, in the order in which Lightning calls these.

    def _resume_start(self, path: Any = None, weights_only: bool | None = None) -> None:
        """Give Lightning the checkpoint's values as if it had read them from its own file.

        path: a Lightning file given by the user; used in a fresh run only.
        """
        trainer = self._trainer
        if self._start.is_fresh:
            self._read_user_file(path, weights_only=weights_only)
            return
        if path and trainer.global_rank == 0:
            logger.info("ckpt_path=%s is ignored: the run has checkpoints and resumes from %s", path, self._key)
        connector = trainer._checkpoint_connector
        connector._ckpt_path = None
        try:
            self._early = self._read_early()
        except DamagedError as error:
            self._damage = error  # restore() finds it too and moves all ranks to an older checkpoint
            return
        connector._loaded_checkpoint = self._early
        for callback in weight_averagings(trainer, self._package):  # its model is restored as an entry
            self._wrap(callback, "on_load_checkpoint", lambda *_args: None)

    @property
    def _key(self) -> str:
        return str(self._start.checkpoint)

    def _read_early(self) -> dict[str, Any]:
        """Read the values that Lightning's hooks see before the strategy is set up."""
        checkpoint = open_run(self._checkpointer.uri).at(self._key)
        values = LightningState()
        checkpoint.restore(into={"lightning": values})
        assert values.saved is not None, "a restore that changes nothing raises"
        found = dict(values.saved["checkpoint"])
        found["optimizer_states"] = []  # restored in place, later
        if not is_sharded(self._trainer.strategy):  # like Lightning's own sharded strategies, which expose no weights
            module = self._trainer.lightning_module
            found["state_dict"] = self._read_weights(checkpoint) if self._has_load_hook else dict(module.state_dict())
        return found

    @property
    def _has_load_hook(self) -> bool:
        """Return whether the user's module or callbacks may change the loaded weights."""
        module, base = type(self._trainer.lightning_module), named(self._package, "callbacks", "Callback")
        module_base = named(self._package, "core", "LightningModule")
        averaging = named(self._package, "callbacks", "WeightAveraging")
        return module.on_load_checkpoint is not module_base.on_load_checkpoint or any(
            type(one).on_load_checkpoint is not base.on_load_checkpoint
            for one in self._trainer.callbacks
            if not isinstance(one, averaging)
        )

    def _read_weights(self, checkpoint: Any) -> dict[str, Any]:
        """Read the saved weights into new tensors, under the names of the live module's state_dict()."""
        saved = {
            tensor.name.removeprefix("model."): torch.empty(tensor.shape, dtype=getattr(torch, tensor.dtype))
            for tensor in checkpoint.tensors()
            if tensor.name.startswith("model.")
        }
        checkpoint.restore(into={"model": ShapedModule(saved)}, strict=False)
        live = self._trainer.lightning_module.state_dict()
        keys = {key.replace("_orig_mod.", ""): key for key in live}
        others = {key: value for key, value in live.items() if not isinstance(value, torch.Tensor)}
        return others | {keys.get(name, name): tensor for name, tensor in saved.items()}

    def _restore(self) -> None:
        """Restore everything, once the module, the optimizers, and the schedulers exist."""
        trainer, checkpointer = self._trainer, self._checkpointer
        check_optimizers(trainer)
        if self._start.is_fresh:
            self._restore_training_state()  # from a Lightning file, if the user gave one
        for name, value in self._entries().items():
            checkpointer.add(name, value)
        checkpointer.restore()
        self._global_step = trainer.fit_loop.epoch_loop.global_step
        if self._start.is_fresh:
            return
        if self._early is None:
            raise self._damage or ConfigError("Lightning did not ask for a checkpoint's values before it was set up")
        self._restore_training_state()
        if self._has_load_hook and "state_dict" in self._early:  # the hook may have changed the weights
            strict = trainer.lightning_module.strict_loading
            trainer.strategy.load_model_state_dict(self._early, strict=strict)
        assert self._state.saved is not None, "the entry `lightning` was restored"
        self._apply_own_values(self._state.saved["raycheck"])

    def _entries(self) -> dict[str, Any]:
        """Return the entries of the state. Metrics come first because a module with metrics is refused without them."""
        trainer, averaged = (
            self._trainer,
            [one._average_model for one in weight_averagings(self._trainer, self._package)],
        )
        if self._keeps_position and trainer.limit_train_batches:
            trainer.fit_loop._data_source.dataloader()
        module, optimizers, engine = trainer.lightning_module, list(trainer.optimizers), engine_of(trainer)
        trained = {"model": module, "optimizer": optimizers[0] if len(optimizers) == 1 else optimizers}
        found = {
            "metrics": _metrics_in([module, *averaged]),
            **(trained if engine is None else {"engine": engine}),
            "average": averaged[0] if len(averaged) == 1 else averaged,
            "lightning": self._state,
            "logged": PerRank(self._logged),
            "data": self._data.batches,
        }
        return {name: value for name, value in found.items() if value is not None and value != []}

    def _own_values(self) -> dict[str, Any]:
        """Return values that an uninterrupted run has but Lightning's own checkpoint leaves out."""
        trainer = self._trainer
        timers = [one for one in trainer.callbacks if isinstance(one, named(self._package, "callbacks", "Timer"))]
        left_s = [one.time_remaining() for one in timers]
        is_out_of_time = any(left is not None and left <= 0 for left in left_s)
        return {
            "should_stop": bool(trainer.should_stop) and not is_out_of_time,  # given more time, a run continues
            "callback_metrics": dict(trainer._logger_connector._callback_metrics),
            "is_epoch_over": self._is_epoch_over,
            "frozen": self._frozen() if self._is_finetuning else [],
        }

    def _apply_own_values(self, values: dict[str, Any]) -> None:
        trainer = self._trainer
        trainer.should_stop = trainer.should_stop or values["should_stop"]
        trainer._logger_connector._callback_metrics.update(values["callback_metrics"])
        self._metrics_before = dict(values["callback_metrics"])
        self._global_step = trainer.fit_loop.epoch_loop.global_step
        if self._is_finetuning:
            for name, parameter in trainer.lightning_module.named_parameters():
                parameter.requires_grad_(name not in values["frozen"])
        progress = trainer.fit_loop.epoch_progress.current
        if progress.ready == progress.completed:
            # With max_steps, Lightning assumes that a restored loop is inside an epoch, and would start an empty one.
            self._end_restart()
        if values["is_epoch_over"]:
            self._checkpointer.end_epoch()
        elif progress.ready != progress.completed and not self._keeps_position and trainer.global_rank == 0:
            logger.warning("the epoch was interrupted; it resumes at the beginning of the training loader's data")

    def _end_restart(self) -> None:
        """Mark the loops as not being in a restored epoch, overriding their own conclusion."""
        named(self._package, "loops.loop", "_Loop").restarting.fset(self._trainer.fit_loop, False)

    @property
    def _is_finetuning(self) -> bool:
        kind = named(self._package, "callbacks", "BaseFinetuning")
        return any(isinstance(one, kind) for one in self._trainer.callbacks)

    def _frozen(self) -> list[str]:
        module = self._trainer.lightning_module
        return [name for name, parameter in module.named_parameters() if not parameter.requires_grad]

    # Saving, in the order in which Lightning calls these.

    def _end_batch(self, data_fetcher: Any) -> None:
        """End a step after its validation if an optimizer has stepped in this batch."""
        loop = self._trainer.fit_loop.epoch_loop
        if loop._skip_next_val:
            loop._skip_next_val = False
            return
        self._end_batch_of_lightning(data_fetcher)
        self._logged.add_restored()
        if loop.global_step == self._global_step:
            return  # gradients are being accumulated, which are never saved
        self._global_step = loop.global_step
        if loop._is_training_done or (self._trainer.should_stop and self._trainer.fit_loop._can_stop_early):
            self._has_unended_step = True
        else:
            self._checkpointer.end_step(self._new_metrics())

    def _end_epoch(self) -> None:
        """End the epoch and its last step, after everything that Lightning and the user's hooks do at its end."""
        if not self._start.is_fresh:
            # In a restored epoch Lightning skips ReduceLROnPlateau because its own checkpoints have no metrics.
            self._end_restart()
        self._end_epoch_of_lightning()
        self._logged.forget()
        self._is_epoch_over = True
        if self._has_unended_step:
            self._has_unended_step = False
            self._checkpointer.end_step(self._new_metrics())
        self._is_epoch_over = False
        self._checkpointer.end_epoch()

    def _end_run(self) -> None:
        """Save the last step before callbacks copy averaged weights into the model."""
        self._checkpointer.close()
        self._has_run_ended = True
        self._end_run_of_lightning()

    def _new_metrics(self) -> dict[str, Any]:
        """Return the numbers logged since the last step. A validation's numbers belong to its own step only."""
        before = self._metrics_before
        now = self._metrics_before = dict(self._trainer._logger_connector._callback_metrics)
        fresh = {name: value for name, value in now.items() if before.get(name) is not value}
        return {name: value for name, value in fresh.items() if not torch.is_tensor(value) or value.numel() == 1}

    def _average_as_at_the_end(self) -> None:
        """Copy averaged weights into the model of a run with nothing left to train, as the end of training does."""
        names = ("WeightAveraging", "StochasticWeightAveraging")
        kinds = tuple(named(self._package, "callbacks", name) for name in names)
        for callback in self._trainer.callbacks:
            if isinstance(callback, kinds):
                callback.on_train_end(self._trainer, self._trainer.lightning_module)


def _metrics_in(modules: list[Any]) -> list[Any]:
    from torchmetrics import Metric

    return [one for module in modules for one in module.modules() if isinstance(one, Metric)]
