"""Trains a policy and a critic in SkyRL's actor groups.

The groups, their workers, the strategy that shards, saves and loads, and the trainer's loop, saving and loading are
SkyRL's. The models are tiny, sharded by FSDP2 over gloo ranks on the CPU: where SkyRL asks torch.cuda, the CPU answers.
Instead of generating and scoring answers, the workers learn the prompts. Where SkyRL moves a model to another device, it
is moved to other memory, and what it leaves is overwritten.
"""

# ruff: noqa: E402  what the CPU answers has to be in place before SkyRL is imported

import asyncio
import math
import os
import signal
import typing
from hashlib import sha256
from types import SimpleNamespace
from typing import Any
from unittest import mock

import typing_extensions

from tests.support.frameworks.absent_on_cpu import let_import

let_import("flash_attn", "vllm")
typing.TypedDict = typing_extensions.TypedDict  # pydantic wants this one before Python 3.12

import ray
import torch
import torch.distributed as dist
from ray.util.placement_group import placement_group
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from transformers import LlamaConfig, LlamaForCausalLM, LlamaForTokenClassification

torch.cuda.synchronize = lambda *_: None
torch.cuda.empty_cache = lambda: None
torch.cuda.set_device = lambda _: None
torch.cuda.current_device = lambda: "cpu"

from skyrl.backends.skyrl_train.distributed import fsdp_strategy, fsdp_utils
from skyrl.backends.skyrl_train.distributed.dispatch import MeshRank
from skyrl.backends.skyrl_train.distributed.fsdp_strategy import FSDPStrategy
from skyrl.backends.skyrl_train.workers.model_wrapper import HFModelWrapper
from skyrl.backends.skyrl_train.workers.worker import CriticWorkerBase, PolicyWorkerBase
from skyrl.backends.skyrl_train.workers.worker_dispatch import WorkerDispatch
from skyrl.train import trainer as trainers
from skyrl.train.config import SkyRLTrainConfig
from skyrl.train.config.config import MixedPrecisionConfig
from skyrl.train.utils.utils import ResolvedPlacementGroup

from tests.support.frameworks.rl_frameworks import TINY, recipe
from tests.support.frameworks.skyrl_prompts import Prompts

BATCH, LENGTH = 4, 6


def share_buffers(model: torch.nn.Module, _: Any) -> None:
    """Give all ranks rank 0's buffers that are not saved, as SkyRL does on GPUs."""
    for module in model.modules():
        for key in sorted(module._non_persistent_buffers_set):
            buffer: Any = module._buffers[key]
            if buffer.is_meta:
                buffer = torch.empty(buffer.shape, dtype=buffer.dtype)
            dist.broadcast(buffer, src=0)
            module._buffers[key] = buffer


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def elsewhere(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy, and overwrite the memory that the tensor was in."""
    copy = tensor.clone()
    local_part(tensor).fill_(math.nan)
    return copy


@torch.no_grad()
def move_model(model: torch.nn.Module, *, empty_cache: bool = True) -> None:
    del empty_cache
    model._apply(elsewhere)


@torch.no_grad()
def move_optimizer(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    for slots in optimizer.state.values():
        slots.update({name: elsewhere(value) for name, value in slots.items() if isinstance(value, torch.Tensor)})


fsdp_utils.init_device_mesh = lambda _, **options: init_device_mesh("cpu", **options)
fsdp_utils._sync_non_persistent_buffers = share_buffers
fsdp_strategy.offload_fsdp2_model_to_cpu = fsdp_strategy.load_fsdp2_model_to_gpu = move_model
fsdp_strategy.offload_fsdp_optimizer = fsdp_strategy.load_fsdp_optimizer = move_optimizer


class OnCpu:
    """What a worker of SkyRL's does on a CPU in place of what it does on a GPU."""

    is_doomed = False

    def init_worker_process_group(self) -> None:
        torch.set_num_threads(1)
        dist.init_process_group("gloo")
        ranks = self._world_size
        self.mesh_rank = MeshRank(dp=self._rank, sp=0, tp=0, pp=0, world_size=ranks, dp_size=ranks, pp_size=1)

    def prepare(self, config: Any, model: Any, num_training_steps: int) -> None:
        self.strategy = FSDPStrategy(
            config.fsdp_config, config.optimizer_config, config.model, num_training_steps=num_training_steps
        )
        self.strategy.setup_distributed()
        torch.manual_seed(self.cfg.seed)
        self.model, self.optimizer, self.scheduler = self.strategy.prepare((model(), None, None))

    def offload_to_cpu(self, **what: bool) -> None:
        self.strategy.offload_to_cpu(self.model, self.optimizer, **what)

    def doom(self) -> None:
        """Have this worker die at its next training."""
        self.is_doomed = True

    def learn(self, prompts: torch.Tensor) -> tuple[float, float, str]:
        """Train on this rank's share. Return the loss of all ranks, a random number, and the weights' checksum."""
        if self.is_doomed:
            os.kill(os.getpid(), signal.SIGKILL)
        mine = prompts.chunk(self._world_size)[self._rank]
        model = self.strategy._unwrap_model(self.model)
        logits = model(input_ids=mine).logits
        if logits.shape[-1] == 1:
            loss = (logits[..., 0] - mine / 32).square().mean()
        else:
            loss = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), mine[:, 1:].flatten())
        self.strategy.backward(loss, self.model, self.optimizer)
        self.strategy.optimizer_step(self.optimizer, self.model, self.scheduler)
        total = loss.detach().clone()
        dist.all_reduce(total)
        weights = b"".join(local_part(weight.detach()).numpy().tobytes() for weight in model.parameters())
        return float(total) / self._world_size, float(torch.rand(1)), sha256(weights).hexdigest()


