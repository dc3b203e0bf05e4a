"""Each loss against its formula, written out for a few numbers, and its gradient against finite differences."""

import math

import pytest
import torch

from raycheck.tinker.engine.losses import LOSSES

LOGPROBS = [-0.5, -2.0, -1.0]
BEFORE = [-1.0, -1.0, -1.1]
ADVANTAGES = [2.0, -1.0, 0.5]
WEIGHTS = [1.0, 0.5, 0.0]


def inputs(weights: list[float] | None = None) -> dict[str, torch.Tensor]:
    found = {"logprobs": torch.tensor(BEFORE), "advantages": torch.tensor(ADVANTAGES)}
    return found if weights is None else {**found, "weights": torch.tensor(weights)}


def clip(ratio: float, low: float = 0.8, high: float = 1.2) -> float:
    return min(max(ratio, low), high)


RATIOS = [math.exp(now - then) for now, then in zip(LOGPROBS, BEFORE, strict=True)]
SEQUENCE = math.exp(sum(now - then for now, then in zip(LOGPROBS, BEFORE, strict=True)) / 3)
EXPECTED = {
    "cross_entropy": [-now for now in LOGPROBS],
    "importance_sampling": [-r * a for r, a in zip(RATIOS, ADVANTAGES, strict=True)],
    "ppo": [-min(r * a, clip(r) * a) for r, a in zip(RATIOS, ADVANTAGES, strict=True)],
    "cispo": [-clip(r) * a * now for r, a, now in zip(RATIOS, ADVANTAGES, LOGPROBS, strict=True)],
    "gspo": [-min(SEQUENCE * a, clip(SEQUENCE) * a) for a in ADVANTAGES],
    "dro": [
        -(now * a - 0.5 * 0.05 * (now - then) ** 2) for now, a, then in zip(LOGPROBS, ADVANTAGES, BEFORE, strict=True)
    ],
    "dppo": [  # exp(-0.5) - exp(-1) is 0.239, and exp(-1) - exp(-2) is 0.233: both are beyond 0.2
        -r * a * keep for r, a, keep in zip(RATIOS, ADVANTAGES, (0, 0, 1), strict=True)
    ],
}


@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_is_its_formula(name) -> None:
    found = LOSSES[name](torch.tensor(LOGPROBS), inputs(), {})

    assert found.tolist() == pytest.approx(EXPECTED[name], rel=1e-5)


@pytest.mark.parametrize("name", sorted(set(LOSSES) - {"gspo"}))
def test_weights_multiply_the_loss_of_each_token(name) -> None:
    found = LOSSES[name](torch.tensor(LOGPROBS), inputs(WEIGHTS), {})

    assert found.tolist() == pytest.approx(
        [w * value for w, value in zip(WEIGHTS, EXPECTED[name], strict=True)], rel=1e-5
    )


def test_gspo_counts_only_tokens_with_a_weight() -> None:
    ratio = math.exp(((-0.5 + 1.0) + (-2.0 + 1.0)) / 2)

    found = LOSSES["gspo"](torch.tensor(LOGPROBS), inputs([1.0, 1.0, 0.0]), {})

    assert found.tolist() == pytest.approx(
        [-min(ratio * a, clip(ratio) * a) * w for a, w in zip(ADVANTAGES, (1, 1, 0), strict=True)]
    )


def test_the_thresholds_are_those_asked_for() -> None:
    found = LOSSES["ppo"](torch.tensor(LOGPROBS), inputs(), {"clip_low_threshold": 0.1, "clip_high_threshold": 9.0})

    assert found.tolist() == pytest.approx(EXPECTED["importance_sampling"])


@pytest.mark.parametrize("name", ["cross_entropy", "importance_sampling", "ppo", "dro", "dppo"])
def test_a_gradient_is_the_slope_of_its_loss(name) -> None:
    values = {key: value.double() for key, value in inputs().items()}

    def loss(logprobs: torch.Tensor) -> torch.Tensor:
        return LOSSES[name](logprobs, values, {}).sum()

    assert torch.autograd.gradcheck(loss, torch.tensor(LOGPROBS, dtype=torch.float64, requires_grad=True))


def test_cispo_weighs_the_gradient_of_the_log_probability() -> None:
    logprobs = torch.tensor(LOGPROBS, requires_grad=True)

    LOSSES["cispo"](logprobs, inputs(), {}).sum().backward()

    assert logprobs.grad.tolist() == pytest.approx([-clip(r) * a for r, a in zip(RATIOS, ADVANTAGES, strict=True)])


def test_gspo_gives_every_token_the_gradient_of_the_sequence() -> None:
    logprobs = torch.tensor(LOGPROBS, requires_grad=True)

    LOSSES["gspo"](logprobs, inputs(), {"clip_low_threshold": 0.0, "clip_high_threshold": 9.0}).sum().backward()

    assert logprobs.grad.tolist() == pytest.approx([-SEQUENCE * a for a in ADVANTAGES])


def divergence_ppo(
    logprobs: torch.Tensor, before: torch.Tensor, advantages: torch.Tensor, low: float, high: float
) -> torch.Tensor:
    """The loss of arXiv 2602.04879 with the mask of its equation 13, token by token."""
    losses = []
    for now, then, advantage in zip(logprobs, before, advantages, strict=True):
        change = now.detach().exp() - then.exp()
        keep = change <= high if advantage > 0 else change >= -low
        losses.append(-torch.exp(now - then) * advantage * float(keep))
    return torch.stack(losses)


@pytest.mark.parametrize(("low", "high"), [(0.2, 0.2), (0.05, 0.6), (0.6, 0.05), (0.0, 0.0)])
def test_dppo_and_its_gradient_are_those_of_the_paper(low, high) -> None:
    draw = torch.Generator().manual_seed(3)
    before = torch.empty(400, dtype=torch.float64).uniform_(-4, -0.01, generator=draw)
    advantages = torch.empty(400, dtype=torch.float64).normal_(generator=draw)
    logprobs = torch.empty(400, dtype=torch.float64).uniform_(-4, -0.01, generator=draw).requires_grad_()
    expected = divergence_ppo(logprobs, before, advantages, low, high)
    (slope,) = torch.autograd.grad(expected.sum(), logprobs)

    given = {"logprobs": before, "advantages": advantages}
    found = LOSSES["dppo"](logprobs, given, {"delta_low": low, "delta_high": high})

    assert 0 < int((expected == 0).sum()) < 400
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(torch.autograd.grad(found.sum(), logprobs)[0], slope)


def test_a_token_that_dppo_leaves_out_has_no_gradient_where_its_ratio_is_infinite() -> None:
    logprobs = torch.tensor([-0.1, -1.0], requires_grad=True)
    given = {"logprobs": torch.tensor([-200.0, -1.0]), "advantages": torch.tensor([1.0, 1.0])}

    LOSSES["dppo"](logprobs, given, {}).sum().backward()

    assert logprobs.grad.tolist() == [0.0, -1.0]
