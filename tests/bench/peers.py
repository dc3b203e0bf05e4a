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
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader, FsspecWriter
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from raycheck.bucket.store.address import parse_uri
from tests.bench.ours import check_same, emptied
from tests.bench.place import new_folder, plain_uri, pyarrow_files, s3fs_options, tensorstore_options
from tests.bench.sampling import Measured
from tests.bench.states import State

CONNECTOR_PART_BYTES = 16 * 1024 * 1024
THREADS = 4
EXPECTED_WARNINGS = ("torch.distributed is disabled", "Detected an existing checkpoint")
"""How stock torch's begin when it saves without a process group, and when it saves to one place again."""
STOCK = "DCP on s3fs, 1 thread"


class Peer(ABC):
    """One way of saving and loading a state at one place: in one process, or by the ranks of a process group."""

    name: str

    def __init__(self, uri: str, state: State) -> None:
        self.uri = uri
        self.path = plain_uri(uri)
        self.options = s3fs_options(uri)
        self.state = state

    @abstractmethod
    def save(self) -> None:
        """Durable when it returns."""

    def begin(self) -> Callable[[], object]:
        """Begin a save, and return what waits until it is durable. For those that save only in the foreground, both."""
        self.save()
        return lambda: None

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
        dcp.save(self.state.nested, storage_writer=self._new_writer(), no_dist=not dist.is_initialized())

    def begin(self) -> Callable[[], object]:
        future: Any = dcp.async_save(self.state.nested, storage_writer=self._new_writer())
        return future.result

    def load(self) -> None:
        dcp.load(self.state.nested, storage_reader=self._new_reader(), no_dist=not dist.is_initialized())

    def _new_writer(self) -> Any:
        return FsspecWriter(self.path, thread_count=self.threads, sync_files=False, **self.options)

    def _new_reader(self) -> Any:
        return FsspecReader(self.path, **self.options)


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
            dcp.save(self.state.nested, storage_writer=writer, no_dist=not dist.is_initialized())
            self._upload(str(folder), self._files, self._place)

    def load(self) -> None:
        with _scratch() as folder:
            self._download(self._files, self._place, str(folder))
            reader = dcp.FileSystemReader(folder)
            dcp.load(self.state.nested, storage_reader=reader, no_dist=not dist.is_initialized())


class Connector(StockDcp):
    """s3torchconnector's own DCP writer and reader."""

    name = "s3torchconnector DCP"

    def __init__(self, uri: str, state: State) -> None:
        from s3torchconnector.dcp import S3StorageReader, S3StorageWriter

        super().__init__(uri, state)
        self._writer, self._reader = S3StorageWriter, S3StorageReader
        self._settings = parse_uri(uri).settings

    def _new_writer(self) -> Any:
        return self._redirected(self._writer(self._settings.region, self.path, thread_count=THREADS))

    def _new_reader(self) -> Any:
        return self._redirected(self._reader(self._settings.region, self.path))

    def _redirected(self, storage: Any) -> Any:
        """Neither class takes an endpoint."""
        from s3torchconnector import S3ClientConfig
        from s3torchconnector._s3client import S3Client

        config = S3ClientConfig(force_path_style=True, part_size=CONNECTOR_PART_BYTES)
        storage.fs._client = S3Client(self._settings.region, endpoint=self._settings.endpoint, s3client_config=config)
        return storage


class TensorStore(Peer):
    """One zarr array for each tensor, with one chunk for each rank, as Orbax saves arrays of JAX. Orbax 0.12.8 itself
    takes an s3:// path for one of the local file system."""

    name = "TensorStore, zarr3"

    def __init__(self, uri: str, state: State) -> None:
        import tensorstore

        super().__init__(uri, state)
        self._tensorstore = tensorstore

    def save(self) -> None:
        self.begin()()

    def begin(self) -> Callable[[], object]:
        writes = []
        for name, tensor in self._named():
            local, place = _local(tensor)
            if local.numel():
                array = self._open(name, tuple(tensor.shape), tuple(local.shape)).result()
                writes.append(array[place].write(local.numpy()))
        for write in writes:
            write.copy.result()
        return lambda: [write.commit.result() for write in writes]

    def load(self) -> None:
        opened = []
        for name, tensor in self._named():
            local, place = _local(tensor)
            if local.numel():
                opened.append((local, place, self._open(name)))
        begun = [(local, array.result()[place].read()) for local, place, array in opened]
        for local, read in begun:
            local.copy_(torch.from_numpy(read.result()))

    def _named(self) -> Iterator[tuple[str, torch.Tensor]]:
        return (
            (f"{part}/{name}", tensor) for part, found in self.state.nested.items() for name, tensor in found.items()
        )

    def _open(self, name: str, shape: tuple[int, ...] = (), chunk: tuple[int, ...] = ()) -> Any:
        spec: dict[str, Any] = {"driver": "zarr3", "kvstore": tensorstore_options(self.uri, name)}
        if not shape:
            return self._tensorstore.open(spec, open=True, read=True)
        grid = {"name": "regular", "configuration": {"chunk_shape": chunk}}
        codecs = [{"name": "bytes", "configuration": {"endian": "little"}}]
        spec["metadata"] = {"shape": shape, "chunk_grid": grid, "data_type": "float32", "codecs": codecs}
        return self._tensorstore.open(spec, open=True, create=True, write=True)


PEERS: tuple[type[Peer], ...] = (StockDcp, ThreadedDcp, TorchSave, RayReport, Connector, TensorStore)
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
                found.append(peer(new_folder(uri), state))
        except ImportError as error:
            why = f"not installed ({error.name or error})"
        if why is not None:
            missing[peer.name] = why
    return found, missing


def _local(tensor: torch.Tensor) -> tuple[torch.Tensor, tuple[slice, ...]]:
    """Return what this rank holds of a tensor, and where that is in it."""
    if not isinstance(tensor, DTensor):
        return tensor, tuple(slice(0, size) for size in tensor.shape)
    shape, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return tensor.to_local(), tuple(slice(at, at + size) for at, size in zip(offset, shape, strict=True))


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
