"""R8: how much host memory a save needs at its peak, beyond the live state. Each side in a fresh process.

The kernel counts the peak of resident memory, from when the state stands and the clients have been used once. What the
parts in flight may take by design, 2 x part x in flight, is taken off.
"""

from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint._fsspec_filesystem import FsspecWriter

from raycheck.bucket.store.part_sizes import PART_SIZES
from tests.bench.fresh import processes
from tests.bench.goals import Row, not_measured
from tests.bench.ours import Ours
from tests.bench.peers import STOCK
from tests.bench.place import ENGINES, new_folder, open_with, plain_uri, s3fs_options
from tests.bench.scale import Bench
from tests.bench.states import State, make_state

STATE = "few large"
WARM_UP_BYTES = 1 << 20  # so little that no buffer of it can serve the save that is measured
WITHIN_S = 300.0
Save = Callable[[str, State], None]


def rows(bench: Bench) -> list[Row]:
    if not bench.scale.has_processes:
        return [not_measured("R8", "no processes at this scale")]
    size = bench.scale.memory_bytes
    extra = {}
    for side in (*ENGINES, STOCK):
        with ProcessPoolExecutor(1, mp_context=processes()) as fresh:
            extra[side] = fresh.submit(peak_bytes, side, bench.uri, size).result(WITHIN_S)
    values = {
        side: (extra[side] - 2 * PART_SIZES["s3"].part_bytes * PART_SIZES["s3"].in_flight) / size for side in ENGINES
    }
    return [
        Row(
            key="R8",
            value=max(values.values()),
            today=extra[STOCK] / size,
            details=values | {f"{side}, nothing taken off": found / size for side, found in extra.items()},
            note=f"{STATE}, {size >> 20} MiB; stock: async_save, nothing taken off",
        )
    ]


def peak_bytes(side: str, uri: str, size_bytes: int) -> int:
    """In a fresh process: resident bytes at the peak of a save, less those before it."""
    save = _stock if side == STOCK else _ours(side)
    save(uri, make_state(STATE, WARM_UP_BYTES))
    state = make_state(STATE, size_bytes)
    before = resident_bytes()
    save(uri, state)
    return highest_bytes() - before


def _ours(engine: str) -> Save:
    def save(uri: str, state: State) -> None:
        ours = Ours(open_with(engine, new_folder(uri)), state)
        ours.save()
        ours.clear()

    return save


def _stock(uri: str, state: State) -> None:
    with TemporaryDirectory() as folder:
        store = dist.FileStore(f"{folder}/rendezvous", 1)
        dist.init_process_group("gloo", store=store, rank=0, world_size=1)
        try:
            writer = FsspecWriter(plain_uri(new_folder(uri)), sync_files=False, **s3fs_options(uri))
            dcp.async_save(state.nested, storage_writer=writer).result()
        finally:
            dist.destroy_process_group()


def resident_bytes() -> int:
    """The resident memory of this process, whose peak is counted anew from here."""
    Path("/proc/self/clear_refs").write_text("5")
    return _status("VmRSS")


def highest_bytes() -> int:
    """The peak of the resident memory of this process."""
    return _status("VmHWM")


def _status(name: str) -> int:
    """Bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    raise AssertionError(f"the kernel does not tell {name}")
