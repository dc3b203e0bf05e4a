"""R10: what checksums cost a save. Without them raycheck's CRC-32 answers 0 at once, and the client adds none of its
own; nothing else changes.

What is written then could not be read; it is never committed, and no user can ask for it.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from time import perf_counter
from types import SimpleNamespace

from raycheck.bucket.format import checksum
from tests.bench.goals import Row, worst_row
from tests.bench.ours import Ours
from tests.bench.place import new_folder, open_with, raw_client
from tests.bench.sampling import Measured, Spread, interleaved
from tests.bench.scale import Bench
from tests.bench.states import make_state

NOTHING = SimpleNamespace(crc32=lambda *_: 0, crc32_combine=lambda *_: 0)


def rows(bench: Bench) -> list[Row]:
    ratios = {name: _measured(bench, name) for name in bench.scale.states}
    return [worst_row("R10", ratios, note="engine fast")]


def _measured(bench: Bench, name: str) -> Spread:
    state = make_state(name, bench.scale.state_bytes)
    careful = Ours(open_with("fast", new_folder(bench.uri)), state)
    bare = Ours(open_with("fast", new_folder(bench.uri)), state)
    bare.store._without_retries = bare.store._with_retries = raw_client(bare.store.uri, of_raycheck=True)

    def turn(ours: Ours) -> Measured:
        bench.server.settle()
        began = perf_counter()
        ours.upload(ours.stage())
        durable_s = perf_counter() - began
        ours.clear()
        return {"save": durable_s}

    def without() -> Measured:
        with _no_checksums():
            return turn(bare)

    return interleaved(
        {"with": lambda: turn(careful), "without": without}, bench.scale.rounds, warm_ups=bench.scale.warm_ups
    ).ratio("with", "without", "save")


@contextmanager
def _no_checksums() -> Iterator[None]:
    real = checksum.isal_zlib
    checksum.isal_zlib = NOTHING
    try:
        yield
    finally:
        checksum.isal_zlib = real
