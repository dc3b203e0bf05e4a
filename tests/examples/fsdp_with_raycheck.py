"""Fine-tune a small Llama with FSDP2 on Ray Train: gradient accumulation, evaluation, early stopping."""

import math

import ray.train.torch
import torch
import torch.distributed as dist
from ray.train import RunConfig, ScalingConfig
from torch.distributed.fsdp import fully_shard
from torch.utils.data import TensorDataset
from transformers import LlamaConfig, LlamaForCausalLM

import raycheck

TINY = LlamaConfig(
    vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2, use_cache=False
)


def train_fn(config: dict) -> None:
    torch.manual_seed(0)
    device = ray.train.torch.get_device()
    model = LlamaForCausalLM(TINY).to(device)
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    opt = torch.optim.AdamW(model.parameters(), lr=1e-3)
    sched = torch.optim.lr_scheduler.CosineAnnealingLR(opt, T_max=200)
    early = {"best": math.inf, "bad": 0}
    data = raycheck.Batches(texts(512, seed=1), global_batch=8)
    with raycheck.Checkpointer({"model": model, "opt": opt, "sched": sched, "early": early, "data": data}) as ckpt:
        step = ckpt.restore().step
        for epoch in range(data.epoch, config["epochs"]):
            for micro, (tokens,) in enumerate(data.loader(epoch), start=1):
                if early["bad"] >= config["patience"]:
                    return
                loss = model(input_ids=tokens.to(device), labels=tokens.to(device)).loss / config["accumulate"]
                loss.backward()
                if micro % config["accumulate"]:
                    continue
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                opt.step()
                sched.step()
                opt.zero_grad()
                step += 1
                if step % config["evaluate_every"] == 0:
                    found = evaluate(model, device)
                    early["bad"] = 0 if found < early["best"] else early["bad"] + 1
                    early["best"] = min(found, early["best"])
                ckpt.end_step({"loss": loss})
            ckpt.end_epoch()


def evaluate(model: torch.nn.Module, device: torch.device) -> float:
    model.eval()
    (tokens,) = texts(16, seed=2).tensors
    with torch.no_grad():
        loss = model(input_ids=tokens.to(device), labels=tokens.to(device)).loss
    model.train()
    dist.all_reduce(loss, dist.ReduceOp.SUM)
    return loss.item() / dist.get_world_size()


def texts(count: int, seed: int) -> TensorDataset:
    start = torch.randint(64, (count, 1), generator=torch.Generator().manual_seed(seed))
    return TensorDataset((start + torch.arange(16)) % 64)


def main(storage_path: str, **config: int) -> None:
    trainer = ray.train.torch.TorchTrainer(
        train_fn,
        train_loop_config={"epochs": 2, "accumulate": 4, "evaluate_every": 5, "patience": 3, **config},
        scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(name="fine-tune", storage_path=storage_path),
    )
    raycheck.fit(trainer)
