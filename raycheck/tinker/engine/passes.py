"""Forward and backward passes over a batch. A request's gradients are added completely or not at all.

Each rank processes a part of the batch with about as many tokens as the other parts. A rank runs its sequences in
order, in groups of bounded size, each padded on the right. Parts and groups depend only on the request and the number
of ranks, so a repeated request gives bitwise identical results.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch

from raycheck.tinker.engine.lora_model import LoraModel
from raycheck.tinker.engine.losses import LOSSES
from raycheck.tinker.engine.orders import PassOutput
from raycheck.tinker.wire.training_data import FloatArray, TrainingBatch, TrainingDatum

MAX_GROUP_TOKENS = 8192
"""The maximum number of tokens in a group, padding included; a longer sequence forms its own group."""
MAX_GROUP_TARGETS = 1 << 22
"""The maximum number of targets in a group, padding included; a sequence with more forms its own group. If each token
has one target, MAX_GROUP_TOKENS is the tighter bound."""


def run_pass(tenant: LoraModel, batch: TrainingBatch) -> PassOutput:
    """Compute a batch's losses and, unless it is forward_only, add their gradients to the tenant's.

    Every rank returns the complete output. Raises ValueError, adding nothing, if a loss or gradient is not finite.
    """
    ranks = tenant.base.ranks
    parts = [list(_groups(part)) for part in _parts(batch.data, ranks.size)]
    mine = parts[ranks.rank]
    logprobs: list[FloatArray] = []
    losses: list[FloatArray] = []
    total = 0.0
    gradients = [torch.zeros_like(parameter) for parameter in tenant.parameters]
    with torch.set_grad_enabled(not batch.forward_only), tenant.base.with_adapter(tenant.lora) as model:
        for number in range(max(map(len, parts))):
            # The base model's weights are gathered from all ranks, so a rank without groups left must take part.
            is_real = number < len(mine)
            group = mine[number] if is_real else batch.data[:1]
            loss, group_logprobs, group_losses = _group_loss(model, group, batch)
            found: Sequence[torch.Tensor] = ()
            if not batch.forward_only:
                found = torch.autograd.grad(loss, tenant.parameters, allow_unused=True, materialize_grads=True)
            if is_real:
                total += float(loss.detach())
                logprobs += group_logprobs
                losses += group_losses
                if found:
                    gradients = [a + b for a, b in zip(gradients, found, strict=True)]
    outputs = ranks.gather((total, logprobs, losses))
    total = sum(part for part, _, _ in outputs)
    if not batch.forward_only:
        gradients = [ranks.sum(gradient) for gradient in gradients]
    if not np.isfinite(total) or not all(bool(torch.isfinite(found).all()) for found in gradients):
        raise ValueError(f"the loss is {total}, or a gradient is not finite: no gradient was added")
    if not batch.forward_only:
        tenant.add_gradients(gradients)
    return PassOutput(
        logprobs=tuple(item for _, part, _ in outputs for item in part),
        losses=tuple(item for _, _, part in outputs for item in part),
        loss_sum=total,
    )


def _parts(data: Sequence[TrainingDatum], count: int) -> list[list[TrainingDatum]]:
    """Return the parts of a batch for this many ranks, in order. A sequence belongs to the part of its first token."""
    parts: list[list[TrainingDatum]] = [[] for _ in range(count)]
    total, before = sum(len(datum.tokens) for datum in data), 0
    for datum in data:
        parts[before * count // total].append(datum)
        before += len(datum.tokens)
    return parts


def _groups(data: Sequence[TrainingDatum]) -> Iterator[list[TrainingDatum]]:
    group: list[TrainingDatum] = []
    longest, widest = 0, 0
    for datum in data:
        length, width = max(longest, len(datum.tokens)), max(widest, _width(datum))
        tokens = length * (len(group) + 1)
        if group and (tokens > MAX_GROUP_TOKENS or tokens * width > MAX_GROUP_TARGETS):
            yield group
            group, length, width = [], len(datum.tokens), _width(datum)
        group.append(datum)
        longest, widest = length, width
    if group:
        yield group


def _width(datum: TrainingDatum) -> int:
    """Return the number of targets per token of a datum."""
    return datum.target_tokens.size // len(datum.tokens)


def _group_loss(
    model: Any, group: Sequence[TrainingDatum], batch: TrainingBatch
) -> tuple[torch.Tensor, list[FloatArray], list[FloatArray]]:
    """Return the sum of a group's losses, and per datum its log-probabilities and its losses by token."""
    device = next(model.parameters()).device
    longest = max(len(datum.tokens) for datum in group)
    widths = [_width(datum) for datum in group]
    tokens = torch.zeros(len(group), longest, dtype=torch.int64)
    mask = torch.zeros(len(group), longest, dtype=torch.int64)
    targets = torch.zeros(len(group), longest, max(widths), dtype=torch.int64)
    for row, (datum, width) in enumerate(zip(group, widths, strict=True)):
        length = len(datum.tokens)
        tokens[row, :length] = torch.from_numpy(datum.tokens.copy())
        targets[row, :length, :width] = torch.from_numpy(datum.target_tokens.reshape(length, width).copy())
        mask[row, :length] = 1
    logits = model(input_ids=tokens.to(device), attention_mask=mask.to(device), use_cache=False).logits.float()
    chosen = torch.log_softmax(logits, dim=-1).gather(-1, targets.to(device))
    loss_of = LOSSES[batch.loss_fn]
    rows = []
    for row, (datum, width) in enumerate(zip(group, widths, strict=True)):
        logprobs = chosen[row, : len(datum.tokens), :width].reshape(datum.target_tokens.shape)
        inputs = {name: torch.from_numpy(value.copy()).to(device) for name, value in datum.inputs.items()}
        rows.append((logprobs, loss_of(logprobs, inputs, batch.config)))
    total = torch.stack([losses.sum() for _, losses in rows]).sum()
    return total, [_array(logprobs) for logprobs, _ in rows], [_array(losses) for _, losses in rows]


def _array(values: torch.Tensor) -> FloatArray:
    return values.detach().to("cpu", torch.float32).numpy()
