"""One call of trainer.train(): its Checkpointer, and the order of events.

For raycheck a step ends after the Trainer has logged and evaluated. So a save includes the evaluation of its step, and
a restart does not lose it. The random state is restored as late as an uninterrupted run would reach it: inside an epoch
just before the first batch (Batches does that), at the start of an epoch after the callbacks' on_train_begin.
"""

import logging
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from numbers import Real
from typing import TYPE_CHECKING, Any

from transformers import Trainer, TrainerCallback

from raycheck.adapters import Checkpointer, Group, PerRank, RankZero, SaveSettings, open_run
from raycheck.errors import ConfigError, NotFoundError
from raycheck.frameworks.transformers.generation_data import generates, generation_layout, hold_generation_batch
from raycheck.frameworks.transformers.refusals import refuse_callbacks
from raycheck.frameworks.transformers.trainer_settings import joined_settings
from raycheck.frameworks.transformers.trainer_values import (
    RankValues,
    TrainerValues,
    take_over_state,
    take_over_sums,
)
from raycheck.frameworks.transformers.training_data import (
    facts_of,
    held_accumulation,
    plain_layout,
    training_data,
)

if TYPE_CHECKING:
    from raycheck.adapters import Batches

logger = logging.getLogger("raycheck")


class TrainerRun:
    """The run of one trainer on this rank, driven by ResumableTrainer.

    ckpt: the Checkpointer during train(); None outside it, and when raycheck is turned off. steps_ended: how many
    optimizer steps have ended in it.
    """

    def __init__(
        self, trainer: Any, settings: SaveSettings | None, extra: Mapping[str, object], group: Group | None
    ) -> None:
        self._trainer = trainer
        self._joined = joined_settings(settings, trainer.args)
        if self._joined.settings.every_tokens and str(trainer.args.include_num_input_tokens_seen) == "no":
            raise ConfigError("every_tokens: the Trainer counts tokens only with include_num_input_tokens_seen='all'")
        self._extra = dict(extra)
        self._group = group
        self._was_trained = False
        self.ckpt: Checkpointer | None = None
        self.steps_ended = 0
        self._place: _Place | None = None
        self._saved: Mapping[str, Any] | None = None  # the checkpoint's trainer entry
        self._values: TrainerValues | None = None
        self._of_rank = RankValues(trainer)
        self._data: Batches | None = None
        self._state: dict[str, object] = {}
        self._is_asked = False  # the Trainer's control flow has requested a save
        self._tokens = 0
        self._random: tempfile.TemporaryDirectory[str] | None = None
        self._clock: tuple[float, float] = (0.0, 0.0)  # seconds trained before this start, and the start time

    def open(self, resume_from_checkpoint: object, trial: object) -> Checkpointer:
        """Create the Checkpointer for this call of train(). Raises ConfigError for unsupported arguments."""
        if trial is not None:
            raise ConfigError(
                "hyperparameter_search: each trial needs its own run; use Ray Tune with one run per trial"
            )
        if isinstance(resume_from_checkpoint, str):
            raise ConfigError(
                f"resume_from_checkpoint={resume_from_checkpoint!r}: a folder that the Trainer wrote has no position "
                "in raycheck's order of samples. Load the model from it (from_pretrained), or leave it out: then "
                "training resumes from the newest checkpoint of the run"
            )
        if self._was_trained:
            raise ConfigError("train() was called before, and this run has ended: a second phase needs a new run")
        self._was_trained = True
        self._say()
        return Checkpointer({}, self._joined.settings, group=self._group)

    def look(self, ckpt: Checkpointer, *, must_resume: bool) -> None:
        """Preview the checkpoint to restore, and keep its number of samples per step. Raises NotFoundError."""
        trainer = self._trainer
        seen, where = ckpt.peek(), ckpt.uri.partition("?")[0]
        if seen.is_fresh and must_resume:
            raise NotFoundError(
                f"resume_from_checkpoint=True: {where} has no checkpoint; leave it out to start a new run"
            )
        self.ckpt = ckpt
        if not seen.is_fresh:
            if "trainer" not in seen.values:
                raise ConfigError(
                    f"{where} was not saved by raycheck.transformers: it has {', '.join(seen.entries)}. Give this "
                    "training a different run name"
                )
            self._saved = seen.values["trainer"]
            accumulation = held_accumulation(trainer, self._saved["facts"])
            if accumulation != trainer.args.gradient_accumulation_steps:
                logger.warning(
                    "gradient_accumulation_steps=%d instead of %d, so that a step still has %d samples on %d ranks",
                    accumulation,
                    trainer.args.gradient_accumulation_steps,
                    self._saved["facts"]["step_samples"],
                    trainer.args.world_size,
                )
                hold_generation_batch(trainer, accumulation)
                trainer.args.gradient_accumulation_steps = accumulation
                _tell_deepspeed(trainer, accumulation)
            same = seen.saved_world_size == trainer.args.world_size
            self._place = _Place(step=seen.step, epoch=seen.epoch, epoch_step=seen.epoch_step, is_same_size=same)
        for callback in [*trainer.callback_handler.callbacks]:
            if _reports_to_ray(callback):
                trainer.remove_callback(callback)
                logger.info("%s is removed: raycheck reports commits to Ray Train", type(callback).__name__)
        trainer.add_callback(_AtTrainBegin(self))

    def loader(self) -> Any:
        """Return the loader of micro-batches, whose position is part of the state."""
        trainer = self._trainer
        layout = generation_layout(trainer) if generates(trainer) else plain_layout(trainer)
        data = training_data(trainer, layout)
        self._data = data.batches
        return data.loader

    def take_over(self, *, num_train_epochs: int) -> tuple[int, int]:
        """Copy the checkpoint's counts into the new TrainerState. Returns the epoch and how many of its micro-batches
        are done; the epoch is the number of epochs when nothing is left to train."""
        trainer, saved, place = self._trainer, self._saved, self._place
        self._values = TrainerValues(trainer, facts_of(trainer))
        if saved is None or place is None:
            return 0, 0
        take_over_state(trainer, saved)
        self._tokens = int(trainer.state.num_input_tokens_seen)
        self.steps_ended = place.step
        if generates(trainer):
            trainer._step = place.step * trainer.args.gradient_accumulation_steps  # noqa: SLF001
        was_stopped = saved["stopped"] and trainer.state.max_steps <= saved["max_steps"]
        if place.step >= trainer.state.max_steps or was_stopped:
            return num_train_epochs, 0
        return place.epoch, place.epoch_step * trainer.args.gradient_accumulation_steps

    def restore(self) -> None:
        """Give the Checkpointer the complete state, which exists by now, and restore it."""
        trainer, ckpt = self._trainer, self.ckpt
        assert ckpt is not None, "restore() is called during train()"
        self._state = {
            **_trained(trainer),
            "data": self._data,
            "trainer": RankZero(self._values),
            "of_rank": PerRank(self._of_rank),
            **_optional_entries(trainer),
            **self._extra,
        }
        if clash := sorted({*self._extra} & ({*self._state} - {*self._extra})):
            raise ConfigError(f"extra[{clash[0]!r}]: the Trainer's state has an entry of this name")
        for name, value in self._state.items():
            ckpt.add(name, value)
        ckpt.restore()
        if self._place is not None:
            self._random = tempfile.TemporaryDirectory()
            Trainer._save_rng_state(trainer, self._random.name)  # noqa: SLF001  of this process, for `begin`

    def begin(self) -> None:
        """Restore the values that the loop has just reset. Called once, before the first step."""
        trainer, place, saved = self._trainer, self._place, self._saved
        refuse_callbacks(trainer.callback_handler.callbacks, self._state)
        self._clock = (0.0, time.time())
        if saved is None or place is None:
            return
        take_over_sums(trainer, saved, self._of_rank.loaded if place.is_same_size else None)
        self._clock = (saved["seconds"], time.time())
        if self._random is not None:
            Trainer._load_rng_state(trainer, self._random.name)  # noqa: SLF001  other callbacks may have drawn
            self._random.cleanup()

    @property
    def is_resumed(self) -> bool:
        """Return whether this call resumes earlier training."""
        return self._place is not None

    def seconds_before(self) -> float:
        return self._clock[0]

    def ask_for_save(self, *, is_by_strategy: bool) -> None:
        """Record that the Trainer requests a save of this step. is_by_strategy: whether save_strategy asked for it."""
        self._is_asked |= self._joined.follows_strategy or not is_by_strategy

    def end_step(self) -> None:
        """End an optimizer step, after its logging and evaluation."""
        ckpt, state = self._live(), self._trainer.state
        tokens, self._tokens = int(state.num_input_tokens_seen) - self._tokens, int(state.num_input_tokens_seen)
        self._note_seconds()
        self.steps_ended = state.global_step
        ckpt.end_step(self._metrics(), tokens=tokens)
        self._save_if_asked()

    def end_epoch(self, *, is_stopping: bool) -> None:
        """End an epoch, after its logging and evaluation. is_stopping: training ends here, perhaps inside the epoch."""
        ckpt, data = self._live(), self._data
        assert data is not None, "an epoch has data"
        self._note_seconds()
        if data.epoch_step == data.batches_per_epoch or not is_stopping:
            ckpt.end_epoch()
        self._save_if_asked()

    def finish(self, *, best_step: int | None) -> None:
        """Save the last step before anything else changes the model. best_step: the step whose model to load then."""
        ckpt, trainer = self._live(), self._trainer
        self._note_seconds()
        ckpt.save(self._metrics())
        if best_step is None:
            return
        ckpt.wait()
        best = open_run(ckpt.uri).at(best_step)
        if trainer.is_deepspeed_enabled:
            others = ("optimizer", "scheduler", "counters")
            best.restore(into={"engine": trainer.deepspeed}, skip=[f"engine.{name}" for name in others])
        else:
            best.restore(into={"model": trainer.model})
        trainer.state.best_model_checkpoint = f"{ckpt.uri}/checkpoints/{best.key}"
        logger.info("the model is now the best one, of step %d (%s)", best_step, best.key)

    def _live(self) -> Checkpointer:
        assert self.ckpt is not None, "called during train()"
        return self.ckpt

    def _save_if_asked(self) -> None:
        if self._is_asked:
            self._is_asked = False
            self._live().save(self._metrics())

    def _note_seconds(self) -> None:
        assert self._values is not None, "set before training begins"
        before, began = self._clock
        self._values.seconds = before + time.time() - began

    def _metrics(self) -> dict[str, float]:
        """Return the numbers logged at exactly this step: an older evaluation says nothing about this model."""
        state = self._trainer.state
        found: dict[str, float] = {}
        for line in reversed(state.log_history):
            if line.get("step") != state.global_step:
                break
            found = {**{name: float(v) for name, v in line.items() if isinstance(v, Real)}, **found}
        found.pop("step", None)
        return found

    def _say(self) -> None:
        if self._trainer.args.process_index == 0:
            for text in self._joined.contradictions:
                logger.warning("ignored: %s", text)
            if self._joined.said:
                logger.info("from the Trainer's arguments: %s", "; ".join(self._joined.said))


