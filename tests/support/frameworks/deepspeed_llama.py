"""Trains a tiny Llama with DeepSpeed, whole or by LoRA: `python this-file TRAINING-AS-JSON`, one process for each rank.

Rank 0 prints the losses, and digests: of the 32-bit weights and their moments, of the frozen weights, and of all
weights in the type in which the engine computes.
"""

import json
import os
import sys
from dataclasses import asdict, dataclass
from typing import Any

from tests.support.frameworks.deepspeed_training import Training, config_of, digest_of, digests_of, launch

STEPS = 4


@dataclass(frozen=True, kw_only=True)
class LlamaTraining:
    """A training over all ranks, with a save after every second step.

    is_merged: the adapter is merged into the weights before the last save. until: the last step. seed: of fresh weights.
    """

    uri: str
    stage: int
    world_size: int = 2
    dtype: str = "bf16"
    is_lora: bool = False
    is_merged: bool = False
    is_tied: bool = False
    seed: int = 0
    until: int = STEPS

    def run(self) -> dict[str, Any]:
        return launch(__file__, asdict(self), self.world_size)


def llama_of(training: LlamaTraining) -> Any:
    from tests.support.frameworks.tiny_trainers import tiny_llama

    model: Any = tiny_llama(training.seed, dropout=0.0, is_tied=training.is_tied)
    if training.is_lora:
        from peft import LoraConfig, get_peft_model

        config = LoraConfig(task_type="CAUSAL_LM", r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
        model = get_peft_model(model, config)
    return model


def train(training: LlamaTraining) -> None:
    import deepspeed
    import torch

    import raycheck

    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    model = llama_of(training)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01)
    config = config_of(Training(uri="", world_size=world_size, stage=training.stage, dtype=training.dtype))
    engine, _, _, _ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    settings = raycheck.SaveSettings(every_steps=2)
    losses = []
    with raycheck.Checkpointer({"engine": engine}, settings, group=raycheck.torchrun_group(training.uri)) as ckpt:
        at = ckpt.restore()
        for number in range(at.step, training.until):
            generator = torch.Generator().manual_seed(number)
            tokens = torch.randint(64, (12, 6), generator=generator)[rank * 12 // world_size :][: 12 // world_size]
            loss = engine(input_ids=tokens, labels=tokens).loss
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
            if training.is_merged and number + 1 == training.until:
                engine.module.merge_adapter()
            ckpt.end_step()
    found = {"losses": losses, "start": at.step, "digests": digests_of(engine, model, optimizer), **low_digests(engine)}
    if rank == 0:
        print(json.dumps(found), flush=True)


def low_digests(engine: Any) -> dict[str, dict[str, str]]:
    """Return digests of the weights as the forward sees them: `frozen` of those that are not trained, `low` of all."""
    from deepspeed.runtime.zero import GatheredParameters

    found: dict[str, dict[str, str]] = {"low": {}, "frozen": {}}
    parameters = list(engine.module.named_parameters())
    with GatheredParameters([p for _, p in parameters], enabled=hasattr(parameters[0][1], "ds_tensor")):
        for name, parameter in parameters:
            found["low"][name] = digest_of(parameter.detach())
            if not parameter.requires_grad:
                found["frozen"][name] = found["low"][name]
    return found


if __name__ == "__main__":
    train(LlamaTraining(**json.loads(sys.argv[1])))
