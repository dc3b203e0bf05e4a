"""DCP's own `.metadata` for a component, so that stock torch reads it. raycheck writes it and never reads it: it is
a pickle."""

import pickle

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from raycheck.bucket.index import Index
from raycheck.bucket.layout import shard_file


def dcp_metadata(index: Index, component: str) -> bytes:
    """The bytes of `.metadata`: a pure function of the index, so that a coordinator's successor writes the same."""
    entries: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {}
    storage: dict[MetadataIndex, _StorageInfo] = {}
    paths: dict[str, tuple[str | int, ...]] = {}
    for chunk in index.chunks:
        if chunk.component != component:
            continue
        tensor = index.tensors[chunk.tensor]
        entry = entries.get(tensor.name)
        if entry is None:
            entry = TensorStorageMetadata(
                properties=TensorProperties(dtype=getattr(torch, tensor.dtype)),
                size=torch.Size(tensor.shape),
                chunks=[],
            )
            entries[tensor.name] = entry
            paths[tensor.name] = tensor.path
        assert isinstance(entry, TensorStorageMetadata)
        place = MetadataIndex(tensor.name, torch.Size(chunk.offsets), len(entry.chunks))
        entry.chunks.append(ChunkStorageMetadata(offsets=torch.Size(chunk.offsets), sizes=torch.Size(chunk.sizes)))
        storage[place] = _StorageInfo(shard_file(chunk.rank), chunk.record_offset, chunk.record_size)
    for leaf in index.leaves:
        if leaf.component == component:
            entries[leaf.name] = BytesStorageMetadata()
            paths[leaf.name] = leaf.path
            storage[MetadataIndex(leaf.name)] = _StorageInfo(
                shard_file(leaf.rank), leaf.record_offset, leaf.record_size
            )
    return pickle.dumps(Metadata(state_dict_metadata=entries, planner_data=paths, storage_data=storage), protocol=4)
