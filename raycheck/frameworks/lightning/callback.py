"""The interface for scripts with Lightning's Trainer: the Callback, which does everything, and `fit`, which adds it."""

from functools import cache
from typing import Any

from raycheck.adapters import Group, SaveSettings
from raycheck.errors import ConfigError
from raycheck.frameworks.lightning.fit_session import FitSession
from raycheck.frameworks.lightning.packages import imported_package, named, package_of


def Callback(  # noqa: N802  users see a callback class, built for whichever package is imported
    settings: SaveSettings | None = None, *, group: Group | None = None, data_position: bool = True
) -> Any:
    """Return a callback for Trainer(callbacks=[...]) that restores, saves, and reports a fit.

    settings: when and how to save; a step is a batch after which an optimizer has stepped. group: the rank's group
    outside Ray Train; default: Ray Train's worker group. data_position: whether to save the position in the training
    data; if so, a plain DataLoader becomes raycheck.Batches. False leaves the loaders unchanged, and an interrupted
    epoch restarts at their first batch.

    Raises ConfigError when Lightning is missing or too old. Unsupported parts of a Trainer are refused when its fit
    starts.
    """
    return _class_of(imported_package())(settings or SaveSettings(), group, keeps_position=data_position)


def fit(  # noqa: PLR0917  the arguments of Trainer.fit, in its order
    trainer: Any,
    model: Any,
    train_dataloaders: Any = None,
    val_dataloaders: Any = None,
    datamodule: Any = None,
    ckpt_path: Any = None,
    *,
    settings: SaveSettings | None = None,
) -> None:
    """Run trainer.fit() with raycheck's Callback, adding it if the Trainer has none.

    The arguments are those of Trainer.fit. train_dataloaders: may also be a LightningDataModule or raycheck.Batches.
    ckpt_path: a Lightning file from which a fresh run starts; a run with checkpoints resumes from its own. settings:
    for the Callback, if this call adds it.

    Raises ConfigError if settings are given although the Trainer has the Callback, and the errors of the fit.
    """
    package_of(trainer)
    has_callback = any(hasattr(callback, "is_raycheck") for callback in trainer.callbacks)
    if has_callback and settings is not None:
        raise ConfigError("the Trainer already has raycheck's Callback, with its own settings: leave settings out")
    if not has_callback:
        trainer.callbacks.insert(0, Callback(settings))
    trainer.fit(model, train_dataloaders, val_dataloaders, datamodule=datamodule, ckpt_path=ckpt_path)


class FitHooks:
    """Lightning's callback hooks that start and end raycheck's part of a fit."""

    is_raycheck = True

    def __init__(self, settings: SaveSettings, group: Group | None, *, keeps_position: bool) -> None:
        self._settings = settings
        self._group = group
        self._keeps_position = keeps_position
        self._session: FitSession | None = None

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        del pl_module
        if stage != "fit" or trainer.fast_dev_run:
            return
        self._session = FitSession(
            trainer,
            self._settings,
            group=self._group,
            keeps_position=self._keeps_position,
            world_size=_workers(self._group),
        )

    def on_fit_end(self, trainer: Any, pl_module: Any) -> None:
        del trainer, pl_module
        session, self._session = self._session, None
        if session is not None:
            session.end()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        del trainer, pl_module
        session, self._session = self._session, None
        if session is not None:
            session.abandon(exception)


def _workers(group: Group | None) -> int:
    """Return how many workers train together."""
    if group is not None:
        return group.world_size
    import torch.distributed as dist

    return dist.get_world_size() if dist.is_initialized() else 1


@cache
def _class_of(package: str) -> type:
    return type("RaycheckCallback", (FitHooks, named(package, "callbacks", "Callback")), {"__module__": __name__})
