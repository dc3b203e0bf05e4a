"""Installs Megatron-core, and trains a GPT with it: `python this-file TRAINING-AS-JSON`, one process for each rank.

It goes into a virtual environment beside the repository's and finds all else in that one. Megatron-core asks for GPUs in
a few places, which `on_cpu` answers with the CPU. Rank 0 prints as JSON the losses, and digests of the whole 32-bit
weights and moments, which Megatron's own ShardedTensors put together from all ranks.
"""

import hashlib
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

VERSION = "0.16.1"
FOLDER = Path(__file__).parents[3] / ".venv-megatron"
PYTHON = FOLDER / "bin/python"
STEPS, LAYERS, HIDDEN, LENGTH, BATCH, REAL_WORDS, EXPERTS = 6, 4, 16, 6, 8, 30, 4


def prepare() -> None:
    from tests.support.processes.virtual_environments import prepare_venv

    install = ("--no-deps", f"megatron-core=={VERSION}", "einops")
    prepare_venv(FOLDER, f"megatron-{VERSION}", *install, finds_ours=True)


@dataclass(frozen=True, kw_only=True)
class Training:
    """A training over all ranks.

    tp, pp, ep: degrees of tensor, pipeline and expert parallelism; the rest is data parallelism. chunks: of the model
    on each pipeline stage. kind: "distributed" or "plain", the optimizer. has_overlap: gather parameters during the
    forward. words: the padded vocabulary. is_tied: the head is the embedding. has_values: the head gives a number for
    each token, as a critic's. saves_at: the step of the only save. until: the last step. seed: of the fresh weights. odd: more of Megatron's settings, of the model, of DDP and of the
    optimizer.
    """

    uri: str
    tp: int = 1
    pp: int = 1
    dp: int = 1
    ep: int = 1
    chunks: int = 1
    kind: str = "distributed"
    dtype: str = "fp32"
    is_gated: bool = True
    has_experts: bool = False
    is_tied: bool = False
    has_values: bool = False
    has_overlap: bool = False
    dropout: float = 0.0
    words: int = 32
    saves_at: int = 3
    until: int = STEPS
    seed: int = 0
    is_strict: bool = True
    odd: dict[str, dict[str, Any]] | None = None

    @property
    def world_size(self) -> int:
        return self.tp * self.pp * self.dp

    def run(self, within_s: float = 180.0) -> dict[str, Any]:
        """Train in processes of their own, and return what rank 0 has printed, with the log."""
        from tests.support.frameworks.engine_runs import launched

        variables = {"CUDA_DEVICE_MAX_CONNECTIONS": "1", "TORCHDYNAMO_DISABLE": "1"}
        job = asdict(self)
        found, log = launched(PYTHON, __file__, job, self.world_size, variables=variables, within_s=within_s)
        return {**found, "log": log}


