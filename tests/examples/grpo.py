"""A small GRPO on Ray actors, led by this driver: two ranks of a sharded policy with LoRA, an EMA reference, a sampler
that generates, and an actor that prepares prompts. Any of them may die: all are made anew and go on where they were.
"""

import random
from typing import Any

import ray
import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model
from torch.distributed.fsdp import fully_shard
from transformers import LlamaConfig, LlamaForCausalLM

import raycheck

RANKS, PROMPTS, GROUP, LENGTH = 2, 4, 4, 6
MAX_FAILURES, PATIENCE_S = 3, 60
TINY = LlamaConfig(
    vocab_size=32, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2, use_cache=False
)


def lora() -> Any:
    torch.manual_seed(0)
    return get_peft_model(LlamaForCausalLM(TINY), LoraConfig(r=4, target_modules=["q_proj", "v_proj"]))


def logprobs(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    """Of each generated token, shape (completions, LENGTH)."""
    logits = model(input_ids=tokens).logits[:, :-1].log_softmax(-1)
    return logits.gather(2, tokens[:, 1:, None])[:, -LENGTH:, 0]


@ray.remote(num_cpus=0)
class Policy:
    def __init__(self, rank: int, where: str) -> None:
        torch.set_num_threads(1)
        dist.init_process_group("gloo", init_method=f"file://{where}", rank=rank, world_size=RANKS)
        self.model, self.reference = lora(), lora().requires_grad_(requires_grad=False)
        for model in (self.model, self.reference):
            fully_shard(model, reshard_after_forward=True)
        adapter = [weight for weight in self.model.parameters() if weight.requires_grad]
        self.optimizer = torch.optim.AdamW(adapter, lr=1e-2)
        self.schedule = torch.optim.lr_scheduler.LinearLR(self.optimizer, total_iters=20)
        self.state = {
            "policy": self.model,
            "reference": self.reference,
            "optimizer": self.optimizer,
            "schedule": self.schedule,
        }

    def learn(self, tokens: torch.Tensor, rewards: torch.Tensor) -> float:
        """tokens: (prompts x GROUP, prompt and completion). rewards: (prompts, GROUP)."""
        spread = rewards.std(1, keepdim=True) + 1e-4
        advantages = ((rewards - rewards.mean(1, keepdim=True)) / spread).flatten()[:, None]
        new = logprobs(self.model, tokens)
        with torch.no_grad():
            old = logprobs(self.reference, tokens)
        drift = (old - new).exp() - (old - new) - 1
        loss = (0.1 * drift - advantages * (new - new.detach()).exp()).mean()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.schedule.step()
        return loss.item()

    def follow(self) -> None:
        """The reference moves towards the policy."""
        with torch.no_grad():
            for old, new in zip(self.reference.parameters(), self.model.parameters(), strict=True):
                old.lerp_(new, 0.5)

    def publish(self, sampler: Any) -> None:
        """Hand the adapter to the sampler; every rank calls this."""
        adapter = {name: weight.full_tensor() for name, weight in self.model.named_parameters() if weight.requires_grad}
        if dist.get_rank() == 0:
            ray.get(sampler.take.remote({name: weight.detach() for name, weight in adapter.items()}))


@ray.remote(num_cpus=0)
class Sampler:
    def __init__(self) -> None:
        torch.set_num_threads(1)
        self.model = lora().eval()
        self.chance = torch.Generator().manual_seed(1)

    def take(self, adapter: dict[str, torch.Tensor]) -> None:
        self.model.load_state_dict(adapter, strict=False)

    @torch.no_grad()
    def generate(self, prompts: torch.Tensor) -> torch.Tensor:
        tokens = prompts.repeat_interleave(GROUP, 0)
        for _ in range(LENGTH):
            chances = self.model(input_ids=tokens).logits[:, -1].softmax(-1)
            tokens = torch.cat([tokens, torch.multinomial(chances, 1, generator=self.chance)], 1)
        return tokens

    def state_dict(self) -> dict[str, Any]:
        return {"chance": self.chance.get_state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.chance.set_state(state["chance"])


@ray.remote(num_cpus=0)
class Prompts:
    def __init__(self) -> None:
        self.chance, self.given = random.Random(2), 0

    def next(self) -> torch.Tensor:
        self.given += PROMPTS
        return torch.tensor([[self.chance.randrange(32) for _ in range(3)] for _ in range(PROMPTS)])

    def state_dict(self) -> dict[str, Any]:
        return {"chance": self.chance.getstate(), "given": self.given}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.chance.setstate(state["chance"])
        self.given = state["given"]


def train(uri: str, steps: int, policy: list[Any], sampler: Any, prompts: Any) -> list[float]:
    """Returns the loss of every step since the run began."""
    losses: dict[str, list[float]] = {"all": []}
    with raycheck.ActorCheckpointer(
        policy,
        lambda actor: actor.state,
        uri,
        raycheck.SaveSettings(every_steps=4, keep_last=2),
        state={"sampler": sampler, "prompts": prompts, "losses": losses},
    ) as ckpt:
        at = ckpt.restore(then=lambda actor, _: actor.publish(sampler))
        for step in range(at.step, steps):
            tokens = ray.get(sampler.generate.remote(ray.get(prompts.next.remote())), timeout=PATIENCE_S)
            rewards = (tokens[:, -LENGTH:] % 2 == 0).float().mean(1).view(PROMPTS, GROUP)
            shares = zip(policy, tokens.chunk(RANKS), rewards.chunk(RANKS), strict=True)
            found = ray.get([actor.learn.remote(*share) for actor, *share in shares], timeout=PATIENCE_S)
            if step % 5 == 4:
                ray.get([actor.follow.remote() for actor in policy], timeout=PATIENCE_S)
            ray.get([actor.publish.remote(sampler) for actor in policy], timeout=PATIENCE_S)
            losses["all"].append(sum(found) / RANKS)
            ckpt.end_step({"reward": rewards.mean()}, tokens=tokens.numel(), episodes=len(tokens))
    return losses["all"]


def main(uri: str, steps: int, meet: str) -> list[float]:
    """meet: a folder in which the policy's ranks find each other."""
    for left in reversed(range(MAX_FAILURES + 1)):
        where = f"{meet}/{left}"
        policy = [Policy.options(name=f"policy-{rank}-{left}").remote(rank, where) for rank in range(RANKS)]
        sampler, prompts = (
            Sampler.options(name=f"sampler-{left}").remote(),
            Prompts.options(name=f"prompts-{left}").remote(),
        )
        try:
            return train(uri, steps, policy, sampler, prompts)
        except ray.exceptions.RayError as error:
            if not left:
                raise
            print(f"an actor has failed ({type(error).__name__}); all are made anew")
        finally:
            for actor in (*policy, sampler, prompts):
                ray.kill(actor)
    raise AssertionError("unreachable: the last round returns or raises")