class CpuPolicyWorker(OnCpu, PolicyWorkerBase):
    def init_model(self, model_path: str, num_training_steps: int) -> None:
        config = LlamaConfig(**TINY, tie_word_embeddings=False)
        self.prepare(self.cfg.policy, lambda: HFModelWrapper(LlamaForCausalLM(config)), num_training_steps)

    def _set_pad_token_id(self, pad_token_id: int) -> None:
        self.model.model.config.pad_token_id = pad_token_id


class CpuCriticWorker(OnCpu, CriticWorkerBase):
    def init_model(self, model_path: str, num_training_steps: int) -> None:
        config = LlamaConfig(**TINY, num_labels=1, classifier_dropout=0.0, tie_word_embeddings=False)
        self.prepare(self.cfg.critic, lambda: LlamaForTokenClassification(config), num_training_steps)


class Batch(dict[str, Any]):
    """A batch in the form that SkyRL's trainer takes."""

    def __init__(self, prompts: list[torch.Tensor]) -> None:
        super().__init__(prompts=torch.stack(prompts), rewards=None)
        self.metadata: dict[str, Any] = {"uids": []}


class CpuDispatch(WorkerDispatch):
    async def save_weights_for_sampler(self, model_id: str | None = None) -> None:
        """Move the models as WorkerDispatch does, and send no weights."""
        self._prepare_for_weight_sync()
        self._finish_weight_sync()


