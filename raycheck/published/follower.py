"""Follows the published versions of a run, for a process that samples with them."""

import secrets
import shutil
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Self

from raycheck.bucket.store import Got, open_store
from raycheck.errors import ConfigError, RaycheckError, StateMismatchError
from raycheck.log import event, logger
from raycheck.published.element_patch import zstd
from raycheck.published.pull import Pulled, pull
from raycheck.published.records import Reader, Versions
from raycheck.published.series import LEASE_S, Series
from raycheck.published.version_folder import LocalFiles, VersionFolder
from raycheck.storage_settings import StorageSettings

if TYPE_CHECKING:
    import torch

POLL_S = 1.0
RENEW_S = LEASE_S / 4
WEIGHTS = ".safetensors"


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
    checkpoint: str
    changed: frozenset[str] | None
    bytes_fetched: int
    _files: LocalFiles = field(repr=False, compare=False)

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
        no forward pass sees some of them. changed_only: leave out those that have not changed since the version before,
        which must have been loaded. Raises StateMismatchError, and changes nothing, when a weight has no tensor of its
        shape and type there, or when a tensor there gets no weight.
        """
        import torch

        self._check(tensors)
        with pause(), torch.no_grad():
            count = 0
            for name, values in self.tensors(changed_only=changed_only):
                tensors[name].copy_(values)
                count += 1
        return count

    def _check(self, tensors: "Mapping[str, torch.Tensor]") -> None:
        found = {name: (tuple(values.shape), values.dtype) for name, values in self.tensors()}
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


class Follower:
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
        lease: bool = True,
    ) -> None:
        """See raycheck.follow."""
        zstd()  # raises before anything is fetched
        if not 0 < poll_s < LEASE_S:
            raise ConfigError(f"poll_s={poll_s!r}: give seconds above 0 and below {LEASE_S:.0f}")
        self._store = open_store(uri, storage)
        self._made = Path(tempfile.mkdtemp(prefix="raycheck-follow-")) if folder is None else None
        self._folder = VersionFolder(Path(folder) if folder is not None else self._made or Path())
        self._poll_s = poll_s
        self._lease = lease
        self._name = f"{_safe(socket.gethostname())}-{secrets.token_hex(4)}"
        self._renewed: tuple[float, int] | None = None
        self._series: Series | None = None
        self._current: PulledVersion | None = None
        self._wake = threading.Event()
        self._closed = False

    @property
    def current(self) -> PulledVersion | None:
        """Return the version that was returned last; None before the first."""
        return self._current

    def update(self) -> PulledVersion | None:
        """Fetch the newest version if it is newer than `current`. Return None if it is not, or nothing is published.

        Raises StoreError when the store cannot be reached, CorruptError when the newest version is damaged. `current`
        stays usable then.
        """
        series = self._series or Series.at(self._store)
        found = series.read()
        if found is None:
            return None
        self._series = series
        pulled: Pulled | None = None
        with self._folder.writing() as is_mine:
            if is_mine:
                pulled = pull(series, self._folder, found)
        files = self._folder.newest()
        if files is None:
            return None  # another process is making the first one
        version = self._take(files, pulled)
        self._renew(series, found, files)
        return version

    def wait(self, timeout_s: float | None = None) -> PulledVersion | None:
        """Wait for a version that is newer than `current`. Return None after `timeout_s`, or when it was closed.

        The store is asked every `poll_s`, and at once after `wake`. Errors of the store are logged, and it is asked
        again.
        """
        end = None if timeout_s is None else time.monotonic() + timeout_s
        while not self._closed:
            self._wake.clear()
            try:
                if (version := self.update()) is not None:
                    return version
            except RaycheckError as error:
                if isinstance(error, ConfigError):
                    raise
                logger.warning(event("the newest version cannot be had yet", cause=error, run=self._store.uri))
            left = None if end is None else end - time.monotonic()
            if left is not None and left <= 0:
                return None
            self._wake.wait(self._poll_s if left is None else min(self._poll_s, left))
        return None

    def wake(self) -> None:
        """Have `wait` ask the store now: whoever knows that something was published may call it, from any thread."""
        self._wake.set()

    def __iter__(self) -> Iterator[PulledVersion]:
        """Yield one version after the other, the newest of each time, until the follower is closed."""
        while (version := self.wait()) is not None:
            yield version

    def close(self) -> None:
        """End following, from any thread. A folder that was made for this follower is removed."""
        self._closed = True
        self._wake.set()
        if self._current is not None:
            self._current._files.release()  # noqa: SLF001  of a class in this file
            self._current = None
        if self._lease and self._series is not None and self._renewed is not None:
            with suppress(RaycheckError):
                self._series.end_lease(self._name)
        if self._made is not None:
            shutil.rmtree(self._made, ignore_errors=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _take(self, files: LocalFiles, pulled: Pulled | None) -> PulledVersion | None:
        """Make these files the current version, unless they are already."""
        record, before = files.record, self._current
        if before is not None and before.path == files.path:
            files.release()
            return None
        is_next = pulled is not None and before is not None and pulled.began_with == before._files.record.number  # noqa: SLF001
        self._current = PulledVersion(
            path=files.path,
            number=record.number,
            step=record.step,
            checkpoint=record.checkpoint,
            changed=pulled.changed if pulled is not None and is_next else None,
            bytes_fetched=pulled.bytes_fetched if pulled is not None else 0,
            _files=files,
        )
        if before is not None:
            before._files.release()  # noqa: SLF001  of a class in this file
        return self._current

    def _renew(self, series: Series, found: tuple[Versions, Got], files: LocalFiles) -> None:
        """Say which version this reader has, so that what leads on from it stays. Without the right to, it may not."""
        now, number = time.monotonic(), files.record.number
        if not self._lease or (self._renewed and self._renewed[1] == number and now - self._renewed[0] < RENEW_S):
            return
        reader = Reader(name=self._name, series=found[0].series, number=number, until=found[1].at + LEASE_S)
        try:
            series.lease(reader)
        except RaycheckError as error:
            logger.info(
                event("this reader cannot say which version it has, and goes on", cause=error, run=self._store.uri)
            )
        self._renewed = now, number


def _safe(text: str) -> str:
    return "".join(letter if letter.isascii() and letter.isalnum() else "-" for letter in text)[:60] or "reader"


def follow(
    uri: str,
    folder: str | Path | None = None,
    *,
    storage: StorageSettings | None = None,
    poll_s: float = POLL_S,
    lease: bool = True,
) -> Follower:
    """Follow the published versions of a run: `for version in raycheck.follow(uri): ...`.

    Each version is a complete Hugging Face directory in a local folder. It is made from the one before and the changed
    elements. Needs neither torch nor Ray.

    uri: the run's URI, or the place to which it publishes. folder: where the versions are made, a new one or one that
    was followed before; in it, `latest` is a link to the newest. None: a temporary folder, removed by `close`. storage:
    how to open the URI. poll_s: the seconds between two looks, each of one small GET. lease: write a small record that
    keeps the versions that this reader still needs, if it has the right to.

    Raises ConfigError when the folder contains something else, or a library is missing.
    """
    return Follower(uri, folder, storage=storage, poll_s=poll_s, lease=lease)
