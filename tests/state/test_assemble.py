"""Reports that do not fit together never become a checkpoint."""

from dataclasses import replace

import pytest
import torch

from raycheck.bucket.assembly.assemble import assemble
from raycheck.bucket.assembly.save_report import Reference, Report
from raycheck.bucket.format.manifest import Blob, Component
from raycheck.bucket.format.progress import Progress
from raycheck.bucket.store import Store
from raycheck.errors import ConfigError, SaveFailedError
from raycheck.state.train_state import TrainState
from tests.support.histories.invariants import assert_invariants
from tests.support.processes.save_without_ray import upload


def reports(store: Store, *states: dict[str, object]) -> list[Report]:
    """Returns one uploaded report per rank, all of step 5."""
    made = []
    for rank, state in enumerate(states):
        progress = Progress(step=5)
        staged = TrainState(state, rank=rank, world_size=len(states)).stage(progress)
        report = Report(group="g", rank=rank, world_size=len(states), attempt=1, save=1, progress=progress)
        done = upload(store, staged, name=report.checkpoint)
        made.append(replace(report, shards=done.records, section=done.section))
    return made


def test_ranks_that_saved_different_steps_are_refused(memory: Store) -> None:
    first, second = reports(memory, {"m": torch.nn.Linear(2, 2)}, {"m": torch.nn.Linear(2, 2)})

    with pytest.raises(SaveFailedError, match=r"rank 1 saved step-000000006-a1-s1"):
        assemble(memory, [first, replace(second, progress=Progress(step=6))])

    assert_invariants(memory)


def test_ranks_that_describe_a_tensor_differently_are_refused(memory: Store) -> None:
    stages = reports(memory, {"m": torch.nn.Linear(2, 2)}, {"m": torch.nn.Linear(3, 2)})

    with pytest.raises(ConfigError, match=r"ranks disagree on m\.weight: float32\[2, 2\] and float32\[2, 3\]"):
        assemble(memory, stages)

    assert_invariants(memory)


def test_a_missing_rank_is_refused(memory: Store) -> None:
    """I1: no manifest is made until every rank has reported that its shards are durable."""
    pair = reports(memory, {"m": torch.nn.Linear(2, 2)}, {"m": torch.nn.Linear(2, 2)})

    with pytest.raises(SaveFailedError, match=r"ranks \[1\]"):
        assemble(memory, pair[1:])

    assert_invariants(memory)


def test_the_same_reports_give_the_same_files(memory: Store) -> None:
    pair = reports(memory, *[{"m": torch.nn.Linear(2, 2)}] * 2)

    assert assemble(memory, pair) == assemble(memory, pair)


BASE = Reference(
    name="m.frozen",
    checkpoint="../base/step-000000001-a1-s1",
    record=Component(
        name="m.frozen",
        checkpoint="../base/step-000000001-a1-s1",
        metadata=Blob(size_bytes=1, crc32=1),
        shards=(),
    ),
)
OWN = Reference(name="m.frozen", checkpoint="step-000000004-a1-s1")


@pytest.mark.parametrize(
    ("first", "second"),
    [((), (BASE,)), ((BASE,), (replace(BASE, checkpoint="../base/step-000000002-a1-s2"),)), ((OWN,), (BASE,))],
    ids=["rank 0 does not", "to another one", "in other boxes"],
)
def test_a_rank_that_alone_refers_to_a_component_in_other_boxes_fails_the_save(
    memory: Store, first: tuple[Reference, ...], second: tuple[Reference, ...]
) -> None:
    """Rank 0 has no rows of what rank 1 refers to: a tensor that only rank 1 holds would be missing."""
    pair = reports(memory, {"m": torch.nn.Linear(2, 2)}, {"m": torch.nn.Linear(2, 2)})

    with pytest.raises(SaveFailedError, match=r"m\.frozen has changed on some ranks only"):
        assemble(memory, [replace(pair[0], references=first), replace(pair[1], references=second)])


@pytest.mark.parametrize("others", [(), (OWN,)], ids=["uploaded", "referred to"])
def test_a_rank_with_a_shard_of_what_rank_0_refers_to_in_other_boxes_fails_the_save(
    memory: Store, others: tuple[Reference, ...]
) -> None:
    frozen = torch.nn.Linear(2, 2).requires_grad_(False)
    pair = reports(memory, {"m": torch.nn.Linear(2, 2)}, {"m": frozen})

    with pytest.raises(SaveFailedError, match=r"m\.frozen has changed on some ranks only"):
        assemble(memory, [replace(pair[0], references=(BASE,)), replace(pair[1], references=others)])
