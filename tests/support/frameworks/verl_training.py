"""Trains a policy and a critic in verl's worker groups.

The groups, their actors, the checkpoint manager, and the trainer's saving and loading are verl's own. The models are tiny,
sharded by FSDP2 over gloo ranks on the CPU. Rank 0 of each model reports its losses.
"""

import hashlib
import math
import os
import signal
from collections.abc import Callable, Mapping, Sequence
from typing import Any
from unittest import mock
from uuid import uuid4

import ray
import torch
import torch.distributed as dist
from omegaconf import OmegaConf
from torch.distributed.fsdp import MixedPrecisionPolicy
from torchdata.stateful_dataloader import StatefulDataLoader
from transformers import LlamaConfig, LlamaForCausalLM, LlamaForTokenClassification
from verl.single_controller.base import Worker
from verl.single_controller.base.decorator import Dispatch, register
from verl.single_controller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup
from verl.single_controller.ray.base import create_colocated_worker_cls
from verl.trainer.ppo import ray_trainer
from verl.trainer.ppo.utils import create_rl_sampler
from verl.utils.checkpoint.fsdp_checkpoint_manager import FSDPCheckpointManager
from verl.utils.fsdp_utils import apply_fsdp2

from tests.support.frameworks.rl_frameworks import TINY, recipe

SAMPLES, BATCH, LENGTH, SAVES_EVERY = 32, 4, 6, 3


class CpuEngine:
    """Has the parts of verl's FSDPEngine that its checkpoints are made of, for a CPU."""

    def __init__(self, model_type: str, seed: int) -> None:
        torch.manual_seed(seed)
        kind = LlamaForCausalLM if model_type == "language_model" else LlamaForTokenClassification
        self.module: Any = kind(LlamaConfig(**TINY, num_labels=1, classifier_dropout=0.0))
        mesh = dist.device_mesh.init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("fsdp",))
        kept = MixedPrecisionPolicy(param_dtype=torch.float32, reduce_dtype=torch.float32, cast_forward_inputs=False)
        apply_fsdp2(self.module, {"mesh": mesh, "mp_policy": kept, "reshard_after_forward": True}, {})
        self.optimizer = torch.optim.AdamW(self.module.parameters(), lr=0.01)
        self.lr_scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda step: 1 / (1 + 0.1 * step))
        self.checkpoint_manager = FSDPCheckpointManager(self.module, self.optimizer, self.lr_scheduler)

    def step(self, tokens: torch.Tensor) -> float:
        """Train on this rank's share. Return the loss of all ranks."""
        mine = tokens.chunk(dist.get_world_size())[dist.get_rank()]
        logits = self.module(input_ids=mine).logits
        if logits.shape[-1] == 1:
            loss = (logits[..., 0] - mine / 32).square().mean()
        else:
            loss = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), mine[:, 1:].flatten())
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.lr_scheduler.step()
        total = loss.detach().clone()
        dist.all_reduce(total)
        return float(total) / dist.get_world_size()

    def digests(self) -> dict[str, str]:
        """Return a digest of each whole weight. A collective."""
        whole = {name: weight.full_tensor() for name, weight in self.module.state_dict().items()}
        return {name: hashlib.sha256(weight.numpy().tobytes()).hexdigest()[:12] for name, weight in whole.items()}

    def save_checkpoint(self, *args: Any, **options: Any) -> None:
        self.checkpoint_manager.save_checkpoint(*args, **options)

    def load_checkpoint(self, *args: Any, **options: Any) -> None:
        self.checkpoint_manager.load_checkpoint(*args, **options)


class CpuWorker(Worker):
    """Holds an engine, as verl's TrainingWorker does."""

    def __init__(self, engine: Callable[[str, int], Any], model_type: str, seed: int) -> None:
        super().__init__()
        torch.set_num_threads(1)
        if not dist.is_initialized():
            dist.init_process_group("gloo")
        self.engine = engine(model_type, seed)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def train(self, tokens: torch.Tensor, *, is_last: bool) -> tuple[float, float]:
        """Return the loss of all ranks, and a random number."""
        if is_last and self.rank == self.world_size - 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return self.engine.step(tokens), float(torch.rand(1))

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def digests(self) -> dict[str, str]:
        return self.engine.digests()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def save_checkpoint(self, *args: Any, **options: Any) -> None:
        self.engine.save_checkpoint(*args, **options)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def load_checkpoint(self, *args: Any, **options: Any) -> None:
        self.engine.load_checkpoint(*args, **options)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    async def update_weights(self) -> None:
        """verl's workers have a method like this one, which makes them asynchronous actors of Ray."""


class CpuPolicyWorker(CpuWorker):
    """Holds the policy's worker, as verl's ActorRolloutRefWorker does."""

    def __init__(self, engine: Callable[[str, int], Any], model_type: str, seed: int) -> None:
        Worker.__init__(self)
        self.actor = CpuWorker(engine, model_type, seed)
        self.engine = self.actor.engine


