"""Fine-tune a language model with the Trainer of transformers on Ray Train, as Ray's documentation shows it."""

import ray.train.huggingface.transformers
import torch
from ray.train import RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments


def train_func(config: dict) -> None:
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**SIZES))
    training_args = TrainingArguments(
        output_dir="test_trainer",
        num_train_epochs=config["epochs"],
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        save_steps=20,
        logging_steps=10,
        report_to="none",
        use_cpu=True,
    )
    trainer = Trainer(model=model, args=training_args, train_dataset=texts(512))
    callback = ray.train.huggingface.transformers.RayTrainReportCallback()
    trainer.add_callback(callback)
    trainer = ray.train.huggingface.transformers.prepare_trainer(trainer)
    trainer.train()


SIZES = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "vocab_size": 64,
    "max_position_embeddings": 32,
}


def texts(count: int) -> list[dict[str, torch.Tensor]]:
    ids = torch.randint(0, 64, (count, 16), generator=torch.Generator().manual_seed(1))
    return [{"input_ids": row, "labels": row} for row in ids]


def main(storage_path: str, workers: int = 2, **config: int) -> None:
    ray_trainer = TorchTrainer(
        train_func,
        train_loop_config={"epochs": 4, **config},
        scaling_config=ScalingConfig(num_workers=workers),
        run_config=RunConfig(name="trainer", storage_path=storage_path),
    )
    ray_trainer.fit()
