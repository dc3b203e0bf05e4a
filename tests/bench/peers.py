"""The others, each on the same state and bytes, with the best settings that their documentation names.

A peer that cannot run here is named with the reason, and not left out in silence.
"""

import os
import shutil
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from time import perf_counter
from typing import Any

import fsspec
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader, FsspecWriter

from raycheck.bucket.store.address import parse_uri
from tests.bench.ours import check_same, emptied
from tests.bench.place import new_folder, plain_uri, pyarrow_files, s3fs_options
from tests.bench.sampling import Measured
from tests.bench.states import State

CONNECTOR_PART_BYTES = 16 * 1024 * 1024
THREADS = 4
EXPECTED_WARNINGS = ("torch.distributed is disabled", "Detected an existing checkpoint")
"""How stock torch's begin when it saves without a process group, and when it saves to one place again."""
STOCK = "DCP on s3fs, 1 thread"


class Peer(ABC):
    """One way of saving and loading a state at one place."""

    name: str

    def __init__(self, uri: str, state: State) -> None:
        self.uri = new_folder(uri)
        self.path = plain_uri(self.uri)
        self.options = s3fs_options(uri)
        self.state = state

    @abstractmethod
    def save(self) -> None:
        """Durable when it returns."""

    @abstractmethod
    def load(self) -> None:
        """Into the live tensors of the state."""

    def turn(self, settle: Callable[[], None]) -> Measured:
        """A side of a comparison, as Ours.turn."""
        settle()
        began = perf_counter()
        self.save()
        saved_s = perf_counter() - began
        expected = [tensor.clone() for tensor in self.state.tensors]
        emptied(self.state)
        settle()
        began = perf_counter()
        self.load()
        loaded_s = perf_counter() - began
        check_same(self.state, expected)
        files, path = fsspec.url_to_fs(self.path, **self.options)
        files.rm(path, recursive=True)
        return {"save": saved_s, "load": loaded_s}


class StockDcp(Peer):
    """torch's FsspecWriter and FsspecReader on s3fs. No flush of local disks, which they do by default."""

    name = STOCK
    threads = 1

    def save(self) -> None:
        writer = FsspecWriter(self.path, thread_count=self.threads, sync_files=False, **self.options)
        dcp.save(self.state.nested, storage_writer=writer, no_dist=True)

    def load(self) -> None:
        dcp.load(self.state.nested, storage_reader=FsspecReader(self.path, **self.options), no_dist=True)


class ThreadedDcp(StockDcp):
    name = f"DCP on s3fs, {THREADS} threads"
    threads = THREADS


class TorchSave(Peer):
    """torch.save into a file of s3fs, torch.load from one."""

    name = "torch.save on s3fs"

    def save(self) -> None:
        with fsspec.open(f"{self.path}/state.pt", "wb", **self.options) as file:
            torch.save(self.state.nested, file)

    def load(self) -> None:
        with fsspec.open(f"{self.path}/state.pt", "rb", **self.options) as file:
            _fill(self.state.nested, torch.load(file, weights_only=True))


class RayReport(Peer):
    """A local directory of stock DCP, uploaded by the function that Ray Train's `report` uploads with, pyarrow's
    copy_files behind it; down again by that of `Checkpoint.as_directory`."""

    name = "local directory, Ray's upload"

    def __init__(self, uri: str, state: State) -> None:
        from ray.train.v2._internal.execution.storage import _download_from_fs_path, _upload_to_fs_path

        super().__init__(uri, state)
        self._upload, self._download = _upload_to_fs_path, _download_from_fs_path
        # By default pyarrow sends trailing checksums, which RGW turns down.
        os.environ["AWS_REQUEST_CHECKSUM_CALCULATION"] = "when_required"
        self._files, self._place = pyarrow_files(self.uri)

    def save(self) -> None:
        with _scratch() as folder:
            writer = dcp.FileSystemWriter(folder, thread_count=2, sync_files=False)
            dcp.save(self.state.nested, storage_writer=writer, no_dist=True)
            self._upload(str(folder), self._files, self._place)

    def load(self) -> None:
        with _scratch() as folder:
            self._download(self._files, self._place, str(folder))
            dcp.load(self.state.nested, storage_reader=dcp.FileSystemReader(folder), no_dist=True)


class Connector(Peer):
    """s3torchconnector's own DCP writer and reader."""

    name = "s3torchconnector DCP"

    def __init__(self, uri: str, state: State) -> None:
        from s3torchconnector.dcp import S3StorageReader, S3StorageWriter

        super().__init__(uri, state)
        self._writer, self._reader = S3StorageWriter, S3StorageReader
        self._settings = parse_uri(uri).settings

    def save(self) -> None:
        writer = self._writer(self._settings.region, self.path, thread_count=THREADS)
        self._redirect(writer)
        dcp.save(self.state.nested, storage_writer=writer, no_dist=True)

    def load(self) -> None:
        reader = self._reader(self._settings.region, self.path)
        self._redirect(reader)
        dcp.load(self.state.nested, storage_reader=reader, no_dist=True)

    def _redirect(self, storage: Any) -> None:
        """Neither class takes an endpoint."""
        from s3torchconnector import S3ClientConfig
        from s3torchconnector._s3client import S3Client

        config = S3ClientConfig(force_path_style=True, part_size=CONNECTOR_PART_BYTES)
        storage.fs._client = S3Client(self._settings.region, endpoint=self._settings.endpoint, s3client_config=config)


PEERS: tuple[type[Peer], ...] = (StockDcp, ThreadedDcp, TorchSave, RayReport, Connector)
NOT_ON = {
    ("ceph", Connector): 'RGW 16 answers it without an ETag ("Header ETag not found")',
    ("ministack", RayReport): "the emulator decodes pyarrow's chunked bodies so slowly that it would flatter us",
}


def peers(kind: str, uri: str, state: State) -> tuple[list[Peer], dict[str, str]]:
    """Those that can run against this kind of server, and why the others cannot, by name."""
    found, missing = [], {}
    for peer in PEERS:
        why = NOT_ON.get((kind, peer))
        try:
            if why is None:
                found.append(peer(uri, state))
        except ImportError as error:
            why = f"not installed ({error.name or error})"
        if why is not None:
            missing[peer.name] = why
    return found, missing


def _fill(live: Any, loaded: Any) -> None:
    for name, value in live.items():
        if isinstance(value, torch.Tensor):
            value.copy_(loaded[name])
        else:
            _fill(value, loaded[name])


@contextmanager
def _scratch() -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="bench-"))
    try:
        yield folder
    finally:
        shutil.rmtree(folder)
