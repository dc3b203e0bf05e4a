"""`python -m tests.bench.publishing`: what publishing a small Llama's weights costs, and how late a reader has them.

The model is trained by AdamW in float32, and published in bfloat16 after each step. The first version is whole.
"changed" is the share of elements that differ from the step before. "publish / read once" is the time of one publish
over that of reading the checkpoint's bytes, which are in float32, once from the same bucket. "lag" is the time from the
end of a publish until a reader, which looks every 0.1 s, has the version as a folder.

`--beside` measures instead how much slower the training's steps are while something publishes, one version after the
other: a process, as if on another node, or a thread of the trainer, as under torchrun. It shares the server's core,
and the training has another one. Each round has steps without and with it. "wall" and "CPU" are ratios of a step's time
and of the training thread's CPU time in it; other programs disturb the latter less. "spin" is a process that only
counts, for comparison.
"""

import argparse
import multiprocessing
import os
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any
from uuid import uuid4

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import raycheck
from raycheck.bucket.reading import Checkpoint, read_newest
from raycheck.bucket.store import open_store
from raycheck.bucket.store.address import join_uri
from raycheck.bucket.store.read_ahead import Spans, read_ahead
from raycheck.published.publish import publish
from raycheck.settings import Publish
from tests.bench.servers import started
from tests.support.processes.save_without_ray import save_state
from tests.support.servers.shaped_proxy import shaped_proxy

RATES = 1e-6, 1e-5
NETWORKS = {"local": None, "1 ms": 0.001, "40 ms": 0.04}
MB_PER_S = 100.0
POLL_S = 0.1
WARM_STEPS = 20
"""Steps at a learning rate of 1e-3: weights that are not those of the initialization."""


def new_model(hidden: int, layers: int) -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            hidden_size=hidden,
            intermediate_size=hidden * 11 // 4,
            num_hidden_layers=layers,
            num_attention_heads=hidden // 64,
            num_key_value_heads=hidden // 64,
            vocab_size=8000,
        )
    )


class Training:
    """Trains the model, and commits its weights in bfloat16."""

    def __init__(self, uri: str, hidden: int, layers: int) -> None:
        self.store = open_store(uri)
        self.model = new_model(hidden, layers)
        self._steps = 0
        self._use(1e-3)
        for _ in range(WARM_STEPS):
            self.update()

    def _use(self, rate: float) -> None:
        self._optimizer = torch.optim.AdamW(self.model.parameters(), lr=rate)

    def settle(self, rate: float, steps: int = 10) -> None:
        """Train on at another rate, until AdamW's moments are those of that rate."""
        self._use(rate)
        for _ in range(steps):
            self.update()

    def update(self) -> None:
        tokens = torch.randint(0, 8000, (2, 64)).cumsum(1) % 8000
        self.model(input_ids=tokens, labels=tokens).loss.backward()
        self._optimizer.step()
        self._optimizer.zero_grad()

    def step(self) -> Checkpoint:
        self.update()
        self._steps += 1
        return save_state(self.store, {"model": self.model}, save_number=self._steps, step=self._steps)

    def weights(self) -> torch.Tensor:
        return torch.cat([values.detach().bfloat16().view(torch.int16).flatten() for values in self.model.parameters()])


def read_once_s(checkpoint: Checkpoint) -> float:
    """Return how long reading the checkpoint's bytes takes."""
    began = time.perf_counter()
    for item in checkpoint.store.list_objects(f"checkpoints/{checkpoint.entry.key}/"):
        for _ in read_ahead(Spans(checkpoint.store, item.key, 0, item.size_bytes)):
            pass
    return time.perf_counter() - began


class Readings:
    """When a reader in a thread had each step."""

    def __init__(self, uri: str, folder: Path) -> None:
        self.at: dict[int, float] = {}
        self._follower = raycheck.follow(uri, folder, poll_s=POLL_S)
        self._thread = threading.Thread(target=self._follow)
        self._thread.start()

    def _follow(self) -> None:
        for version in self._follower:
            self.at[version.step] = time.time()

    def lag_s(self, step: int, published_at: float) -> float:
        end = time.monotonic() + 120
        while step not in self.at and time.monotonic() < end:
            time.sleep(0.01)
        return self.at[step] - published_at

    def close(self) -> None:
        self._follower.close()
        self._thread.join()


@contextmanager
def network(uri: str, latency_s: float | None) -> Iterator[str]:
    if latency_s is None:
        yield uri
    else:
        with shaped_proxy(uri, mb_per_s=MB_PER_S, latency_s=latency_s) as through:
            yield through


def measure(uri: str, name: str, rate: float, arguments: argparse.Namespace, folder: Path) -> None:
    training = Training(uri, arguments.hidden, arguments.layers)
    training.settle(rate)
    options = Publish(dtype="bfloat16", cache=str(folder / "cache"), whole_every=256)
    first = publish(training.step(), options)
    assert first is not None
    readings = Readings(uri, folder / "local")
    readings.lag_s(1, first.version.published_at)
    rows: dict[str, list[float]] = {"share": [], "bytes": [], "publish": [], "seconds": [], "lag": []}
    for step in range(2, 2 + arguments.steps):
        before = training.weights()
        checkpoint = training.step()
        rows["share"].append((training.weights() != before).float().mean().item())
        read_s = read_once_s(checkpoint)
        began = time.perf_counter()
        done = publish(checkpoint, options)
        took = time.perf_counter() - began
        assert done is not None
        rows["seconds"].append(took)
        rows["publish"].append(took / read_s)
        rows["bytes"].append(done.version.patch_bytes / done.version.whole_bytes)
        rows["lag"].append(readings.lag_s(step, time.time()))
    readings.close()
    mib = first.version.whole_bytes / 2**20
    found = {column: statistics.median(values) for column, values in rows.items()}
    print(
        f"| {name} | {rate:g} | {mib:.0f} | {found['share']:.2%} | {found['bytes']:.2%} | {found['seconds']:.2f} "
        f"| {found['publish']:.2f} | {found['lag']:.2f} |",
        flush=True,
    )


