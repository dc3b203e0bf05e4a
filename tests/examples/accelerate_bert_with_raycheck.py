"""Fine-tune a BERT with Accelerate on Ray Train, as Ray's own guide for Accelerate does, on synthetic sentences."""

import ray.train
import ray.train.torch
import torch
from accelerate import Accelerator
from ray.train import RunConfig, ScalingConfig
from torch.utils.data import DataLoader, Dataset
from transformers import BertConfig, BertForSequenceClassification, get_linear_schedule_with_warmup, set_seed

import raycheck


class Sentences(Dataset):
    def __init__(self, count: int) -> None:
        self.tokens = torch.randint(3, 100, (count, 12), generator=torch.Generator().manual_seed(count))

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, number: int) -> dict:
        tokens = self.tokens[number]
        return {"input_ids": tokens, "labels": (tokens[0] > tokens[1]).long()}


def train_func(config: dict) -> None:
    accelerator = Accelerator(cpu=True)
    set_seed(42)
    size = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    model = BertForSequenceClassification(BertConfig(vocab_size=100, **size))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    train_dataloader = DataLoader(Sentences(192), shuffle=True, batch_size=16 // accelerator.num_processes)
    eval_dataloader = DataLoader(Sentences(64), batch_size=8)
    lr_scheduler = get_linear_schedule_with_warmup(optimizer, 10, len(train_dataloader) * config["num_epochs"])
    model, optimizer, train_dataloader, eval_dataloader, lr_scheduler = accelerator.prepare(
        model, optimizer, train_dataloader, eval_dataloader, lr_scheduler
    )
    ckpt = raycheck.accelerate.attach(accelerator, raycheck.SaveSettings(every_steps=10))
    for epoch in ckpt.epochs(config["num_epochs"]):
        model.train()
        for batch in train_dataloader:
            loss = model(**batch).loss
            accelerator.backward(loss)
            optimizer.step()
            lr_scheduler.step()
            optimizer.zero_grad()
        model.eval()
        correct = torch.tensor(0)
        for batch in eval_dataloader:
            with torch.no_grad():
                predictions = model(**batch).logits.argmax(dim=-1)
            predictions, references = accelerator.gather_for_metrics((predictions, batch["labels"]))
            correct += (predictions == references).sum()
        ray.train.report({"epoch": epoch, "accuracy": correct.item() / 64})


def main(storage_path: str, num_epochs: int = 3, num_workers: int | tuple[int, int] = 2) -> None:
    trainer = ray.train.torch.TorchTrainer(
        train_func,
        train_loop_config={"num_epochs": num_epochs},
        scaling_config=ScalingConfig(num_workers=num_workers),
        run_config=RunConfig(name="bert", storage_path=storage_path),
    )
    raycheck.fit(trainer)
