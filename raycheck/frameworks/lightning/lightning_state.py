"""The state entry for everything in Lightning's own checkpoint except weights and optimizers, as Lightning collects it.

It contains loops, callbacks, schedulers, the precision plugin, the datamodule, and whatever the user's
on_save_checkpoint adds. As in Lightning's own files, the values are rank 0's: they are stored as a module's extra
state, which may differ from rank to rank and of which only the first rank's is saved.
"""

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from raycheck.errors import ConfigError
from raycheck.frameworks.lightning.packages import named
from raycheck.frameworks.lightning.strategies import engine_of

logger = logging.getLogger("raycheck")

HYPER_PARAMETERS = ("hyper_parameters", "datamodule_hyper_parameters")
PLAIN = (bool, int, float, str, bytes, type(None), torch.dtype, torch.device)


class LightningState(torch.nn.Module):
    """The entry `lightning`. saved: the restored values, None before a restore.

    more: a function that returns raycheck's own values, saved along with Lightning's.
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
        """Return Lightning's checkpoint without the parts that other entries hold.

        Nothing is gathered or copied: Lightning sees the live tensors. Raises ConfigError if a user's hook replaced
        weights, because raycheck saves the live ones.
        """
        trainer = self._trainer
        live = dict(trainer.lightning_module.state_dict())
        shown: dict[str, Any] = {"lightning_module_state_dict": lambda: dict(live)}
        if engine_of(trainer) is None:
            shown["optimizer_state"] = lambda one: one.state_dict()
        else:  # what its optimizer returns is a copy
            shown["optimizer_state"] = lambda _one: {}
        with _shadowed(trainer.strategy, shown):
            checkpoint: dict[str, Any] = trainer._checkpoint_connector.dump_checkpoint(weights_only=False)
        if has_weight_averaging(trainer, self._package):  # the averaged model is a separate entry
            checkpoint["state_dict"] = checkpoint.pop("current_model_state", checkpoint["state_dict"])
            checkpoint.pop("averaging_state", None)
        replaced = [name for name, value in checkpoint.pop("state_dict", {}).items() if live.get(name) is not value]
        if replaced:
            raise ConfigError(
                f"an on_save_checkpoint puts other tensors into checkpoint['state_dict'] ({', '.join(replaced[:3])}). "
                "raycheck saves the live weights, each once; store other tensors under another key"
            )
        checkpoint.pop("optimizer_states", None)
        for key in HYPER_PARAMETERS:
            if key in checkpoint:
                checkpoint[key] = self._plain(key, checkpoint[key])
        checkpoint.pop("hparams_type", None)  # a class; only load_from_checkpoint reads these keys
        return checkpoint

    def _plain(self, key: str, values: Mapping[str, Any]) -> dict[str, Any]:
        """Return the hyperparameters that are plain values. Restoring a fit reads none of them."""
        left = sorted(name for name, value in values.items() if not _is_plain(value))
        if left and key not in self._said and self._trainer.global_rank == 0:
            self._said.add(key)
            logger.info("%s: hyperparameters that are objects are not saved: %s", key, ", ".join(left))
        return {name: value for name, value in values.items() if name not in left}


def weight_averagings(trainer: Any, package: str) -> list[Any]:
    """Return the Trainer's callbacks that keep averaged weights in a separate model."""
    return [one for one in trainer.callbacks if isinstance(one, named(package, "callbacks", "WeightAveraging"))]


def has_weight_averaging(trainer: Any, package: str) -> bool:
    return bool(weight_averagings(trainer, package))


@contextmanager
def _shadowed(obj: Any, methods: Mapping[str, Any]) -> Iterator[None]:
    """Replace an object's methods temporarily."""
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
    if isinstance(value, list | tuple) and type(value) in (list, tuple):
        return all(map(_is_plain, value))
    return type(value) in PLAIN or type(value) is torch.Tensor
