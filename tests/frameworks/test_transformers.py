"""A Trainer that is cut off and started again trains as one that never was: same losses, same weights, nothing read twice."""

import logging
from collections import Counter
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import EarlyStoppingCallback, Trainer, TrainerCallback

import raycheck
from raycheck.bucket.store import open_store
from raycheck.errors import ConfigError, NotFoundError, StateMismatchError
from raycheck.frameworks.transformers.training_data import held_accumulation
from raycheck.frameworks.transformers.unsaved_counts import UnsavedCounts
from tests.support.frameworks.tiny_trainers import (
    CrashAfter,
    CrashError,
    Texts,
    arguments,
    fresh_accelerate,
    losses,
    tiny_llama,
    weights,
)
from tests.support.histories.invariants import assert_invariants
from tests.support.processes.coordinator_in_thread import group_of

pytestmark = pytest.mark.filterwarnings("ignore")  # transformers and torch warn of each other


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    with fresh_accelerate():
        yield


@pytest.fixture
def run(tmp_path: Path) -> str:
    return f"memory://{uuid4().hex}"


def trainer_of(
    run: str | None,
    folder: Path,
    settings: raycheck.SaveSettings | None = None,
    *,
    callbacks: tuple[TrainerCallback, ...] = (),
    model: torch.nn.Module | None = None,
    data: Texts | None = None,
    extra: dict[str, object] | None = None,
    **options: Any,
) -> Trainer:
    """A trainer as a script makes it, anew for each start; prepared if there is a run."""
    trainer = Trainer(
        model=model or tiny_llama(),
        args=arguments(folder, **options),
        train_dataset=data or Texts(),
        eval_dataset=Texts(6),
        callbacks=[*callbacks],
    )
    if run is not None:
        raycheck.transformers.prepare(trainer, settings, extra=extra, group=group_of(run)[0])
    return trainer


def cut_off(run: str, folder: Path, step: int, *more: Any, callbacks: tuple[TrainerCallback, ...] = (), **options: Any):
    trainer = trainer_of(run, folder, *more, callbacks=(*callbacks, CrashAfter(step)), **options)
    with pytest.raises(CrashError):
        trainer.train()


def steps_of(run: str) -> list[int]:
    return [checkpoint.step for checkpoint in raycheck.open_run(run).checkpoints]


EVERY_3 = raycheck.SaveSettings(every_steps=3)


