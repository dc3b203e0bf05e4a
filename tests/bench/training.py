"""R9: how much slower a training's steps are while an upload goes on, mean against mean, and the upload's own pace.

Two kinds of steps of about a millisecond: one that never lets go of the GIL, and one that is inside a matmul most of
the time. The upload runs in a thread of the trainer, as raycheck's does, or in a process beside it for comparison. The
pace stands beside each ratio: an upload that is starved costs the training little. The raw client's upload of as many
bytes, which computes nothing, shows what sharing the cores costs by itself. Run apart from the throughput.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from time import perf_counter

import torch

from tests.bench.ceilings import Raw
from tests.bench.fresh import processes
from tests.bench.goals import Row, worst_row
from tests.bench.ours import Ours
from tests.bench.peers import STOCK, StockDcp
from tests.bench.place import ENGINES, new_folder, open_with
from tests.bench.sampling import Measured, Samples, Spread, interleaved
from tests.bench.scale import Bench
from tests.bench.states import make_state

STATE = "few large"
RAW = "raw client"
STEP_S = 0.001
MATRIX = torch.rand(320, 320)
ANSWER_WITHIN_S = 120.0
Step = Callable[[], object]
Upload = Callable[[], Callable[[], bool]]
"""Begins an upload; what it returns tells whether it is over."""


def rows(bench: Bench) -> list[Row]:
    steps = {"Python": _python_step(), "matmul": _matmul_step}
    with _uploads(bench) as uploads:
        sides = {
            f"{side}, {kind}": lambda step=step, upload=upload: _turn(bench, step, upload)
            for kind, step in steps.items()
            for side, upload in uploads.items()
        }
        samples = interleaved(sides, bench.scale.rounds, warm_ups=bench.scale.warm_ups)
    return [_row(key, engine, samples) for key, engine in (("R9", "fast"), ("R9.fsspec", "fsspec"))]


def _row(key: str, engine: str, samples: Samples) -> Row:
    found = {side: Spread.of(samples.of(side, "ratio")) for side in samples.sides}
    in_thread = {side: ratio for side, ratio in found.items() if side.startswith(f"{engine} in a thread")}
    stock = [ratio.median for side, ratio in found.items() if side.startswith(STOCK)]
    raw = [ratio.median for side, ratio in found.items() if side.startswith(RAW)]
    details = {side: ratio.median for side, ratio in found.items() if side.startswith(engine)}
    details |= {f"{side}, MB/s": Spread.of(samples.of(side, "mb_s")).median for side in details}
    return worst_row(key, in_thread, today=max(stock), peers={STOCK: max(stock), RAW: max(raw)}, details=details)


def _turn(bench: Bench, step: Step, upload: Upload) -> Measured:
    bench.server.settle()
    until = perf_counter() + bench.scale.steps_s
    without_s = _mean_s(step, lambda: perf_counter() > until)
    began = perf_counter()
    with_s = _mean_s(step, upload())
    return {"ratio": with_s / without_s, "mb_s": bench.scale.upload_bytes / (perf_counter() - began) / 1e6}


def _mean_s(step: Step, is_over: Callable[[], bool]) -> float:
    began, count = perf_counter(), 0
    while not count or not is_over():
        step()
        count += 1
    return (perf_counter() - began) / count


def _python_step() -> Step:
    """A loop of about a millisecond here."""

    def loop(times: int) -> int:
        total = 0
        for number in range(times):
            total += number & 7
        return total

    began = perf_counter()
    loop(100_000)
    times = int(100_000 * STEP_S / (perf_counter() - began))
    return lambda: loop(times)


def _matmul_step() -> object:
    return MATRIX @ MATRIX


@contextmanager
def _uploads(bench: Bench) -> Iterator[dict[str, Upload]]:
    state = make_state(STATE, bench.scale.upload_bytes)
    found: dict[str, Upload] = {}
    for engine in ENGINES:
        ours = Ours(open_with(engine, new_folder(bench.uri)), state)
        found[f"{engine} in a thread"] = lambda ours=ours: _in_thread(ours)
    raw = Raw(bench.uri, bench.scale.upload_bytes)
    found[f"{RAW} in a thread"] = lambda: _started(raw.put)
    stock = StockDcp(bench.uri, state)
    found[f"{STOCK} in a thread"] = lambda: _started(stock.save)
    beside = [_Beside(engine, bench) for engine in ENGINES if bench.scale.has_processes]
    for process in beside:
        found[f"{process.engine} in a process"] = process.begin
    try:
        yield found
    finally:
        for process in beside:
            process.stop()


def _in_thread(ours: Ours) -> Callable[[], bool]:
    staged = ours.stage()
    return _started(lambda: ours.upload(staged))


def _started(call: Callable[[], object]) -> Callable[[], bool]:
    """A thread whose failure is raised where the training asks whether it is over."""
    failures: list[BaseException] = []

    def run() -> None:
        try:
            call()
        except BaseException as error:
            failures.append(error)

    def is_over() -> bool:
        if failures:
            raise failures[0]
        return not thread.is_alive()

    thread = threading.Thread(target=run, name="bench-upload")
    thread.start()
    return is_over


class _Beside:
    """A process that stages and uploads a state of its own when it is told."""

    def __init__(self, engine: str, bench: Bench) -> None:
        self.engine = engine
        context = processes()
        self._ours, theirs = context.Pipe()
        arguments = (theirs, engine, new_folder(bench.uri), bench.scale.upload_bytes)
        self._process = context.Process(target=serve_uploads, args=arguments, daemon=True)
        self._process.start()
        theirs.close()
        self._wait()

    def begin(self) -> Callable[[], bool]:
        self._ours.send("stage")
        self._wait()
        self._ours.send("upload")

        def is_over() -> bool:
            return self._ours.poll() and self._ours.recv() == "done"

        return is_over

    def stop(self) -> None:
        self._process.kill()
        self._process.join()
        self._ours.close()

    def _wait(self) -> None:
        if not self._ours.poll(ANSWER_WITHIN_S):
            raise TimeoutError(f"the uploading process did not answer within {ANSWER_WITHIN_S:.0f} s")
        assert self._ours.recv() == "done"


def serve_uploads(connection: Connection, engine: str, uri: str, size_bytes: int) -> None:
    """In the process beside the training; it ends when it is killed."""
    torch.set_num_threads(1)
    ours = Ours(open_with(engine, uri), make_state(STATE, size_bytes))
    staged = None
    connection.send("done")
    while True:
        if connection.recv() == "stage":
            staged = ours.stage()
        else:
            assert staged is not None
            ours.upload(staged)
        connection.send("done")
