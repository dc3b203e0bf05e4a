"""Trains a policy and a critic in verl's worker groups with verl's Megatron engine, on gloo ranks.

The engine, its optimizer and schedule, the checkpoint manager, and the trainer's saving and loading are verl's own. The
models are Megatron-core's, which need no GPU: verl's bridges build them of Transformer Engine's layers.
"""

from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from transformers import LlamaConfig
from verl.trainer.config import CheckpointConfig
from verl.workers.config import McoreEngineConfig, McoreOptimizerConfig
from verl.workers.engine.megatron import transformer_impl

from tests.support.frameworks import verl_training
from tests.support.frameworks.megatron_training import Training, config_of, digests_of, model_of, on_cpu, step_of
from tests.support.frameworks.rl_frameworks import TINY

RECIPES = ("verl", "verl with Megatron")
transformer_impl.log_gpu_memory_usage = lambda *_, **__: None  # there is no GPU to ask


class CpuMegatronEngine(transformer_impl.MegatronEngine):
    """verl's engine, with a model for the CPU.

    degrees: of each parallelism, and other fields of a Training. config: more of verl's McoreEngineConfig.
    """

    def __init__(self, degrees: dict[str, Any], config: dict[str, Any], model_type: str, seed: int) -> None:
        self._training = Training(uri="", seed=seed, dtype="bf16", has_values=model_type == "value_model", **degrees)
        with on_cpu():
            super().__init__(
                SimpleNamespace(
                    model_type=model_type,
                    hf_config=LlamaConfig(**TINY),
                    architectures=["LlamaForCausalLM"],
                    local_path="",
                    mtp=SimpleNamespace(enable=False),
                    get_processor=lambda: None,
                ),
                McoreEngineConfig(
                    tensor_model_parallel_size=self._training.tp,
                    pipeline_model_parallel_size=self._training.pp,
                    sequence_parallel=False,
                    use_dist_checkpointing=True,
                    seed=seed,
                    **config,
                ),
                McoreOptimizerConfig(lr=0.01, lr_warmup_steps=8, total_training_steps=80, lr_decay_style="cosine"),
                CheckpointConfig(),
            )
            model_parallel_cuda_manual_seed(seed)
            self.initialize()

    def _build_tf_config(self) -> None:
        self.tf_config = config_of(self._training)
        self.is_value_model = self._training.has_values
        self.share_embeddings_and_output_weights = False
        self.param_dtype = torch.bfloat16
        self.bridge = self.provider = self.peft_cls = None

    def _build_megatron_module(self) -> Any:
        return model_of(self._training)

    def step(self, tokens: torch.Tensor) -> float:
        with on_cpu():
            return step_of(self._training, self.module, self.optimizer, self.lr_scheduler, tokens)

    def digests(self) -> dict[str, str]:
        """Return a digest of each whole 32-bit weight and moment. A collective."""
        with on_cpu():
            return digests_of(self.module, self.optimizer)

    def save_checkpoint(self, *args: Any, **options: Any) -> None:
        with on_cpu():
            super().save_checkpoint(*args, **options)

    def load_checkpoint(self, *args: Any, **options: Any) -> None:
        with on_cpu():
            super().load_checkpoint(*args, **options)


def train(*args: Any, degrees: dict[str, dict[str, Any]], **options: Any) -> dict[str, Any]:
    """Do what verl_training.train does, with the degrees of each role."""
    config = options.pop("config", {})
    engines = {role: partial(CpuMegatronEngine, own, config) for role, own in degrees.items()}
    return verl_training.train(*args, recipes=RECIPES, engines=engines, **options)
