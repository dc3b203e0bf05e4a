"""Where a run lies, by what its RunConfig says of Ray's storage, and Ray's own way to that place."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from raycheck.bucket.store.arrow import ray_filesystem, uri_of
from raycheck.bucket.store.uri import join_uri
from raycheck.errors import ConfigError

_DEFAULT_NAME = re.compile(r"ray_train_run-\d{4}-\d{2}-\d{2}.*")


def storage_uri(config: Any) -> str:
    """Ray's storage path as a URI. Raises ConfigError for a run that could never be resumed."""
    if not config.name or _DEFAULT_NAME.fullmatch(config.name):
        raise ConfigError(
            "RunConfig(name=...) is not set, so Ray makes up a new name each time and nothing could ever resume. "
            "Give the run a name"
        )
    if config.storage_filesystem is not None:
        return uri_of(config.storage_filesystem, str(config.storage_path))
    return str(config.storage_path)


def run_uri(config: Any) -> str:
    """The run's root: Ray's storage path and run name. Raises ConfigError as storage_uri does."""
    return join_uri(storage_uri(config), config.name)


@contextmanager
def ray_storage(config: Any, uri: str) -> Iterator[None]:
    """In the block Ray, too, writes to the storage at `uri`, with all its settings."""
    before = config.storage_path, config.storage_filesystem
    if uri != storage_uri(config):
        config.storage_path, config.storage_filesystem = uri, None
    if config.storage_filesystem is None:
        config.storage_path, config.storage_filesystem = ray_filesystem(uri) or (config.storage_path, None)
    try:
        yield
    finally:
        config.storage_path, config.storage_filesystem = before
