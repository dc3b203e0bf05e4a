"""`python -m tests.bench.tinker_saves`: what a save for a sampling session costs, over what save_state costs.

The server is the real one, with its engine in a thread of this process, and the SDK calls it. The bucket is a local S3
server behind the proxy that is like a cloud: 20 ms for each answer, 100 MB/s on each connection. Each round makes one
step, and then each kind of save in turn. The ratio is the median of the rounds' ratios.
"""

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from uuid import uuid4

os.environ["TINKER_TELEMETRY"] = "0"  # read when the SDK is imported

import tinker
from tinker import types
from transformers import LlamaConfig, LlamaForCausalLM

from raycheck.bucket.store.address import join_uri
from tests.bench.servers import started
from tests.support.frameworks.tinker_client import TIMEOUT_S, batch
from tests.support.servers.shaped_proxy import shaped_proxy
from tests.support.servers.tinker_server import tinker_server

KEY = "tml-of-the-benchmark"
SIZES = {"small": (16, 2, 4), "large": (512, 6, 64)}
"""The width and the layers of the base model, and the rank of the adapter."""
LATENCY_S, MB_PER_S = 0.02, 100.0


def write_base_model(folder: Path, width: int, layers: int) -> str:
    config = LlamaConfig(
        hidden_size=width,
        intermediate_size=width * 11 // 4,
        num_hidden_layers=layers,
        num_attention_heads=2,
        num_key_value_heads=2,
        vocab_size=64,
        max_position_embeddings=64,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return str(folder)


def seconds(call: Callable[[], object]) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def one_round(model: tinker.TrainingClient, number: int) -> dict[str, float]:
    model.forward_backward(batch(number), "cross_entropy").result(TIMEOUT_S)
    model.optim_step(types.AdamParams(learning_rate=1e-3)).result(TIMEOUT_S)
    return {
        "save_state": seconds(lambda: model.save_state(f"{number}").result(TIMEOUT_S)),
        "sampling session": seconds(lambda: model.save_weights_and_get_sampling_client().result(TIMEOUT_S)),
        "sampler, by name": seconds(lambda: model.save_weights_for_sampler(f"{number}").result(TIMEOUT_S)),
    }


def measure(size: str, server_uri: str, rounds: int) -> None:
    width, layers, rank = SIZES[size]
    with (
        tempfile.TemporaryDirectory() as folder,
        shaped_proxy(server_uri, mb_per_s=MB_PER_S, latency_s=LATENCY_S) as uri,
    ):
        base, bucket = write_base_model(Path(folder) / "base", width, layers), join_uri(uri, uuid4().hex)
        with tinker_server(base, bucket, Path(folder) / "state.sqlite", key=KEY) as server:
            client = tinker.ServiceClient(base_url=server.url, api_key=KEY)
            model = client.create_lora_training_client(base_model=base, rank=rank).result(TIMEOUT_S)
            found = [one_round(model, number) for number in range(rounds + 1)][1:]
    for what in found[0]:
        ratio = statistics.median(one[what] / one["save_state"] for one in found)
        print(f"{size:6} {what:17} {statistics.median(one[what] for one in found):6.2f} s  {ratio:5.2f} of save_state")


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--rounds", type=int, default=8)
    given = options.parse_args()
    with started("moto") as server:
        for size in SIZES:
            measure(size, server.uri, given.rounds)


if __name__ == "__main__":
    main()
