"""Inside Accelerate: a loop that is cut off in the middle of an epoch ends as one that never was, at any world size."""

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils import DistributedType, ProjectConfiguration
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset, WeightedRandomSampler

import raycheck
from raycheck.errors import ConfigError, StateMismatchError
from tests.support.frameworks.accelerate_training import Job, accelerator_of, train
from tests.support.processes.coordinator_in_thread import group_of
from tests.support.processes.gloo_ranks import Ranks

pytestmark = pytest.mark.filterwarnings("ignore")  # Accelerate and torch warn


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    """Reset Accelerate, which keeps its settings in classes."""
    yield
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


@pytest.fixture(scope="module")
def warm() -> set[bool]:
    """Which trainings the ranks have had: those without FSDP2 (False), and those with it (True)."""
    return set()


def lives(ranks: Ranks, uri: str, *jobs: tuple[int, Job]) -> list[list[dict[str, Any]]]:
    """Train one job after the other in the same run, each on its number of ranks."""
    return [ranks.run(train, world_size, job, uri) for world_size, job in jobs]


@pytest.mark.parametrize(
    "options",
    [{}, {"accumulate": 2, "seedable": True}, {"split": True, "batch": 8, "stop": 11}, {"fsdp": True}],
    ids=["shuffled", "accumulating", "split at an epoch's end", "FSDP2"],
)
def test_a_run_cut_off_in_an_epoch_goes_on_to_the_last_bit(
    pair: Ranks, warm: set[bool], tmp_path: Path, options: Any
) -> None:
    """Samples, losses, learning rates and weights are those of a run without raycheck that was never cut off; what the
    dataset draws at random for a batch fetched ahead, too."""
    job = Job(**{"stop": 8, **options})
    never_cut_off = Job(**{**options, "stop": -1})
    if job.fsdp not in warm:  # what a process imports while it trains for the first time draws numbers
        pair.run(train, 2, never_cut_off, None)
        warm.add(job.fsdp)
    plain = pair.run(train, 2, never_cut_off, None)

    first, second = lives(pair, f"file://{tmp_path}/run", (2, job), (2, never_cut_off))

    for rank in range(2):
        for name in ("losses", "samples", "rates"):
            restored = len(plain[rank][name]) - len(second[rank][name])
            assert 0 < restored <= len(first[rank][name])
            assert first[rank][name] == plain[rank][name][: len(first[rank][name])]
            assert second[rank][name] == plain[rank][name][restored:]
        assert second[rank]["weights"] == plain[rank]["weights"]


def test_at_another_world_size_each_sample_of_the_epoch_comes_once(pair: Ranks, tmp_path: Path) -> None:
    """Two processes with batches of 4 become one that accumulates two batches of 4, and the other way round. The
    learning rates are the same step by step, though Accelerate steps the scheduler once for each process."""
    whole = lives(pair, f"file://{tmp_path}/whole", (2, Job()))[0]

    first, alone, again = lives(
        pair,
        f"file://{tmp_path}/run",
        (2, Job(stop=5, every_steps=1)),
        (1, Job(batch=4, accumulate=2, stop=4, every_steps=1)),
        (2, Job()),
    )

    # A life that is cut off in a step had not ended it: that step comes again.
    assert [*steps_of(first)[:4], *steps_of(alone)[:3], *steps_of(again)] == steps_of(whole)
    rates = [*first[0]["rates"][:4], *alone[0]["rates"][1:6:2], *again[0]["rates"]]
    assert rates == pytest.approx(whole[0]["rates"])


def steps_of(life: list[dict[str, Any]]) -> list[set[int]]:
    """Returns the numbers of the samples of each group of 8, over all ranks."""
    per_rank = [[number for batch in rank["samples"] for number in batch] for rank in life]
    size = 8 // len(life)
    return [
        {number for numbers in per_rank for number in numbers[at : at + size]}
        for at in range(0, len(per_rank[0]), size)
    ]


def test_another_number_of_samples_per_step_is_refused(pair: Ranks, tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="an optimizer step took 8 samples over all processes, and would take 4"):
        lives(pair, f"file://{tmp_path}/run", (2, Job(stop=4, every_steps=2)), (1, Job()))


def prepared(tmp_path: Path, **options: Any) -> tuple[Any, ...]:
    """Returns an Accelerator in this process, its attachment, and model, optimizer and loader."""
    accelerator = Accelerator(cpu=True, **options)
    torch.manual_seed(0)
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = TensorDataset(torch.arange(24.0).reshape(12, 2))
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(data, batch_size=2))
    (group,) = group_of(f"file://{tmp_path}/run")
    ckpt = raycheck.accelerate.attach(accelerator, raycheck.SaveSettings(every_steps=100), group=group)
    return accelerator, ckpt, model, optimizer, loader


