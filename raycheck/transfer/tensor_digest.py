"""Computes a short digest of a tensor on its own device, to detect whether it was written to and whether ranks differ.

torch's version counters are not enough: they miss a write through `.data`.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache
from typing import Any, cast

import torch

from raycheck.bucket.format.checksum import SUB_BLOCK, sub_block_crcs
from raycheck.transfer.stage.local_box import as_bytes, bytes_of

Digest = tuple[int, ...]
_WORDS = 1 << 20
"""The number of 32-bit words in one sum."""
_ROWS = 8
"""How many sums are computed at a time: their products, twice the size of the words, then fit in a device's cache."""
_PIECE_BYTES = 16 * SUB_BLOCK
"""How much of a tensor in host memory one thread digests at a time."""
_ALONE_BYTES = SUB_BLOCK
"""Up to this total size, tensors in host memory are digested without threads: starting these would take longer."""


def digests(tensors: Sequence[torch.Tensor]) -> list[Digest]:
    """Return one digest per tensor. Equal bytes give equal digests, for tensors on the same kind of device.

    In host memory a digest is the CRC-32 of each 4 MiB. On an accelerator it is a weighted sum of each 4 MiB, computed
    there after everything that was enqueued so far; the host waits once for all sums.
    """
    return PendingDigests(tensors).result()


class PendingDigests:
    """Digests that are computed in the background, so that the rank can copy other tensors at the same time.

    Tensors in host memory are digested in threads. Those on an accelerator are digested on a separate stream, after
    everything that was enqueued when this object was created; `release` enqueues it, so that the host can enqueue
    copies first. The tensors must not change before `release` has returned; on an accelerator, this holds for work
    enqueued before that.
    """

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        on_host = [tensor for tensor in tensors if tensor.device.type == "cpu"]
        is_small = sum(tensor.nbytes for tensor in on_host) <= _ALONE_BYTES
        self._threads = None if is_small else ThreadPoolExecutor(_num_threads(), thread_name_prefix="raycheck-digest")
        self._running: list[Future[list[int]]] = []
        self._sums: dict[torch.device, list[torch.Tensor]] = {}
        self._counts: dict[torch.device, int] = {}  # of these sums so far, to count thousands of tensors once
        self._there: dict[torch.device, tuple[torch.Tensor, torch.Event]] = {}
        self._digests: list[Digest | Callable[[], Digest]] = [
            self._begin_on_host(tensor.detach()) if tensor.device.type == "cpu" and tensor.numel() else ()
            for tensor in tensors
        ]
        self._to_enqueue = [
            (number, tensor.detach())
            for number, tensor in enumerate(tensors)
            if tensor.device.type != "cpu" and tensor.numel()
        ]
        devices = {tensor.device for _, tensor in self._to_enqueue}
        self._written = {device: torch.accelerator.current_stream(device).record_event() for device in devices}

    def release(self) -> None:
        """Wait until the tensors may change."""
        self._enqueue()
        for running in self._running:
            running.exception()
        if self._threads is not None:
            self._threads.shutdown(wait=False)
        for device in self._there:
            torch.accelerator.current_stream(device).wait_stream(_stream(device))

    def result(self) -> list[Digest]:
        """Return one digest per tensor, in order."""
        self.release()
        for _, event in self._there.values():
            event.synchronize()
        return [found() if callable(found) else found for found in self._digests]

    def _enqueue(self) -> None:
        on_device, self._to_enqueue = self._to_enqueue, []
        for device, written in self._written.items():
            _stream(device).wait_event(written)
        self._written = {}
        with torch.no_grad():
            for number, tensor in on_device:
                self._digests[number] = self._begin_on_device(tensor)
        for device, sums in self._sums.items():
            with _stream(device) as stream:
                here = torch.cat(sums).to("cpu", non_blocking=True)
                event = torch.Event(device)
                event.record(stream)
            self._there[device] = here, event
        self._sums.clear()

    def _begin_on_host(self, tensor: torch.Tensor) -> Digest | Callable[[], Digest]:
        if self._threads is None:
            return tuple(_crcs_of(tensor))
        if not _is_plain(tensor):
            parts = [self._threads.submit(_crcs_of, tensor)]
        else:
            data = memoryview(cast("Any", as_bytes(tensor).numpy()))
            starts = range(0, len(data), _PIECE_BYTES)
            parts = [self._threads.submit(sub_block_crcs, data[at : at + _PIECE_BYTES]) for at in starts]
        self._running += parts
        return lambda: tuple(crc for part in parts for crc in part.result())

    def _begin_on_device(self, tensor: torch.Tensor) -> Callable[[], Digest]:
        device = tensor.device
        with _stream(device):
            try:
                sums = weighted_sums(bytes_of(tensor))
            except torch.OutOfMemoryError:  # sum a copy in host memory instead: slower, with the same result
                sums = weighted_sums(bytes_of(tensor.cpu())).to(device)
        start = self._counts.get(device, 0)
        stop = self._counts[device] = start + sums.numel()
        self._sums.setdefault(device, []).append(sums)
        return lambda: tuple(self._there[device][0][start:stop].tolist())


def _num_threads() -> int:
    """Return how many threads digest tensors in host memory: as many as torch would use, at most one per CPU."""
    return max(1, min(torch.get_num_threads(), os.cpu_count() or 1))


def _is_plain(tensor: torch.Tensor) -> bool:
    return tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()


def _crcs_of(tensor: torch.Tensor) -> list[int]:
    return sub_block_crcs(memoryview(cast("Any", bytes_of(tensor).numpy())))


def are_equal(known: Mapping[str, Digest], found: Mapping[str, Digest]) -> bool:
    """Return whether all tensors in `found` are in `known`, by name, with the same digest.

    Tensors without elements need not be in `known`: a restore does not read them.
    """
    return all(known.get(name, ()) == digest for name, digest in found.items())


def weighted_sums(plain: torch.Tensor) -> torch.Tensor:
    """Return the weighted sum of each 4 MiB of a flat tensor, modulo 2^64.

    Weights are odd and have 64 bits. So a change of one word always changes the sum, and a change of the top bits of
    many words is still weighted by the lower half of the weights. Each word has its own weight, so two words that
    change places change the sum too.
    """
    data = plain.view(torch.uint8)
    if data.storage_offset() % 4:
        data = data.clone()
    weights = _weights(data.device)
    whole = data.numel() // 4 * 4
    words = data[:whole].view(torch.int32)
    in_rows = words.numel() // _WORDS * _WORDS
    # The product of a 32-bit and a 64-bit tensor has 64 bits, so the words need not be converted first.
    rows = torch.split(words[:in_rows].view(-1, _WORDS), _ROWS) if in_rows else ()
    sums = [(some * weights).sum(1) for some in rows]
    rests = (rest for rest in (words[in_rows:], data[whole:]) if rest.numel())
    return torch.cat([*sums, *((rest * weights[: rest.numel()]).sum().view(1) for rest in rests)])


@cache
def _stream(device: torch.device) -> torch.Stream:
    return torch.Stream(device)


@cache
def _weights(device: torch.device) -> torch.Tensor:
    chance = torch.Generator().manual_seed(0)
    bounds = torch.iinfo(torch.int64)
    return (torch.randint(bounds.min, bounds.max, (_WORDS,), generator=chance) | 1).to(device)
