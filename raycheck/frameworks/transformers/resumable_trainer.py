"""The class of a prepared trainer: only the methods of Trainer that raycheck replaces.

Each docstring says what transformers does there; trainer_run.py has what happens instead. When raycheck is turned off,
all of them call transformers' own methods.
"""

from typing import Any

from transformers import Trainer
from transformers.trainer_utils import SaveStrategy

from raycheck.frameworks.transformers.trainer_run import TrainerRun

_Trainer: Any = Trainer
"""The base class as Any, because its methods are untyped."""


class ResumableTrainer(_Trainer):
    """A mixin, added to a trainer's class by `prepare`, that saves to and resumes from a run's bucket.

    raycheck_run: controls this trainer's run.
    """

    raycheck_run: TrainerRun

    def train(
        self,
        resume_from_checkpoint: str | bool | None = None,
        trial: Any = None,
        ignore_keys_for_eval: list[str] | None = None,
        **more: Any,
    ) -> Any:
        """Train as Trainer.train does, resuming from the run's newest checkpoint if there is one.

        resume_from_checkpoint: True refuses to start a new run. None and False mean the same. A folder is refused.
        """
        run = self.raycheck_run
        with run.open(resume_from_checkpoint, trial) as ckpt:
            if ckpt.is_off:
                return super().train(resume_from_checkpoint, trial, ignore_keys_for_eval, **more)
            run.look(ckpt, must_resume=resume_from_checkpoint is True)
            try:
                # None: the methods below read from the bucket what transformers would read from a folder.
                return super().train(None, None, ignore_keys_for_eval, **more)
            finally:
                run.ckpt = None

    def get_train_dataloader(self) -> Any:
        """Return the loader of raycheck's stream; accelerate's reads one batch ahead and cannot report its position."""
        return super().get_train_dataloader() if self.raycheck_run.ckpt is None else self.raycheck_run.loader()

    def _init_training_state(
        self, max_steps: int, num_update_steps_per_epoch: int, num_train_epochs: int, *rest: Any
    ) -> tuple[int, int]:
        """Create the TrainerState and return where the loop starts. transformers divides the step by the steps of an
        epoch, which is wrong once an epoch was ended early."""
        begin: tuple[int, int] = super()._init_training_state(
            max_steps, num_update_steps_per_epoch, num_train_epochs, *rest
        )
        if self.raycheck_run.ckpt is None:
            return begin
        return self.raycheck_run.take_over(num_train_epochs=num_train_epochs)

    def _prepare_for_training(self, *args: Any) -> Any:
        """Wrap the model and create the optimizer; then, when everything exists, restore."""
        prepared = super()._prepare_for_training(*args)
        if self.raycheck_run.ckpt is not None:
            self.raycheck_run.restore()
        return prepared

    def _evaluate(self, *args: Any, skip_scheduler: bool = False, **kwargs: Any) -> Any:
        """Evaluate, but skip eval_on_start (skip_scheduler) when training resumes."""
        if skip_scheduler and self.raycheck_run.ckpt is not None and self.raycheck_run.is_resumed:
            return {}
        return super()._evaluate(*args, skip_scheduler=skip_scheduler, **kwargs)

    def _run_epoch(self, **kwargs: Any) -> None:
        """Train an epoch. With a path to resume from, transformers counts the batches that are skipped."""
        if self.raycheck_run.ckpt is not None and kwargs["steps_trained_in_current_epoch"]:
            kwargs["resume_from_checkpoint"] = self.raycheck_run.ckpt.uri
        super()._run_epoch(**kwargs)

    def _load_rng_state(self, checkpoint: str | None) -> None:
        """Do nothing: Batches restores the random state just before the first batch."""
        if self.raycheck_run.ckpt is None:
            super()._load_rng_state(checkpoint)

    def _maybe_log_save_evaluate(self, *args: Any, **kwargs: Any) -> None:
        """Log, evaluate, and save after a step, and again at the end of an epoch."""
        run, state = self.raycheck_run, self.state
        best = state.best_global_step
        super()._maybe_log_save_evaluate(*args, **kwargs)
        if run.ckpt is None:
            return
        if self.args.load_best_model_at_end and state.best_global_step != best:
            run.ask_for_save(is_by_strategy=False)  # the best weights are loaded at the end
        if state.global_step > run.steps_ended:
            run.end_step()
        else:
            run.end_epoch(is_stopping=self.control.should_training_stop)

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        """Write a folder. Here the save is only requested; it starts when the step has ended."""
        if self.raycheck_run.ckpt is None:
            super()._save_checkpoint(model, trial)
        else:
            self.raycheck_run.ask_for_save(is_by_strategy=self._is_due_by_strategy())

    def _is_due_by_strategy(self) -> bool:
        """Return whether save_strategy asks for a save now. Callbacks may also ask, at any step."""
        state, strategy = self.state, self.args.save_strategy
        if strategy == SaveStrategy.STEPS:
            every = state.save_steps
            return bool(state.global_step >= state.max_steps or (every > 0 and state.global_step % every == 0))
        if strategy == SaveStrategy.EPOCH:
            return bool(state.global_step == self.raycheck_run.steps_ended)
        return bool(strategy == SaveStrategy.BEST)

    def _finalize_training(self, trial: Any, num_train_samples: int, start_time: float) -> Any:
        """End training: the last save, the best model, and the speed, which includes the time before a restart."""
        run, state = self.raycheck_run, self.state
        if run.ckpt is None:
            return super()._finalize_training(trial, num_train_samples, start_time)
        run.finish(best_step=state.best_global_step if self.args.load_best_model_at_end else None)
        best, state.best_model_checkpoint = state.best_model_checkpoint, None  # transformers would treat it as a folder
        try:
            return super()._finalize_training(trial, num_train_samples, start_time - run.seconds_before())
        finally:
            state.best_model_checkpoint = best
