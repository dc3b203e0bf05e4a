"""Fine-tune a BERT by DeepSpeed's ZeRO-3 on Ray Train, as Ray's own example for DeepSpeed does, on synthetic sentences."""

from tempfile import TemporaryDirectory

import ray.train
import torch
from ray.train import RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer
from torch.utils.data import DataLoader, Dataset
from torchmetrics.classification import BinaryAccuracy, BinaryF1Score
from transformers import BertConfig, BertForSequenceClassification, set_seed

DEEPSPEED_CONFIG = {
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
    "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 10}},
    "bf16": {"enabled": True},
    "zero_optimization": {
        "stage": 3,
        "offload_optimizer": {"device": "none"},
        "offload_param": {"device": "none"},
    },
    "gradient_accumulation_steps": 1,
    "gradient_clipping": True,
    "train_batch_size": 24,
}


class Sentences(Dataset):
    def __init__(self, count: int) -> None:
        self.tokens = torch.randint(3, 100, (count, 12), generator=torch.Generator().manual_seed(count))

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, number: int) -> dict:
        tokens = self.tokens[number]
        return {"input_ids": tokens, "labels": (tokens[0] > tokens[1]).long()}


def train_func(config: dict) -> None:
    import deepspeed
    from deepspeed.accelerator import get_accelerator

    set_seed(42)
    size = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    dropout = {"hidden_dropout_prob": config["dropout"], "attention_probs_dropout_prob": config["dropout"]}
    model = BertForSequenceClassification(BertConfig(vocab_size=100, **size, **dropout))
    eval_dataloader = DataLoader(Sentences(64), batch_size=8)
    model, optimizer, train_dataloader, lr_scheduler = deepspeed.initialize(
        model=model,
        model_parameters=model.parameters(),
        training_data=Sentences(192),
        config=DEEPSPEED_CONFIG,
    )
    device = get_accelerator().device_name(model.local_rank)
    f1 = BinaryF1Score().to(device)
    accuracy = BinaryAccuracy().to(device)
    for epoch in range(config["num_epochs"]):
        model.train()
        for batch in train_dataloader:
            inputs = {key: value.to(device) for key, value in batch.items()}
            loss = model(**inputs).loss
            model.backward(loss)
            optimizer.step()
            lr_scheduler.step()
            optimizer.zero_grad()
        model.eval()
        for batch in eval_dataloader:
            inputs = {key: value.to(device) for key, value in batch.items()}
            with torch.no_grad():
                predictions = model(**inputs).logits.argmax(dim=-1)
            f1.update(predictions, inputs["labels"])
            accuracy.update(predictions, inputs["labels"])
        eval_metric = {"epoch": epoch, "f1": f1.compute().item(), "accuracy": accuracy.compute().item()}
        f1.reset()
        accuracy.reset()
        with TemporaryDirectory() as folder:
            model.save_checkpoint(folder)
            torch.distributed.barrier()
            ray.train.report(eval_metric, checkpoint=ray.train.Checkpoint.from_directory(folder))


def main(storage_path: str, num_epochs: int = 3, num_workers: int = 2, dropout: float = 0.1) -> None:
    trainer = TorchTrainer(
        train_func,
        train_loop_config={"num_epochs": num_epochs, "dropout": dropout},
        scaling_config=ScalingConfig(num_workers=num_workers),
        run_config=RunConfig(name="bert", storage_path=storage_path),
    )
    trainer.fit()
