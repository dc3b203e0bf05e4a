"""Installs DeepSpeed, and trains with its engines: `python this-file TRAINING-AS-JSON`, one process for each rank.

It goes into a virtual environment beside the repository's, without its compiled parts, and finds all else in that one.
Rank 0 prints as JSON the losses, and digests of the 32-bit weights and of the moments that DeepSpeed's own functions
put together from all ranks.
"""

import hashlib
import json
import os
import sys
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

VERSION = "0.19.8"
FOLDER = Path(__file__).parents[3] / ".venv-deepspeed"
PYTHON = FOLDER / "bin/python"
NEEDS = ("hjson", "py-cpuinfo", "ninja", "einops", "msgpack", "setuptools", "wheel")
BATCH, STEPS = 12, 8
SHARED_MEMORY = Path("/dev/shm")
COMPILED = FOLDER / "torch_extensions"


def prepare() -> None:
    from tests.support.processes.virtual_environments import prepare_venv

    os.environ["DS_BUILD_OPS"] = "0"
    install = ("--no-deps", f"deepspeed=={VERSION}", *NEEDS)
    prepare_venv(FOLDER, f"deepspeed-{VERSION}", *install, finds_ours=True)
    for lock in COMPILED.glob("**/lock"):  # left by ranks that were killed while they compiled; the next would wait
        lock.unlink()


@dataclass(frozen=True, kw_only=True)
class Training:
    """A training over all ranks.

    stage: of ZeRO; None: without DeepSpeed, under plain DDP, or FSDP2 if is_sharded. zero: more of ZeRO's settings.
    saves_at: the step of the only save. until: the last step. is_tied: the head is the embedding. is_strict, is_cast:
    see restore. seed: of the fresh weights. moves: "off": the engine's states are offloaded before the save; "back": and
    reloaded, into other memory, with a save two steps before.
    """

    uri: str
    world_size: int
    stage: int | None
    is_sharded: bool = False
    dtype: str = "fp32"
    zero: dict[str, Any] = field(default_factory=dict)
    saves_at: int = 4
    until: int = STEPS
    is_tied: bool = False
    is_strict: bool = True
    is_cast: bool = False
    seed: int = 0
    moves: str = ""

    def run(self) -> dict[str, Any]:
        """Train in processes of their own, and return what rank 0 has printed."""
        return launch(__file__, asdict(self), self.world_size)


def launch(file: str, job: dict[str, Any], world_size: int, within_s: float = 180.0) -> dict[str, Any]:
    """Run a file with DeepSpeed on this many ranks, and return what rank 0 printed. See engine_runs.launched."""
    from tests.support.frameworks.engine_runs import launched

    variables = {"DS_ACCELERATOR": "cpu", "LOCAL_SIZE": str(world_size), "TORCH_EXTENSIONS_DIR": str(COMPILED)}
    left_over = set(SHARED_MEMORY.glob("deepspeed_*"))
    try:
        return launched(PYTHON, file, job, world_size, variables=variables, within_s=within_s)[0]
    finally:
        for buffer in set(SHARED_MEMORY.glob("deepspeed_*")) - left_over:  # 66 MiB of each rank, which stay
            buffer.unlink()


def model_of(training: Training) -> Any:
    import torch

    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = torch.nn.Embedding(11, 6)
            self.hidden = torch.nn.Linear(6, 8)
            self.frozen = torch.nn.Linear(8, 6)
            self.head = torch.nn.Linear(6, 11, bias=False)
            self.register_buffer("seen", torch.zeros(1))
            if training.is_tied:
                self.head.weight = self.embed.weight
            self.frozen.requires_grad_(False)

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            self.seen = self.seen + 1  # another tensor each time
            return self.head(self.frozen(torch.tanh(self.hidden(self.embed(tokens)))))

    torch.manual_seed(training.seed)
    return Net()


