"""Samples from a model: a request's sequences in batches, each sequence with its own random numbers.

A token's log-probability is the model's own, at temperature 1 and with all tokens allowed, as a policy gradient needs
it. A sequence depends only on the order (including its seed), not on earlier requests: batches depend only on the order
and the number of ranks, and keep their size until their last sequence has ended. Sequences are distributed over the
ranks in turn.
"""

from collections.abc import Callable, Sequence
from inspect import signature
from typing import Any

import numpy as np
import torch
from torch import Tensor

from raycheck.errors import ConfigError
from raycheck.tinker.engine.base_model import Adapter, BaseModel
from raycheck.tinker.engine.orders import SampleOrder
from raycheck.tinker.wire.samples import (
    UNSCORED,
    LikeliestTokens,
    PromptScores,
    SampledTokens,
    SampleOutput,
    TargetCells,
)
from raycheck.tinker.wire.training_data import FloatArray

MAX_BATCH_TOKENS = 65536
"""The maximum number of tokens in a batch, prompts included; a longer sequence gets its own batch."""


def sample(base: BaseModel, adapter: Adapter | None, order: SampleOrder) -> SampleOutput:
    """Sample as `order` says, from the base model with or without an adapter. Every rank returns all sequences."""
    ranks = base.ranks
    size = max(1, MAX_BATCH_TOKENS // (len(order.prompt) + order.max_tokens))
    mine = range(ranks.rank, order.num_samples, ranks.size)
    made: dict[int, SampledTokens] = {}
    with torch.no_grad(), base.with_adapter(adapter) as model:
        prompt = torch.tensor([order.prompt], device=base.device)
        for begin in range(0, -(-order.num_samples // ranks.size), size):
            found = model(input_ids=prompt, use_cache=True)
            logits, cache = found.logits[0].float(), getattr(found, _cache_name(model), None)
            if cache is None:
                raise ConfigError(f"base_model={base.source}: the model has no key-value cache, which sampling needs")
            numbers = mine[begin : begin + size]
            made |= _sequences(base, model, order, numbers, cache=cache, logits=logits[-1])
    everywhere = {number: found for part in ranks.gather(made) for number, found in part.items()}
    return SampleOutput(
        sequences=tuple(everywhere[number] for number in range(order.num_samples)),
        prompt=_prompt_scores(logits, order),
    )


def _sequences(
    base: BaseModel, model: Any, order: SampleOrder, numbers: Sequence[int], *, cache: Any, logits: Tensor
) -> dict[int, SampledTokens]:
    """Return the sequences with these numbers. cache: the prompt's key-value cache. logits: of the first new token.

    Without numbers, this rank runs along until the other ranks have finished, because weights are gathered from all
    ranks.
    """
    rows = max(1, len(numbers))
    cache.batch_repeat_interleave(rows)
    logits = logits.expand(rows, -1)
    generators = [torch.Generator(base.device).manual_seed(order.seed + number) for number in numbers or [0]]
    choose, is_stop, cached = _choice(order), _stop(base, order), {_cache_name(model): cache}
    tokens = torch.zeros(rows, order.max_tokens, dtype=torch.int64, device=base.device)
    logprobs = torch.zeros(rows, order.max_tokens, device=base.device)
    likeliest: list[Any] = []
    stopped_at = torch.zeros(rows, dtype=torch.int64, device=base.device)
    for place in range(order.max_tokens):
        chosen = choose(logits, generators)
        tokens[:, place] = chosen
        scores = torch.log_softmax(logits, -1)
        logprobs[:, place] = scores.gather(-1, chosen[:, None])[:, 0]
        if order.likeliest_sampled:
            likeliest.append(scores.topk(order.likeliest_sampled))
        stops = is_stop(tokens[:, : place + 1]) & (stopped_at == 0)
        stopped_at[stops] = place + 1
        is_over = place + 1 == order.max_tokens or not numbers or bool((stopped_at > 0).all())
        if base.ranks.is_on_all(is_over):
            break
        logits = model(input_ids=chosen[:, None], use_cache=True, **cached).logits[:, -1].float()
    found = {}
    for row, number in enumerate(numbers):
        length = int(stopped_at[row]) or order.max_tokens
        found[number] = SampledTokens(
            tokens=tokens[row, :length].cpu().numpy().astype(np.int32),
            logprobs=logprobs[row, :length].cpu().numpy(),
            is_stopped=bool(stopped_at[row]),
            likeliest=_likeliest_of(row, likeliest[:length]),
        )
    return found


def _likeliest_of(row: int, found: Sequence[Any]) -> LikeliestTokens | None:
    """Return one sequence's most likely tokens. found: those of all sequences, by position; [] for none."""
    if not found:
        return None
    return LikeliestTokens(
        tokens=torch.stack([item.indices[row] for item in found]).cpu().numpy().astype(np.int32),
        logprobs=torch.stack([item.values[row] for item in found]).cpu().numpy(),
    )


def _cache_name(model: Any) -> str:
    """Return the name of the cache argument of the model's forward, which transformers 5.24 renamed."""
    return "cache" if "cache" in signature(model.forward).parameters else "past_key_values"


def _choice(order: SampleOrder) -> Callable[[Tensor, Sequence[torch.Generator]], Tensor]:
    """Return the function that chooses a token per row of logits: the most likely, or one drawn by its generator."""
    from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

    if order.temperature <= 0:
        return lambda logits, _: logits.argmax(-1)
    warpers: list[Any] = [TemperatureLogitsWarper(order.temperature)]
    if order.top_k > 0:
        warpers.append(TopKLogitsWarper(order.top_k))
    if order.top_p < 1:
        warpers.append(TopPLogitsWarper(order.top_p))

    def choose(logits: Tensor, generators: Sequence[torch.Generator]) -> Tensor:
        for warper in warpers:
            logits = warper(None, logits)
        rows = torch.softmax(logits, -1)
        drawn = [torch.multinomial(row, 1, generator=own) for row, own in zip(rows, generators, strict=True)]
        return torch.cat(drawn)

    return choose


def _stop(base: BaseModel, order: SampleOrder) -> Callable[[Tensor], Tensor]:
    """Return the function that says, for each row of tokens so far, whether its last token ends it."""
    from transformers import StopStringCriteria

    given = base.stop_tokens if order.stop_tokens is None else list(order.stop_tokens)
    stop_tokens = torch.tensor(given, dtype=torch.int64, device=base.device)
    if not order.stop_strings:
        return lambda tokens: torch.isin(tokens[:, -1], stop_tokens)
    by_strings: Any = StopStringCriteria(base.tokenizer, list(order.stop_strings))
    return lambda tokens: torch.isin(tokens[:, -1], stop_tokens) | by_strings(tokens, None)


def _prompt_scores(logits: Tensor, order: SampleOrder) -> PromptScores:
    """Return the prompt scores that `order` requests. A token is scored given those before it, so the first has no
    score. logits: for the token after each prompt token."""
    if not (order.prompt_logprobs or order.likeliest_prompt or order.targets):
        return PromptScores()
    scores = torch.log_softmax(logits[:-1], -1)
    first = 0 if order.scored_last is None else len(scores) - order.scored_last
    logprobs, likeliest = None, None
    if order.prompt_logprobs:
        found = scores.gather(-1, torch.tensor(order.prompt[1:], device=scores.device)[:, None])[first:, 0]
        logprobs = np.concatenate([np.full(first + 1, np.nan), found.cpu().numpy()]).astype(np.float32)
    if order.likeliest_prompt:
        values, tokens = scores[first:].topk(order.likeliest_prompt)
        unscored = (first + 1, 0), (0, 0)
        likeliest = LikeliestTokens(
            tokens=np.pad(tokens.cpu().numpy().astype(np.int32), unscored),
            logprobs=np.pad(values.cpu().numpy(), unscored, constant_values=UNSCORED),
        )
    targets = None if order.targets is None else _target_logprobs(scores, order.targets)
    return PromptScores(logprobs=logprobs, likeliest=likeliest, targets=targets)


def _target_logprobs(scores: Tensor, targets: TargetCells) -> FloatArray:
    rows, tokens = (torch.tensor(item, device=scores.device).long() for item in (targets.rows, targets.tokens))
    found = scores[rows, tokens.clamp(min=0)].masked_fill(tokens < 0, 0.0)
    return found.cpu().numpy().astype(np.float32)
