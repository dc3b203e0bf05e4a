"""The class that a prepared trainer gets: the methods of Trainer that raycheck replaces, and no more.

Each of them says what transformers does there. What happens instead is in trainer_run.py. When raycheck is turned off,
all of them are transformers' own.
"""

from typing import Any

from transformers import Trainer
from transformers.trainer_utils import SaveStrategy

from raycheck.frameworks.transformers.trainer_run import TrainerRun

_Trainer: Any = Trainer  # whose own methods have no types


class ResumableTrainer(_Trainer):  # type: ignore[misc]
    """Is mixed into the class of a trainer by `prepare`. It saves to and resumes from a run's bucket.

    raycheck_run: leads this trainer through its run.
    """

    raycheck_run: TrainerRun

    def train(
        self,
        resume_from_checkpoint: str | bool | None = None,
        trial: Any = None,
        ignore_keys_for_eval: list[str] | None = None,
        **more: Any,
    ) -> Any:
        """Train as Trainer.train does, and go on from the run's newest checkpoint if it has one.

        resume_from_checkpoint: True refuses to begin a new run. None and False are the same. A folder is refused.
        """
        run = self.raycheck_run
        with run.open(resume_from_checkpoint, trial) as ckpt:
            if ckpt.is_off:
                return super().train(resume_from_checkpoint, trial, ignore_keys_for_eval, **more)
            run.look(ckpt, must_resume=resume_from_checkpoint is True)
            try:
                # None: what transformers would read from a folder comes from the bucket, by the methods below.
                return super().train(None, None, ignore_keys_for_eval, **more)
            finally:
                run.ckpt = None

    def get_train_dataloader(self) -> Any:
        """Returns the loader of raycheck's stream; accelerate's reads one batch ahead and cannot tell its position."""
        return super().get_train_dataloader() if self.raycheck_run.ckpt is None else self.raycheck_run.loader()

    def _init_training_state(
        self, max_steps: int, num_update_steps_per_epoch: int, num_train_epochs: int, *rest: Any
    ) -> tuple[int, int]:
        """Make the TrainerState, and say where the loop begins. transformers divides steps by those of an epoch, which
        is wrong once an epoch was ended early."""
        begin: tuple[int, int] = super()._init_training_state(
            max_steps, num_update_steps_per_epoch, num_train_epochs, *rest
        )
        if self.raycheck_run.ckpt is None:
            return begin
        return self.raycheck_run.take_over(num_train_epochs=num_train_epochs)

    def _prepare_for_training(self, *args: Any) -> Any:
        """Wrap the model and make the optimizer; then, with all that exists, restore."""
        prepared = super()._prepare_for_training(*args)
        if self.raycheck_run.ckpt is not None:
            self.raycheck_run.restore()
        return prepared

    def _evaluate(self, *args: Any, skip_scheduler: bool = False, **kwargs: Any) -> Any:
        """Evaluate; but not for eval_on_start (skip_scheduler) when a training goes on: it has begun long ago."""
        if skip_scheduler and self.raycheck_run.ckpt is not None and self.raycheck_run.is_resumed:
            return {}
        return super()._evaluate(*args, skip_scheduler=skip_scheduler, **kwargs)

    def _run_epoch(self, **kwargs: Any) -> None:
        """Train an epoch. A path to resume from makes transformers count the batches that are left out."""
        if self.raycheck_run.ckpt is not None and kwargs["steps_trained_in_current_epoch"]:
            kwargs["resume_from_checkpoint"] = self.raycheck_run.ckpt.uri
        super()._run_epoch(**kwargs)

    def _load_rng_state(self, checkpoint: str | None) -> None:
        """Do nothing: Batches put the random state back, just before the first batch."""
        if self.raycheck_run.ckpt is None:
            super()._load_rng_state(checkpoint)

    def _maybe_log_save_evaluate(self, *args: Any, **kwargs: Any) -> None:
        """Log, evaluate and save after a step, and once more at the end of an epoch."""
        run, state = self.raycheck_run, self.state
        best = state.best_global_step
        super()._maybe_log_save_evaluate(*args, **kwargs)
        if run.ckpt is None:
            return
        if self.args.load_best_model_at_end and state.best_global_step != best:
            run.ask_for_save(is_by_strategy=False)  # the weights must be there at the end
        if state.global_step > run.steps_ended:
            run.end_step()
        else:
            run.end_epoch(is_stopping=self.control.should_training_stop)

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        """Write a folder; instead, the save is noted, and begins when all of the step is done."""
        if self.raycheck_run.ckpt is None:
            super()._save_checkpoint(model, trial)
        else:
            self.raycheck_run.ask_for_save(is_by_strategy=self._is_due_by_strategy())

    def _is_due_by_strategy(self) -> bool:
        """Returns whether save_strategy asks for a save now. A callback may do so too, at any step."""
        state, strategy = self.state, self.args.save_strategy
        if strategy == SaveStrategy.STEPS:
            every = state.save_steps
            return bool(state.global_step >= state.max_steps or (every > 0 and state.global_step % every == 0))
        if strategy == SaveStrategy.EPOCH:
            return bool(state.global_step == self.raycheck_run.steps_ended)
        return bool(strategy == SaveStrategy.BEST)

    def _finalize_training(self, trial: Any, num_train_samples: int, start_time: float) -> Any:
        """End training: the last save, the best model, the speed, which counts the time before a restart too."""
        run, state = self.raycheck_run, self.state
        if run.ckpt is None:
            return super()._finalize_training(trial, num_train_samples, start_time)
        run.finish(best_step=state.best_global_step if self.args.load_best_model_at_end else None)
        best, state.best_model_checkpoint = state.best_model_checkpoint, None  # transformers takes it for a folder
        try:
            return super()._finalize_training(trial, num_train_samples, start_time - run.seconds_before())
        finally:
            state.best_model_checkpoint = best
