"""Counts kept by the Trainer and its callbacks, as entries of the state.

One entry holds rank 0's values. Every rank takes them from the checkpoint's preview before its loop counts from them.
The other entry holds each rank's own values. Values are restored into the existing objects; transformers would instead
create a new callback by the name of its class.
"""

import logging
from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from raycheck.frameworks.transformers.unsaved_counts import UnsavedCounts

logger = logging.getLogger("raycheck")

_COUNTED = (
    "epoch",
    "global_step",
    "num_input_tokens_seen",
    "total_flos",
    "log_history",
    "best_metric",
    "best_global_step",
    "best_model_checkpoint",
)
"""Fields of TrainerState that training changes. The others follow from the current arguments."""
_LOSS = ("_total_loss_scalar", "_globalstep_last_logged", "_initial_global_step")
_OF_TRL = ("_total_train_tokens", "entropy_coef", "_last_world_entropy")
"""Counts of TRL's trainers, equal on all ranks."""


class TrainerValues:
    """The entry with rank 0's values: TrainerState, callbacks, running sums for the log, and facts to compare.

    facts: values with which a restart compares its own arguments.
    """

    def __init__(self, trainer: Any, facts: Mapping[str, object]) -> None:
        self._trainer = trainer
        self._facts = dict(facts)
        self._began = dict(_callback_states(trainer))
        self._unsaved = UnsavedCounts(trainer.callback_handler.callbacks)
        self.seconds = 0.0

    def state_dict(self) -> dict[str, Any]:
        trainer = self._trainer
        if trainer.state.global_step:
            self._unsaved.warn()
        metrics = getattr(trainer, "_metrics", {}).get("train", {})
        return {
            "state": {name: getattr(trainer.state, name) for name in _COUNTED},
            "stopped": trainer.control.should_training_stop and trainer.state.global_step < trainer.state.max_steps,
            "max_steps": trainer.state.max_steps,
            "callbacks": dict(_callback_states(trainer)),
            "callbacks_began": self._began,
            "loss": {name: getattr(trainer, name, 0) for name in _LOSS},  # created by the loop at its start
            "trl": {name: getattr(trainer, name) for name in _OF_TRL if hasattr(trainer, name)},
            "metrics": {name: list(values) for name, values in metrics.items()},
            "seconds": self.seconds,
            "facts": self._facts,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Do nothing: `take_over_state` and `take_over_sums` have read the values from the preview on every rank."""


def take_over_state(trainer: Any, saved: Mapping[str, Any]) -> None:
    """Copy saved counts into a new TrainerState, and saved callback state into the existing callbacks."""
    for name in _COUNTED:
        setattr(trainer.state, name, saved["state"][name])
    for name, value in saved["trl"].items():
        setattr(trainer, name, value)
    if hasattr(trainer, "_metrics"):
        trainer._metrics["train"] = defaultdict(list, {name: list(v) for name, v in saved["metrics"].items()})  # noqa: SLF001
    here = dict(_callbacks(trainer))
    for name, state in saved["callbacks"].items():
        if name in here:
            _fill_callback(name, here[name], state, saved["callbacks_began"].get(name, state))
        else:
            logger.warning("the checkpoint has state of the callback %s, which the trainer does not have", name)


def take_over_sums(trainer: Any, saved: Mapping[str, Any], of_rank: Mapping[str, Any] | None) -> None:
    """Restore the running loss, so that the next logged value continues from before the restart.

    of_rank: this rank's values. None after a resize: the sum since the last log line is then missing from the next line
    and from the run's mean loss.
    """
    for name in _LOSS:
        setattr(trainer, name, saved["loss"][name])
    if of_rank is None:
        step = trainer.state.global_step
        trainer._initial_global_step += step - trainer._globalstep_last_logged  # noqa: SLF001
        trainer._globalstep_last_logged = step  # noqa: SLF001
        return
    trainer._tr_loss = torch.tensor(of_rank["loss"], device=trainer.args.device)  # noqa: SLF001
    trainer.current_flos = of_rank["flos"]
    if "buffered" in of_rank:
        trainer._buffered_inputs = trainer._prepare_input(of_rank["buffered"])  # noqa: SLF001  onto its device


class RankValues:
    """The entry with each rank's own values: the loss since the last log, and GRPO's generations.

    loaded: the restored values; None in a fresh run.
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self.loaded: dict[str, Any] | None = None

    def state_dict(self) -> dict[str, Any]:
        trainer = self._trainer
        found = {
            "loss": float(getattr(trainer, "_tr_loss", 0.0)),
            "flos": trainer.current_flos,
        }
        if hasattr(trainer, "_buffered_inputs"):
            found["buffered"] = trainer._buffered_inputs  # noqa: SLF001  they last for several steps
        return found

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.loaded = state


def _callbacks(trainer: Any) -> Iterator[tuple[str, Any]]:
    """Yield the callbacks that export their state, named by class and by their number within the class."""
    from transformers.trainer_callback import ExportableState

    count: dict[str, int] = defaultdict(int)
    for callback in trainer.callback_handler.callbacks:
        if isinstance(callback, ExportableState):
            name = type(callback).__qualname__
            yield f"{name}.{count[name]}", callback
            count[name] += 1


def _callback_states(trainer: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    return ((name, callback.state()) for name, callback in _callbacks(trainer))


def _fill_callback(name: str, callback: Any, saved: Mapping[str, Any], began: Mapping[str, Any]) -> None:
    """Load saved state into a callback. Arguments that the script has changed since training started stay as given."""
    live = callback.state()
    for key, value in saved.get("attributes", {}).items():
        setattr(callback, key, value)
    for key, value in saved.get("args", {}).items():
        if live.get("args", {}).get(key) == began.get("args", {}).get(key):
            setattr(callback, key, value)
        else:
            logger.info("%s: %s is taken from the script, not from the checkpoint", name, key)
