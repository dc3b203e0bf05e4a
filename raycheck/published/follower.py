"""Follows the published versions of a run, for a process that samples with them."""

import secrets
import shutil
import socket
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Self

from raycheck.bucket.format.object_keys import version_number
from raycheck.bucket.store import Got, open_store
from raycheck.errors import ConfigError, CorruptError, NotFoundError, RaycheckError, StateMismatchError, StoreError
from raycheck.host import VersionCopies, version_copies
from raycheck.log import event, logger
from raycheck.published.element_patch import zstd
from raycheck.published.pull import Pulled, pull
from raycheck.published.records import Reader, Versions
from raycheck.published.series import LEASE_S, Series
from raycheck.published.version_folder import LocalVersion, VersionFolder
from raycheck.published.weights_file import WEIGHTS
from raycheck.storage_settings import StorageSettings

if TYPE_CHECKING:
    import torch

POLL_S = 1.0
TRIES = 5
RENEW_S = LEASE_S / 4


@dataclass(frozen=True, slots=True)
class PulledVersion:
    """A published version in a local folder, which is complete and never changes.

    path: the folder, a Hugging Face directory. It stays until the follower that returned it returns another version or
    is closed. number: counts the versions. step, checkpoint: what was published. changed: the names of the tensors that
    differ from those of the version before that this follower returned; None: any may. bytes_fetched: what it took.
    """

    path: Path
    number: int
    step: int
    checkpoint: str | None
    changed: frozenset[str] | None
    bytes_fetched: int
    _files: LocalVersion = field(repr=False, compare=False)

    def tensors(self, *, changed_only: bool = False) -> "Iterator[tuple[str, torch.Tensor]]":
        """Yield the name and the values of each weight, on the CPU. Needs torch and safetensors.

        changed_only: leave out those that have not changed since the version before.
        """
        from safetensors import safe_open

        for file in sorted(self.path.glob(f"*{WEIGHTS}")):
            with safe_open(file, framework="pt") as weights:
                for name in weights.keys():  # noqa: SIM118  it is not a mapping
                    if not changed_only or self.changed is None or name in self.changed:
                        yield name, weights.get_tensor(name)

    def load_into(
        self,
        tensors: "Mapping[str, torch.Tensor]",
        *,
        pause: "Callable[[], AbstractContextManager[object]]" = nullcontext,
        changed_only: bool = False,
    ) -> int:
        """Copy the weights into live tensors, such as a model's `state_dict()`. Return how many were copied.

        tensors: by the names that the published files have. pause: makes the context in which they are copied, so that
        no forward pass sees some of them. An error of the disk meanwhile leaves some of each version: load again then.
        changed_only: leave out those that have not changed since the version before, which must have been loaded.
        Raises StateMismatchError, and changes nothing, when a weight has no tensor of its shape and type there, or when
        a tensor there gets no weight.
        """
        import torch

        self._check(tensors)
        with pause(), torch.no_grad():
            count = 0
            for name, values in self.tensors(changed_only=changed_only):
                tensors[name].copy_(values)
                count += 1
        return count

    def _forms(self) -> "dict[str, tuple[tuple[int, ...], torch.dtype]]":
        """Return the shape and type of each weight. Only the heads of the files are read."""
        from safetensors import safe_open

        from raycheck.huggingface.export_contents import SAFETENSORS_DTYPES

        dtypes = {name: dtype for dtype, name in SAFETENSORS_DTYPES.items()}
        found: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}
        for file in self.path.glob(f"*{WEIGHTS}"):
            with safe_open(file, framework="pt") as weights:
                slices = {name: weights.get_slice(name) for name in weights.keys()}  # noqa: SIM118  not a mapping
                found |= {name: (tuple(one.get_shape()), dtypes[one.get_dtype()]) for name, one in slices.items()}
        return found

    def _check(self, tensors: "Mapping[str, torch.Tensor]") -> None:
        found = self._forms()
        problems = [f"{name} is not there" for name in found.keys() - tensors.keys()]
        for name in found.keys() & tensors.keys():
            shape, dtype = tuple(tensors[name].shape), tensors[name].dtype
            if (shape, dtype) != found[name]:
                problems.append(f"{name} is {list(shape)} {dtype}, and {list(found[name][0])} {found[name][1]} here")
        filled = {tensors[name].data_ptr() for name in found.keys() & tensors.keys()}
        problems += [
            f"{name} gets no weight"
            for name in tensors.keys() - found.keys()
            if tensors[name].numel() and tensors[name].data_ptr() not in filled  # tied weights are published once
        ]
        if problems:
            listed = "; ".join(sorted(problems)[:8])
            raise StateMismatchError(f"{self.path}: {len(problems)} tensors do not fit: {listed}")


