"""R4, R5 and R13: bytes and requests, counted on the wire.

Neither depends on the machine, so each is counted once. A ratio above its goal comes with the requests that made it.
"""

from collections.abc import Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader

from raycheck.bucket.format.latest import Entry
from raycheck.bucket.reading import Checkpoint
from raycheck.bucket.store.address import join_uri
from raycheck.state.train_state import TrainState
from raycheck.transfer.incremental_upload import frozen_component
from tests.bench.fresh import processes
from tests.bench.goals import Row, not_measured
from tests.bench.ours import Ours
from tests.bench.peers import STOCK, StockDcp
from tests.bench.place import ENGINES, new_folder, open_with, plain_uri, s3fs_options
from tests.bench.scale import Bench
from tests.bench.states import make_state, size_of
from tests.bench.wire import Wire, bytes_read, bytes_sent, watched, without_data
from tests.support.processes.played_ranks import Played, local, playing, save_played

SAVED_BY = 4
RESHARDED, COLUMNS = 2, 1024  # tensors, and their columns
REPLICAS = 2
REPLICAS_WITHIN_S = 120.0
STATE = "few large"


def rows(bench: Bench) -> list[Row]:
    with watched(bench.uri) as wire:
        found = [*_one_rank(bench, wire), _resharded(bench, wire), _changed(bench, wire)]
        if bench.scale.has_processes:
            return [*found, _replicas(bench, wire)]
        return [*found, not_measured("R4.replicas", "no processes at this scale")]


def _one_rank(bench: Bench, wire: Wire) -> list[Row]:
    """R4 and R5: a save, its commit and its load at the same world size, by each engine, and by stock DCP."""
    state = make_state("Llama, AdamW", bench.scale.wire_bytes)
    root = open_with("fsspec", bench.uri)
    requests: dict[str, dict[str, list[str]]] = {}
    read: dict[str, float] = {}
    for engine in ENGINES:
        ours = Ours(open_with(engine, new_folder(wire.uri)), state)
        began = wire.mark
        staged = ours.stage()
        uploaded = ours.upload(staged)
        saved = wire.mark
        ours.commit(staged, uploaded)
        committed = wire.mark
        checkpoint = ours.newest()
        before_load = wire.mark
        ours.load(checkpoint)
        read[engine] = bytes_read(wire.since(before_load), root) / state.size_bytes
        handed = replace(checkpoint, documents=checkpoint.read_documents())
        before_handed = wire.mark
        ours.load(handed)
        requests[engine] = {
            "save": without_data(wire.since(began)[: saved - began]),
            "commit": without_data(wire.since(saved)[: committed - saved]),
            "load": without_data(wire.since(before_handed)),
        }
        ours.clear()
    stock = StockDcp(wire.uri, state)
    began = wire.mark
    stock.save()
    saved = wire.mark
    stock.load()
    stock_saves, stock_loads = without_data(wire.since(began)[: saved - began]), wire.since(saved)
    stock_read = bytes_read(stock_loads, root) / state.size_bytes
    return [
        Row(key="R4", value=max(read.values()), today=stock_read, details=read, note="manifest and index included"),
        _requests("R5", "save", requests),
        _requests(
            "R5.commit", "commit", requests, today=len(stock_saves), note="stock: of a rank's save and its commit"
        ),
        _requests(
            "R5.load",
            "load",
            requests,
            today=len(without_data(stock_loads)),
            note="manifest and index come from the coordinator, which reads them once per claim",
        ),
    ]


def _requests(key: str, what: str, requests: Mapping[str, Mapping[str, list[str]]], **more: Any) -> Row:
    counts = {engine: len(found[what]) for engine, found in requests.items()}
    return Row(key=key, value=max(counts.values()), details=counts | {"requests": requests["fsspec"][what]}, **more)