def shard(model: Any) -> None:
    """Shard each layer by FSDP2, over all ranks: those of 11, 8 and 6 rows are uneven on 3 ranks or 4."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for part in (model.embed, model.hidden, model.frozen, model.head, model):
        fully_shard(part, mesh=mesh)


def groups_of(model: Any) -> list[dict[str, Any]]:
    named = {name: p for name, p in model.named_parameters() if p.requires_grad}
    return [
        {"params": [p for name, p in named.items() if "bias" not in name], "weight_decay": 0.1},
        {"params": [p for name, p in named.items() if "bias" in name], "weight_decay": 0.0, "lr": 0.02},
    ]


def config_of(training: Training) -> dict[str, Any]:
    config: dict[str, Any] = {
        "train_batch_size": BATCH,
        "gradient_clipping": 1.0,
        "zero_optimization": {"stage": training.stage, **training.zero},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    }
    if training.dtype == "bf16":
        config["bf16"] = {"enabled": True}
    if training.dtype == "fp16":
        config["fp16"] = {"enabled": True, "initial_scale_power": 10, "loss_scale_window": 3}
    return config


def train(training: Training) -> None:
    import torch
    import torch.distributed as dist

    import raycheck

    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    model = model_of(training)
    if training.stage is None:
        dist.init_process_group("gloo")
    if training.is_sharded:
        shard(model)
    optimizer = torch.optim.AdamW(groups_of(model), lr=0.01)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + 0.1 * step))
    engine: Any = None
    if training.stage is None:
        wrapped: Any = model if training.is_sharded else torch.nn.parallel.DistributedDataParallel(model)
        state: dict[str, Any] = {"engine": {"model": model, "optimizer": optimizer, "scheduler": scheduler}}
    else:
        import deepspeed
        from deepspeed.accelerator import get_accelerator

        get_accelerator().is_fp16_supported = lambda: True  # DeepSpeed refuses it on a CPU, where torch has it
        engine, _, _, _ = deepspeed.initialize(
            model=model, optimizer=optimizer, lr_scheduler=scheduler, config=config_of(training)
        )
        wrapped, state = engine, {"engine": engine}

    def step(number: int) -> float:
        generator = torch.Generator().manual_seed(number)
        tokens = torch.randint(11, (BATCH, 2), generator=generator)[
            rank * BATCH // world_size : (rank + 1) * BATCH // world_size
        ]
        logits = wrapped(tokens[:, 0]).float()
        loss = torch.nn.functional.cross_entropy(logits, tokens[:, 1])
        if engine is None:
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
        else:
            engine.backward(loss)
            engine.step()
        total = loss.detach().clone()
        dist.all_reduce(total)
        return float(total) / world_size

    client: dict[str, Any] = {"consumed": 0, "best": {"loss": float("inf"), "step": -1}, "history": []}
    state["client"] = client
    first = [training.saves_at - 2] if training.moves else []
    settings = raycheck.SaveSettings(every_steps=None, at_steps=[*first, training.saves_at])
    losses = []
    with raycheck.Checkpointer(state, settings, group=raycheck.torchrun_group(training.uri)) as ckpt:
        at = ckpt.restore(strict=training.is_strict, cast=training.is_cast)
        digests, clients = digests_of(engine, model, optimizer), json.dumps(client)
        for number in range(at.step, training.until):
            losses.append(step(number))
            client["consumed"] += BATCH
            client["history"].append(losses[-1])
            client["best"] |= {"loss": losses[-1], "step": number} if losses[-1] < client["best"]["loss"] else {}
            if training.moves and number + 1 == training.saves_at:
                move_states(engine, are_reloaded=training.moves == "back")
            ckpt.end_step()
            if number + 1 == training.saves_at:
                digests, clients = digests_of(engine, model, optimizer), json.dumps(client)
    if rank == 0:
        found = {"losses": losses, "start": at.step, "digests": digests, "client": clients, "scale": scale_of(engine)}
        print(json.dumps(found), flush=True)


def move_states(engine: Any, *, are_reloaded: bool) -> None:
    from deepspeed.ops.adam import fused_adam
    from deepspeed.runtime.zero.offload_config import OffloadStateTypeEnum

    fused_adam.FusedAdam = type(engine.optimizer.optimizer)  # DeepSpeed offloads the state of this class alone
    moved = [OffloadStateTypeEnum.hp_params, OffloadStateTypeEnum.optim_states]  # it fails with frozen lp_params
    engine.offload_states(include=moved, pin_memory=True)  # on CPUs this is other memory, where they then stay
    if are_reloaded:
        engine.reload_states()


def scale_of(engine: Any) -> float | None:
    own = getattr(engine, "optimizer", None)
    scaler = getattr(own, "loss_scaler", None) or getattr(own, "loss_scale_config", None)
    return None if scaler is None else float(scaler.cur_scale)


def digests_of(engine: Any, model: Any, optimizer: Any) -> dict[str, str]:
    """Return a digest of each whole 32-bit weight and of its moments. A collective."""
    import torch

    found: dict[str, str] = {}
    found["seen"] = str(float(getattr(engine.module if engine is not None else model, "seen", 0.0)))
    with torch.no_grad():
        for name, parameter in (engine.module if engine is not None else model).named_parameters():
            if not parameter.requires_grad:
                continue
            for slot, value in slots_of(engine, parameter, optimizer).items():
                found[f"{name}.{slot}"] = digest_of(value)
    return found


def digest_of(value: Any) -> str:
    """Return a digest of a whole tensor's elements as 32-bit floats. A collective for a DTensor."""
    whole = value.full_tensor() if hasattr(value, "full_tensor") else value
    return hashlib.sha256(whole.detach().float().cpu().contiguous().numpy().tobytes()).hexdigest()[:12]


def slots_of(engine: Any, parameter: Any, optimizer: Any) -> dict[str, Any]:
    if engine is None or engine.optimizer is engine.basic_optimizer:
        own = (optimizer if engine is None else engine.optimizer).state.get(parameter, {})
        return {"weight": parameter, **{slot: own[slot] for slot in ("exp_avg", "exp_avg_sq") if own}}
    if hasattr(engine.optimizer, "fp32_groups"):  # ZeRO 0
        pairs = zip(engine.optimizer.fp16_groups, engine.optimizer.fp32_groups, strict=True)
        master = next(b for low, high in pairs for a, b in zip(low, high, strict=True) if a is parameter)
        own = engine.optimizer.optimizer.state.get(master, {})
        return {"weight": master, **{slot: own[slot] for slot in ("exp_avg", "exp_avg_sq") if own}}
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

    found = {"weight": safe_get_full_fp32_param(parameter)}
    if any(engine.optimizer.optimizer.state.values()):
        if hasattr(engine.optimizer, "_hp_optimizer_states_linked"):  # it has linked the first group's alone
            engine.optimizer._hp_optimizer_states_linked = False
            engine.optimizer._lazy_init_hp_params_optimizer_state()
        found |= {slot: safe_get_full_optimizer_state(parameter, slot) for slot in ("exp_avg", "exp_avg_sq")}
    return found


if __name__ == "__main__":
    if len(sys.argv) == 1:
        prepare()
    else:
        train(Training(**json.loads(sys.argv[1])))