class VersionFollower:
    """The newest published version of a run in a local folder. Iterating waits for one version after the other.

    Use it as a context manager, or call `close`. Several processes of a node may follow with the same folder: one of
    them fetches, the others find what it has made.
    """

    def __init__(
        self,
        uri: str,
        folder: str | Path | None = None,
        *,
        storage: StorageSettings | None = None,
        poll_s: float = POLL_S,
        keep: int = 2,
        lease: bool = True,
        version: int | str | None = None,
    ) -> None:
        """See raycheck.follow."""
        zstd()  # raises before anything is fetched
        if not 0 < poll_s < LEASE_S:
            raise ConfigError(f"poll_s={poll_s!r}: give seconds above 0 and below {LEASE_S:.0f}")
        if type(keep) is not int or keep < 1:
            raise ConfigError(f"keep={keep!r}: give a whole number of at least 1")
        self._store = open_store(uri, storage)
        made = tempfile.mkdtemp(prefix="raycheck-follow-") if folder is None else None
        self._remove = weakref.finalize(self, shutil.rmtree, made, ignore_errors=True) if made is not None else None
        self._folder = VersionFolder(Path(made or folder or ""), keep=keep)
        self._poll_s = poll_s
        self._version = version
        self._lease = _Lease(f"{_safe(socket.gethostname())}-{secrets.token_hex(4)}") if lease else None
        self._series: Series | None = None
        self._seen: str | None = None  # the version of the list whose newest version is the current one
        self._is_behind = False  # the list was not read, or names a version that this follower does not have
        self._failed: tuple[str, CorruptError] | None = None  # the version of a list that could not be had, and why
        self._current: PulledVersion | None = None
        self._lock = threading.Lock()
        self._wake = threading.Event()
        self._closed = False

    @property
    def current(self) -> PulledVersion | None:
        """Return the version that was returned last; None before the first."""
        return self._current

    def update(self, *, wait: bool = False) -> PulledVersion | None:
        """Fetch the newest version if it is newer than `current`. Return None if it is not, or nothing is published.

        wait: for another process that is making a version in this folder; otherwise what is there is returned. Raises
        StoreError when the store cannot be reached, CorruptError when the newest version is damaged, as long as no
        other one is published. `current` stays usable then.
        """
        with self._lock:
            for _ in range(TRIES):
                try:
                    return None if self._closed else self._update(wait=wait)
                except NotFoundError:  # what the list named is gone, and the list has changed: read it again
                    continue
            raise StoreError(f"{self._store}: versions go faster than they can be fetched")

    def _update(self, *, wait: bool) -> PulledVersion | None:
        series = self._series or Series.at(self._store)
        pulled: Pulled | None = None
        self._is_behind = True
        with self._folder.writing(wait=wait) as is_mine:
            found = self._read(series)  # with the lock: an older list would bring an older version back
            if found is None:
                self._is_behind = False
                return None
            if type(series.copies) is VersionCopies:  # Ray may have been started since the last look
                series = replace(series, copies=version_copies(series.uri))
            self._series = series
            if found[1].version == self._seen:
                self._is_behind = False
                self._renew(series, found, None if self._current is None else self._current._files)  # noqa: SLF001
                return None
            if self._failed is not None and self._failed[0] == found[1].version:
                raise self._failed[1]
            have = self._folder.newest()
            try:
                self._check_folder(found[0], have)
                if is_mine:
                    self._renew(series, found, have)
                    with self._lease.kept(series, now=found[1].at) if self._lease is not None else nullcontext():
                        pulled = pull(series, self._folder, found[0], have)
            except CorruptError as error:
                self._failed = found[1].version, error  # not again and again: a whole version is large
                raise
            finally:
                if have is not None:
                    have.release()
        made = self._folder.newest()
        if made is None:
            return None  # another process is making the first one
        if self._version is not None and made.record.directory != found[0].newest.directory:
            made.release()  # another process has made it
            return None
        version = self._take(made, pulled)
        if made.record.directory == found[0].newest.directory:
            self._seen, self._is_behind = found[1].version, False
        self._renew(series, found, made)
        return version

    def _read(self, series: Series) -> tuple[Versions, Got] | None:
        """Read the list, up to the version that is followed."""
        found = series.read()
        if self._version is None:
            return found
        versions = None if found is None else found[0].up_to(self._version)
        if found is None or versions is None:
            listed = [] if found is None else [str(version.number) for version in found[0].versions]
            raise ConfigError(
                f"{series}: there is no version {self._version}; there are: {', '.join(listed) or 'none'}"
            )
        return versions, found[1]

    def _check_folder(self, versions: Versions, have: LocalVersion | None) -> None:
        """Raise ConfigError if the only version to be fetched would come after a newer one in the same folder."""
        number = 0 if have is None else version_number(have.record.directory) or 0
        if self._version is not None and number > versions.newest.number:
            raise ConfigError(f"{self._folder.path} has version {number}, which is newer: give another folder")

    def wait(self, timeout_s: float | None = None) -> PulledVersion | None:
        """Wait for a version that is newer than `current`. Return None after `timeout_s`, or when there will be none.

        The store is asked every `poll_s`, at once after `wake`, and every second after an error, or while another
        process fetches. An error is logged when it first occurs. Raises ConfigError.
        """
        said = ""
        end = None if timeout_s is None else time.monotonic() + timeout_s
        while not self._closed and (self._version is None or self._current is None):
            self._wake.clear()
            try:
                if (version := self.update()) is not None:
                    return version
            except RaycheckError as error:
                if isinstance(error, ConfigError):
                    raise
                if str(error) != said:
                    said = str(error)
                    logger.warning(event("the newest version cannot be had yet", cause=error, run=self._store.uri))
            left = None if end is None else end - time.monotonic()
            if left is not None and left <= 0:
                return None
            pause_s = min(self._poll_s, POLL_S) if self._is_behind else self._poll_s
            if self._series is not None:
                self._series.copies.wake_at_next(self._wake)
            self._wake.wait(pause_s if left is None else min(pause_s, left))
        return None

    def wake(self) -> None:
        """Have `wait` ask the store now: whoever knows that something was published may call it, from any thread."""
        self._wake.set()

    def __iter__(self) -> Iterator[PulledVersion]:
        """Yield one version after the other, the newest of each time, until the follower is closed; or the only one."""
        while (version := self.wait()) is not None:
            yield version

    def close(self) -> None:
        """End following, from any thread. A folder that was made for this follower is removed."""
        self._closed = True
        self._wake.set()
        with self._lock:
            if self._current is not None:
                self._current._files.release()  # noqa: SLF001  of a class in this file
                self._current = None
            if self._lease is not None and self._series is not None:
                self._lease.end(self._series)
            if self._remove is not None:
                self._remove()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _take(self, made: LocalVersion, pulled: Pulled | None) -> PulledVersion | None:
        """Make this the current version, unless it is already."""
        record, before = made.record, self._current
        if before is not None and before.path == made.path:
            made.release()
            return None
        is_next = pulled is not None and before is not None and pulled.began_with == before._files.record.directory  # noqa: SLF001
        self._current = PulledVersion(
            path=made.path,
            number=version_number(record.directory) or 0,
            step=record.step,
            checkpoint=record.checkpoint,
            changed=pulled.changed if pulled is not None and is_next else None,
            bytes_fetched=pulled.bytes_fetched if pulled is not None else 0,
            _files=made,
        )
        if before is not None:
            before._files.release()  # noqa: SLF001  of a class in this file
        return self._current

    def _renew(self, series: Series, found: tuple[Versions, Got], have: LocalVersion | None) -> None:
        """Say with which version this reader begins, so that it, and what leads on from it, stays."""
        if self._lease is None:
            return
        versions = found[0]
        if have is not None and versions.patches_from(have.record.directory) is not None:
            self._lease.renew(series, have.record.directory, now=found[1].at)
        elif versions.newest_whole is not None:
            self._lease.renew(series, versions.newest_whole.directory, now=found[1].at)


