"""A small GRPO whose samplers are processes of their own: each follows the weights that the trainer publishes.

Start the trainer with torchrun, and any number of samplers beside it, on any node that reaches the bucket:

    torchrun --standalone --nproc-per-node=1 --max-restarts=3 grpo_served.py train URI ROLLOUTS STEPS
    python grpo_served.py sample URI ROLLOUTS

Any of them may die. A trainer that is started again continues from its newest checkpoint, and a sampler from the newest
published version. ROLLOUTS is a folder that all of them see; a real training would have a queue there.
"""

import contextlib
import sys
import time
from pathlib import Path
from uuid import uuid4

import torch
import torch.distributed as dist
from transformers import LlamaConfig, LlamaForCausalLM

import raycheck

PROMPTS, GROUP, LENGTH, STALE = 4, 4, 6, 4
"""A rollout is learned from if its policy is at most STALE steps old."""
TINY = LlamaConfig(
    vocab_size=32, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2, use_cache=False
)


def new_policy() -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(TINY)


@torch.no_grad()
def generate(policy: LlamaForCausalLM, chance: torch.Generator) -> torch.Tensor:
    prompts = torch.randint(0, 32, (PROMPTS, 3), generator=chance)
    tokens = prompts.repeat_interleave(GROUP, 0)
    for _ in range(LENGTH):
        chances = policy(input_ids=tokens).logits[:, -1].softmax(-1)
        tokens = torch.cat([tokens, torch.multinomial(chances, 1, generator=chance)], 1)
    return tokens


def sample(uri: str, rollouts: Path) -> None:
    """Generate with the newest policy there is, until the process is ended."""
    policy, chance = new_policy().eval(), torch.Generator()
    chance.seed()
    with raycheck.follow(uri, poll_s=0.1) as follower:
        while True:
            version = follower.wait(timeout_s=None if follower.current is None else 0)
            if version is not None:
                version.load_into(policy.state_dict())
            made = {"step": follower.current.step, "tokens": generate(policy, chance)}
            path = rollouts / uuid4().hex
            torch.save(made, path)
            path.rename(path.with_suffix(".pt"))
            while len(list(rollouts.glob("*.pt"))) > 8:  # more than the trainer needs
                time.sleep(0.01)


def next_rollout(rollouts: Path, step: int) -> torch.Tensor:
    """Wait for a rollout of a policy that is not too old. Older ones are thrown away."""
    while True:
        for path in sorted(rollouts.glob("*.pt"), key=lambda path: path.stat().st_mtime_ns):
            made = torch.load(path)
            path.unlink()
            if step - STALE <= made["step"] <= step:
                return made["tokens"]
        time.sleep(0.01)


def learn(policy: LlamaForCausalLM, tokens: torch.Tensor) -> tuple[torch.Tensor, float]:
    """Return the loss, and the mean reward: the share of even tokens."""
    rewards = (tokens[:, -LENGTH:] % 2 == 0).float().mean(1).view(PROMPTS, GROUP)
    advantages = ((rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, keepdim=True) + 1e-4)).flatten()[:, None]
    logits = policy(input_ids=tokens).logits[:, :-1].log_softmax(-1)
    new = logits.gather(2, tokens[:, 1:, None])[:, -LENGTH:, 0]
    return -(advantages * (new - new.detach()).exp()).mean(), rewards.mean().item()


def train(uri: str, rollouts: Path, steps: int) -> None:
    dist.init_process_group("gloo")
    policy = new_policy()
    optimizer = torch.optim.AdamW(policy.parameters(), lr=3e-3)
    settings = raycheck.SaveSettings(
        every_steps=1,
        at_start=True,  # samplers need a first policy
        keep_last=2,
        after_commit=raycheck.AfterCommit.publish(every_save=True, mode="async"),
    )
    state = {"policy": policy, "optimizer": optimizer}
    with raycheck.Checkpointer(state, settings, group=raycheck.torchrun_group(uri)) as ckpt:
        at = ckpt.restore()
        for step in range(at.step, steps):
            loss, reward = learn(policy, next_rollout(rollouts, step))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            ckpt.end_step({"loss": loss, "reward": reward})
    dist.destroy_process_group()


if __name__ == "__main__":
    torch.set_num_threads(1)
    what, uri, folder, *rest = sys.argv[1:]
    Path(folder).mkdir(parents=True, exist_ok=True)
    if what == "sample":
        with contextlib.suppress(KeyboardInterrupt):
            sample(uri, Path(folder))
    else:
        train(uri, Path(folder), int(rest[0]))
