"""Trains with open-instruct's GRPO loop, policy actors and reference policy.

The loop, the group of actors, the actors, their DeepSpeed engines and data loaders, the loss, and the saving and loading
are open-instruct's own. The models are tiny and train on the CPU over gloo: where an actor names a GPU, the CPU answers.
There is no vLLM: weights are sent nowhere, and completions come from an actor that reads the prompts with open-instruct's
loader, one batch at a time. open-instruct's own actor of this kind prompts ahead of the training, and a resumed training
skips what it had prompted: its losses are never those of an undisturbed one.
"""

# ruff: noqa: E402  what has no build for a CPU has to be named before open-instruct is imported

import os
import random
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import make_dataclass
from importlib import import_module
from pathlib import Path
from queue import Queue
from types import SimpleNamespace
from typing import Any
from unittest import mock

import datasets
import deepspeed
import numpy as np
import ray
import torch
import torch.distributed as dist
from ray.util.placement_group import placement_group
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from tests.support.frameworks.absent_on_cpu import let_import

let_import("beaker", "bettermap", "cached_path", "immutabledict", "langdetect", "mcp", "nltk", "openai", "openenv")
let_import("tiktoken", "vllm")
import_module("vllm.v1.kv_cache_interface").MambaSpec = make_dataclass("MambaSpec", ["dtypes"])  # its field is changed
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # it would be compiled; gloo does
torch.cuda.set_device = lambda _: None
_from_pretrained = AutoModelForCausalLM.from_pretrained


def on_cpu(*args: Any, device_map: Any = None, **options: Any) -> Any:
    """Load a model where it is computed with. device_map: it would name a GPU."""
    return _from_pretrained(*args, **options)


AutoModelForCausalLM.from_pretrained = on_cpu

from olmo_core.nn.attention import AttentionBackendName
from open_instruct import actor_manager, data_loader, data_types, grpo_fast, grpo_utils, model_utils, utils

from tests.support.frameworks.rl_frameworks import TINY, recipe

utils.calculate_utilization_metrics = lambda **_: {}
PROMPTS, BATCH, LENGTH, SAVES_EVERY, STEPS = 24, 6, 6, 3, 10
LOGGED = ("loss/policy_avg", "loss/kl_avg", "lr", "optim/grad_norm", "val/num_total_tokens")
DRAWN = "drawn/"
GENERATORS = (random.random, np.random.rand, lambda: torch.rand(()))


class CpuTorch:
    """torch, with a CPU for each number of a device."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    def device(self, number: int) -> torch.device:
        return torch.device("cpu")


grpo_fast.torch = CpuTorch()
Learner = grpo_fast.PolicyTrainerRayProcess.__ray_actor_class__
Learner.__module__, Learner.__name__, Learner.__qualname__ = __name__, "Learner", "Learner"
"""Named so that Ray finds it: pickled by value, it would take a module of torch with it that cannot be pickled."""


class CpuPolicy(Learner):
    """open-instruct's actor, over gloo, that may die."""

    def from_pretrained(self, args: Any, *rest: Any) -> Any:
        torch.set_num_threads(1)
        dist.init_process_group("gloo")
        return super().from_pretrained(args, *rest)

    def step(self) -> Any:
        """Train, and add to the metrics what each rank's random generators give. The last rank dies in its step."""
        if self._streaming_dataloader.training_step + 1 == self.args.dies_at and self.rank == self.world_size - 1:
            if hasattr(self, "checkpointer"):
                self.checkpointer.wait()
            os.kill(os.getpid(), signal.SIGKILL)
        metrics, arrays = super().step()
        for _ in range(self.rank):  # open-instruct seeds all ranks alike
            for generator in GENERATORS:
                generator()
        drawn: list[Any] = [None] * self.world_size
        dist.all_gather_object(drawn, [float(generator()) for generator in GENERATORS])
        metrics |= {
            f"{DRAWN}{rank}/{number}": own[number] for rank, own in enumerate(drawn) for number in range(len(own))
        }
        return metrics, arrays


