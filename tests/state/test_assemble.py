"""Reports that do not fit together never become a checkpoint."""

from dataclasses import replace

import pytest
import torch

from raycheck.bucket.assembly.assemble import assemble
from raycheck.bucket.assembly.save_report import Report
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
    pair = reports(memory, {"m": torch.nn.Linear(2, 2)}, {"m": torch.nn.Linear(2, 2)})

    with pytest.raises(SaveFailedError, match=r"ranks \[1\]"):
        assemble(memory, pair[1:])

    assert_invariants(memory)


def test_the_same_reports_give_the_same_files(memory: Store) -> None:
    pair = reports(memory, *[{"m": torch.nn.Linear(2, 2)}] * 2)

    assert assemble(memory, pair) == assemble(memory, pair)
