"""Fine-tune a language model with TRL's SFTTrainer on Ray Train."""

import torch
from datasets import Dataset
from ray.train import RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer


def train_func(config: dict) -> None:
    torch.manual_seed(0)
    trainer = SFTTrainer(
        model=LlamaForCausalLM(LlamaConfig(hidden_size=32, intermediate_size=64, num_hidden_layers=2, vocab_size=64)),
        args=SFTConfig(
            output_dir="sft",
            max_length=16,
            num_train_epochs=config["epochs"],
            per_device_train_batch_size=4,
            save_steps=20,
            logging_steps=10,
            report_to="none",
            use_cpu=True,
            bf16=False,
        ),
        train_dataset=Dataset.from_dict({"text": [" ".join(f"w{(n + m) % 40}" for m in range(8)) for n in range(256)]}),
        processing_class=tokenizer(),
    )
    trainer.train()


def tokenizer() -> PreTrainedTokenizerFast:
    words = ["<pad>", "<eos>", "<unk>", *(f"w{number}" for number in range(40))]
    made = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")


def main(storage_path: str, workers: int = 2, **config: int) -> None:
    ray_trainer = TorchTrainer(
        train_func,
        train_loop_config={"epochs": 4, **config},
        scaling_config=ScalingConfig(num_workers=workers),
        run_config=RunConfig(name="sft", storage_path=storage_path),
    )
    ray_trainer.fit()