@dataclass(frozen=True, kw_only=True, slots=True)
class _Place:
    """The position of a checkpoint's training. is_same_size: whether as many ranks wrote it as there are now."""

    step: int
    epoch: int
    epoch_step: int
    is_same_size: bool


class _AtTrainBegin(TrainerCallback):
    """The last callback of on_train_begin: it runs after the loop has reset its sums and before the first step."""

    def __init__(self, run: TrainerRun) -> None:
        self._run = run

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        del args, state, control, kwargs
        self._run.begin()


def _trained(trainer: Any) -> dict[str, object]:
    """Return the entries of model, optimizer and scheduler. An engine of DeepSpeed includes the first two, and the
    scheduler if the engine's configuration describes it."""
    if not trainer.is_deepspeed_enabled:
        return {"model": trainer.model, "optimizer": trainer.optimizer, "scheduler": trainer.lr_scheduler}
    scheduler, own = trainer.lr_scheduler, trainer.deepspeed.lr_scheduler
    is_of_engine = own is not None and own in (scheduler, getattr(scheduler, "scheduler", None))
    return {"engine": trainer.deepspeed, **({} if is_of_engine else {"scheduler": scheduler})}


def _tell_deepspeed(trainer: Any, accumulation: int) -> None:
    """Give DeepSpeed's configuration, which was made from the arguments, this number of micro-batches per step."""
    if trainer.is_deepspeed_enabled:
        args, config = trainer.args, trainer.accelerator.state.deepspeed_plugin.deepspeed_config
        config["gradient_accumulation_steps"] = accumulation
        config["train_batch_size"] = accumulation * args.per_device_train_batch_size * args.world_size


def _optional_entries(trainer: Any) -> dict[str, object]:
    """Return the entries that only some trainers have: a gradient scaler, a tokenizer, callbacks with state, and a
    reference model that training changes."""
    found: dict[str, object] = {}
    scaler = getattr(trainer.accelerator, "scaler", None)
    if scaler is not None:
        found["scaler"] = scaler
    if trainer.processing_class is not None and hasattr(trainer.processing_class, "save_pretrained"):
        found["processing_class"] = trainer.processing_class
    callbacks = trainer.callback_handler.callbacks
    stateful = [callback for callback in callbacks if hasattr(callback, "load_state_dict")]
    for number, callback in enumerate(stateful):
        found[f"callback_{type(callback).__name__}_{number}"] = callback
    synced = [callback for callback in callbacks if type(callback).__name__ == "SyncRefModelCallback"]
    if synced:
        found["ref_model"] = synced[0].ref_model
    return found


def _reports_to_ray(callback: object) -> bool:
    """Return whether this is Ray's callback, which reports checkpoints from a folder. raycheck reports them itself."""
    kinds = [(base.__module__.partition(".")[0], base.__name__) for base in type(callback).__mro__]
    return ("ray", "RayTrainReportCallback") in kinds