class CpuTrainer(trainers.RayPPOTrainer):
    """Trains as RayPPOTrainer does, without generation."""

    dies_at: int | None = None

    def __init__(self, cfg: SkyRLTrainConfig, samples: int) -> None:
        chance = torch.Generator().manual_seed(3)
        prompts = Prompts(torch.randint(32, (LENGTH,), generator=chance) for _ in range(samples))
        tracker = SimpleNamespace(log=lambda *_, **__: None, finish=lambda: None)
        tokenizer = SimpleNamespace(pad_token_id=0, save_pretrained=lambda _: None)
        inference = SimpleNamespace(sleep=self.sleep)
        shared = None
        if cfg.trainer.placement.colocate_all:
            bundles = [{"GPU": 1, "CPU": 1}] * cfg.trainer.placement.policy_num_gpus_per_node
            shared = ResolvedPlacementGroup(placement_group(bundles))
        super().__init__(cfg, tracker, tokenizer, prompts, inference, None, shared)
        self.found: dict[str, Any] = {"read": {}, "losses": {}, "drawn": {}, "weights": {}, "died": False}
        with mock.patch.object(trainers, "WorkerDispatch", CpuDispatch):
            self.build_models(*(ray.remote(num_gpus=1)(kind) for kind in (CpuPolicyWorker, CpuCriticWorker)), None)

    async def sleep(self) -> None:
        """Do nothing."""

    def init_weight_sync_state(self) -> None:
        """Do nothing."""

    def _cleanup_old_checkpoints(self) -> None:
        """Do it here alone, and not also in a task that imports SkyRL without this module."""
        trainers.cleanup_old_checkpoints(self.cfg.trainer.ckpt_path, self.cfg.trainer.max_ckpts_to_keep)

    async def generate(self, input_batch: Any) -> Any:
        return {"prompts": input_batch["prompts"]}

    def postprocess_generator_output(self, generator_output: Any, uids: list[str]) -> Any:
        return generator_output, uids

    def convert_to_training_input(self, generator_output: Any, uids: list[str]) -> Any:
        return Batch(generator_output["prompts"])

    def fwd_logprobs_values_reward(self, training_input: Any) -> Any:
        return training_input

    def compute_advantages_and_returns(self, data: Any) -> Any:
        return data

    def _execute_training_step(self, model: str, data: Any) -> dict[str, float]:
        self.found.setdefault("start", self.global_step - 1)
        group = {"policy": self.policy_model, "critic": self.critic_model}[model]
        if model == "policy" and self.global_step == self.dies_at:
            ray.get(group._actor_handlers[-1].doom.remote())
        self.dispatch._ensure_on_gpu(model)
        ranks = ray.get(group.async_run_ray_method("pass_through", "learn", data["prompts"]))
        losses, *others = zip(*ranks, strict=True)
        for what, values in zip(("losses", "drawn", "weights"), (losses[:1], *others), strict=True):
            self.found[what].setdefault(self.global_step, []).extend(values)
        self.found["read"][self.global_step] = data["prompts"].tolist()
        return {"loss": losses[0]}


def configuration(
    folder: str, sizes: dict[str, int], *, until: int, epochs: int, seed: int, is_colocated: bool, readers: int
) -> SkyRLTrainConfig:
    cfg = SkyRLTrainConfig()
    trainer = cfg.trainer
    trainer.seed, trainer.epochs, trainer.max_training_steps = seed, epochs, until
    trainer.ckpt_path, trainer.ckpt_interval, trainer.max_ckpts_to_keep = folder, 3, 1
    trainer.train_batch_size = trainer.policy_mini_batch_size = trainer.critic_mini_batch_size = BATCH
    trainer.eval_interval, trainer.print_example_interval, trainer.enable_ray_gpu_monitor = -1, 0, False
    trainer.algorithm.temperature, trainer.algorithm.use_kl_loss = 1.0, False
    cfg.generator.n_samples_per_prompt, cfg.generator.inference_engine.enable_ray_prometheus_stats = 1, False
    cfg.data.dataloader.num_workers = readers
    trainer.placement.colocate_all, trainer.placement.colocate_policy_ref = is_colocated, False
    trainer.placement.policy_num_gpus_per_node, trainer.placement.critic_num_gpus_per_node = sizes.values()
    cfg.generator.inference_engine.num_engines = sizes["policy"]
    trainer.critic.model.path = "tiny"
    for role in (trainer.policy, trainer.critic):
        role.fsdp_config.mixed_precision = MixedPrecisionConfig(param_dtype="fp32", reduce_dtype="fp32")
        role.optimizer_config.lr, role.optimizer_config.num_warmup_steps = 0.01, 20
    return cfg


def train(
    way: str,
    folder: str,
    sizes: dict[str, int],
    until: int,
    *,
    samples: int = 64,
    readers: int = 0,
    is_colocated: bool = False,
    dies_at: int | None = None,
    seed: int = 0,
) -> dict[str, Any]:
    """Train with SkyRL's own checkpoints or with raycheck's. Return the losses of each step, and where it began.

    readers: how many processes read the data, 0 for the trainer's own.
    """
    trainer_class: Any = CpuTrainer
    if way == "raycheck":
        with mock.patch.object(trainers, "RayPPOTrainer", CpuTrainer):
            trainer_class = recipe("SkyRL")["Trainer"]
    epochs = math.ceil(until / (samples // BATCH))
    options = {"until": until, "epochs": epochs, "seed": seed, "is_colocated": is_colocated, "readers": readers}
    trainer = trainer_class(configuration(folder, sizes, **options), samples)
    trainer.dies_at = dies_at
    try:
        asyncio.run(trainer.train())
    except ray.exceptions.RayError:
        if dies_at is None:
            raise
        trainer.found["died"] = True
    return dict(trainer.found)
