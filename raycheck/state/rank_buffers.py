"""Finds module buffers and extra state that differ between ranks: a checkpoint keeps the first rank's for all.

This may be by design (a queue of negatives, running statistics), so it is not an error. The ranks compare checksums at
their first save, and rank 0 names what differs. Buffers that DDP broadcasts from rank 0 before each forward are left
out: for these the first rank's are right. Whatever a PerRank entry keeps for each rank is left out too.
"""

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch.nn.parallel import DistributedDataParallel

from raycheck.errors import ConfigError
from raycheck.state.entries.module.module_entry import EXTRA, ModuleEntry
from raycheck.state.entries.per_rank_entries import PerRank
from raycheck.state.entries.state_entry import GatheredEntry, StateEntry
from raycheck.state.replica_checksums import crc32_of_json, crc32_of_tensor
from raycheck.terminal import first_few
from raycheck.transfer.stage.gather_cache import local_of


def buffer_checksums(
    objects: Mapping[str, object], entries: Sequence[StateEntry], gathered: Sequence[GatheredEntry]
) -> dict[str, int]:
    """Return checksums of this rank's buffers and extra state, by name. Sharded tensors are left out."""
    known = _broadcast_by_ddp(objects)
    for entry, found in zip(entries, gathered, strict=True):
        if entry.is_per_rank:
            known |= {_memory(tensor) for tensor in found.tensors.values()}
    checksums: dict[str, int] = {}
    for entry, found in zip(entries, gathered, strict=True):
        if isinstance(entry, ModuleEntry):
            for name, tensor in found.tensors.items():
                if not entry.is_compared(name) and local_of(tensor) is tensor and _memory(tensor) not in known:
                    checksums[name] = crc32_of_tensor(tensor)
            for key, value in found.values[EXTRA].items():
                checksums[f"{entry.name}.{key}"] = crc32_of_json(value)
    return checksums


def advice_on(names: Sequence[str]) -> str:
    """Return the warning about buffers and extra state that differ between ranks."""
    key = names[0].rpartition(".")[2]
    return (
        f"{first_few(names)} differ between ranks, and a restore gives all ranks the first rank's. "
        f'To keep each rank\'s own, add an entry such as raycheck.PerRank({{"{key}": {names[0]}}}) to the state, and '
        "write into the buffer in place. To make them equal (running statistics), use SyncBatchNorm, or DDP with its "
        "default options, which sends rank 0's buffers to all ranks before each forward"
    )


class PerRankBuffers:
    """The buffers of the state's modules that are in PerRank entries as plain tensors."""

    def __init__(self, objects: Mapping[str, object]) -> None:
        places = {
            id(buffer): (f"{name}.{path}".replace("..", "."), module._buffers, key)  # noqa: SLF001
            for name, value in objects.items()
            if isinstance(value, torch.nn.Module)
            for path, module in value.named_modules()
            for key, buffer in module._buffers.items()  # noqa: SLF001
            if buffer is not None
        }
        self._held = [
            (name, tensor, places[id(tensor)])
            for name, value in objects.items()
            if isinstance(value, PerRank)
            for tensor in _tensors_in(value.value)
            if id(tensor) in places
        ]

    def check(self) -> None:
        """Raise ConfigError when a module has replaced such a buffer, since the entry would save the old one."""
        for name, tensor, (path, buffers, key) in self._held:
            if buffers.get(key) is not tensor:
                raise ConfigError(
                    f"state[{name!r}] holds the tensor that was {path.rstrip('.')}.{key} when the state was given, and "
                    "the module has another one now: write into the buffer in place (copy_), and give the state after "
                    "the module was moved to its device"
                )


def _tensors_in(value: object) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict | list | tuple) and type(value) in (dict, list, tuple):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _tensors_in(item)


def _broadcast_by_ddp(objects: Mapping[str, object]) -> set[object]:
    """Return the memory of the buffers that rank 0 sends to all ranks before each forward."""
    return {
        _memory(buffer)
        for value in objects.values()
        if isinstance(value, torch.nn.Module)
        for module in value.modules()
        if isinstance(module, DistributedDataParallel) and module.broadcast_buffers
        for buffer in module.modules_buffers
    }


def _memory(tensor: torch.Tensor) -> object:
    return local_of(tensor).data_ptr(), tensor.device
