"""Refuses a framework that is not installed or too old, before an adapter or the Tinker server imports it."""

from importlib.metadata import PackageNotFoundError, version

from packaging.version import Version

from raycheck.errors import ConfigError


def require(distribution: str, at_least: str, *, extra: str) -> None:
    """Raise ConfigError, with the command to run, unless a distribution is installed in this version or a newer one.

    distribution: its name for pip. at_least: the oldest version tested with the adapter. extra: the raycheck extra that
    installs it.
    """
    advice = f"pip install 'raycheck[{extra}]'"
    try:
        found = version(distribution)
    except PackageNotFoundError:
        raise ConfigError(f"{distribution} is not installed, and raycheck needs it here: {advice}") from None
    if Version(found) < Version(at_least):
        raise ConfigError(
            f"{distribution} {found} is older than {at_least}, the oldest version that raycheck supports: {advice}"
        )
