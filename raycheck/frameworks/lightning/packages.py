"""Distinguishes the two packages that PyTorch Lightning is installed as: `lightning.pytorch` and `pytorch_lightning`.

Their classes have the same names but are different classes, so everything here is built for the package that the script
uses. No module of this folder imports either package at import time.
"""

import sys
from importlib import import_module
from typing import Any

from raycheck.errors import ConfigError
from raycheck.frameworks.versions import require

DISTRIBUTIONS = {"lightning.pytorch": "lightning", "pytorch_lightning": "pytorch-lightning"}
TESTED = "2.6.6"


def imported_package() -> str:
    """Return the name of the package that the script imported, or `lightning.pytorch` if it imported both or neither.

    Raises ConfigError when the package is not installed or is older than the oldest tested version.
    """
    loaded = [name for name in DISTRIBUTIONS if name in sys.modules]
    package = loaded[0] if loaded else next(iter(DISTRIBUTIONS))
    require(DISTRIBUTIONS[package], TESTED, extra="lightning")
    return package


def package_of(trainer: object) -> str:
    """Return the name of the package that defines a Trainer's class. Raises ConfigError for any other object."""
    for base in type(trainer).__mro__:
        for package in DISTRIBUTIONS:
            if base.__module__.startswith(f"{package}.trainer"):
                return package
    raise ConfigError(f"{type(trainer).__qualname__} is not a Trainer of lightning.pytorch or pytorch_lightning")


def named(package: str, module: str, name: str) -> Any:
    """Return a class or function of the package, such as ("callbacks", "ModelCheckpoint")."""
    return getattr(import_module(f"{package}.{module}"), name)