class Completions:
    """Has a batch of each step for each rank, where open-instruct's own actor asks vLLM."""

    def __init__(self, folder: str, dp_world_size: int) -> None:
        prompts = datasets.Dataset.from_dict({"index": list(range(PROMPTS))})
        options: dict[str, Any] = {"batch_size": BATCH, "seed": 3, "dp_rank": 0, "dp_world_size": 1, "work_dir": folder}
        self.prompts = data_loader.HFDataLoader(prompts, **options, automatic_reshuffle=True, collator=_indices)
        self.dp_world_size, self.batch, self.last = dp_world_size, (-1, []), -1

    def get_data(self, rank: int, step: int) -> dict[str, Any]:
        if self.batch[0] != step:
            self.batch, self.last = (step, next(self.prompts)["index"]), step
        mine = self.batch[1][rank :: self.dp_world_size]
        metrics = {"batch/prompt_lengths": [2] * len(mine), "batch/response_lengths": [LENGTH - 2] * len(mine)}
        return {"batch": completed(mine), "metrics": {**metrics, "time/group_generation_max": 1.0}}

    def get_state(self) -> dict[str, Any]:
        state = self.prompts.state_dict()
        return {"training_step": self.last + 1, "last_consumed_step": self.last, "iter_dataloader_state": state}

    def set_state(self, state: dict[str, Any]) -> None:
        self.prompts.load_state_dict(state["iter_dataloader_state"])
        self.last = state["last_consumed_step"]


def _indices(examples: list[dict[str, Any]]) -> dict[str, Any]:
    return {"index": [example["index"] for example in examples]}


def completed(indices: list[int]) -> Any:
    """Return the prompts of these numbers with their completions."""
    rows = []
    for index in indices:
        chance = torch.Generator().manual_seed(index)
        rows.append(
            {
                "query_responses": torch.randint(2, 32, (1, LENGTH), generator=chance),
                "attention_masks": torch.ones(1, LENGTH, dtype=torch.long),
                "position_ids": torch.arange(LENGTH)[None],
                "advantages": torch.randn(1, 1, generator=chance).expand(1, LENGTH),
                "response_masks": torch.tensor([[False, False] + [True] * (LENGTH - 2)]),
                "vllm_logprobs": -3 - torch.rand(1, LENGTH, generator=chance),
            }
        )
    return data_types.CollatedBatchData(**{name: [row[name] for row in rows] for name in rows[0]})


class Manager(actor_manager.ActorManager):
    """open-instruct's, that tells of every pause at least once: without vLLM, pauses end before the loop asks."""

    is_told = True

    def set_should_stop(self, should_stop: bool) -> None:
        super().set_should_stop(should_stop)
        self.is_told = self.is_told and not should_stop

    def should_stop(self) -> bool:
        is_told, self.is_told = self.is_told, True
        return super().should_stop() or not is_told


def write_model(folder: Path, seed: int) -> str:
    torch.manual_seed(seed)
    path = str(folder / f"model-{seed}")
    LlamaForCausalLM(LlamaConfig(**TINY)).save_pretrained(path)
    return path


def arguments(folder: str, workers: int, **options: Any) -> Any:
    args = grpo_utils.GRPOExperimentConfig(
        checkpoint_state_dir=folder,
        checkpoint_state_freq=SAVES_EVERY,
        save_freq=-1,
        output_dir=f"{folder.removeprefix('file://')}-final",
        num_learners_per_node=[workers],
        deepspeed_zpg=1,
        per_device_train_batch_size=1,
        learning_rate=0.01,
        max_grad_norm=1.0,
        warmup_ratio=0.0,
        local_eval_every=-1,
        enable_queue_dashboard=False,
        push_to_hub=False,
        **options,
    )
    args.world_size, args.num_training_steps = workers, STEPS
    return args


def train(
    way: str,
    folder: str,
    workers: int,
    *,
    stage: int = 2,
    dies_at: int | None = None,
    seed: int = 0,
    **options: Any,
) -> dict[str, Any]:
    """Train with open-instruct's own checkpoints or with raycheck's. Return the metrics of each step."""
    place = Path(folder.removeprefix("file://"))
    args = arguments(folder, workers, deepspeed_stage=stage, **options)
    args.dies_at = dies_at
    training = Training(args)
    try:
        with mock.patch.object(grpo_fast, "PolicyTrainerRayProcess", ray.remote(CpuPolicy)):
            if way == "raycheck":
                recipe("open-instruct")
            training.start(grpo_fast.PolicyTrainerRayProcess, write_model(place.parent, seed))
        return training.run()
    finally:
        training.end()


