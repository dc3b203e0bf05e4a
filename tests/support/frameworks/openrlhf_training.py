"""Trains a policy and a critic in OpenRLHF's actor groups.

The groups, their actors, the DeepSpeed strategy, and the trainer's loop, saving and loading are OpenRLHF's. The models are
tiny, sharded by ZeRO over gloo ranks on the CPU: where OpenRLHF asks torch.cuda, the CPU answers. Instead of generating
and scoring answers, the actors learn the prompts.
"""

# ruff: noqa: E402  what has no build for a CPU has to be named before OpenRLHF is imported

import os
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import deepspeed
import ray
import torch
import torch.distributed as dist
from deepspeed.ops.adam import fused_adam
from torch.distributed.device_mesh import init_device_mesh
from transformers import LlamaConfig, LlamaForCausalLM, LlamaForTokenClassification

from tests.support.frameworks.absent_on_cpu import let_import

let_import("flash_attn", "vllm")
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # it would be compiled; gloo does
fused_adam.FusedAdam = torch.optim.AdamW  # DeepSpeed offloads the state of this class alone
torch.cuda.synchronize = lambda *_: None
torch.cuda.empty_cache = lambda: None
torch.cuda.set_device = lambda _: None

from openrlhf.models import Actor
from openrlhf.trainer import ppo_trainer as trainers
from openrlhf.trainer.ppo_utils.samples_generator import SamplesGenerator, _collect_prompt_batch
from openrlhf.trainer.ray.launcher import RayActorGroup
from openrlhf.trainer.ray.ppo_actor import PolicyModelActor
from openrlhf.trainer.ray.ppo_critic import CriticModelActor
from openrlhf.utils.deepspeed import DeepspeedStrategy
from openrlhf.utils.deepspeed import deepspeed as strategies

from tests.support.frameworks.rl_frameworks import TINY, recipe

strategies.init_device_mesh = lambda _, *args, **options: init_device_mesh("cpu", *args, **options)
SAMPLES, BATCH, LENGTH, EMA_BETA = 32, 4, 6, 0.9
TRAINED = {
    "optim": "adam",
    "adam": {"lr": 0.01, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1},
    "lr_scheduler": "linear",
    "lr_warmup_ratio": 0.1,
    "max_norm": 1.0,
    "scheduler_steps": 40,
}
PASSED = {2: 0.1, 4: 0.3, 6: 0.7, 8: 0.5, 10: 0.2}
"""What the evaluations find, by step."""


class CpuStrategy(DeepspeedStrategy):
    def get_ds_train_config(self, *args: Any, **options: Any) -> dict[str, Any]:
        config = super().get_ds_train_config(*args, **options)
        config["optimizer"]["params"]["torch_adam"] = True  # the others are compiled for a device
        config["zero_force_ds_cpu_optimizer"] = False
        return config


def arguments(folder: str, *, stage: int, has_ema: bool, sleeps: bool, disable_ds: bool) -> Any:
    """Return the arguments of OpenRLHF's command line that are read here."""
    kept = {"max_num": 1, "max_mem": 1000, "save_hf": False, "save_steps": 3, "best_metric_key": "eval_prompts_pass1"}
    return SimpleNamespace(
        algo=SimpleNamespace(dynamic_filtering_enable=False),
        ckpt=SimpleNamespace(path=folder, load_enable=True, disable_ds=disable_ds, **kept),
        critic=SimpleNamespace(freezing_steps=-1),
        ds=SimpleNamespace(param_dtype="bf16", zero_stage=stage, tensor_parallel_size=1, enable_sleep=sleeps),
        eval=SimpleNamespace(steps=2, temperature=1.0, n_samples_per_prompt=1),
        local_rank=-1,
        logger=SimpleNamespace(logging_steps=1),
        rollout=SimpleNamespace(batch_size=BATCH, n_samples_per_prompt=1),
        train=SimpleNamespace(dynamic_batch_enable=False, enable_ema=has_ema, num_episodes=2),
        vllm=SimpleNamespace(enable_sleep=False),
    )


