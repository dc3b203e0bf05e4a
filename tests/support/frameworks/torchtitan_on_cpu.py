"""Runs torchtitan's own train entry on CPUs: `torchrun tests/support/frameworks/torchtitan_on_cpu.py --module llama3 --config ...`.

torchtitan 0.3 is made for GPUs. What it lacks here is given to it: a device module for the CPU, an attention with a
backward pass on the CPU, no triton kernels, and a function of torch's that is not in every release. Its trainer, data
loader, optimizers and parallelisms are its own. `debug_raycheck` is its llama3_debugmodel with raycheck's manager.
RAYCHECK_TEST_LOSSES names a file for rank 0's losses, RAYCHECK_TEST_KILL a step after which rank 0 is killed.
"""

import json
import os
import signal
import sys
import types
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch

EVERY_STEP = (
    "--parallelism.spmd_backend",
    "partial_dtensor",
    "--training.disable_cuda_graphs",
    "--optimizer.implementation",
    "for-loop",
    "--metrics.log_freq",
    "1",
)


class CpuDevice:
    """Answers for the CPU what torch.cuda answers for a GPU."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.cpu, name)

    def get_device_name(self, device: Any = None) -> str:
        return "cpu"

    def current_device(self) -> int:
        return 0

    def device_count(self) -> int:
        return 64

    def get_device_properties(self, device: Any = None) -> Any:
        return types.SimpleNamespace(total_memory=1 << 34, name="cpu")

    def reset_peak_memory_stats(self) -> None: ...

    def empty_cache(self) -> None: ...

    def set_device(self, device: Any) -> None: ...

    def memory_stats(self, device: Any = None) -> Any:
        return defaultdict(int)


def make_run_on_cpu() -> None:
    """Call it before anything else of torchtitan is imported."""
    torch.set_num_threads(1)
    kernels: Any = types.ModuleType("torchtitan.distributed.minimal_async_ep.kernels")
    kernels.__getattr__ = lambda name: None
    sys.modules[kernels.__name__] = kernels
    if not hasattr(torch.distributed, "set_timeout"):
        torch.distributed.set_timeout = lambda timeout, group=None: None
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.pipelining.schedules import PipelineScheduleMulti

    set_factor = FSDPModule.set_gradient_divide_factor

    def set_factor_for_gloo(self: Any, factor: float) -> None:
        self.set_force_sum_reduction_for_comms(True)  # gloo cannot divide while it sums
        set_factor(self, factor)

    FSDPModule.set_gradient_divide_factor = set_factor_for_gloo
    PipelineScheduleMulti.step = step_of(PipelineScheduleMulti.step)
    import torchtitan.tools.utils as utils

    utils.device_type, utils.device_module = "cpu", CpuDevice()


def step_of(stock: Any) -> Any:
    """torch 2.13's step of a pipeline takes whole batches; torchtitan gives micro-batches, as later releases take."""

    def step(
        self: Any, *args: Any, kwarg_mbs: Any = None, arg_mbs: Any = None, target_mbs: Any = None, **more: Any
    ) -> Any:
        if kwarg_mbs is None:
            return stock(self, *args, **more)
        for stage in self._stages:
            stage.has_backward = self._has_backward
            stage.clear_runtime_states()
        return self._step_microbatches(
            arg_mbs, kwarg_mbs, target_mbs, more["losses"], more["return_outputs"], loss_kwargs=more["loss_kwargs"]
        )

    return step


def make_assets(folder: Path) -> tuple[Path, Path]:
    """A tokenizer of characters and a few documents. Returns their folders."""
    from random import Random

    from tokenizers import Regex, Tokenizer, models, pre_tokenizers

    tokens, texts = folder / "tokenizer", folder / "texts"
    tokens.mkdir(parents=True)
    texts.mkdir()
    vocabulary = ["<s>", "</s>", "<unk>", *(chr(code) for code in range(32, 127))]
    tokenizer = Tokenizer(models.WordLevel({token: n for n, token in enumerate(vocabulary)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.save(str(tokens / "tokenizer.json"))
    (tokens / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>", "eos_token": "</s>"}))
    random = Random(0)
    words = ["the", "cat", "sat", "on", "a", "mat", "dog", "ran", "away"]
    lines = (f"{n} " + " ".join(random.choices(words, k=random.randint(5, 25))) for n in range(60))
    (texts / "data.json").write_text("".join(json.dumps({"text": line}) + "\n" for line in lines))
    return tokens, texts


def debug_raycheck() -> Any:
    """torchtitan's llama3_debugmodel, two layers of it, with raycheck's CheckpointManager."""
    import raycheck

    config = debug_model()
    config.checkpoint = raycheck.torchtitan.CheckpointManager.Config(enable=True, interval=2)
    return config


def debug_model() -> Any:
    from torchtitan.models.common.attention import ScaledDotProductAttention
    from torchtitan.models.llama3.config_registry import llama3_debugmodel

    config = llama3_debugmodel()
    model = config.model_spec.model
    model.layers = model.layers[: int(os.environ.get("RAYCHECK_TEST_LAYERS", "2"))]
    for layer in model.layers:
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    return config


def record_losses(file: Path, kill: int) -> None:
    """Append each step's loss to a file, exactly, and be killed after step `kill`."""
    from torchtitan.components.metrics import MetricsProcessor
    from torchtitan.trainer import Trainer

    log, step = MetricsProcessor.log, Trainer.train_step

    def log_and_record(self: Any, step: int, loss: float, *args: Any, **more: Any) -> None:
        if os.environ["RANK"] == "0":
            with file.open("a") as out:
                out.write(json.dumps([step, float(loss).hex()]) + "\n")
        log(self, step, loss, *args, **more)

    def step_or_die(self: Any, batches: Any) -> None:
        if self.step == kill + 1 and os.environ["RANK"] == "0":
            os.kill(os.getpid(), signal.SIGKILL)
        step(self, batches)

    MetricsProcessor.log, Trainer.train_step = log_and_record, step_or_die


def main() -> None:
    make_run_on_cpu()
    from torchtitan.models.llama3 import config_registry

    config_registry.debug_raycheck, config_registry.debug_model = debug_raycheck, debug_model
    record_losses(Path(os.environ["RAYCHECK_TEST_LOSSES"]), int(os.environ.get("RAYCHECK_TEST_KILL", "-1")))
    from torchtitan.train import main as train

    sys.argv += EVERY_STEP
    train()


if __name__ == "__main__":
    main()