def step(accelerator: Accelerator, model: nn.Module, optimizer: Any, inputs: torch.Tensor) -> None:
    accelerator.backward(model(inputs).mean())
    optimizer.step()
    optimizer.zero_grad()


def test_save_state_saves_the_step_at_its_end_under_the_last_part_of_a_path(tmp_path: Path) -> None:
    """The counter that the loop moves after save_state is saved as it was at the end of the step."""
    accelerator, ckpt, model, optimizer, loader = prepared(tmp_path)
    counter = {"steps": 0}

    class Counter:
        state_dict = staticmethod(lambda: dict(counter))
        load_state_dict = staticmethod(counter.update)

    accelerator.register_for_checkpointing(Counter())
    assert accelerator.load_state().step == 0
    for number, (inputs,) in enumerate(loader, start=1):
        step(accelerator, model, optimizer, inputs)
        if number == 4:
            accelerator.save_state("outputs/step_4")
        counter["steps"] += 1
    accelerator.end_training()

    run = raycheck.open_run(f"file://{tmp_path}/run")
    named = run.at("step_4")
    assert (named.step, run.head.step) == (4, 6)
    named.restore(into={"registered": [Counter()]})
    assert counter["steps"] == 4
    assert ckpt.checkpointer.is_closed


def test_a_loop_over_evaluation_inside_a_step_does_not_end_it(tmp_path: Path) -> None:
    accelerator, ckpt, model, optimizer, loader = prepared(tmp_path)
    evaluation = accelerator.prepare(DataLoader(TensorDataset(torch.ones(4, 2)), batch_size=2))
    seen = []
    for _ in ckpt.epochs(1):
        for (inputs,) in loader:
            step(accelerator, model, optimizer, inputs)
            seen += [ckpt.checkpointer._counter.step for _batch in evaluation]

    assert seen == [done for done in range(6) for _ in range(2)]  # the step at hand is not counted yet


def test_batches_of_raychecks_own_need_end_step_and_are_told_so(tmp_path: Path) -> None:
    accelerator, ckpt, model, optimizer, _ = prepared(tmp_path)
    data = raycheck.Batches(TensorDataset(torch.arange(24.0).reshape(12, 2)), global_batch=2, rank=0, world_size=1)
    accelerator.register_for_checkpointing(data)
    losses = iter(ckpt.epochs(1))
    next(losses)
    batches = iter(data.loader())
    step(accelerator, model, optimizer, next(batches)[0])
    ckpt.end_step({"loss": 1.0})
    step(accelerator, model, optimizer, next(batches)[0])

    with pytest.raises(ConfigError, match=r"Iterate a prepared loader, or call end_step\(\)"):
        step(accelerator, model, optimizer, next(batches)[0])
    assert data.epoch_step == 1


def test_skip_first_batches_is_for_what_the_loader_skips_by_itself(tmp_path: Path) -> None:
    accelerator, ckpt, model, optimizer, loader = prepared(tmp_path)
    accelerator.load_state()
    for number, (inputs,) in enumerate(loader):
        if number == 4:
            break
        step(accelerator, model, optimizer, inputs)
        if number == 3:
            accelerator.save_state()
    position = ckpt._loaders.state_dict()["loaders"][0]
    assert position["consumed"] == 0  # the loop was left, so the next one begins at the first batch
    del position

    assert accelerator.skip_first_batches(loader, 0) is loader
    with pytest.raises(ConfigError, match="leaves out 0 batches"):
        accelerator.skip_first_batches(loader, 3)


class Endless(IterableDataset[Any]):
    def __iter__(self) -> Iterator[torch.Tensor]:
        yield from torch.ones(8, 2)


def test_what_cannot_go_on_is_refused_before_the_first_step(tmp_path: Path) -> None:
    accelerator, _, model, optimizer, _ = prepared(tmp_path)
    data = TensorDataset(torch.ones(4, 2))
    stream = accelerator.prepare(DataLoader(Endless(), batch_size=2))
    weighted = accelerator.prepare(DataLoader(data, sampler=WeightedRandomSampler([1.0] * 4, 4), batch_size=2))
    before = model.weight.clone()

    with pytest.raises(ConfigError, match="restore before the first step"):
        step(accelerator, model, optimizer, torch.ones(2, 2))
    accelerator.load_state()
    for loader, why in ((stream, "DataLoaderDispatcher"), (weighted, "WeightedRandomSampler")):
        for batch in loader:
            inputs = batch if loader is stream else batch[0]
            with pytest.raises(ConfigError, match=rf"cannot resume in the middle of .*{why}.*raycheck\.Batches"):
                step(accelerator, model, optimizer, inputs)
    assert torch.equal(model.weight, before)


