"""`python -m tests.bench.publishing`: what publishing a small Llama's weights costs, and how late a reader has them.

The model is trained by AdamW in float32, and published in bfloat16 after each step. The first version is whole.
"changed" is the share of elements that differ from the step before. "publish / read once" is the time of one publish
over that of reading the checkpoint's bytes, which are in float32, once from the same bucket. "lag" is the time from the
end of a publish until a reader, which looks every 0.1 s, has the version as a folder.
"""

import argparse
import statistics
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from uuid import uuid4

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import raycheck
from raycheck.bucket.reading import Checkpoint
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
            self._update()

    def _use(self, rate: float) -> None:
        self._optimizer = torch.optim.AdamW(self.model.parameters(), lr=rate)

    def settle(self, rate: float, steps: int = 10) -> None:
        """Train on at another rate, until AdamW's moments are those of that rate."""
        self._use(rate)
        for _ in range(steps):
            self._update()

    def _update(self) -> None:
        tokens = torch.randint(0, 8000, (2, 64)).cumsum(1) % 8000
        self.model(input_ids=tokens, labels=tokens).loss.backward()
        self._optimizer.step()
        self._optimizer.zero_grad()

    def step(self) -> Checkpoint:
        self._update()
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--steps", type=int, default=5)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
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
