"""torchtitan's CheckpointManager, saving to and restoring from a raycheck run.

The trainer calls `load` once and `save` after each step; this module implements both. raycheck decides when a save is
due, from `interval` and on a preemption notice.
"""

import os
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro
from torch import nn
from torchtitan.components.checkpointer.base import BaseCheckpointManager
from torchtitan.tools import filesystem

from raycheck.adapters import Checkpointer, PerRank, SaveSettings, torchrun_group
from raycheck.errors import ConfigError
from raycheck.frameworks.torchtitan.first_weights import load_first_weights
from raycheck.frameworks.torchtitan.parts import Counters, is_trainer, whole
from raycheck.frameworks.torchtitan.position import ENTRY, LoaderPosition, Steps
from raycheck.frameworks.torchtitan.resplit import Resplit

TORCHRUN = "TORCHELASTIC_RUN_ID"
"""An environment variable that torchrun sets, and Ray Train does not."""


class CheckpointManager(BaseCheckpointManager):
    """The checkpoint manager that torchtitan's trainer creates from the Config."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseCheckpointManager.Config):
        """Settings of raycheck in torchtitan's terms: when to save, what to keep, and where.

        folder: under torchrun, the run's URI, such as "s3://bucket/runs/my-run", or a folder in dump_folder. Inside Ray
        Train, Ray determines the run; keep the default.
        """

        # torchtitan's command line prints the strings below the fields, so these two are not described above.
        async_mode: Literal["disabled", "async", "async_with_pinned_mem"] = "async"
        """Whether training waits for each commit ("disabled"), or only for the copy into host memory."""

        settings: Annotated[SaveSettings | None, tyro.conf.Suppress] = None
        """More triggers and retention rules, in addition to `interval` and `keep_latest_k`."""

        def __post_init__(self) -> None:
            own: Any = self
            keep, in_hf = own.keep_latest_k, own.initial_load_in_hf
            if keep == 1:  # torchtitan requires two because its newest folder may be half written
                own.keep_latest_k = 2
            if filesystem.is_remote(own.initial_load_path or "") and not own.initial_load_in_hf_quantized:
                own.initial_load_in_hf = False  # torchtitan cannot read Hugging Face files from a bucket; we read runs
            BaseCheckpointManager.Config.__post_init__(self)
            own.keep_latest_k, own.initial_load_in_hf = keep, in_hf
            if own.enable:
                _check(self)

    enable: bool

    def __init__(
        self,
        config: Config,
        *,
        dataloader: Any,
        model_parts: list[nn.Module],
        optimizers: Any,
        lr_schedulers: Any,
        states: dict[str, Any],
        sd_adapter: Any,
        base_folder: str = "",
    ) -> None:
        self.enable = config.enable
        self.save_future = None  # the trainer has nothing to wait for
        if not self.enable:
            return
        self._config = config
        self._parts = model_parts
        self._adapter = sd_adapter
        self._model = whole(model_parts)
        trainer = states.get("train_state")
        self._position = LoaderPosition(
            dataloader, Resplit(dataloader, getattr(getattr(trainer, "config", None), "dataloader", None))
        )
        self._step = 0
        self._is_loaded = False
        parts = list(optimizers)
        counters = Counters(trainer) if is_trainer(trainer) else None
        steps = Steps(dataloader, counters.samples_per_step if counters else 0)
        self._tokens_per_step = counters.tokens_per_step if counters else 0
        state = {
            **states,
            "model": self._model,
            "optimizer": parts[0] if len(parts) == 1 else parts,
            "lr_scheduler": lr_schedulers,
            "steps": steps,
            ENTRY: PerRank(self._position),
        }
        if counters:
            state["train_state"] = counters
        unknown = set(config.exclude_from_loading) - state.keys()
        if unknown:
            raise ConfigError(f"exclude_from_loading: there is no entry {min(unknown)!r}; there are {', '.join(state)}")
        self._checkpointer = Checkpointer(state, _settings_of(config), group=_group(config, base_folder))

    def _load(self, step: int = -1) -> bool:
        """Restore the newest checkpoint or that of `load_step`; in a fresh run, load the initial weights."""
        if step != self._config.load_step:
            raise ConfigError(
                f"load(step={step}): set load_step in the Config instead, where it is {self._config.load_step}"
            )
        skip = self._config.exclude_from_loading
        is_restart = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"
        preview = self._checkpointer.peek(at=None if step == -1 or is_restart else step, skip=skip)
        takes_data = preview.will_restore(ENTRY)
        if takes_data:
            self._position.check([own[ENTRY] for own in preview.rank_values if ENTRY in own])
        at = self._checkpointer.restore(skip=skip)
        self._step, self._is_loaded = at.step, True
        if takes_data:
            self._position.go()
        if not preview.is_fresh:
            return True
        return load_first_weights(self._config, self._model, self._parts, self._adapter)

    def _save(self, curr_step: int, last_step: bool = False) -> bool:
        """End a step and save it if due. The last step is committed when this returns."""
        if curr_step == 0:  # create_seed_checkpoint
            if not self._is_loaded:
                self._load(self._config.load_step)
            self._checkpointer.close()
            return True
        if not self._is_loaded:
            raise ConfigError("raycheck.torchtitan: call load() before the first step, even in a fresh run")
        if curr_step != self._step + 1:
            raise ConfigError(
                f"save(step {curr_step}) was called after step {self._step}; each step is saved or counted only once"
            )
        self._step = curr_step
        self._checkpointer.end_step(tokens=self._tokens_per_step)
        if last_step:
            self._checkpointer.close()
        elif self._config.async_mode == "disabled" and self._is_due(curr_step):
            self._checkpointer.wait()
        return last_step or self._is_due(curr_step)

    def _is_due(self, step: int) -> bool:
        return step % self._config.interval == 0 or (step == 1 and self._config.enable_first_step_checkpoint)

    def _maybe_wait_for_staging(self) -> None:
        """Do nothing: the copy into host memory is complete when `save` returns."""

    def _wait_for_saving(self) -> None:
        self._checkpointer.wait()

    def _close(self) -> None:
        """Save the last step; if training failed, only wait for the saves in flight."""
        checkpointer = getattr(self, "_checkpointer", None)
        if checkpointer is None or checkpointer.is_closed:
            return
        error = sys.exc_info()[1]  # torchtitan calls close() while handling the error
        if error is None:
            checkpointer.close()
        else:
            checkpointer.__exit__(type(error), error, error.__traceback__)


def _check(config: CheckpointManager.Config) -> None:
    """Raise ConfigError for settings that cannot be honored."""
    if config.load_only:
        raise ConfigError(
            "load_only=True: a run that saves nothing does not need raycheck's CheckpointManager; load the weights "
            "with initial_load_path, in a new run, or with raycheck.open_run(uri).restore"
        )
    if config.last_save_in_hf:
        raise ConfigError(
            "last_save_in_hf=True: raycheck saves the complete last step, so that training can continue from it. "
            "Convert it to Hugging Face files afterwards, as `raycheck docs torchtitan` shows: "
            "raycheck.open_run(uri).restore, then torchtitan's state_dict_adapter"
        )
    if config.initial_load_path and not config.initial_load_model_only:
        raise ConfigError(
            "initial_load_model_only=False: to start from the full state of another run, use raycheck.fit(trainer, "
            "resume=uri), or 'raycheck fork' and the new run's name"
        )
    settings = config.settings
    if settings is not None and settings.every_steps != SaveSettings().every_steps:
        raise ConfigError(
            f"settings.every_steps={settings.every_steps}: set `interval` instead, which torchtitan also uses"
        )


def _settings_of(config: CheckpointManager.Config) -> SaveSettings:
    settings = config.settings or SaveSettings()
    at_steps = {*settings.at_steps, *([1] if config.enable_first_step_checkpoint else [])}
    return replace(
        settings, every_steps=config.interval, keep_last=config.keep_latest_k or None, at_steps=sorted(at_steps)
    )


def _group(config: CheckpointManager.Config, base_folder: str) -> Any:
    """Return the group under torchrun, or None inside Ray Train, whose group the Checkpointer finds automatically."""
    if TORCHRUN not in os.environ:
        if config.load_step != -1:
            raise ConfigError(
                f"load_step={config.load_step}: inside Ray Train give raycheck.fit(trainer, resume={config.load_step})"
            )
        if filesystem.is_remote(config.folder):
            raise ConfigError(
                f"folder={config.folder!r}: inside Ray Train, RunConfig(storage_path=, name=) determines the run's "
                "location; leave folder out"
            )
        return None
    folder = config.folder
    uri = folder if filesystem.is_remote(folder) else Path(base_folder or ".", folder).absolute().as_uri()
    return torchrun_group(uri)