@pytest.mark.parametrize(
    "crash",
    [
        pytest.param(5, id="inside"),
        pytest.param(6, id="at its end"),
        pytest.param(7, id="in the next", marks=pytest.mark.slow),
    ],
)
def test_a_restart_goes_on_as_if_the_epoch_had_never_been_cut_off(crash: int, tmp_path: Path) -> None:
    options = {"eval_strategy": "steps", "eval_steps": 2}
    straight, again = f"memory://{uuid4().hex}", f"memory://{uuid4().hex}"
    whole = trainer_of(straight, tmp_path, EVERY_3, **options)
    expected = whole.train()

    cut_off(again, tmp_path, crash, EVERY_3, **options)
    data = Texts()
    trainer = trainer_of(again, tmp_path, EVERY_3, data=data, **options)
    output = trainer.train()

    assert losses(trainer) == losses(whole)
    assert output.training_loss == expected.training_loss
    assert output.metrics["train_runtime"] > 0
    for name, tensor in weights(whole.model).items():
        assert torch.equal(weights(trainer.model)[name], tensor), name
    assert len(data.read) == (12 - crash // 3 * 3) * 4  # samples that were trained before are not read again
    assert trainer.state.global_step == 12
    assert_invariants(open_store(again))


def test_nothing_is_written_into_the_trainers_own_folder(run: str, tmp_path: Path) -> None:
    trainer_of(run, tmp_path, save_steps=4).train()

    assert not list(tmp_path.iterdir())
    assert steps_of(run) == [4, 8, 12]  # the last one after the end of the epoch, in the place of the one before it


@pytest.mark.parametrize(
    ("options", "settings", "expected"),
    [
        ({"save_strategy": "epoch"}, None, [6, 12]),
        ({"save_steps": 4}, raycheck.SaveSettings(every_steps=5), [5, 10, 12]),
        ({"save_strategy": "no"}, None, [12]),
        ({"save_strategy": "no"}, raycheck.SaveSettings(at_steps=[7]), [7, 12]),
        ({"save_steps": 0.25, "save_total_limit": 2}, None, [9, 12]),
    ],
)
def test_the_trainers_arguments_say_when_to_save_unless_save_settings_do(
    options: dict[str, Any], settings: raycheck.SaveSettings | None, expected: list[int], run: str, tmp_path: Path
) -> None:
    trainer_of(run, tmp_path, settings, **options).train()

    assert steps_of(run) == expected


def test_a_contradiction_is_said(run: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    settings = raycheck.SaveSettings(every_steps=5, keep_last=3)

    with caplog.at_level(logging.WARNING, "raycheck"):
        trainer_of(run, tmp_path, settings, save_steps=4, save_total_limit=7, max_steps=1).train()

    assert "save_steps=4: SaveSettings(every_steps) says when to save" in caplog.text
    assert "save_total_limit=7: SaveSettings(keep_last=3)" in caplog.text


class Evaluated(Trainer):
    def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        metrics = {"eval_score": -abs(self.state.global_step - 4.0)}
        self.log(metrics)
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        return metrics


BEST = {
    "eval_strategy": "steps",
    "eval_steps": 2,
    "save_steps": 2,
    "load_best_model_at_end": True,
    "metric_for_best_model": "score",
    "greater_is_better": True,
}


def evaluated(run: str, folder: Path, *callbacks: TrainerCallback, **options: Any) -> Trainer:
    trainer = Evaluated(
        model=tiny_llama(),
        args=arguments(folder, **{**BEST, **options}),
        train_dataset=Texts(),
        eval_dataset=Texts(6),
        callbacks=[*callbacks],
    )
    return raycheck.transformers.prepare(trainer, group=group_of(run)[0])


def test_the_best_model_of_before_a_restart_is_loaded_at_the_end(run: str, tmp_path: Path) -> None:
    with pytest.raises(CrashError):
        evaluated(run, tmp_path, CrashAfter(9), save_total_limit=1).train()
    trainer = evaluated(run, tmp_path, save_total_limit=1)
    trainer.train()

    opened = raycheck.open_run(run)
    best = tiny_llama(seed=9)
    opened.at(4).restore(into={"model": best})
    assert steps_of(run) == [4, 12]
    assert trainer.state.best_global_step == 4
    assert trainer.state.best_metric == 0
    assert trainer.state.best_model_checkpoint == f"{run}/checkpoints/{opened.at(4).key}"
    for name, tensor in weights(best).items():
        assert torch.equal(weights(trainer.model)[name], tensor), name
    last = tiny_llama(seed=9)
    opened.restore(into={"model": last})
    assert not torch.equal(last.lm_head.weight, best.lm_head.weight)  # the head is the last step, not the best one


def test_early_stopping_counts_on_and_stays_stopped(run: str, tmp_path: Path) -> None:
    """Step 4 is the best; with patience 3 the end is at step 10, also when the run was cut off at step 7."""
    with pytest.raises(CrashError):
        evaluated(run, tmp_path, EarlyStoppingCallback(3), CrashAfter(7)).train()
    trainer = evaluated(run, tmp_path, EarlyStoppingCallback(3))
    trainer.train()
    assert trainer.state.global_step == 10

    finished = evaluated(run, tmp_path, EarlyStoppingCallback(3))
    finished.train()

    assert finished.state.global_step == 10
    assert raycheck.open_run(run).head.step == 10


def test_an_argument_of_a_callback_that_the_script_has_changed_stays_changed(run: str, tmp_path: Path) -> None:
    with pytest.raises(CrashError):
        evaluated(run, tmp_path, EarlyStoppingCallback(3), CrashAfter(7)).train()
    early = EarlyStoppingCallback(4)
    trainer = evaluated(run, tmp_path, early)

    trainer.train()

    assert early.early_stopping_patience == 4
    assert trainer.state.global_step == 12


def test_a_run_that_has_finished_trains_nothing_and_one_with_more_epochs_goes_on(run: str, tmp_path: Path) -> None:
    trainer_of(run, tmp_path, EVERY_3).train()
    data = Texts()
    trainer_of(run, tmp_path, EVERY_3, data=data).train()
    assert data.read == []

    longer = trainer_of(run, tmp_path, EVERY_3, num_train_epochs=3)
    longer.train()

    assert longer.state.global_step == 18


class Average:
    """A moving average of weights, as people keep it beside the Trainer."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.model = tiny_llama()
        self.source = model

    def update(self) -> None:
        with torch.no_grad():
            for mine, theirs in zip(self.model.parameters(), self.source.parameters(), strict=True):
                mine.lerp_(theirs, 0.3)


class Averaging(TrainerCallback):
    def __init__(self, average: Average) -> None:
        self.weights = average.model
        self.update = average.update

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.update()


def test_an_average_of_the_weights_is_saved_as_an_extra(tmp_path: Path) -> None:
    def start(run: str, *callbacks: TrainerCallback) -> dict[str, torch.Tensor]:
        model = tiny_llama()
        average = Average(model)
        trainer = trainer_of(
            run,
            tmp_path,
            EVERY_3,
            model=model,
            callbacks=(Averaging(average), *callbacks),
            extra={"average": average.model},
        )
        trainer.train()
        return weights(average.model)

    straight, again = f"memory://{uuid4().hex}", f"memory://{uuid4().hex}"
    expected = start(straight)
    with pytest.raises(CrashError):
        start(again, CrashAfter(8))

    found = start(again)

    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_a_callback_with_weights_of_its_own_is_refused_by_name(run: str, tmp_path: Path) -> None:
    model = tiny_llama()
    trainer = trainer_of(run, tmp_path, model=model, callbacks=(Averaging(Average(model)),))

    with pytest.raises(ConfigError, match=r"callback Averaging holds weights.*'weights'.*extra"):
        trainer.train()

    assert raycheck.open_run(run).head is None


class Counts(TrainerCallback):
    """Counts steps, and has a setting that looks alike."""

    def __init__(self) -> None:
        self.patience = 3
        self.steps = 0
        self.seen: list[int] = []

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.steps += 1
        self.seen.append(state.global_step)


class SavedCounts(Counts):
    """Counts the same, and is saved."""

    def state_dict(self) -> dict[str, Any]:
        return {"steps": self.steps, "seen": list(self.seen)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.steps, self.seen = state["steps"], list(state["seen"])


def test_what_a_callback_counts_and_no_save_has_is_named_once(
    run: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    saved = SavedCounts()
    cut_off(run, tmp_path, 5, callbacks=(Counts(), saved))
    said = [record.message for record in caplog.records if "starts again" in record.message]

    assert len(said) == 1
    assert "the callback Counts counts in seen, steps, which is not saved" in said[0]
    assert "patience" not in said[0]


class Sulky:
    """Cannot be written as text, as an object whose parts are gone."""

    def __repr__(self) -> str:
        raise RuntimeError("it has no text")


class Holds(TrainerCallback):
    """Holds what is no count, beside some that are."""

    def __init__(self) -> None:
        self.outputs: list[object] = [Sulky()]
        self.huge = 10**5000
        self.rows: list[object] = [{"text": Sulky()}] * 1_000
        self.words: Counter[str] = Counter()
        self.losses: dict[str, list[float]] = {"eval": []}


def test_a_look_at_callbacks_asks_nothing_of_what_they_hold_and_is_short(caplog: pytest.LogCaptureFixture) -> None:
    callback = Holds()

    counts = UnsavedCounts([callback])
    callback.words["step"] += 1
    callback.losses["eval"].append(0.5)
    callback.rows.append({})
    counts.warn()

    (said,) = [record.message for record in caplog.records]
    assert "counts in losses, rows, words, which" in said


def test_the_base_of_a_peft_model_is_uploaded_once(tmp_path: Path) -> None:
    def model() -> torch.nn.Module:
        torch.manual_seed(0)
        return get_peft_model(tiny_llama(), LoraConfig(task_type="CAUSAL_LM", r=2))

    straight, again = f"memory://{uuid4().hex}", f"memory://{uuid4().hex}"
    whole = trainer_of(straight, tmp_path, EVERY_3, model=model())
    whole.train()
    cut_off(again, tmp_path, 5, EVERY_3, model=model())
    trainer = trainer_of(again, tmp_path, EVERY_3, model=model())
    trainer.train()

    for name, tensor in weights(whole.model).items():
        assert torch.equal(weights(trainer.model)[name], tensor), name
    keys = [item.key for item in open_store(again).list_objects("checkpoints/")]
    bases = [key for key in keys if "/model.frozen/" in key and key.endswith(".distcp")]
    assert len(bases) == 1, bases


def test_group_by_length_keeps_its_order_over_a_restart(tmp_path: Path) -> None:
    class Ragged(Texts):
        def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
            return {name: ids[: 2 + index % 4] for name, ids in super().__getitem__(index).items()}

    def pad(samples: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
        return {
            name: torch.nn.utils.rnn.pad_sequence([sample[name] for sample in samples], batch_first=True)
            for name in ("input_ids", "labels")
        }

    def start(run: str, *callbacks: TrainerCallback) -> dict[int, Any]:
        trainer = trainer_of(
            run, tmp_path, EVERY_3, data=Ragged(), callbacks=callbacks, train_sampling_strategy="group_by_length"
        )
        trainer.data_collator = pad
        trainer.train()
        return losses(trainer)

    straight, again = f"memory://{uuid4().hex}", f"memory://{uuid4().hex}"
    expected = start(straight)
    with pytest.raises(CrashError):
        start(again, CrashAfter(8))

    assert start(again) == expected


def test_loader_workers_read_the_next_samples_too(tmp_path: Path) -> None:
    straight, again = f"memory://{uuid4().hex}", f"memory://{uuid4().hex}"
    whole = trainer_of(straight, tmp_path, EVERY_3, dataloader_num_workers=1)
    whole.train()
    cut_off(again, tmp_path, 5, EVERY_3, dataloader_num_workers=1)
    trainer = trainer_of(again, tmp_path, EVERY_3, dataloader_num_workers=1)
    trainer.train()

    assert losses(trainer) == losses(whole)


def test_turned_off_it_is_the_trainer_itself(tmp_path: Path) -> None:
    trainer = trainer_of("memory://none", tmp_path, raycheck.SaveSettings(enabled=False), save_steps=6)

    trainer.train()

    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "checkpoint-12",
        "checkpoint-14",
        "checkpoint-6",
    ]  # its last batch of an epoch is smaller


def test_resume_from_checkpoint_true_needs_one_and_a_folder_is_refused(run: str, tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match=r"resume_from_checkpoint=True: .* has no checkpoint"):
        trainer_of(run, tmp_path).train(resume_from_checkpoint=True)
    with pytest.raises(ConfigError, match=r"resume_from_checkpoint='old/checkpoint-5'.*from_pretrained"):
        trainer_of(run, tmp_path).train(resume_from_checkpoint="old/checkpoint-5")
    trainer = trainer_of(run, tmp_path, max_steps=1)
    trainer.train()
    with pytest.raises(ConfigError, match=r"train\(\) was called before"):
        trainer.train()


class OwnLoader(Trainer):
    def get_train_dataloader(self) -> Any:
        raise AssertionError


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"auto_find_batch_size": True}, "auto_find_batch_size=True"),
        ({"save_only_model": True}, r"save_only_model=True.*AfterCommit"),
        ({"train_sampling_strategy": "batch_rebalance"}, "train_sampling_strategy='batch_rebalance'"),
        ({"accelerator_config": {"split_batches": True}}, "split_batches=True"),
        ({"accelerator_config": {"dispatch_batches": True}}, "dispatch_batches=True"),
    ],
)
def test_what_cannot_be_supported_is_refused_by_name(options: dict[str, Any], match: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=match):
        trainer_of("memory://none", tmp_path, **options)


def test_classes_and_datasets_that_cannot_be_supported_are_refused_by_name(run: str, tmp_path: Path) -> None:
    class Stream(torch.utils.data.IterableDataset):
        def __iter__(self) -> Any:
            return iter(Texts())

    own = OwnLoader(model=tiny_llama(), args=arguments(tmp_path), train_dataset=Texts())
    with pytest.raises(ConfigError, match=r"OwnLoader\.get_train_dataloader would not be called"):
        raycheck.transformers.prepare(own)
    trainer = trainer_of(run, tmp_path, max_steps=3)
    trainer.train_dataset = Stream()
    with pytest.raises(ConfigError, match=r"train_dataset is a .*Stream: it cannot resume at a given sample"):
        trainer.train()
    with pytest.raises(ConfigError, match=r"prepare\(\) was called with this trainer before"):
        raycheck.transformers.prepare(trainer)


def test_the_number_of_samples_in_a_step_is_held_or_refused(tmp_path: Path) -> None:
    trainer = trainer_of(None, tmp_path)  # 2 samples x 2 micro-batches on one rank

    assert held_accumulation(trainer, {"step_samples": 8, "world_size": 2}) == 4
    assert held_accumulation(trainer, {"step_samples": 4, "world_size": 2}) == 2
    with pytest.raises(ConfigError, match="steps have 9 samples, which 1 ranks"):
        held_accumulation(trainer, {"step_samples": 9, "world_size": 3})
    with pytest.raises(StateMismatchError, match=r"a step has 4 samples here .* and 8 in the checkpoint"):
        held_accumulation(trainer, {"step_samples": 8, "world_size": 1})


def test_a_run_of_another_kind_of_script_is_refused(run: str, tmp_path: Path) -> None:
    state = {"model": tiny_llama(), "numbers": {"a": 1}}
    with raycheck.Checkpointer(state, group=group_of(run)[0]) as ckpt:
        ckpt.restore()
        ckpt.end_step()

    with pytest.raises(ConfigError, match=r"was not saved by raycheck\.transformers: it has model, numbers"):
        trainer_of(run, tmp_path).train()
