"""Samples from a model by transformers' generate, one sequence after the other.

The log-probability of a token is that under the model itself, at temperature 1 and with all tokens allowed: what a
policy gradient compares with. A sequence depends on the order alone (seed included) and not on what ran before.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from raycheck.tinker.engine.base_model import BaseModel
from raycheck.tinker.engine.orders import SampledTokens, SampleOrder, SampleOutput
from raycheck.tinker.wire.training_data import FloatArray


def sample(base: BaseModel, model: Any, order: SampleOrder) -> SampleOutput:
    """Sample what `order` says from `model`: the base model's own modules, or a tenant's over the same weights."""
    with torch.inference_mode():
        sequences = tuple(_sequence(base, model, order, number) for number in range(order.num_samples))
        prompt = _prompt_logprobs(model, order.prompt) if order.prompt_logprobs else None
    return SampleOutput(sequences=sequences, prompt_logprobs=prompt)


def _sequence(base: BaseModel, model: Any, order: SampleOrder, number: int) -> SampledTokens:
    from transformers import GenerationConfig

    stops = base.stop_tokens if order.stop_tokens is None else list(order.stop_tokens)
    new_config: Any = GenerationConfig
    config = new_config(
        max_new_tokens=order.max_tokens,
        do_sample=order.temperature > 0,
        eos_token_id=stops or None,
        pad_token_id=0,
        use_cache=True,
        output_logits=True,
        return_dict_in_generate=True,
        **_sampling(order),
        **({"stop_strings": list(order.stop_strings)} if order.stop_strings else {}),
    )
    tokens = torch.tensor([order.prompt], device=base.device)
    extra = {"tokenizer": base.tokenizer} if order.stop_strings else {}
    with torch.random.fork_rng():
        torch.manual_seed(order.seed + number)
        found = model.generate(tokens, attention_mask=torch.ones_like(tokens), generation_config=config, **extra)
    made = found.sequences[0, len(order.prompt) :]
    logits = torch.cat(found.logits).float()
    logprobs = torch.log_softmax(logits, -1).gather(-1, made[:, None])[:, 0]
    is_stopped = len(made) < order.max_tokens or int(made[-1]) in stops or _ends_by(base, made, order.stop_strings)
    return SampledTokens(
        tokens=made.cpu().numpy().astype(np.int32),
        logprobs=logprobs.cpu().numpy().astype(np.float32),
        is_stopped=is_stopped,
    )


def _sampling(order: SampleOrder) -> dict[str, Any]:
    """Returns the settings of generate that only sampling takes."""
    if order.temperature <= 0:
        return {}
    return {"temperature": order.temperature, "top_p": order.top_p, "top_k": max(0, order.top_k)}


def _ends_by(base: BaseModel, tokens: torch.Tensor, stop_strings: Sequence[str]) -> bool:
    return bool(stop_strings) and any(stop in base.tokenizer.decode(tokens) for stop in stop_strings)


def _prompt_logprobs(model: Any, prompt: Sequence[int]) -> FloatArray:
    """Returns the log-probability of each token of the prompt after those before it; NaN for the first."""
    tokens = torch.tensor([prompt], device=next(model.parameters()).device)
    logits = model(input_ids=tokens, use_cache=False).logits[0, :-1].float()
    found = torch.log_softmax(logits, -1).gather(-1, tokens[0, 1:, None])[:, 0]
    return np.concatenate([[np.nan], found.cpu().numpy()]).astype(np.float32)