class Training:
    """Starts the actors as open-instruct's main does, and runs its loop."""

    def __init__(self, args: Any) -> None:
        self.args = args
        self.tokenizer = PreTrainedTokenizerFast(
            tokenizer_object=Tokenizer(WordLevel({"a": 0, "b": 1}, "a")), pad_token="a"
        )
        self.streaming = data_loader.StreamingDataLoaderConfig(num_unique_prompts_rollout=BATCH)
        self.vllm = data_loader.VLLMConfig()
        self.stop, self.threads = threading.Event(), ThreadPoolExecutor(3)
        name = data_loader.DATA_PREP_ACTOR_NAME
        self.completions = (
            ray.remote(Completions).options(num_cpus=0, name=name).remote(args.output_dir, args.world_size)
        )
        self.manager = ray.remote(Manager).options(num_cpus=0).remote({}, args, self.streaming, self.vllm)

    def start(self, policy: Any, model: str) -> None:
        workers = self.args.world_size
        bundle = {"GPU": workers, "CPU": workers * grpo_fast.LEARNER_ACTOR_NUM_CPUS}
        given = {"streaming_config": self.streaming, "vllm_config": self.vllm, "tokenizer": self.tokenizer}
        group = placement_group([bundle], strategy="STRICT_SPREAD")
        self.group = grpo_fast.ModelGroup(group, policy, [workers], False, args=self.args, **given)
        config = model_utils.ModelConfig(model, attn_implementation=AttentionBackendName.torch)
        began = [one.from_pretrained.remote(self.args, config, None, None, self.tokenizer) for one in self.group.models]
        self.began = ray.get(began)[0]

    def run(self) -> dict[str, Any]:
        done, state = self.began["optimization_steps_done"], self.began["checkpoint_state"]
        if state:
            ray.get(self.completions.set_state.remote(grpo_fast._build_data_prep_actor_resume_state(state)))
        found: dict[str, Any] = {"start": done, "losses": {}, "drawn": {}, "saving": {}, "died": False}

        def note(metrics: dict[str, float]) -> None:
            step = metrics["training_step"]
            found["losses"][step] = [metrics[name] for name in LOGGED]
            found["drawn"][step] = {name: value for name, value in metrics.items() if name.startswith(DRAWN)}
            found["saving"][step] = metrics.get("time/saving_state")

        with mock.patch.object(grpo_fast, "print_rich_single_line_metrics", note):
            try:
                self._train(done + 1, state)
            except ray.exceptions.RayError:  # of the worker that died, or of one that waited for it
                if self.args.dies_at is None:
                    raise
                found["died"] = True
        return found

    def _train(self, resume_step: int, state: Any) -> None:
        grpo_fast.run_training(
            self.args,
            self.streaming,
            self.vllm,
            self.tokenizer,
            train_dataset=range(PROMPTS),
            eval_dataset=None,
            policy_group=self.group,
            vllm_engines=[],
            generation_configs={"eval": None},
            resume_training_step=resume_step,
            episode=state["episode"] if state else 0,
            wandb_url=None,
            tc=SimpleNamespace(chat_template_name=None),
            stop_event=self.stop,
            executor=self.threads,
            inference_results_Q=None,
            prompt_Q=None,
            evaluation_inference_results_Q=None,
            weight_sync_metrics_Q=Queue(maxsize=8),
            actor_manager=self.manager,
            model_dims=None,
            checkpoint_state=state,
        )

    def end(self) -> None:
        self.stop.set()
        self.threads.shutdown()
        for actor in (self.completions, self.manager):
            ray.kill(actor)
        deadline = time.monotonic() + 30
        while time.monotonic() < deadline:  # the next training takes the name
            try:
                ray.get_actor(data_loader.DATA_PREP_ACTOR_NAME)
            except ValueError:
                return
            time.sleep(0.05)
