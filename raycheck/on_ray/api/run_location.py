"""Finds a run's URI in its RunConfig, and proves that Ray's own file system reaches the same place."""

import pickle
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any
from uuid import uuid4

from raycheck.bucket.format import object_keys
from raycheck.bucket.store import Store
from raycheck.bucket.store.address import join_uri, kind_of
from raycheck.bucket.store.ray_filesystem import ray_filesystem, uri_of
from raycheck.errors import ConfigError, NotFoundError, RaycheckError

START_S = 60.0
"""The time that a process has to import Ray's file system, from a cold start on a busy machine."""
PROBE_S = 60.0
"""The time limit for Ray's file system to read and write one small file, once it is imported."""
_PROBE = "import sys; sys.path[:] = {path!r}; from raycheck.bucket.store.ray_filesystem import main; main()"

_DEFAULT_NAME = re.compile(r"ray_train_run-\d{4}-\d{2}-\d{2}.*")


def storage_uri(config: Any) -> str:
    """Return Ray's storage path as a URI. Raises ConfigError for a run that could never be resumed."""
    if not config.name or _DEFAULT_NAME.fullmatch(config.name):
        raise ConfigError(
            "RunConfig(name=...) is not set, so Ray makes up a new name each time and nothing could ever resume. "
            "Give the run a name"
        )
    if config.storage_filesystem is not None:
        return uri_of(config.storage_filesystem, str(config.storage_path))
    return str(config.storage_path)


def run_uri(config: Any) -> str:
    """Return the run's root: Ray's storage path and the run's name. Raises ConfigError as `storage_uri` does."""
    return join_uri(storage_uri(config), config.name)


@contextmanager
def ray_storage(config: Any, uri: str) -> Iterator[None]:
    """Make Ray write to the storage at `uri` too, with all its settings, during the block."""
    before = config.storage_path, config.storage_filesystem
    if uri != storage_uri(config):
        config.storage_path, config.storage_filesystem = uri, None
    if config.storage_filesystem is None:
        config.storage_path, config.storage_filesystem = ray_filesystem(uri) or (config.storage_path, None)
    try:
        yield
    finally:
        config.storage_path, config.storage_filesystem = before


def check_ray_storage(config: Any, uri: str, store: Store) -> None:
    """Prove with scratch objects that Ray's own file system reaches the same place as raycheck's store of the run.

    Raises the errors of check_ray_files.
    """
    with ray_storage(config, uri):
        check_ray_files(store, str(config.storage_path), config.storage_filesystem, below=f"{config.name}/")


def check_ray_files(store: Store, path: str, files: Any, *, below: str = "") -> None:
    """Prove with scratch objects that a file system of Ray's reaches the same place as raycheck's store.

    Each must read what the other has written. Ray may find other credentials or endpoints than raycheck, and would then
    hang after it has started workers. path, files: Ray's storage path, and its file system; None: that of the path, a
    URI. below: the way from there to the store's root, ending in "/". Raises ConfigError that names what Ray's side
    cannot do, and StoreError if raycheck's own side fails.
    """
    if kind_of(store.uri) == "memory":  # each process has its own
        return
    token = uuid4().hex
    source, target = object_keys.probe_key(token), object_keys.probe_key(f"{token}-ray")
    try:
        store.put(source, token.encode())
        kind = "pyarrow, by the URI" if files is None else type(getattr(files, "handler", files)).__name__
        request = (path, files, f"{below}{source}", f"{below}{target}", token.encode(), PROBE_S)
        problem = _problem_of_ray(pickle.dumps(request))
        if not problem and not _holds(store, target, token.encode()):
            problem = "write there: raycheck does not find what Ray wrote, so it wrote to another place"
        if problem:
            cure = "Set its credentials and endpoint in a way that pyarrow also reads, or set"
            if "411" in problem or "MissingContentLength" in problem:
                cure = (
                    "A current pyarrow uploads without the length, which this store does not accept: set "
                    "AWS_REQUEST_CHECKSUM_CALCULATION=when_required in the environment of the driver and of all of "
                    "Ray's nodes. Or set"
                )
            raise ConfigError(
                f"{store}: raycheck reaches this place, but Ray's own file system ({kind}) cannot {problem}. Ray "
                f"would hang or fail once workers start. {cure} storage_path as a URI, without storage_filesystem, "
                "and pass the settings to raycheck.fit(trainer, storage=raycheck.StorageSettings(...))"
            )
    finally:
        for key in (source, target):
            with suppress(RaycheckError):  # the earlier error is more useful
                store.delete(key)


def _problem_of_ray(request: bytes) -> str:
    """Test Ray's file system in a separate process. Return what it cannot do, or "" if it can do everything."""
    command = [sys.executable, "-c", _PROBE.format(path=sys.path)]
    with subprocess.Popen(  # noqa: S603
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        try:
            answer, complaint = process.communicate(request, timeout=START_S + PROBE_S)
            took_too_long = process.returncode == -signal.SIGALRM
            after = f"no answer in {PROBE_S:.0f} s" if took_too_long else "its process died"
        except subprocess.TimeoutExpired:
            process.kill()
            answer, complaint = process.communicate()
            after = f"no answer in {START_S + PROBE_S:.0f} s"
    said = [item.split("\0") for item in answer.decode(errors="replace").split("\1")[:-1]]
    word, text = said[-1] if said else ("begins", "be started")
    if word == "failed" or not text:
        return text
    lines = complaint.decode(errors="replace").strip().splitlines()
    return f"{text}: {after}{f' ({lines[-1]})' if lines else ''}"


def _holds(store: Store, key: str, data: bytes) -> bool:
    try:
        return store.get(key).data == data
    except NotFoundError:
        return False
