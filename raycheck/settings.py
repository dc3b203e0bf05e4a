"""What a user tunes about saving. Plain data, checked whole at construction."""

from dataclasses import dataclass

from raycheck.errors import ConfigError


@dataclass(frozen=True, kw_only=True, slots=True)
class SaveSettings:
    """When to save, what to keep, and how long to wait.

    every_steps: save after each so many optimizer steps; None turns the step trigger off.
    every_seconds: save when so many seconds passed since the last save began; None turns the time trigger off.
    keep_last: how many of the newest committed checkpoints stay; older ones leave `latest` in the same swap that
        commits a newer one, and their objects are deleted after a grace for readers.
    save_timeout_s: how long a save may take from its start to the commit before it counts as failed.
    max_failed_saves: so many failed saves in a row end the training with SaveFailedError; fewer are logged.

    Raises ConfigError when a value cannot work.
    """

    every_steps: int | None = 100
    every_seconds: float | None = None
    keep_last: int = 10
    save_timeout_s: float = 600.0
    max_failed_saves: int = 3

    def __post_init__(self) -> None:
        for name in ("every_steps", "keep_last", "max_failed_saves"):
            value = getattr(self, name)
            if value is not None and (type(value) is not int or value < 1):
                raise ConfigError(f"SaveSettings({name}={value!r}): give a whole number of at least 1")
        for name in ("every_seconds", "save_timeout_s"):
            value = getattr(self, name)
            if value is not None and not (isinstance(value, int | float) and value > 0):
                raise ConfigError(f"SaveSettings({name}={value!r}): give a number of seconds above 0")
