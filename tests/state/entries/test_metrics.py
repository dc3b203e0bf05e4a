"""Metrics of torchmetrics keep each rank's accumulation over a restore, or an error names the metric that would not."""

from typing import Any

import pytest
import torch
import torchmetrics
from torch import nn

from raycheck.bucket.format.progress import Progress
from raycheck.bucket.reading import Checkpoint
from raycheck.bucket.store import Store
from raycheck.errors import ConfigError, StateMismatchError
from raycheck.state.entries.per_rank_entries import PerRank
from raycheck.state.train_state import TrainState
from tests.support.processes.save_without_ray import save, save_state

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")


def batch(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(16, generator=generator), torch.randint(0, 2, (16,), generator=generator)


KINDS: dict[str, Any] = {
    "accuracy": torchmetrics.classification.BinaryAccuracy,
    "auroc": torchmetrics.classification.BinaryAUROC,
    "minmax": lambda: torchmetrics.wrappers.MinMaxMetric(torchmetrics.classification.BinaryAccuracy()),
    "pearson": torchmetrics.PearsonCorrCoef,
    "collection": lambda: torchmetrics.MetricCollection(
        {
            "p": torchmetrics.classification.BinaryPrecision(),
            "r": torchmetrics.classification.BinaryRecall(),
            "e": torchmetrics.MeanSquaredError(),
        }
    ),
}


def updated(metric: Any, seeds: range) -> Any:
    for seed in seeds:
        scores, labels = batch(seed)
        metric.update(scores, labels.float() if isinstance(metric, torchmetrics.PearsonCorrCoef) else labels)
        if isinstance(metric, torchmetrics.wrappers.MinMaxMetric):
            metric.compute()
    return metric


def assert_equal(found: Any, expected: Any) -> None:
    if isinstance(expected, dict):
        assert found.keys() == expected.keys()
        for key in expected:
            assert_equal(found[key], expected[key])
    else:
        assert torch.equal(found, expected), (found, expected)


@pytest.mark.parametrize("wrap", [lambda metric: metric, PerRank, lambda metric: nn.ModuleList([metric])])
@pytest.mark.parametrize("kind", KINDS)
def test_a_metric_goes_on_where_it_was(memory: Store, kind: str, wrap: Any) -> None:
    one, two = updated(KINDS[kind](), range(3)), KINDS[kind]()

    TrainState({"metric": wrap(two)}, rank=0, world_size=1).apply(save_state(memory, {"metric": wrap(one)}))

    assert_equal(two.compute(), one.compute())
    assert_equal(updated(two, range(3, 5)).compute(), updated(one, range(3, 5)).compute())


def saved_by(store: Store, metrics: list[Any]) -> Checkpoint:
    ranks = [
        TrainState({"metric": metric}, rank=rank, world_size=len(metrics)).stage(Progress(step=1))
        for rank, metric in enumerate(metrics)
    ]
    return save(store, ranks)


@pytest.mark.parametrize("kind", ["accuracy", "auroc", "collection"])
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_nothing_that_ranks_accumulated_is_lost_at_another_world_size(
    memory: Store, kind: str, world_size: int
) -> None:
    checkpoint = saved_by(memory, [updated(KINDS[kind](), range(10 * rank, 10 * rank + 2)) for rank in range(3)])
    found = [KINDS[kind]() for _ in range(world_size)]

    reports = [
        TrainState({"metric": metric}, rank=rank, world_size=world_size).apply(checkpoint).report
        for rank, metric in enumerate(found)
    ]

    total = updated(KINDS[kind](), [seed for rank in range(3) for seed in range(10 * rank, 10 * rank + 2)])
    together = saved_by(memory_of(memory), found)
    alone = KINDS[kind]()
    TrainState({"metric": alone}, rank=0, world_size=1).apply(together)
    for mine, theirs in zip(flat(alone.compute()), flat(total.compute()), strict=True):
        assert torch.allclose(mine, theirs)
    assert not any(report.missing or report.unexpected or report.unused for report in reports)
    assert [bool(report.fresh) for report in reports] == [rank >= 3 for rank in range(world_size)]


def memory_of(store: Store) -> Store:
    from raycheck.bucket.store import open_store

    return open_store(f"{store.uri}-more")


def flat(found: Any) -> list[torch.Tensor]:
    return list(found.values()) if isinstance(found, dict) else [found]


def test_a_mean_over_ranks_is_weighted_by_their_updates(memory: Store) -> None:
    class Mean(torchmetrics.Metric):
        full_state_update = False

        def __init__(self) -> None:
            super().__init__()
            self.add_state("mean", torch.tensor(0.0), dist_reduce_fx="mean")

        def update(self, value: float) -> None:
            self.mean = self.mean + (value - self.mean) / self.update_count

        def compute(self) -> torch.Tensor:
            return self.mean

    many, few = Mean(), Mean()
    for value in (1.0, 2.0, 3.0):
        many.update(value)
    few.update(10.0)
    live = Mean()

    TrainState({"metric": live}, rank=0, world_size=1).apply(saved_by(memory, [many, few]))

    assert live.compute() == pytest.approx(4.0)
    assert live.update_count == 4


def test_a_reduction_that_cannot_be_done_is_refused_before_anything_is_changed(memory: Store) -> None:
    checkpoint = saved_by(memory, [updated(KINDS["pearson"](), range(rank, rank + 1)) for rank in range(2)])
    live = KINDS["pearson"]()

    with pytest.raises(
        StateMismatchError, match=r"metric\.itself\.mean_x was accumulated by 2 ranks.*skip=\['metric'\]"
    ):
        TrainState({"metric": live}, rank=0, world_size=1).apply(checkpoint)

    assert live.update_count == 0


def test_another_metric_under_the_name_is_a_mismatch(memory: Store) -> None:
    checkpoint = save_state(memory, {"metric": updated(KINDS["accuracy"](), range(1))})

    with pytest.raises(
        StateMismatchError, match=r"metric: the metrics are itself .BinaryAUROC.* here, and .*BinaryAccuracy"
    ):
        TrainState({"metric": KINDS["auroc"]()}, rank=0, world_size=1).apply(checkpoint)


class Net(nn.Module):
    """Holds metrics as attributes, as a LightningModule does."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.train_accuracy = torchmetrics.classification.BinaryAccuracy()
        self.val = torchmetrics.MetricCollection([torchmetrics.MeanMetric()])


def test_metrics_inside_a_module_that_nothing_would_save_are_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"state\['model'\] holds metrics \(train_accuracy, val\.MeanMetric\)"):
        TrainState({"model": Net()}, rank=0, world_size=1)


def test_metrics_inside_a_module_come_back_as_an_entry_of_their_own(memory: Store) -> None:
    def build() -> Any:
        net = Net()
        return net, {"model": net, "metrics": [m for m in net.modules() if isinstance(m, torchmetrics.Metric)]}

    (one, saved), (two, live) = build(), build()
    updated(one.train_accuracy, range(2))
    one.val.update(3.0)

    TrainState(live, rank=0, world_size=1).apply(save_state(memory, saved))

    assert torch.equal(two.train_accuracy.compute(), one.train_accuracy.compute())
    assert two.val.compute() == {"MeanMetric": 3.0}


def test_metrics_that_are_persistent_in_the_module_too_are_refused() -> None:
    net = Net()
    net.train_accuracy.persistent(True)

    with pytest.raises(ConfigError, match=r"would save train_accuracy a second time.*persistent\(False\)"):
        TrainState({"model": net, "metrics": [net.train_accuracy, net.val]}, rank=0, world_size=1)


def test_a_tracker_that_adds_metrics_by_itself_is_refused() -> None:
    tracker = torchmetrics.wrappers.MetricTracker(torchmetrics.classification.BinaryAccuracy())
    tracker.increment()

    with pytest.raises(ConfigError, match=r"state\['metric'\] is a MetricTracker, which adds metrics"):
        TrainState({"metric": tracker}, rank=0, world_size=1)