def test_folders_and_what_comes_too_late_are_refused(tmp_path: Path) -> None:
    accelerator, _, model, optimizer, loader = prepared(tmp_path)

    with pytest.raises(ConfigError, match=r"restores the run's newest checkpoint.*resume=.*before attach"):
        accelerator.load_state("checkpoints/step_4")
    with pytest.raises(ConfigError, match="restore before the first step"):
        accelerator.save_state()
    accelerator.load_state()
    with pytest.raises(ConfigError, match="was called before"):
        accelerator.load_state()
    with pytest.raises(ConfigError, match="is a folder that exists"):
        accelerator.save_state(str(tmp_path))
    with pytest.raises(ConfigError, match="max_shard_size"):
        accelerator.save_state(max_shard_size=1)
    with pytest.raises(ConfigError, match="attach was called before"):
        raycheck.accelerate.attach(accelerator)
    accelerator.prepare(torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=0.1))
    for (inputs,) in loader:
        with pytest.raises(ConfigError, match=r"prepared or registered after load_state\(\)"):
            step(accelerator, model, optimizer, inputs)


@pytest.mark.parametrize(
    ("kind", "cure"),
    [
        (DistributedType.MEGATRON_LM, "Megatron-LM.*fsdp_version=2"),
        (DistributedType.FSDP, "FSDP1.*fsdp_version=2"),
        (DistributedType.XLA, "XLA"),
    ],
)
def test_ways_of_training_that_cannot_be_saved_whole_are_refused_by_name(kind: DistributedType, cure: str) -> None:
    accelerator = Accelerator(cpu=True)
    AcceleratorState._shared_state["distributed_type"] = kind
    AcceleratorState._shared_state["fsdp_plugin"] = type("Plugin", (), {"fsdp_version": 1})()

    with pytest.raises(ConfigError, match=cure):
        raycheck.accelerate.attach(accelerator, group=group_of("memory://refused")[0])


def test_settings_of_folders_are_refused() -> None:
    (group,) = group_of("memory://refused")
    limited = Accelerator(cpu=True, project_config=ProjectConfiguration(project_dir="x", total_limit=2))
    with pytest.raises(ConfigError, match=r"SaveSettings\(keep_last=2\)"):
        raycheck.accelerate.attach(limited, group=group)
    hooked = Accelerator(cpu=True)
    hooked.register_save_state_pre_hook(lambda models, weights, folder: None)
    with pytest.raises(ConfigError, match="register_save_state_pre_hook"):
        raycheck.accelerate.attach(hooked, group=group)


def test_loader_processes_are_left_to_fetch_ahead(tmp_path: Path) -> None:
    """With num_workers the sampler is far ahead; the position is still that of the step."""

    def numbers(stop: int) -> list[int]:
        with accelerator_of(0, 1, Job()) as accelerator:
            torch.manual_seed(3)
            model = nn.Linear(1, 1)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            data = TensorDataset(torch.arange(20.0).reshape(20, 1))
            loader = DataLoader(data, batch_size=2, shuffle=True, num_workers=1)
            model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
            (group,) = group_of(f"file://{tmp_path}/run")
            seen: list[int] = []
            ckpt = raycheck.accelerate.attach(accelerator, raycheck.SaveSettings(every_steps=3), group=group)
            for _ in ckpt.epochs(2):
                for (inputs,) in loader:
                    seen += inputs.flatten().int().tolist()
                    step(accelerator, model, optimizer, inputs)
                    if len(seen) == stop:
                        ckpt.checkpointer.wait()
                        ckpt.__exit__(KeyError, KeyError(), None)
                        return seen
        return seen

    first = numbers(stop=10)  # the step that sees the last of these has not ended
    second = numbers(stop=-1)

    assert len(first) == 10
    assert sorted([*first[:6], *second[:14]]) == list(range(20))
    assert sorted(second[14:]) == list(range(20))
    warnings.resetwarnings()


def test_positions_of_other_data_are_refused(tmp_path: Path) -> None:
    accelerator, _, model, optimizer, loader = prepared(tmp_path)
    accelerator.load_state()
    for (inputs,) in loader:
        step(accelerator, model, optimizer, inputs)
    accelerator.end_training()
    AcceleratorState._reset_state(reset_partial_state=True)
    other = Accelerator(cpu=True)
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    other.prepare(model, optimizer, DataLoader(TensorDataset(torch.ones(16, 2)), batch_size=2, shuffle=True))
    (group,) = group_of(f"file://{tmp_path}/run")
    raycheck.accelerate.attach(other, group=group)

    with pytest.raises(StateMismatchError, match="the loader's sampler was 'SequentialSampler' and is 'RandomSampler'"):
        other.load_state()