class OnCpu:
    """What an actor of OpenRLHF's does on a CPU in place of what it does on a GPU."""

    role: str
    is_doomed = False

    def prepare(self, strategy: DeepspeedStrategy) -> None:
        torch.set_num_threads(1)
        self._setup_distributed(strategy)
        self.disable_ds_ckpt = strategy.args.ckpt.disable_ds
        self.prompts: list[torch.Tensor] = []

    def load(self, engine: Any) -> dict[str, Any]:
        """Load OpenRLHF's own checkpoint if there is one, as its actors do."""
        path = Path(self.strategy.args.ckpt.path, f"_{self.role}")
        states = self.strategy.load_ckpt(engine, str(path))[1] if path.exists() else {}
        if self.strategy.args.ds.enable_sleep:
            self.offload_states()
        return states

    def append(self, experience: torch.Tensor) -> None:
        self.prompts.append(experience)

    def doom(self) -> None:
        """Have this actor die at its next training."""
        self.is_doomed = True

    def learn(self, engine: Any) -> dict[str, float]:
        """Train on this rank's prompts, one by one. Return the loss of all ranks, and a random number."""
        if self.is_doomed:
            os.kill(os.getpid(), signal.SIGKILL)
        total = torch.zeros(())
        for prompt in self.prompts:
            logits = engine(input_ids=prompt[None]).logits.float()[0]
            if logits.shape[-1] == 1:
                loss = (logits[:, 0] - prompt / 32).square().mean()
            else:
                loss = torch.nn.functional.cross_entropy(logits[:-1], prompt[1:])
            self.strategy.backward(loss, engine, None)
            self.strategy.optimizer_step(None, engine, None)
            self.after_micro_batch()
            total += loss.detach() / BATCH
        self.prompts.clear()
        dist.all_reduce(total)
        return {f"{self.role}_loss": float(total), f"{self.role}_drawn_{self._rank}": float(torch.rand(1))}

    def after_micro_batch(self) -> None:
        """Do nothing."""


class CpuPolicy(OnCpu, PolicyModelActor.__ray_actor_class__):
    role = "actor"

    def init_model_from_pretrained(self, strategy: DeepspeedStrategy, seed: int) -> None:
        self.prepare(strategy)
        self.save_hf_ckpt, self.ema_model = False, None
        torch.manual_seed(seed)
        self.actor, *_ = strategy.prepare((Actor(LlamaForCausalLM(LlamaConfig(**TINY))), TRAINED))
        if strategy.args.train.enable_ema:
            torch.manual_seed(seed)
            self.ema_model = strategy.prepare(Actor(LlamaForCausalLM(LlamaConfig(**TINY))))
        torch.manual_seed(seed)
        self.checkpoint_states = self.load(self.actor.model)

    def after_micro_batch(self) -> None:
        if self.ema_model is not None:
            self.strategy.moving_average(self.actor, self.ema_model, EMA_BETA, "cpu")

    def fit(self, kl_ctl: float) -> dict[str, float]:
        del kl_ctl
        found = self.learn(self.actor.model)
        averages = [] if self.ema_model is None else self.ema_model.parameters()
        return {**found, "ema": float(sum(average.float().abs().sum() for average in averages))}


class CpuCritic(OnCpu, CriticModelActor.__ray_actor_class__):
    role = "critic"

    def init_model_from_pretrained(self, strategy: DeepspeedStrategy, seed: int) -> None:
        self.prepare(strategy)
        torch.manual_seed(seed)
        model = LlamaForTokenClassification(LlamaConfig(**TINY, num_labels=1, classifier_dropout=0.0))
        self.critic, *_ = strategy.prepare((model, TRAINED))
        self.load(self.critic)

    def fit(self) -> dict[str, float]:
        return self.learn(self.critic)


class CpuSamples(SamplesGenerator):
    """Draws prompts as SamplesGenerator does, without having them answered, until the trainer has done its steps."""

    is_done = False

    def generate_samples(self, **options: Any) -> Any:
        return ([], None, 0, True) if self.is_done else super().generate_samples(**options)

    def _generate_vllm(self, dataloader_iter: Any, num_prompts: int, **options: Any) -> Any:
        prompts, _, _, is_exhausted = _collect_prompt_batch(dataloader_iter, num_prompts)
        return prompts, len(prompts), is_exhausted


