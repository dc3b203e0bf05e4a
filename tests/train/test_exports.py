"""Periodic Hugging Face exports, written by the coordinator behind the training."""

from uuid import uuid4

import pytest
import ray
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

import raycheck
from raycheck.bucket.store import open_store
from tests.invariants import assert_invariants

pytestmark = [pytest.mark.ray, pytest.mark.filterwarnings("ignore")]  # Ray itself warns


@ray.remote(num_cpus=0)
class Trainer:
    """One rank with a small language model."""

    def __init__(self, uri: str, coordinator) -> None:
        torch.manual_seed(0)
        config = LlamaConfig(
            vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2
        )
        self.model = LlamaForCausalLM(config)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        place = raycheck.Group(id=uuid4().hex, uri=uri, rank=0, world_size=1, coordinator=coordinator)
        settings = raycheck.SaveSettings(every_steps=4, export_every_steps=3, keep_last=1)
        state = {"model": self.model, "optimizer": self.optimizer}
        self.ckpt = raycheck.Checkpointer(state, settings, group=place)
        self.ckpt.restore()

    def train(self, steps: int) -> torch.Tensor:
        tokens = torch.arange(8).reshape(1, 8)
        for _ in range(steps):
            self.optimizer.zero_grad()
            self.model(input_ids=tokens, labels=tokens).loss.backward()
            self.optimizer.step()
            self.ckpt.end_step()
        self.ckpt.close()
        return self.model(input_ids=tokens).logits.detach()


@pytest.mark.slow
def test_exports_stand_in_the_bucket_when_training_is_over(cluster: None, tmp_path) -> None:
    uri = f"file://{tmp_path}/run"
    trainer = Trainer.remote(uri, raycheck.start_coordinator(uri, owner="me"))

    logits = ray.get(trainer.train.remote(6))

    exports = sorted(folder.name for folder in (tmp_path / "run/exports").iterdir())
    assert [name.partition("-a")[0] for name in exports] == ["step-000000003", "step-000000006"]
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "run/exports" / exports[1])
    assert torch.equal(model(input_ids=torch.arange(8).reshape(1, 8)).logits, logits)
    body = assert_invariants(open_store(uri))
    assert [entry.step for entry in body.live] == [6]


def test_exports_need_a_model_that_says_what_it_is() -> None:
    place = raycheck.Group(id="g", uri=f"memory://{uuid4().hex}", rank=0, world_size=1, coordinator=None)

    with pytest.raises(raycheck.ConfigError, match="one model with a Hugging Face configuration"):
        raycheck.Checkpointer(
            {"model": torch.nn.Linear(2, 2)}, raycheck.SaveSettings(export_every_steps=5), group=place
        )