class CpuTrainer(ray_trainer.RayPPOTrainer):
    """Trains as RayPPOTrainer does, without rollouts. Saving and loading are RayPPOTrainer's own.

    engines: what makes the engine of each role; CpuEngine by default.
    """

    def __init__(
        self,
        folder: str,
        sizes: dict[str, int],
        *,
        is_colocated: bool,
        until: int,
        seed: int,
        engines: Mapping[str, Callable[[str, int], Any]],
    ) -> None:
        checkpoint = {"async_save": False}
        trainer = {
            "default_local_dir": folder,
            "default_hdfs_dir": None,
            "resume_mode": "auto",
            "max_actor_ckpt_to_keep": 1,
            "max_critic_ckpt_to_keep": 1,
            "del_local_ckpt_after_load": False,
        }
        self.config = OmegaConf.create({"trainer": trainer, "actor_rollout_ref": {"actor": {"checkpoint": checkpoint}}})
        self.use_critic, self.total_training_steps = True, until
        chance = torch.Generator().manual_seed(3)
        tokens = [torch.randint(32, (LENGTH,), generator=chance) for _ in range(SAMPLES)]
        sampler = create_rl_sampler(OmegaConf.create({"shuffle": True, "seed": 1}), tokens)
        self.train_dataloader = StatefulDataLoader(tokens, batch_size=BATCH, sampler=sampler)
        policy, critic = (engines.get(role, CpuEngine) for role in ("actor", "critic"))
        classes = {
            "actor_rollout": RayClassWithInitArgs(ray.remote(CpuPolicyWorker), policy, "language_model", seed),
            "critic": RayClassWithInitArgs(ray.remote(CpuWorker), critic, "value_model", seed + 1),
        }
        self._init_groups(classes, sizes, is_colocated=is_colocated)

    def _init_groups(self, classes: dict[str, Any], sizes: dict[str, int], *, is_colocated: bool) -> None:
        """Start the workers as RayPPOTrainer.init_workers does."""
        pools = [classes] if is_colocated else [{name: cls} for name, cls in classes.items()]
        groups: dict[str, Any] = {}
        for number, own in enumerate(pools):
            size = sizes["critic" if "critic" in own else "actor"]
            pool = RayResourcePool([size], use_gpu=False, name_prefix=f"pool{number}", max_colocate_count=1)
            prefix = uuid4().hex[:8]  # its own would come from the random state, which a restore puts back
            workers = create_colocated_worker_cls(own)
            group = RayWorkerGroup(resource_pool=pool, ray_cls_with_init=workers, name_prefix=prefix)
            groups |= group.spawn(prefix_set=own.keys())
        self.actor_rollout_wg, self.critic_wg = groups["actor_rollout"], groups["critic"]

    def fit(self) -> None:
        self.global_steps = 0
        self._load_checkpoint()
        self.found = {"start": self.global_steps, "losses": {}, "drawn": {}, "weights": {}, "died": False}
        self._note_weights()
        per_epoch = len(self.train_dataloader)
        for _ in range(self.global_steps // per_epoch, math.ceil(self.total_training_steps / per_epoch)):
            for tokens in self.train_dataloader:
                self.global_steps += 1
                dies = self.global_steps == self.dies_at
                results = [group.train(tokens, is_last=dies) for group in (self.actor_rollout_wg, self.critic_wg)]
                self.found["losses"][self.global_steps] = [ranks[0][0] for ranks in results]
                self.found["drawn"][self.global_steps] = [number for ranks in results for _, number in ranks]
                self._note_weights()
                is_last = self.global_steps == self.total_training_steps
                if is_last or self.global_steps % SAVES_EVERY == 0:
                    self._save_checkpoint()
                if is_last:
                    return

    def _note_weights(self) -> None:
        groups = (self.actor_rollout_wg, self.critic_wg)
        self.found["weights"][self.global_steps] = [group.digests()[0] for group in groups]


def train(
    way: str,
    folder: str,
    sizes: dict[str, int],
    until: int,
    *,
    is_colocated: bool = False,
    dies_at: int | None = None,
    seed: int = 0,
    recipes: Sequence[str] = ("verl",),
    engines: Mapping[str, Callable[[str, int], Any]] | None = None,
) -> dict[str, Any]:
    """Train with verl's own checkpoints or with raycheck's. Return what each step gave, and where it began.

    recipes: the headings of the guide whose code is run, one after the other. engines: see CpuTrainer.
    """
    trainer_class: Any = CpuTrainer
    if way == "raycheck":
        with mock.patch.object(ray_trainer, "RayPPOTrainer", CpuTrainer):
            trainer_class = recipe(*recipes)["Trainer"]
    trainer = trainer_class(folder, sizes, is_colocated=is_colocated, until=until, seed=seed, engines=engines or {})
    trainer.dies_at = dies_at
    try:
        trainer.fit()
    except ray.exceptions.RayActorError:
        trainer.found["died"] = True
    return dict(trainer.found)