@contextmanager
def on_cpu() -> Iterator[None]:
    """Let Megatron-core take the CPU for the current GPU: tensors for it, their type, and its random numbers."""
    import torch
    from megatron.core.tensor_parallel import random
    from megatron.core.transformer.moe import moe_utils
    from torch.overrides import TorchFunctionMode

    class CpuForGpu(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            kwargs = dict(kwargs or {})
            if str(kwargs.get("device", "")).startswith("cuda"):
                kwargs["device"] = "cpu"
            kwargs.pop("pin_memory", None)
            if func is torch.Tensor.cuda:
                return args[0]
            found = func(*args, **kwargs)
            if func is torch.Tensor.type and len(args) == 1:
                return found.replace("torch.", "torch.cuda.")
            return found

    moe_utils.te_general_gemm = None  # without Transformer Engine it is not defined, and is looked at
    torch.cuda.current_device = lambda: "cpu"  # type: ignore[assignment, return-value]
    torch.cuda.get_rng_state = lambda *_, **__: torch.get_rng_state()
    torch.cuda.synchronize = lambda *_, **__: None
    torch.cuda.manual_seed = torch.manual_seed  # type: ignore[assignment]
    random._get_cuda_rng_state = lambda *_, **__: torch.get_rng_state()
    random._set_cuda_rng_state = lambda state, *_, **__: torch.set_rng_state(state)
    with CpuForGpu():
        yield


def config_of(training: Training) -> Any:
    import torch
    from megatron.core.transformer.transformer_config import TransformerConfig

    dtypes = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
    more: dict[str, Any] = {}
    if training.chunks > 1:  # two stages with chunks would mix up what they send each other otherwise
        more |= {"overlap_p2p_comm": True, "batch_p2p_comm": False}
    if training.has_experts:
        more |= {
            "num_moe_experts": EXPERTS,
            "moe_router_topk": 2,
            "moe_ffn_hidden_size": 8,
            "moe_token_dispatcher_type": "allgather",
            "moe_router_enable_expert_bias": True,
            "moe_router_score_function": "sigmoid",
        }
    settings: dict[str, Any] = {
        "num_layers": LAYERS,
        "hidden_size": HIDDEN,
        "num_attention_heads": 4,
        "num_query_groups": 2,
        "ffn_hidden_size": 24,
        "gated_linear_unit": training.is_gated,
        "activation_func": torch.nn.functional.silu,
        "add_bias_linear": not training.has_experts,
        "use_cpu_initialization": True,
        "tensor_model_parallel_size": training.tp,
        "pipeline_model_parallel_size": training.pp,
        "virtual_pipeline_model_parallel_size": training.chunks if training.chunks > 1 else None,
        "expert_model_parallel_size": training.ep,
        "hidden_dropout": training.dropout,
        "attention_dropout": training.dropout,
        "params_dtype": dtypes[training.dtype],
        "pipeline_dtype": dtypes[training.dtype],
        "bf16": training.dtype == "bf16",
        "fp16": training.dtype == "fp16",
        "bias_activation_fusion": False,
        "masked_softmax_fusion": False,
        "gradient_accumulation_fusion": False,
    }
    return TransformerConfig(**{**settings, **more, **(training.odd or {}).get("model", {})})


def model_of(training: Training) -> list[Any]:
    from megatron.core import parallel_state
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.transformer.enums import ModelType
    from megatron.core.transformer.module import Float16Module

    config = config_of(training)
    spec = get_gpt_layer_local_spec(num_experts=EXPERTS if training.has_experts else None, moe_grouped_gemm=False)
    settings = {
        "use_distributed_optimizer": training.kind == "distributed",
        "overlap_param_gather": training.has_overlap,
        "overlap_grad_reduce": training.has_overlap,
        "bucket_size": 2000 if training.has_overlap else None,
        **(training.odd or {}).get("ddp", {}),
    }
    found = []
    for number in range(training.chunks):
        stage = number if training.chunks > 1 else None
        model: Any = GPTModel(
            config,
            spec,
            vocab_size=training.words,
            max_sequence_length=LENGTH,
            pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=stage),
            post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=stage),
            share_embeddings_and_output_weights=training.is_tied,
            vp_stage=stage,
        )
        if training.has_values and model.post_process:
            model.output_layer = value_head(config.params_dtype)
        model.model_type = ModelType.encoder_or_decoder
        if training.dtype != "fp32":
            model = Float16Module(config, model)
        found.append(
            DistributedDataParallel(
                config, DistributedDataParallelConfig(**settings), model, disable_bucketing=number > 0
            )
        )
    return found


def value_head(dtype: Any) -> Any:
    """Return a head like that of verl's critics, which need Megatron-Bridge."""
    import torch

    class ValueHead(torch.nn.Linear):
        def forward(self, states: Any, *_: Any, **__: Any) -> Any:
            return super().forward(states).float(), None

    return ValueHead(HIDDEN, 1, bias=False, dtype=dtype)


def optimizer_of(training: Training, model: list[Any]) -> tuple[Any, Any]:
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

    config = model[0].config
    settings: dict[str, Any] = {
        "optimizer": "adam",
        "lr": 0.01,
        "min_lr": 0.001,
        "weight_decay": 0.1,
        "clip_grad": 1.0,
        "bf16": training.dtype == "bf16",
        "fp16": training.dtype == "fp16",
        "initial_loss_scale": 1024.0,
        "loss_scale_window": 2,
        "params_dtype": config.params_dtype,
        "use_distributed_optimizer": training.kind == "distributed",
    }
    optimizer = get_megatron_optimizer(
        OptimizerConfig(**{**settings, **(training.odd or {}).get("optimizer", {})}), model
    )
    scheduler = OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=0.01,
        min_lr=0.001,
        lr_warmup_steps=2 * BATCH,
        lr_decay_steps=10 * BATCH,
        lr_decay_style="cosine",
        start_wd=0.1,
        end_wd=0.1,
        wd_incr_steps=10 * BATCH,
        wd_incr_style="constant",
    )
    return optimizer, scheduler


