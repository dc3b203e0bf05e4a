"""What a script with Lightning's Trainer uses: the Callback, which does everything, and `fit`, which adds it."""

from functools import cache
from typing import Any

from raycheck.adapters import Group, SaveSettings
from raycheck.errors import ConfigError
from raycheck.frameworks.lightning.fit_session import FitSession
from raycheck.frameworks.lightning.packages import imported_package, named, package_of


def Callback(  # noqa: N802  to the user it is the class of a callback, made for whichever package is imported
    settings: SaveSettings | None = None, *, group: Group | None = None, data_position: bool = True
) -> Any:
    """Returns a callback for Trainer(callbacks=[...]) that restores, saves and reports a fit; it needs nothing else.

    settings: when and how to save; a step is a batch after which an optimizer has stepped. group: this rank's place in
    a group outside Ray Train; by default Ray Train's. data_position: whether the position in the training data is
    saved, for which a plain DataLoader becomes raycheck.Batches. False leaves the loaders as they are: an epoch that
    was cut off goes on at their beginning.

    Raises ConfigError when Lightning is absent or too old. What a Trainer has that is not supported is refused when its
    fit begins.
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
    """Runs trainer.fit() with raycheck's Callback, which is added if the Trainer has none.

    The arguments are those of Trainer.fit. train_dataloaders: also a LightningDataModule, or raycheck.Batches.
    ckpt_path: a file of Lightning's to begin a fresh run from; a run that has checkpoints goes on from its own.
    settings: for a Callback that is added.

    Raises ConfigError when the Trainer has the Callback and settings are given too, and as the fit does.
    """
    package_of(trainer)
    has_callback = any(hasattr(callback, "is_raycheck") for callback in trainer.callbacks)
    if has_callback and settings is not None:
        raise ConfigError("the Trainer has raycheck's Callback already, with settings of its own: leave settings out")
    if not has_callback:
        trainer.callbacks.insert(0, Callback(settings))
    trainer.fit(model, train_dataloaders, val_dataloaders, datamodule=datamodule, ckpt_path=ckpt_path)


class FitHooks:
    """Begins and ends raycheck's side of a fit by Lightning's hooks of a callback."""

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
    """Returns how many workers train together."""
    if group is not None:
        return group.world_size
    import torch.distributed as dist

    return dist.get_world_size() if dist.is_initialized() else 1


@cache
def _class_of(package: str) -> type:
    return type("RaycheckCallback", (FitHooks, named(package, "callbacks", "Callback")), {"__module__": __name__})
