"""Every committed checkpoint is in TensorBoard's log directory once, as TensorBoard's own reader finds it."""

from pathlib import Path
from uuid import uuid4

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import raycheck
from raycheck.errors import ConfigError
from raycheck.loggers import checkpoint_list
from tests.support.processes.coordinator_in_thread import group_of


def train(uri: str, task: raycheck.AfterCommit, *, until: int, **settings) -> raycheck.values.RestoreResult:
    """Train as a new driver up to this step, saving every second step. The loss tells steps and attempts apart."""
    (place,) = group_of(uri, owner=uuid4().hex)
    chosen = raycheck.SaveSettings(every_steps=2, after_commit=task, **settings)
    with raycheck.Checkpointer({"model": torch.nn.Linear(2, 2)}, chosen, group=place) as ckpt:
        at = ckpt.restore()
        for step in range(at.step + 1, until + 1):
            ckpt.end_step({"loss": 1.0 / step, "attempt": float(at.attempt)})
    return at


def read(folder: Path) -> EventAccumulator:
    found = EventAccumulator(str(folder))
    found.Reload()
    return found


def scalars(folder: Path, name: str) -> list[tuple[int, float]]:
    return [(item.step, round(item.value, 4)) for item in read(folder).Scalars(name)]


def texts(folder: Path) -> list[tuple[int, str]]:
    return [(item.step, item.tensor_proto.string_val[0].decode()) for item in read(folder).Tensors("checkpoint")]


def test_every_checkpoint_is_there_once_with_address_metrics_and_digest(tmp_path: Path) -> None:
    uri, logs = f"file://{tmp_path}/run", tmp_path / "logs"

    train(uri, raycheck.loggers.tensorboard(str(logs)), until=5)

    (folder,) = logs.iterdir()
    assert scalars(folder, "loss") == [(2, 0.5), (4, 0.25), (5, 0.2)]
    for (step, text), checkpoint in zip(texts(folder), raycheck.open_run(uri).checkpoints, strict=True):
        assert step == checkpoint.step
        assert f"`file://{tmp_path}/run/checkpoints/{checkpoint.key}`" in text
        assert Path(checkpoint.address.removeprefix("file://"), "manifest.json").is_file()
        assert f"`{checkpoint.digest}`" in text


def test_a_restart_continues_the_same_run_and_writes_no_step_twice(tmp_path: Path) -> None:
    uri, logs = f"file://{tmp_path}/run", tmp_path / "logs"
    task = raycheck.loggers.tensorboard(str(logs))

    train(uri, task, until=4)
    first = {path.name: path.read_bytes() for path in (logs / "run").iterdir()}
    at = train(uri, task, until=8)

    assert at.step == 4
    assert scalars(logs / "run", "attempt") == [(2, 1.0), (4, 1.0), (6, 2.0), (8, 2.0)]
    assert first.items() <= {path.name: path.read_bytes() for path in (logs / "run").iterdir()}.items()


def test_a_step_trained_again_after_a_rewind_keeps_its_first_value_and_is_another_checkpoint(tmp_path: Path) -> None:
    uri, logs = f"file://{tmp_path}/run", tmp_path / "logs"
    task = raycheck.loggers.tensorboard(str(logs))

    train(uri, task, until=4)
    raycheck.open_run(uri).rewind(2)
    train(uri, task, until=6)

    live = raycheck.open_run(uri).checkpoints
    assert [item.step for item in live] == [2, 4, 4, 6]
    assert scalars(logs / "run", "attempt") == [(2, 1.0), (4, 1.0), (6, 3.0)]
    assert [step for step, _ in texts(logs / "run")] == [2, 4, 4, 6]


def test_what_a_tracker_missed_while_it_was_out_of_reach_follows_in_order(tmp_path: Path, caplog, monkeypatch) -> None:
    uri, logs = f"file://{tmp_path}/run", tmp_path / "logs"
    task = raycheck.loggers.tensorboard(str(logs))
    monkeypatch.setattr(checkpoint_list, "AT_ONCE", 3)

    logs.write_text("a file is no folder")
    train(uri, task, until=8)
    logs.unlink()
    begins = [train(uri, task, until=until).step for until in (10, 12)]

    assert begins == [8, 10]
    assert "TensorBoard of step-000000002-a1-s1 failed" in caplog.text
    assert [step for step, _ in scalars(logs / "run", "loss")] == [2, 4, 6, 8, 10, 12]


def test_rolling_checkpoints_are_not_listed(tmp_path: Path) -> None:
    uri, logs = f"file://{tmp_path}/run", tmp_path / "logs"

    train(uri, raycheck.loggers.tensorboard(str(logs)), until=4, rolling_every_steps=1)

    assert [step for step, _ in scalars(logs / "run", "loss")] == [2, 4]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: raycheck.loggers.tensorboard("logs"), "absolute path"),
        (lambda: raycheck.loggers.mlflow("mlflow:5000"), "address of an MLflow server"),
        (lambda: raycheck.loggers.mlflow("http://me:secret@mlflow:5000"), "MLFLOW_TRACKING_PASSWORD"),
        (lambda: raycheck.loggers.mlflow("http://mlflow:5000", experiment=""), "name of an MLflow experiment"),
        (lambda: raycheck.loggers.wandb(""), "name of a project"),
        (lambda: raycheck.loggers.wandb("mine", folder="wandb"), "absolute path"),
    ],
)
def test_a_setting_that_cannot_work_is_refused_and_no_password_is_repeated(make, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        make()
    assert "secret" not in str(caught.value)


def test_a_missing_package_is_refused_before_the_first_step(tmp_path: Path) -> None:
    """MLflow is not among the packages of this environment."""
    with pytest.raises(ConfigError, match=r"raycheck\.loggers\.mlflow: .* pip install mlflow"):
        train(f"file://{tmp_path}/run", raycheck.loggers.mlflow("http://127.0.0.1:1"), until=1)

    assert not (tmp_path / "run/latest").exists()


def test_the_settings_that_a_checkpoint_shows_name_the_tracker_but_not_its_address(tmp_path: Path) -> None:
    uri = f"file://{tmp_path}/run"

    train(uri, raycheck.loggers.tensorboard(f"file://{tmp_path}/logs"), until=1)

    (shown,) = [text for text in raycheck.open_run(uri).at(1).details().settings if "after_commit" in text]
    assert shown == "after_commit=AfterCommit(TensorBoard, every_save=True, mode='async')"