def _resharded(bench: Bench, wire: Wire) -> Row:
    """R4: what four ranks saved, loaded by fewer and by more, each reading for itself."""
    num_rows = bench.scale.wire_bytes // (RESHARDED * COLUMNS * 4)
    weights = {f"weight{number}": torch.rand(num_rows, COLUMNS) for number in range(RESHARDED)}
    place = new_folder(bench.uri)
    root, folder = open_with("fsspec", bench.uri), place.partition("?")[0].rpartition("/")[2]
    saved = save_played(open_with("fast", place), weights, world_size=SAVED_BY, is_bare=True)
    watched_uri = join_uri(wire.uri, folder)
    through = Checkpoint(open_with("fast", watched_uri), saved.entry)
    stock_path = f"{plain_uri(watched_uri)}/{saved.read_manifest().prefixes()[frozen_component('model')]}"
    ours, stock = {}, {}
    for world_size in bench.scale.loaded_by:
        needed = read = stock_read = 0
        for rank in range(world_size):
            with playing(rank, world_size):
                played = Played(weights, {}, (world_size,), is_bare=True, blank=True)
                needed += size_of([local(value) for value in played.model.parameters()])
                began = wire.mark
                TrainState(played.state(), rank=rank, world_size=world_size).apply(through)
                read += bytes_read(wire.since(began), root)
                began = wire.mark
                nested = {"model": {name: value.detach() for name, value in played.model.named_parameters()}}
                dcp.load(nested, storage_reader=FsspecReader(stock_path, **s3fs_options(wire.uri)), no_dist=True)
                stock_read += bytes_read(wire.since(began), root)
        name = f"{SAVED_BY} to {world_size} ranks"
        ours[name], stock[name] = read / needed, stock_read / needed
    return Row(
        key="R4.resharded",
        value=max(ours.values()),
        today=max(stock.values()),
        details=ours | {f"{STOCK}, {name}": ratio for name, ratio in stock.items()},
        note=f"{num_rows * COLUMNS * 4 // SAVED_BY / 1e6:.1f} MB of a tensor on each rank, read in whole 4 MiB sub-blocks",
    )


def _changed(bench: Bench, wire: Wire) -> Row:
    """R13: the second save of a LoRA fine-tune whose base did not change."""
    state = make_state("LoRA", 2 * bench.scale.state_bytes)
    ours = Ours(open_with("fast", new_folder(wire.uri)), state)
    ours.save()
    for tensor in state.changing:
        tensor.add_(1)
    began = wire.mark
    ours.save()
    sent = bytes_sent(wire.since(began))
    ours.clear()
    stock = StockDcp(wire.uri, state)
    began = wire.mark
    stock.save()
    stock_sent = bytes_sent(wire.since(began))
    changed = size_of(state.changing)
    share = 1 - changed / state.size_bytes
    return Row(
        key="R13",
        value=sent / changed,
        today=stock_sent / changed,
        note=f"{share:.1%} of {state.size_bytes / 1e6:.0f} MB frozen; a tensor has 1.6 kB of torch's own framing",
    )


def _replicas(bench: Bench, wire: Wire) -> Row:
    """R4: two processes of one group restore the same replicated state."""
    state = make_state(STATE, bench.scale.wire_bytes)
    place = new_folder(bench.uri)
    ours = Ours(open_with("fast", place), state)
    entry = ours.save().checkpoint.entry
    watched_uri = join_uri(wire.uri, place.partition("?")[0].rpartition("/")[2])
    began = wire.mark
    with TemporaryDirectory() as folder, ProcessPoolExecutor(REPLICAS, mp_context=processes()) as pool:
        rendezvous = str(Path(folder) / "rendezvous")
        loads = [
            pool.submit(load_replica, rank, rendezvous, watched_uri, entry, bench.scale.wire_bytes)
            for rank in range(REPLICAS)
        ]
        for load in loads:
            load.result(REPLICAS_WITHIN_S)
    read = bytes_read(wire.since(began), open_with("fsspec", bench.uri))
    ours.clear()
    return Row(key="R4.replicas", value=read / state.size_bytes, note=f"{REPLICAS} replicas with a gloo group")


def load_replica(rank: int, rendezvous: str, uri: str, entry: Entry, size_bytes: int) -> None:
    """In a process of its own."""
    state = make_state(STATE, size_bytes)
    store = dist.FileStore(rendezvous, REPLICAS)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=REPLICAS)
    try:
        TrainState(state.live, rank=rank, world_size=REPLICAS).apply(
            Checkpoint(open_with("fast", uri), entry), share=True
        )
    finally:
        dist.destroy_process_group()