def batch_of(number: int) -> Any:
    """Return the batch of this number."""
    import torch

    return torch.randint(REAL_WORDS, (BATCH, LENGTH + 1), generator=torch.Generator().manual_seed(number))


def step_of(training: Training, model: list[Any], optimizer: Any, scheduler: Any, batch: Any) -> float:
    """Take one step with this rank's share of the batch, and return the loss over all ranks."""
    import torch
    import torch.distributed as dist
    from megatron.core import parallel_state
    from megatron.core.distributed import finalize_model_grads
    from megatron.core.pipeline_parallel import get_forward_backward_func

    rank, count = parallel_state.get_data_parallel_rank(), training.dp
    tokens = batch[rank * len(batch) // count : (rank + 1) * len(batch) // count]
    length = tokens.shape[1] - 1
    places = torch.arange(length)[None]
    mask = torch.ones(1, 1, length, length).tril() < 0.5
    sums = torch.zeros(2)

    def forward(samples: Any, chunk: Any) -> tuple[Any, Any]:
        own = next(samples)[None]
        output = chunk(own[:, :-1], places, mask, labels=None if training.has_values else own[:, 1:])

        def loss_of(losses: Any) -> tuple[Any, dict[str, Any]]:
            losses = (losses[..., 0] - own[:, 1:] / training.words).square() if training.has_values else losses
            loss = losses.float().mean()
            if parallel_state.get_tensor_model_parallel_rank() == 0:
                sums.add_(torch.stack([loss.detach(), torch.ones(())]))
            return loss, {}

        return output, loss_of

    for chunk in model:
        chunk.zero_grad_buffer()
    optimizer.zero_grad()
    model[0].config.finalize_model_grads_func = finalize_model_grads
    model[0].config.grad_scale_func = optimizer.scale_loss
    samples = [iter(tokens) for _ in model]
    get_forward_backward_func()(
        forward_step_func=forward,
        data_iterator=samples if len(samples) > 1 else samples[0],
        model=model if len(model) > 1 else model[0],
        num_microbatches=len(tokens),
        seq_length=length,
        micro_batch_size=1,
        forward_only=False,
    )
    is_taken, _, _ = optimizer.step()
    if is_taken:
        scheduler.step(len(batch))
    dist.all_reduce(sums)
    return float(sums[0] / sums[1])


def whole_state(model: list[Any], optimizer: Any) -> dict[str, Any]:
    """Return each whole 32-bit weight, and its moments, put together from all ranks. A collective.

    The ranges of DistributedOptimizer are joined over the data-parallel group. Megatron's make_sharded_optimizer_tensor
    and its factories then tell where they lie in the whole.
    """
    import torch
    import torch.distributed as dist
    from megatron.core.dist_checkpointing.mapping import apply_factories
    from megatron.core.dist_checkpointing.optimizer import make_sharded_optimizer_tensor

    mine = []
    for chunk in model:
        inner = chunk.module
        inner = inner.module if type(inner).__name__ == "Float16Module" else inner
        for key, sharded in inner.sharded_state_dict(metadata={"non_homogeneous_layers": True}).items():
            if not isinstance(sharded.data, torch.Tensor):
                continue
            for slot, value in own_state(optimizer, sharded.data).items():
                tree = {key: make_sharded_optimizer_tensor(sharded, value.float(), prefix=slot)}
                apply_factories(tree)
                found = tree[key] if isinstance(tree[key], list) else [tree[key]]
                mine += [
                    (
                        item.key,
                        item.global_shape,
                        item.global_offset,
                        item.data.reshape((1,) * item.prepend_axis_num + tuple(item.data.shape)).clone(),
                    )
                    for item in found
                ]
    ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(ranks, mine)
    whole: dict[str, Any] = {}
    for key, shape, offset, data in (item for own in ranks for item in own):
        target = whole.setdefault(key, torch.full(shape, float("nan")))
        place = tuple(slice(low, low + size) for low, size in zip(offset, data.shape, strict=True))
        before = target[place]
        assert torch.equal(before[~before.isnan()], data[~before.isnan()]), f"ranks have different {key}"
        target[place] = data
    assert not any(tensor.isnan().any() for tensor in whole.values())
    return whole


def own_state(optimizer: Any, parameter: Any) -> dict[str, Any]:
    """Return the 32-bit weight and the moments of a rank's own parameter, or the values of a buffer."""
    import torch
    import torch.distributed as dist

    for item in optimizer.chained_optimizers:
        if item.is_stub_optimizer:
            continue
        if hasattr(item, "buffers"):
            if not any(parameter is other for buffer in item.buffers for other in buffer.params):
                continue
            own = {slot: torch.zeros(parameter.numel()) for slot in ("weight", "exp_avg", "exp_avg_sq")}
            if parameter in item.model_param_gbuf_map:
                span = item._get_model_param_range_map(parameter)["param"]
                group, order = item.model_param_group_index_map[parameter]
                memory = item.optimizer.param_groups[group]["params"][order]
                slots = item.optimizer.state.get(memory, {})
                for slot, value in {"weight": memory, **slots}.items():
                    if slot in own:
                        own[slot][span.start : span.end] = value.detach()
            for value in own.values():
                dist.all_reduce(value, group=item.data_parallel_group)
            return {slot: value.view(parameter.shape) for slot, value in own.items()}
        memory = getattr(parameter, "main_param", parameter)
        if any(memory is other for group in item.optimizer.param_groups for other in group["params"]):
            slots = item.optimizer.state.get(memory, {})
            zeros = torch.zeros_like(memory)
            moments = {slot: slots.get(slot, zeros) for slot in ("exp_avg", "exp_avg_sq")}
            return {"weight": memory.detach(), **moments}
    return {"value": parameter.detach()}


def digests_of(model: list[Any], optimizer: Any) -> dict[str, str]:
    """Return a digest of each whole tensor; of a vocabulary's, only the rows that are not padding."""
    found = {}
    for key, value in sorted(whole_state(model, optimizer).items()):
        rows = value[:REAL_WORDS] if "word_embeddings" in key or "output_layer" in key else value
        found[key] = hashlib.sha256(rows.contiguous().numpy().tobytes()).hexdigest()[:12]
    return found


def train(training: Training) -> None:
    import torch
    import torch.distributed as dist
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    import raycheck
    import raycheck.adapters

    dist.init_process_group("gloo")
    parallel_state.initialize_model_parallel(
        training.tp,
        training.pp,
        training.chunks if training.chunks > 1 else None,
        expert_model_parallel_size=training.ep,
        expert_tensor_parallel_size=1 if training.has_experts else None,
    )
    model_parallel_cuda_manual_seed(training.seed + 123)
    torch.manual_seed(training.seed)
    model = model_of(training)
    optimizer, scheduler = optimizer_of(training, model)
    place = parallel_state.get_pipeline_model_parallel_rank() * training.dp + parallel_state.get_data_parallel_rank()
    torch.manual_seed(training.seed + 10 * place)  # only now, since equal weights need one seed
    state = {"engine": raycheck.adapters.megatron(model, optimizer, scheduler)}
    settings = raycheck.SaveSettings(every_steps=None, at_steps=[training.saves_at])
    losses = []
    with raycheck.Checkpointer(state, settings, group=raycheck.torchrun_group(training.uri)) as ckpt:
        at = ckpt.restore(strict=training.is_strict)
        digests, low, random = digests_of(model, optimizer), low_weights(model), random_of_ranks()
        for number in range(at.step, training.until):
            losses.append(step_of(training, model, optimizer, scheduler, batch_of(number)))
            ckpt.end_step()
            if number + 1 == training.saves_at:
                digests, low, random = digests_of(model, optimizer), low_weights(model), random_of_ranks()
    scale = float(optimizer.get_loss_scale())
    if dist.get_rank() == 0:
        found = {"losses": losses, "start": at.step, "digests": digests, "low": low, "random": random, "scale": scale}
        print(json.dumps({**found, "fresh": list(at.report.fresh) if at.report else []}), flush=True)


def low_weights(model: list[Any]) -> str:
    """Return a digest of the weights with which rank 0 computes."""
    import torch

    flat = [parameter.detach().float().reshape(-1) for chunk in model for parameter in chunk.parameters()]
    return hashlib.sha256(torch.cat(flat).numpy().tobytes()).hexdigest()[:12]


def random_of_ranks() -> list[str]:
    """Return a digest of the state of torch's own generator on each rank. A collective."""
    import torch
    import torch.distributed as dist

    found = [""] * dist.get_world_size()
    dist.all_gather_object(found, hashlib.sha256(torch.get_rng_state().numpy().tobytes()).hexdigest()[:12])
    return found


if __name__ == "__main__":
    if len(sys.argv) == 1:
        prepare()
    else:
        with on_cpu():
            train(Training(**json.loads(sys.argv[1])))
