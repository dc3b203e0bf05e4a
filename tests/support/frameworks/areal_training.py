"""Trains an actor and a critic with AReaL's PPOTrainer.

The trainer, its controllers, the scheduler of Ray actors, the FSDP engines, and the recovery are AReaL's own. The
models are tiny and train on the CPU over gloo. In place of an inference server, trajectories come from the dataset.
"""

# ruff: noqa: E402  what has no build for a CPU has to be named before AReaL is imported

import os
import signal
import time
from pathlib import Path
from typing import Any
from unittest import mock

import ray
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM, Qwen2ForTokenClassification

from tests.support.frameworks.absent_on_cpu import let_import

let_import("numba", "openai", "swanlab", "trackio", "uvloop")

from areal import trainer as trainers
from areal.api import RolloutWorkflow
from areal.api.cli_args import (
    ClusterSpecConfig,
    EvaluatorConfig,
    InferenceEngineConfig,
    MicroBatchSpec,
    NameResolveConfig,
    OptimizerConfig,
    PPOActorConfig,
    PPOConfig,
    PPOCriticConfig,
    RecoverConfig,
    SaverConfig,
    SchedulerConfig,
    SchedulingSpec,
    StatsLoggerConfig,
    TrainDatasetConfig,
)
from areal.infra.rpc.ray_rpc_server import RayRPCServer
from areal.infra.scheduler import ray as schedulers
from areal.infra.scheduler.exceptions import WorkerFailedError
from areal.trainer import rl_trainer
from areal.utils import seeding
from areal.utils.data import cycle_dataloader
from areal.utils.network import find_free_ports

from tests.support.frameworks.rl_frameworks import TINY, recipe

SAMPLES, BATCH, LENGTH, SAVES_EVERY = 16, 4, 6, 3
LOGGED = (
    "ppo_actor/update/actor_loss/avg",
    "ppo_actor/update/grad_norm",
    "ppo_actor/update/lr",
    "ppo_critic/critic_loss/avg",
    "ppo_critic/grad_norm",
    "ppo_critic/lr",
)


class Worker(RayRPCServer.__ray_actor_class__):
    """AReaL's container of engines. By this class Ray's workers find what AReaL cannot import on a CPU."""

    def configure(self, config: Any, role: str, rank: int) -> None:
        """Seed as AReaL means to: it asks for the engines here, and has none yet, so that no worker is ever seeded."""
        super().configure(config, role, rank)
        seeding.set_random_seed(config.seed, key=f"{role}{rank}")

    def die(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)


schedulers.RayRPCServer = ray.remote(Worker)
schedulers.get_placement_group_master_ip_and_port = lambda *_, **__: ("127.0.0.1", find_free_ports(1)[0])


class CpuScheduler(schedulers.RayScheduler):
    def __del__(self) -> None:
        """Leave the workers alone: AReaL's own would start Ray again when this process ends."""


class Rollouts:
    """Makes trajectories of the dataset's samples, where AReaL asks an inference engine."""

    staleness_manager = None

    def __init__(self) -> None:
        self.version = 0
        self.has_weights_of: list[int] = []
        self.before_batch: Any = None
        self.read: dict[int, list[int]] = {}

    def prepare_batch(self, dataloader: Any, **_: Any) -> list[dict[str, torch.Tensor]]:
        if not hasattr(self, "samples"):
            self.samples = cycle_dataloader(dataloader)
        self.before_batch()
        batch = next(self.samples)
        self.read[self.version + 1] = [sample["number"] for sample in batch]
        return [
            {
                "input_ids": sample["tokens"][None],
                "attention_mask": torch.ones(1, LENGTH, dtype=torch.bool),
                "loss_mask": torch.tensor([[0, 0] + [1] * (LENGTH - 2)], dtype=torch.int32),
                "logprobs": sample["logprobs"][None].clone(),
                "rewards": sample["reward"][None],
            }
            for sample in batch
        ]

    def set_version(self, version: int) -> None:
        self.version = version

    def export_stats(self) -> dict[str, float]:
        return {}

    def _nothing(self, *_: Any, **__: Any) -> None:
        pass

    pause = resume = destroy = save_perf_tracer = _nothing


class CpuTrainer(trainers.PPOTrainer):
    """Trains as PPOTrainer does, from trajectories that are there."""

    def _init_scheduler(self) -> Any:
        return CpuScheduler(300.0, exp_config=self.config)

    def _create_train_engine(self, config: Any, alloc: Any) -> Any:
        actor = super()._create_train_engine(config, alloc)
        actor.connect_engine = lambda rollout, meta: setattr(actor, "rollout", rollout)
        actor.update_weights = lambda meta: actor.rollout.has_weights_of.append(meta.version)
        return actor

    def _init_rollout(self, config: Any, is_eval: bool = False, lora_path: str | None = None) -> Any:
        return Rollouts()

    def note(self, dies_at: int | None, *, dies_in_save: bool) -> None:
        """Note each step's numbers in `found`. A worker dies in a step.

        dies_in_save: it does not wait for the last save's commit.
        """
        start = self.recover_info.last_step_info.global_step + 1 if self.recover_info else 0
        has_weights_of = list(self.rollout.has_weights_of)
        self.found = {"start": start, "losses": {}, "read": self.rollout.read, "has_weights_of": has_weights_of}
        commit = self.stats_logger.commit

        def noting(epoch: int, step: int, global_step: int, data: dict[str, float]) -> None:
            data = {**data, **self.critic.export_stats()}
            self.found["losses"][global_step + 1] = [data[name] for name in LOGGED]
            commit(epoch, step, global_step, data)

        def dying() -> None:
            if self.rollout.version + 1 == dies_at:
                if hasattr(self.recover_handler, "checkpointer") and not dies_in_save:
                    self.recover_handler.checkpointer.wait()
                self.scheduler._workers["actor"][-1].actor.die.remote()

        self.stats_logger.commit = noting
        self.rollout.before_batch = dying


