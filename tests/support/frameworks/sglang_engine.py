"""Installs SGLang, and has it load what a run publishes: `python this-file FOLDER` prints notes.

Its kernels have no build for CPUs on PyPI, so the model does not compute here. What loads its weights is SGLang's own: the
loader of models, and what the server calls for `/update_weights_from_disk` and `/update_weights_from_tensor`. SGLang goes
into a virtual environment beside the repository's, and finds torch and all else in that one.
"""

import json
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

VERSION = "0.5.23"
FOLDER = Path(__file__).parents[3] / ".venv-sglang"
NEEDS = (
    "apache-tvm-ffi==0.1.11", "blobfile==3.0.0", "cachetools==8.0.2", "cloudpickle==3.1.3", "compressed-tensors==0.18.0",
    "easydict==1.14", "fastapi==0.136.3", "gguf==0.19.0", "httpx2==2.16.2", "interegular==0.3.3", "jiter==0.19.0",
    "llguidance==1.7.6", "loguru==0.7.3", "modelscope==1.40.2", "msgspec==0.22.0", "nvidia-ml-py==13.615.71",
    "openai==2.8.0", "outlines==0.1.11", "partial-json-parser==0.2.1.1.post7", "pybase64==1.5.1",
    "python-multipart==0.0.34", "scipy==1.17.1", "sentencepiece==0.2.1", "setproctitle==1.3.8", "starlette==1.10.0",
    "tiktoken==0.14.0", "timm==1.0.25", "torchao==0.9.0", "triton==3.7.1", "uvicorn==0.54.0", "uvloop==0.23.0",
    "watchfiles==1.3.0", "xgrammar==0.2.7",
)  # fmt: skip


def prepare() -> None:
    from tests.support.processes.virtual_environments import prepare_venv

    prepare_venv(FOLDER, f"sglang-{VERSION}", "--no-deps", f"sglang=={VERSION}", *NEEDS, finds_ours=True)


def judged(place: Path) -> list[dict[str, Any]]:
    from tests.support.frameworks import engine_versions

    return engine_versions.judged(FOLDER / "bin/python", __file__, place, {"SGLANG_USE_CPU_ENGINE": "1"})


def judge(place: Path) -> list[dict[str, Any]]:
    """Load version after version into one model of SGLang's, by each way that it has. Return the notes."""
    from transformers.utils.import_utils import is_torchvision_available

    from tests.support.frameworks.absent_on_cpu import let_import
    from tests.support.frameworks.engine_versions import Served, unfused

    assert not is_torchvision_available()  # transformers asks once, and would use it
    let_import("torchvision", "sgl_kernel")
    served = Served(place)
    updater = updater_of(str(served.next_version().path))
    model = updater.get_model()
    served.note("a new model", unfused(model).items())
    for load_format, threads in (("auto", True), ("safetensors", True), ("auto", False)):
        version = served.next_version()
        served.note(f"read as {load_format}, {threads=}", read(version.path, load_format, threads=threads))
        assert updater.update_weights_from_disk(str(version.path), load_format) == (
            True,
            "Succeeded to update model weights.",
        )
        served.note("updated from the folder", unfused(model).items())
    for changed_only in (False, True):
        tensors = list(served.next_version().tensors(changed_only=changed_only))
        assert updater.update_weights_from_tensor(tensors) == (True, "Success")
        served.note(f"updated from version.tensors({changed_only=})", unfused(model).items())
    version = served.next_version()
    served.note_read_meanwhile("read while newer versions come", version, iter(read(version.path, threads=False)))
    served.follower.close()
    return served.found


def updater_of(path: str) -> Any:
    """Load a model as SGLang's server does when it starts. Return the object with which the server updates weights."""
    from sglang.srt.configs.device_config import DeviceConfig
    from sglang.srt.configs.load_config import LoadConfig
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.distributed.bootstrap import init_parallel_runtime
    from sglang.srt.model_executor.model_runner_components.weight_updater import WeightUpdater
    from sglang.srt.model_loader import get_model
    from sglang.srt.runtime_context import SpawnRanks, publish
    from sglang.srt.server_args import ServerArgs

    arguments = ServerArgs(
        path, device="cpu", dtype="bfloat16", skip_tokenizer_init=True, attention_backend="torch_native"
    )
    publish(arguments, role="scheduler", ranks=SpawnRanks(world_rank=0, gpu_id=0))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    init_parallel_runtime(server_args=arguments, device="cpu", dist_port=port)
    config = ModelConfig.from_server_args(arguments)
    model = get_model(model_config=config, load_config=LoadConfig(), device_config=DeviceConfig("cpu"))
    return WeightUpdater(
        tp_rank=0,
        device="cpu",
        gpu_id=0,
        model_config=config,
        custom_weight_loaders={},
        get_model=lambda: model,
        update_model_fields=lambda *_, **__: None,
        recapture_cuda_graph=lambda: None,
        get_model_runner=lambda: None,
    )


def read(path: Path, load_format: str = "auto", *, threads: bool = True) -> Iterator[tuple[str, Any]]:
    """Read a folder as SGLang does when it loads a model."""
    from sglang.srt.configs.load_config import LoadConfig
    from sglang.srt.model_loader.loader import DefaultModelLoader

    config = LoadConfig(load_format=load_format, model_loader_extra_config={"enable_multithread_load": threads})
    return DefaultModelLoader(config)._get_weights_iterator(DefaultModelLoader.Source(str(path), None))


if __name__ == "__main__":
    if len(sys.argv) > 1:
        print(json.dumps(judge(Path(sys.argv[1]))))
    else:
        prepare()
