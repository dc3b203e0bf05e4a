"""Makes an entry of what Lightning's own checkpoint holds beside weights and optimizers, as Lightning collects it.

Loops, callbacks, schedulers, precision plugin, datamodule, and whatever the user's on_save_checkpoint adds. It is rank
0's, as in Lightning's own files: it is the extra state of a module, which may differ from rank to rank, and of which
the first rank's is kept.
"""

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from raycheck.errors import ConfigError
from raycheck.frameworks.lightning.packages import named

logger = logging.getLogger("raycheck")

HYPER_PARAMETERS = ("hyper_parameters", "datamodule_hyper_parameters")
PLAIN = (bool, int, float, str, bytes, type(None), torch.dtype, torch.device)


class LightningState(torch.nn.Module):
    """Is the entry `lightning`. saved: what a restore has read, None before.

    more: returns values of raycheck's own, which are kept beside Lightning's.
    """

    def __init__(self, trainer: Any = None, package: str = "", more: Any = dict) -> None:
        super().__init__()
        self._trainer = trainer
        self._package = package
        self._more = more
        self._said: set[str] = set()
        self.saved: dict[str, Any] | None = None

    def get_extra_state(self) -> dict[str, Any]:
        return {"checkpoint": self._collected(), "raycheck": self._more()} if self._trainer is not None else {}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        self.saved = state

    def _collected(self) -> dict[str, Any]:
        """Returns Lightning's checkpoint without what other entries hold.

        Nothing is gathered or copied: Lightning is shown the live tensors. Raises ConfigError when a user's hook
        replaced weights, since the live ones are what is saved.
        """
        trainer = self._trainer
        live = dict(trainer.lightning_module.state_dict())
        shown = {"lightning_module_state_dict": lambda: dict(live), "optimizer_state": lambda one: one.state_dict()}
        with _shadowed(trainer.strategy, shown):
            checkpoint: dict[str, Any] = trainer._checkpoint_connector.dump_checkpoint(weights_only=False)
        if has_weight_averaging(trainer, self._package):  # the averaged model is an entry of its own
            checkpoint["state_dict"] = checkpoint.pop("current_model_state", checkpoint["state_dict"])
            checkpoint.pop("averaging_state", None)
        replaced = [name for name, value in checkpoint.pop("state_dict", {}).items() if live.get(name) is not value]
        if replaced:
            raise ConfigError(
                f"an on_save_checkpoint puts other tensors into checkpoint['state_dict'] ({', '.join(replaced[:3])}). "
                "raycheck saves the live weights, each once; put other tensors under a key of their own"
            )
        checkpoint.pop("optimizer_states", None)
        for key in HYPER_PARAMETERS:
            if key in checkpoint:
                checkpoint[key] = self._plain(key, checkpoint[key])
        checkpoint.pop("hparams_type", None)  # a class; with it goes what only load_from_checkpoint reads
        return checkpoint

    def _plain(self, key: str, values: Mapping[str, Any]) -> dict[str, Any]:
        """Returns those hyperparameters that are plain values. No restore of a fit reads any of them."""
        left = sorted(name for name, value in values.items() if not _is_plain(value))
        if left and key not in self._said and self._trainer.global_rank == 0:
            self._said.add(key)
            logger.info("%s that are objects are not saved: %s", key, ", ".join(left))
        return {name: value for name, value in values.items() if name not in left}


def weight_averagings(trainer: Any, package: str) -> list[Any]:
    """Returns the Trainer's callbacks that keep averaged weights as a model of their own."""
    return [one for one in trainer.callbacks if isinstance(one, named(package, "callbacks", "WeightAveraging"))]


def has_weight_averaging(trainer: Any, package: str) -> bool:
    return bool(weight_averagings(trainer, package))


@contextmanager
def _shadowed(obj: Any, methods: Mapping[str, Any]) -> Iterator[None]:
    """Give an object other methods for a moment."""
    for name, method in methods.items():
        setattr(obj, name, method)
    try:
        yield
    finally:
        for name in methods:
            delattr(obj, name)


def _is_plain(value: object) -> bool:
    if type(value) is dict:
        return all(type(key) is str and _is_plain(item) for key, item in value.items())
    if type(value) in (list, tuple):
        return all(map(_is_plain, value))  # type: ignore[call-overload]
    return type(value) in PLAIN or type(value) is torch.Tensor
