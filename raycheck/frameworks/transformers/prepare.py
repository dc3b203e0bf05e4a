"""The call for scripts, after they have created a trainer. transformers is imported once its version is checked."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, TypeVar

from raycheck.adapters import Group, SaveSettings
from raycheck.frameworks.versions import require

if TYPE_CHECKING:
    from transformers import Trainer

T = TypeVar("T", bound="Trainer")


def prepare(
    trainer: T,
    settings: SaveSettings | None = None,
    *,
    extra: Mapping[str, object] | None = None,
    group: Group | None = None,
) -> T:
    """Make a transformers or TRL trainer save to and resume from the run's bucket.

    Call it in the training function once the trainer is complete, either instead of Ray's `prepare_trainer` or after
    it. The trainer's class is replaced by a subclass of it. `trainer.train()` then resumes from the run's newest
    checkpoint, or starts a new run.

    settings: when and how to save. What they leave open, the trainer's arguments decide (save_strategy, save_steps,
        save_total_limit, metric_for_best_model).
    extra: further entries of the state, by name, such as a moving average of the weights, a reference model, or an
        object with state_dict and load_state_dict.
    group: the rank's group outside Ray Train; default: Ray Train's worker group.

    Returns the trainer itself. Raises ConfigError, naming the setting, for what cannot be saved or restored.
    """
    require("transformers", "5.23", extra="hf")
    require("accelerate", "1.15", extra="hf")
    from raycheck.frameworks.transformers.refusals import refuse_trainer
    from raycheck.frameworks.transformers.resumable_trainer import ResumableTrainer
    from raycheck.frameworks.transformers.trainer_run import TrainerRun

    refuse_trainer(trainer)
    run = TrainerRun(trainer, settings, extra or {}, group)
    own: type = trainer.__class__
    trainer.__class__ = type(own.__name__, (ResumableTrainer, own), {"__module__": own.__module__, "raycheck_run": run})
    return trainer
