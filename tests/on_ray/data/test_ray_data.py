"""Ray Data's rows: each comes once per epoch, over kills and other world sizes, and what has no such position is refused."""

import json
import os
import signal
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import ray.data
import ray.train
import ray.train.torch
import torch

import raycheck

ROWS, EPOCHS = 96, 2


def train(config: dict[str, Any]) -> None:
    """Writes down the ids of each step. kill: the step in which rank 1 dies in the first attempt of this life."""
    rank = ray.train.get_context().get_world_rank()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = torch.nn.Linear(1, 1)
    data = raycheck.RayData("train", id="id")
    ckpt = raycheck.Checkpointer({"model": model, "data": data}, raycheck.SaveSettings(every_steps=2))
    at = ckpt.restore()
    told = Path(config["folder"]) / f"told-{at.attempt:03d}-{rank}"
    told.write_text(json.dumps([at.step, at.epoch, at.samples]) + "\n")
    step = at.step
    for epoch in range(at.epoch, EPOCHS):
        for batch in data.iter_torch_batches(batch_size=2, local_shuffle_buffer_size=4):
            with told.open("a") as file:
                file.write(json.dumps([step, epoch, batch["id"].tolist()]) + "\n")
            if config["kill"] == step and rank == 1 and not Path(config["folder"], "killed").exists():
                Path(config["folder"], "killed").touch()
                os.kill(os.getpid(), signal.SIGKILL)
            step += 1
            ckpt.end_step()
            if step == 2:
                ckpt.wait()
            if step == config["stop"]:
                ckpt.close()
                return
        ckpt.end_epoch()
    ckpt.close()


def dataset(rows: int = ROWS) -> ray.data.Dataset:
    return ray.data.range(rows, override_num_blocks=6).randomize_block_order()


def fit(folder: Path, workers: int, *, splitting: Any = None, **config: Any) -> None:
    train_fn, more = config.pop("train", train), config.pop("more", {})
    trainer = ray.train.torch.TorchTrainer(
        train_fn,
        train_loop_config={"folder": str(folder), "kill": -1, "stop": -1, **config},
        datasets={"train": dataset(), **more},
        scaling_config=ray.train.ScalingConfig(num_workers=workers),
        run_config=ray.train.RunConfig(name="run", storage_path=str(folder / "runs")),
        dataset_config=splitting,
    )
    raycheck.fit(trainer)


def trained(folder: Path) -> list[Counter[int]]:
    """How often each row was trained on, by epoch, of what the final weights have seen."""
    attempts: dict[int, list[list[Any]]] = {}
    for path in sorted(folder.glob("told-*")):
        attempts.setdefault(int(path.name.split("-")[1]), []).append(
            [json.loads(x) for x in path.read_text().splitlines()]
        )
    ends = [*[ranks[0][0][0] for ranks in attempts.values()][1:], 1 << 30]
    counts = [Counter[int]() for _ in range(EPOCHS)]
    for end, ranks in zip(ends, attempts.values(), strict=True):
        for step, epoch, ids in (line for lines in ranks for line in lines[1:]):
            if step < end:
                counts[epoch].update(ids)
    return counts


LIVES = [
    ([(2, 5), (1, -1)], [[0, 0, 0], [2, 0, 8], [5, 0, 20]]),
    pytest.param(
        [(4, 5), (3, 7), (2, 10), (4, -1)],
        [[0, 0, 0], [2, 0, 16], [5, 0, 40], [7, 0, 52], [10, 0, 64]],
        marks=pytest.mark.slow,
    ),
]


@pytest.mark.ray
@pytest.mark.filterwarnings("ignore")  # Ray itself warns
@pytest.mark.parametrize(("lives", "expected"), LIVES, ids=["2 to 1 ranks", "4 to 3 to 2 to 4 ranks"])
def test_each_row_is_trained_on_once_per_epoch_over_a_kill_and_other_world_sizes(
    cluster: None, tmp_path: Path, lives: list[tuple[int, int]], expected: list[list[int]]
):
    """lives: (world size, the step at which it stops). expected: the step, epoch and rows of each restore."""
    for number, (workers, stop) in enumerate(lives):
        fit(tmp_path, workers, kill=-1 if number else 3, stop=stop)

    once = Counter(dict.fromkeys(range(ROWS), 1))
    assert trained(tmp_path) == [once, once]
    assert (tmp_path / "killed").exists()
    starts = [json.loads(path.read_text().splitlines()[0]) for path in sorted(tmp_path.glob("told-*-0"))]
    assert starts == expected


def test_outside_of_ray_train_there_is_no_dataset_to_share():
    with pytest.raises(raycheck.errors.ConfigError, match="only Ray Train's workers"):
        raycheck.RayData("train", id="id")


def try_what_is_refused(config: dict[str, Any]) -> None:
    """Writes down the error of each attempt to use RayData in a wrong way."""
    said = {}

    def steps(data: raycheck.RayData, count: int) -> None:
        for _, _ in zip(range(count), data.iter_batches(batch_size=2), strict=False):
            data.end_step()

    def begin_twice() -> None:
        data = raycheck.RayData("train", id="id")
        steps(data, 1)
        steps(data, 1)

    calls = {
        "no such dataset": lambda: raycheck.RayData("nothing", id="id"),
        "not split": lambda: raycheck.RayData("whole", id="id"),
        "no such column": lambda: steps(raycheck.RayData("train", id="key"), 1),
        "no numbers": lambda: steps(raycheck.RayData("odd", id="text"), 1),
        "twice": lambda: steps(raycheck.RayData("odd", id="same"), 2),
        "begun": begin_twice,
    }
    for name, call in calls.items():
        try:
            call()
        except raycheck.errors.ConfigError as error:
            said[name] = str(error)
    Path(config["folder"], "said").write_text(json.dumps(said))


@pytest.mark.ray
@pytest.mark.filterwarnings("ignore")  # Ray itself warns
@pytest.mark.slow
def test_what_would_lose_rows_is_refused_before_the_first_step(cluster: None, tmp_path: Path):
    odd = ray.data.from_items([{"text": str(number), "same": number // 3} for number in range(12)])
    splitting = ray.train.DataConfig(datasets_to_split=["train", "odd"])

    fit(tmp_path, 1, train=try_what_is_refused, more={"whole": dataset(), "odd": odd}, splitting=splitting)

    said = json.loads((tmp_path / "said").read_text())
    assert "was given no such dataset" in said["no such dataset"]
    assert "every rank reads all of this dataset" in said["not split"]
    assert "has no such column" in said["no such column"]
    assert "whole numbers" in said["no numbers"]
    assert "came twice in epoch 0" in said["twice"]
    assert "call end_epoch()" in said["begun"]
