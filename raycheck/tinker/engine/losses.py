"""The losses by name: each returns the loss of every token of one datum; their sum is differentiated.

logprobs: log-probabilities of the datum's target tokens under the model, float32, of shape (tokens,), or with
cross_entropy (tokens, targets). inputs: the datum's other inputs, of that shape. config: the settings of
`loss_fn_config`. Thresholds are those of the probability ratio.
"""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

LossFunction = Callable[[Tensor, Mapping[str, Tensor], Mapping[str, float]], Tensor]
LOW, HIGH, BETA, DELTA = 0.8, 1.2, 0.05, 0.2


def cross_entropy(logprobs: Tensor, inputs: Mapping[str, Tensor], config: Mapping[str, float]) -> Tensor:
    del config
    return -logprobs * _weights(logprobs, inputs)


def importance_sampling(logprobs: Tensor, inputs: Mapping[str, Tensor], config: Mapping[str, float]) -> Tensor:
    del config
    return -_ratio(logprobs, inputs) * inputs["advantages"] * _weights(logprobs, inputs)


def ppo(logprobs: Tensor, inputs: Mapping[str, Tensor], config: Mapping[str, float]) -> Tensor:
    """The clipped surrogate: the smaller of the plain and the clipped objective, token by token."""
    ratio, advantages = _ratio(logprobs, inputs), inputs["advantages"]
    return -torch.minimum(ratio * advantages, _clipped(ratio, config) * advantages) * _weights(logprobs, inputs)


def cispo(logprobs: Tensor, inputs: Mapping[str, Tensor], config: Mapping[str, float]) -> Tensor:
    """Policy gradient weighted by the clipped ratio, which is detached."""
    ratio = _clipped(_ratio(logprobs, inputs), config).detach()
    return -ratio * logprobs * inputs["advantages"] * _weights(logprobs, inputs)


def gspo(logprobs: Tensor, inputs: Mapping[str, Tensor], config: Mapping[str, float]) -> Tensor:
    """PPO with the ratio of the whole sequence: the geometric mean over the tokens whose weight is not 0."""
    weights, advantages = _weights(logprobs, inputs), inputs["advantages"]
    counted = (weights != 0).to(logprobs.dtype)
    mean = ((logprobs - inputs["logprobs"]) * counted).sum() / counted.sum().clamp(min=1)
    ratio = torch.exp(mean).detach() * torch.exp(logprobs - logprobs.detach())
    return -torch.minimum(ratio * advantages, _clipped(ratio, config) * advantages) * weights


def dro(logprobs: Tensor, inputs: Mapping[str, Tensor], config: Mapping[str, float]) -> Tensor:
    """Policy gradient with a quadratic penalty on the distance from the policy that sampled."""
    penalty = 0.5 * config.get("beta", BETA) * (logprobs - inputs["logprobs"]) ** 2
    return -(logprobs * inputs["advantages"] - penalty) * _weights(logprobs, inputs)


def dppo(logprobs: Tensor, inputs: Mapping[str, Tensor], config: Mapping[str, float]) -> Tensor:
    """Policy gradient without the tokens whose probability has already moved far in the direction of the advantage.

    It is the binary total variation of Divergence PPO (arXiv 2602.04879, equation 13). delta_low bounds how far a
    probability falls, and delta_high how far it rises.
    """
    advantages = inputs["advantages"]
    rise = torch.exp(logprobs.detach()) - torch.exp(inputs["logprobs"])
    has_risen = (advantages > 0) & (rise > config.get("delta_high", DELTA))
    has_fallen = (advantages < 0) & (-rise > config.get("delta_low", DELTA))
    is_out = has_risen | has_fallen
    # Filled before exp: the gradient of an infinite ratio that is multiplied by 0 would be NaN.
    ratio = torch.exp((logprobs - inputs["logprobs"]).masked_fill(is_out, 0.0))
    return -ratio * (advantages * _weights(logprobs, inputs)).masked_fill(is_out, 0.0)


def _weights(logprobs: Tensor, inputs: Mapping[str, Tensor]) -> Tensor:
    return inputs["weights"] if "weights" in inputs else torch.ones_like(logprobs)


def _ratio(logprobs: Tensor, inputs: Mapping[str, Tensor]) -> Tensor:
    return torch.exp(logprobs - inputs["logprobs"])


def _clipped(ratio: Tensor, config: Mapping[str, float]) -> Tensor:
    return ratio.clamp(config.get("clip_low_threshold", LOW), config.get("clip_high_threshold", HIGH))


LOSSES: Mapping[str, LossFunction] = {
    "cross_entropy": cross_entropy,
    "importance_sampling": importance_sampling,
    "ppo": ppo,
    "cispo": cispo,
    "gspo": gspo,
    "dro": dro,
    "dppo": dppo,
}