class _Lease:
    """The record of one reader in a series. Without the right to write it, the reader goes on."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._written: tuple[str, float] | None = None  # the version, and when by the monotonic clock

    def renew(self, series: Series, directory: str, *, now: float) -> None:
        """Write the record if it names another version, or is old. now: by the store's clock."""
        at = time.monotonic()
        if self._written is not None and self._written[0] == directory and at - self._written[1] < RENEW_S:
            return
        try:
            series.lease(self._name, Reader(directory=directory, until=now + LEASE_S))
        except RaycheckError as error:
            what = "this reader cannot say which version it has, and goes on"
            logger.info(event(what, cause=error, run=series.store.uri))
        self._written = directory, at

    @contextmanager
    def kept(self, series: Series, *, now: float) -> Iterator[None]:
        """Renew the record inside the block: a large version may take longer to fetch than a record counts."""
        began, ended = time.monotonic(), threading.Event()

        def renew() -> None:
            while self._written is not None and not ended.wait(RENEW_S):
                self.renew(series, self._written[0], now=now + time.monotonic() - began)

        thread = threading.Thread(target=renew, name="raycheck-lease", daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()

    def end(self, series: Series) -> None:
        if self._written is not None:
            with suppress(RaycheckError):
                series.end_lease(self._name)


def _safe(text: str) -> str:
    return "".join(letter if letter.isascii() and letter.isalnum() else "-" for letter in text)[:60] or "reader"


def follow(
    uri: str,
    folder: str | Path | None = None,
    *,
    storage: StorageSettings | None = None,
    poll_s: float = POLL_S,
    keep: int = 2,
    lease: bool = True,
    version: int | str | None = None,
) -> VersionFollower:
    """Follow the published versions of a run: `for version in raycheck.follow(uri): ...`.

    Each version is a complete Hugging Face directory in a local folder. It is made from the one before and the changed
    elements. Needs neither torch nor Ray. In the publisher's Ray cluster, files come from the object store.

    uri: the run's URI, or the place to which it publishes. folder: where the versions are made, a new one or one that
    was followed before; in it, `latest` is a link to the newest. None: a temporary folder, removed by `close`. storage:
    how to open the URI. poll_s: the seconds between two looks, each of one small GET. keep: how many of the newest
    versions stay in the folder; the current one always does. lease: write a small record that keeps the versions that
    this reader still needs, if it has the right to. version: the number, or the directory in the bucket, of the only
    version that is fetched, as long as it is listed; `folder` must have none that is newer. None: the newest one at any
    time.

    Raises ConfigError when the folder contains something else, or a library is missing.
    """
    return VersionFollower(uri, folder, storage=storage, poll_s=poll_s, keep=keep, lease=lease, version=version)
