"""Tells apart the two packages that PyTorch Lightning is installed as: `lightning.pytorch` and `pytorch_lightning`.

Their classes have the same names and are not the same classes, so everything here is made for the one that the script
uses. No module of this folder imports either of them by itself.
"""

import sys
from importlib import import_module
from typing import Any

from raycheck.errors import ConfigError
from raycheck.frameworks.versions import require

DISTRIBUTIONS = {"lightning.pytorch": "lightning", "pytorch_lightning": "pytorch-lightning"}
TESTED = "2.6.6"


def imported_package() -> str:
    """Returns the name of the package that the script has imported; that of `lightning.pytorch` if it is both or none.

    Raises ConfigError when it is not installed, or older than the version that was tested.
    """
    loaded = [name for name in DISTRIBUTIONS if name in sys.modules]
    package = loaded[0] if loaded else next(iter(DISTRIBUTIONS))
    require(DISTRIBUTIONS[package], TESTED, extra="lightning")
    return package


def package_of(trainer: object) -> str:
    """Returns the name of the package that a Trainer's class comes from. Raises ConfigError for anything else."""
    for base in type(trainer).__mro__:
        for package in DISTRIBUTIONS:
            if base.__module__.startswith(f"{package}.trainer"):
                return package
    raise ConfigError(f"{type(trainer).__qualname__} is no Trainer of lightning.pytorch or pytorch_lightning")


def named(package: str, module: str, name: str) -> Any:
    """Returns a class or function of the package, such as ("callbacks", "ModelCheckpoint")."""
    return getattr(import_module(f"{package}.{module}"), name)
