"""Stock torch loads every committed component: plain DCP directories, with no help from raycheck."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from raycheck.bucket.catalog import Checkpoint
from raycheck.bucket.layout import component_prefix
from raycheck.bucket.store import open_store
from raycheck.bucket.store.uri import join_uri
from raycheck.shards.state import COMPONENT
from tests.shards import fsdp
from tests.shards.ranks import Ranks
from tests.shards.saving import claimed, committed
from tests.shards.fsdp import PROGRESS, Tensors

Saved = tuple[dict[str, Checkpoint], Tensors]
no_group = pytest.mark.filterwarnings("ignore:torch.distributed is disabled, unavailable or uninitialized:UserWarning")


@pytest.fixture(scope="module")
def saved(ranks: Ranks, s3: str, tmp_path_factory: pytest.TempPathFactory) -> dict[int, Saved]:
    """By world size: an FSDP2 training's checkpoint in a folder and on S3, and the full tensors it must hold."""
    found = {}
    for world_size in (2, 4):
        folder = tmp_path_factory.mktemp(f"saved-by-{world_size}")
        stores = {"file": open_store(f"file://{folder}"), "s3": open_store(join_uri(s3, folder.name))}
        names = {store.uri: claimed(store, world_size=world_size, step=PROGRESS.step) for store in stores.values()}
        answers = ranks.run(fsdp.save_trained, world_size, names)
        checkpoints = {
            kind: committed(
                store, names[store.uri], [uploads[store.uri] for uploads, _ in answers], progress=PROGRESS
            )
            for kind, store in stores.items()
        }
        found[world_size] = (checkpoints, answers[0][1])
    return found


def place_of(checkpoint: Checkpoint) -> tuple[type, str, dict[str, Any]]:
    """The stock reader for a component, with its arguments."""
    uri, _, query = checkpoint.store.uri.partition("?")
    path = f"{uri}/{component_prefix(checkpoint.entry.key, COMPONENT)}".rstrip("/")
    if uri.startswith("file://"):
        return FileSystemReader, path.removeprefix("file://"), {}
    address = dict(item.split("=") for item in query.split("&"))["endpoint_override"]
    return FsspecReader, path, {"endpoint_url": f"http://{address}"}


def assert_same(found: Tensors, expected: Tensors) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype, name
        assert torch.equal(found[name], tensor), name


def test_x(saved):
    pass