def write_model(folder: Path, seed: int, dropout: float) -> tuple[str, str]:
    """Write a language model and a value model. Return their paths."""
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel({"a": 0, "b": 1}, "a")), eos_token="b")
    config = Qwen2Config(**TINY, num_labels=1, attention_dropout=dropout, classifier_dropout=0.0)
    paths = []
    for number, kind in enumerate((Qwen2ForCausalLM, Qwen2ForTokenClassification)):
        torch.manual_seed(seed + number)
        path = str(folder / f"{kind.__name__}-{seed}-{dropout}")
        kind(config).save_pretrained(path)
        tokenizer.save_pretrained(path)
        paths.append(path)
    return paths[0], paths[1]


def config_of(folder: str, models: tuple[str, str], sizes: dict[str, int], until: int) -> PPOConfig:
    names = {"experiment_name": "ppo", "trial_name": "tiny"}
    places = {**names, "fileroot": folder}

    def engine(role: str, path: str) -> dict[str, Any]:
        return {
            **names,
            "path": path,
            "backend": f"fsdp:d{sizes[role]}",
            "dtype": "float32",
            "attn_impl": "sdpa",
            "weight_update_mode": "disk",
            "ppo_n_minibatches": 1,
            "mb_spec": MicroBatchSpec(max_tokens_per_mb=LENGTH),  # one sample: on a CPU, attention would mix several
            "optimizer": OptimizerConfig(lr=0.01, lr_scheduler_type="linear"),
            "scheduling_spec": (SchedulingSpec(cpu=1, gpu=0, mem=1),),
        }

    return PPOConfig(
        **names,
        cluster=ClusterSpecConfig(fileroot=folder, name_resolve=NameResolveConfig(nfs_record_root=f"{folder}/names")),
        total_train_epochs=5,
        total_train_steps=until,
        tokenizer_path=models[0],
        train_dataset=TrainDatasetConfig(path="", type="rl", batch_size=BATCH),
        saver=SaverConfig(**places),
        evaluator=EvaluatorConfig(**places),
        recover=RecoverConfig(**places, mode="on", freq_steps=SAVES_EVERY),
        stats_logger=StatsLoggerConfig(**places),
        scheduler=SchedulerConfig(type="ray"),
        rollout=InferenceEngineConfig(**names, backend="sglang:d1"),
        actor=PPOActorConfig(**engine("actor", models[0]), kl_ctl=0.0),
        critic=PPOCriticConfig(**engine("critic", models[1]), is_critic=True),
    )


def dataset() -> list[dict[str, Any]]:
    chance = torch.Generator().manual_seed(3)
    return [
        {
            "number": number,
            "tokens": torch.randint(32, (LENGTH,), generator=chance),
            "logprobs": -3 - torch.rand(LENGTH, generator=chance),
            "reward": torch.rand((), generator=chance),
        }
        for number in range(SAMPLES)
    ]


def train(
    way: str,
    folder: str,
    sizes: dict[str, int],
    until: int,
    *,
    dies_at: int | None = None,
    dies_in_save: bool = False,
    uri: str = "",
    dropout: float = 0.1,
    seed: int = 0,
) -> dict[str, Any]:
    """Train with AReaL's own recovery or with raycheck's. Return the losses of each step, and where it began.

    folder: where AReaL writes. uri: of the run; by default, it is in the folder.
    """
    place = Path(folder)
    config = config_of(folder, write_model(place.parent, seed, dropout), sizes, until)
    trainer_class: Any = CpuTrainer
    with (
        mock.patch.object(rl_trainer, "RecoverHandler", rl_trainer.RecoverHandler),
        mock.patch.object(trainers, "PPOTrainer", CpuTrainer),
    ):
        if way == "raycheck":
            made = recipe("AReaL")
            made["RecoverHandler"].uri, trainer_class = uri or f"file://{folder}/run", made["Trainer"]
        trainer = trainer_class(config, train_dataset=dataset())
    trainer.note(dies_at, dies_in_save=dies_in_save)
    died = ""
    try:
        trainer.train(workflow=RolloutWorkflow)
        trainer.close()
    except WorkerFailedError as error:
        died = type(error).__name__
    end(trainer.scheduler)
    return {**trainer.found, "died": died}


def end(scheduler: Any) -> None:
    """Kill the workers that are left, and wait until their names are free."""
    for worker in scheduler._worker_info_by_id.values():
        ray.kill(worker.actor)
    deadline = time.monotonic() + 30
    for name in scheduler._worker_info_by_id:
        while time.monotonic() < deadline:
            try:
                ray.get_actor(name)
            except ValueError:
                break
            time.sleep(0.05)
