"""Pre-train a small Llama with torchtitan's trainer on Ray Train."""

from ray.train import RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer

from tests.support.frameworks.torchtitan_on_cpu import make_run_on_cpu


def train_func(config: dict) -> None:
    make_run_on_cpu()  # torchtitan is made for GPUs: leave this out there
    from torchtitan.components.checkpointer import CheckpointManager
    from torchtitan.models.common.attention import ScaledDotProductAttention
    from torchtitan.models.llama3.config_registry import llama3_debugmodel

    job = llama3_debugmodel()
    job.model_spec.model.layers = job.model_spec.model.layers[:2]
    for layer in job.model_spec.model.layers:
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    job.hf_assets_path = config["tokenizer"]
    job.dataloader.dataset_path = config["texts"]
    job.dump_folder = config["dump_folder"]
    job.training.seq_len = 32
    job.training.local_batch_size = 2
    job.training.global_batch_size = 4
    job.training.steps = config["steps"]
    job.training.disable_cuda_graphs = True
    job.parallelism.spmd_backend = "partial_dtensor"
    job.optimizer.implementation = "for-loop"
    job.debug.seed = 1
    job.checkpoint = CheckpointManager.Config(enable=True, interval=2)
    trainer = job.build()
    try:
        trainer.train()
    finally:
        trainer.close()


def main(storage_path: str, workers: int = 2, **config: object) -> None:
    ray_trainer = TorchTrainer(
        train_func,
        train_loop_config={"steps": 8, **config},
        scaling_config=ScalingConfig(num_workers=workers),
        run_config=RunConfig(name="llama", storage_path=storage_path),
    )
    ray_trainer.fit()