class Repeated:
    """Calls a function again and again on one core while it is `running`. done: how many times."""

    def __init__(self, make: Callable[[str], Callable[[], object]], uri: str, core: int, *, in_thread: bool) -> None:
        """make: makes the function, from the URI, in a process or in a thread of this one."""
        context = multiprocessing.get_context("spawn")
        self._may, self._idle, self._ends = context.Event(), context.Event(), context.Event()
        self._done = context.Value("i", 0)
        arguments = (make, uri, core, self._may, self._idle, self._ends, self._done)
        self._runner: Any = (threading.Thread if in_thread else context.Process)(target=_repeat, args=arguments)
        self._runner.start()
        assert self._idle.wait(120)

    @contextmanager
    def running(self) -> Iterator[None]:
        self._may.set()
        yield
        self._may.clear()
        assert self._idle.wait(120)

    @property
    def done(self) -> int:
        return int(self._done.value)

    def close(self) -> None:
        self._ends.set()
        self._may.set()
        self._runner.join(120)


def _repeat(make: Callable[..., Any], uri: str, core: int, may: Any, idle: Any, ends: Any, done: Any) -> None:
    os.sched_setaffinity(0, [core])  # of this thread, and those that it starts
    torch.set_num_threads(1)
    call = make(uri)
    while True:
        idle.set()
        may.wait()
        idle.clear()
        if ends.is_set():
            return
        call()
        done.value += 1


def make_publish(uri: str) -> Callable[[], object]:
    """Return a function that publishes the run's two checkpoints in turn."""
    store = open_store(uri)
    checkpoints = [Checkpoint(store, entry) for entry in read_newest(store).newest]
    options = Publish(dtype="bfloat16", cache=tempfile.mkdtemp(), whole_every=256)
    numbers = count()
    return lambda: publish(checkpoints[next(numbers) % 2], options)


def make_spin(uri: str) -> Callable[[], object]:
    del uri
    return lambda: sum(range(3_000_000))


def steps(training: Training, number: int) -> tuple[list[float], list[float]]:
    """Return the time and the thread's CPU time of each step."""
    wall, cpu = [], []
    for _ in range(number):
        began, used = time.perf_counter(), time.thread_time()
        training.update()
        wall.append(time.perf_counter() - began)
        cpu.append(time.thread_time() - used)
    return wall, cpu


def measure_beside(name: str, beside: Repeated, training: Training, arguments: argparse.Namespace) -> None:
    found: dict[str, list[float]] = {"alone": [], "wall": [], "p90": [], "CPU": []}
    for number in range(arguments.rounds + 1):
        alone = steps(training, arguments.steps)
        with beside.running():
            busy = steps(training, arguments.steps)
        if number:  # the first round warms up
            found["alone"].append(statistics.median(alone[0]))
            found["wall"].append(statistics.median(busy[0]) / statistics.median(alone[0]))
            found["p90"].append(statistics.quantiles(busy[0], n=10)[-1] / statistics.quantiles(alone[0], n=10)[-1])
            found["CPU"].append(statistics.median(busy[1]) / statistics.median(alone[1]))
    beside.close()
    ratios = " | ".join(
        f"{statistics.median(found[column]):.3f} ({min(found[column]):.2f}..{max(found[column]):.2f})"
        for column in ("wall", "p90", "CPU")
    )
    print(f"| {name} | {statistics.median(found['alone']):.3f} | {ratios} | {beside.done} |", flush=True)


def beside(uri: str, arguments: argparse.Namespace, cores: list[int]) -> None:
    """Measure the training's steps on the first core beside what runs on the last one, where the server is."""
    os.sched_setaffinity(0, cores[-1:])  # the store's client starts its threads there
    training = Training(uri, arguments.hidden, arguments.layers)
    training.settle(RATES[0])
    for _ in range(2):
        training.step()
    os.sched_setaffinity(0, cores[:1])
    print("| beside | step alone, s | wall | p90 | CPU | done |\n|---|---|---|---|---|---|")
    for name, make, in_thread in (
        ("spin", make_spin, False),
        ("publisher in a process", make_publish, False),
        ("publisher in a thread", make_publish, True),
    ):
        measure_beside(name, Repeated(make, uri, cores[-1], in_thread=in_thread), training, arguments)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--beside", action="store_true", help="the training's step time instead")
    parser.add_argument("--rounds", type=int, default=7, help="with --beside")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if arguments.beside:
        cores = sorted(os.sched_getaffinity(0))
        with started("seaweed") as server:
            beside(join_uri(server.uri, uuid4().hex), arguments, cores)
        return
    print(
        "| network | learning rate | whole, MiB | changed | patch / whole | publish, s | publish / read once | lag, s |"
    )
    print("|---|---|---|---|---|---|---|---|")
    with started("seaweed") as server:
        for name, latency_s in NETWORKS.items():
            for rate in RATES:
                with (
                    network(join_uri(server.uri, uuid4().hex), latency_s) as uri,
                    tempfile.TemporaryDirectory() as folder,
                ):
                    measure(uri, name, rate, arguments, Path(folder))


if __name__ == "__main__":
    main()