def collate(prompts: Any) -> Any:
    return None, prompts, prompts, prompts


class CpuTrainer(trainers.PPOTrainer.__ray_actor_class__):
    """Trains as PPOTrainer does, without generation."""

    def __init__(
        self, strategy: DeepspeedStrategy, groups: list[RayActorGroup], *, until: int, dies_at: int | None, seed: int
    ) -> None:
        self.args, self.until, self.dies_at = strategy.args, until, dies_at
        self.actor_model_group, self.critic_model_group = groups
        self.wandb_logger = self.tensorboard_logger = self._latest_eval_metric_value = None
        self.best_eval_metric_key, self.best_eval_metric_value = self.args.ckpt.best_metric_key, float("-inf")
        self.generate_kwargs, self.vllm_engines, self.kl_ctl = {}, None, SimpleNamespace(value=0.0)
        chance = torch.Generator().manual_seed(3)
        prompts = [torch.randint(32, (LENGTH,), generator=chance) for _ in range(SAMPLES)]
        torch.manual_seed(seed)  # the second episode's order of the prompts comes from it
        self.prompts_dataloader = self.eval_dataloader = strategy.setup_dataloader(prompts, 1, collate_fn=collate)
        self.samples_generator = CpuSamples(strategy, self.prompts_dataloader, None, None, None)
        self.found = {"losses": {}, "drawn": {}, "ema": {}, "died": False}

    def broadcast_to_vllm(self) -> None:
        """Do nothing."""

    def train_step(self, rollout_samples: list[torch.Tensor], global_step: int) -> tuple[dict[str, float], int]:
        self.found.setdefault("start", global_step)
        refs: list[Any] = []
        for group in (self.actor_model_group, self.critic_model_group):
            refs += group.async_run_method_batch(method_name="append", experience=rollout_samples)
        ray.get(refs)
        step = global_step + 1
        if step == self.dies_at:
            ray.get(self.actor_model_group._actor_handlers[-1].doom.remote())
        status = self.ppo_train(global_step)
        self.found["losses"][step] = [status["actor_loss"], status["critic_loss"]]
        self.found["drawn"][step] = {name: value for name, value in status.items() if "drawn" in name}
        self.found["ema"][step] = status["ema"]
        self.samples_generator.is_done = step == self.until
        return status, step

    def evaluate(self, global_step: int, **options: Any) -> dict[str, float]:
        del options
        return {"eval_prompts_pass1": PASSED.get(global_step, 0.0)}

    def result_of_fit(self) -> dict[str, Any]:
        """Fit, and return what was found, also when an actor has died."""
        try:
            self.fit()
        except ray.exceptions.RayError:
            if self.dies_at is None:
                raise
            self.found["died"] = True
        return self.found


def train(
    way: str,
    folder: str,
    sizes: dict[str, int],
    until: int,
    *,
    stage: int = 2,
    has_ema: bool = False,
    sleeps: bool = False,
    dies_at: int | None = None,
    seed: int = 0,
) -> dict[str, Any]:
    """Train with OpenRLHF's own checkpoints or with raycheck's. Return the losses of each step, and where it began."""
    remote: Any = ray.remote(CpuTrainer)
    if way == "raycheck":
        with mock.patch.object(trainers, "PPOTrainer", remote):
            remote = recipe("OpenRLHF")["Trainer"]
    args = arguments(folder, stage=stage, has_ema=has_ema, sleeps=sleeps, disable_ds=way == "raycheck")
    strategy = CpuStrategy(zero_stage=stage, train_batch_size=BATCH, args=args)
    kinds = {"actor": CpuPolicy, "critic": CpuCritic}
    groups = [RayActorGroup(1, sizes[role], ray.remote(kind)) for role, kind in kinds.items()]
    trainer = remote.options(num_cpus=0).remote(strategy, groups, until=until, dies_at=dies_at, seed=seed)
    for number, group in enumerate(groups):
        ray.get(group.async_init_model_from_pretrained(strategy, seed + number))
    found: dict[str, Any] = ray.get(trainer.result_of_fit.remote())
    return found
