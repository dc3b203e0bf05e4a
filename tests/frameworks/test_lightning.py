"""raycheck.lightning in one process: a run that was killed and restarted is the run that was never hurt."""

import copy
import functools
import logging
from dataclasses import replace
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torchmetrics
from lightning.pytorch import callbacks as of_lightning
from lightning.pytorch.utilities import CombinedLoader
from torch.utils.data import DataLoader, IterableDataset, StackDataset

import raycheck
from raycheck.bucket.format.progress import Progress
from raycheck.bucket.store import open_store
from tests.group.worker.test_damaged_restore import damage
from tests.support.frameworks.lightning_training import QUIET, Killed, Regression, Training, samples
from tests.support.histories.invariants import assert_invariants
from tests.support.processes.coordinator_in_thread import group_of

pytestmark = [pytest.mark.filterwarnings("ignore")]  # Lightning itself warns


def memory(tmp_path: Any) -> str:
    return f"memory://{abs(hash(str(tmp_path)))}"


@pytest.fixture(autouse=True)
def quiet(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    monkeypatch.chdir(tmp_path)  # Lightning's own callbacks write there
    monkeypatch.setattr(logging.getLogger("lightning.pytorch"), "level", logging.ERROR)


def same_state(one: Any, other: Any) -> bool:
    """Returns whether two trees of values are equal to the last bit."""
    if isinstance(one, torch.Tensor):
        return isinstance(other, torch.Tensor) and one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, dict):
        return isinstance(other, dict) and one.keys() == other.keys() and all(same_state(one[k], other[k]) for k in one)
    if isinstance(one, list | tuple):
        return type(one) is type(other) and len(one) == len(other) and all(map(same_state, one, other))
    return type(one) is type(other) and one == other


def check_restarts(training: Training, uri: str, killed_at: list[int], *, saves_always: bool = False) -> None:
    """Kill the training at each of these steps, restart it, and compare all it saw and became with a whole run.

    saves_always: save after every step. Otherwise the whole run saves at its end only, and the others also at the step
    where they are killed.
    """

    def saving(step: int) -> Training:
        return training if saves_always else replace(training, settings={"at_steps": [step]})

    (group,) = group_of(f"{uri}-whole")
    whole, trainer = saving(1000).run(group)
    for step in killed_at:
        module, restarted, seen = saving(step).killed_and_restarted(f"{uri}-{step}", step)

        assert seen == whole.seen, f"killed at {step}"
        assert same_state(dict(module.state_dict()), dict(whole.state_dict())), f"killed at {step}"
        assert (restarted.global_step, restarted.current_epoch) == (trainer.global_step, trainer.current_epoch)
        assert_invariants(open_store(f"{uri}-{step}"))


def killed_at(step: int, *, slow: list[int]) -> pytest.MarkDecorator:
    """Run the test with `killed_at` at this step, and with --all at the others, too."""
    return pytest.mark.parametrize("killed_at", [step, *(pytest.param(at, marks=pytest.mark.slow) for at in slow)])


# --- restarts: 10 batches per epoch, 3 epochs ---


@pytest.mark.parametrize(
    ("options", "killed_at"),
    [
        pytest.param({}, [13], id="plain"),
        pytest.param({}, [1, 20], id="plain-elsewhere", marks=pytest.mark.slow),
        pytest.param({"max_steps": 25}, [10], id="max_steps"),
        pytest.param({"max_steps": 25}, [24], id="max_steps-last", marks=pytest.mark.slow),
        pytest.param({"accumulate_grad_batches": 3}, [4], id="accumulated"),
        pytest.param({"accumulate_grad_batches": 3}, [2, 7], id="accumulated-elsewhere", marks=pytest.mark.slow),
        pytest.param({"val_check_interval": 4}, [14], id="validated-within"),
        pytest.param({"val_check_interval": 4}, [4], id="validated-within-first", marks=pytest.mark.slow),
        pytest.param({"limit_train_batches": 7}, [6, 7, 9], id="limited", marks=pytest.mark.slow),
        pytest.param(
            {"check_val_every_n_epoch": None, "val_check_interval": 7},
            [7, 15],
            id="validated-across",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_restarted_run_is_the_run_that_was_never_hurt(
    tmp_path: Any, options: dict[str, Any], killed_at: list[int]
) -> None:
    check_restarts(Training(options=options), memory(tmp_path), killed_at, saves_always=not options)


class Adversaries(Regression):
    """Optimizes by hand, with two optimizers that step in turn, and a scheduler."""

    def __init__(self, *, killed_at: int | None = None) -> None:
        super().__init__(killed_at=killed_at)
        self.automatic_optimization = False
        self.other = torch.nn.Linear(1, 1)

    def training_step(self, batch: Any, batch_idx: int) -> None:
        if self.killed_at is not None and self.global_step >= self.killed_at:
            raise Killed
        first, second = self.optimizers()
        loss = self.loss(batch)
        first.zero_grad()
        self.manual_backward(loss)
        first.step()
        if batch_idx % 2:
            second.zero_grad()
            self.manual_backward(self.other(self.net(batch[0]).detach()).square().mean())
            second.step()
            self.lr_schedulers().step()
        self.seen.append((self.global_step, batch_idx, loss.item()))

    def configure_optimizers(self) -> Any:
        first = torch.optim.SGD(self.net.parameters(), lr=0.01, momentum=0.9)
        second = torch.optim.Adam(self.other.parameters(), lr=0.01)
        return [first, second], [torch.optim.lr_scheduler.StepLR(second, 2)]


@killed_at(15, slow=[4])
def test_several_optimizers_stepped_by_hand_go_on_where_they_were(tmp_path: Any, killed_at: int) -> None:
    check_restarts(Training(module=Adversaries), memory(tmp_path), [killed_at], saves_always=True)


class Monitored(Regression):
    """Lowers its rate by the epoch's mean loss, which Lightning's own checkpoint has no part of."""

    def __init__(self, *, killed_at: int | None = None) -> None:
        super().__init__(killed_at=killed_at)
        self.seen_losses = torchmetrics.MeanMetric()

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = super().training_step(batch, batch_idx)
        self.seen_losses(loss)
        self.log("mean_of_metric", self.seen_losses, on_step=False, on_epoch=True)
        return loss

    def on_train_epoch_end(self) -> None:
        found = self.trainer.callback_metrics
        self.seen.append((self.current_epoch, float(found["train_loss_epoch"]), float(found["mean_of_metric"])))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=0.5)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": scheduler, "monitor": "train_loss_epoch", "interval": "epoch"},
        }


@killed_at(19, slow=[5, 10])
def test_the_means_of_an_epoch_are_those_of_a_whole_epoch(tmp_path: Any, killed_at: int) -> None:
    check_restarts(Training(module=Monitored), memory(tmp_path), [killed_at])


@killed_at(6, slow=[3, 9])
def test_early_stopping_stops_where_it_would_have(tmp_path: Any, killed_at: int) -> None:
    def stopping() -> list[Any]:
        return [of_lightning.EarlyStopping("val_loss", patience=1, min_delta=100.0)]

    training = Training(callbacks=stopping, options={"max_epochs": 9, "val_check_interval": 5})

    check_restarts(training, memory(tmp_path), [killed_at])


def test_a_run_that_was_stopped_early_stays_stopped(tmp_path: Any) -> None:
    training = Training(callbacks=lambda: [of_lightning.EarlyStopping("val_loss", patience=1, min_delta=100.0)])
    _, first = training.run(*group_of(memory(tmp_path)))

    module, again = training.run(*group_of(memory(tmp_path)))

    assert first.global_step == again.global_step == 20
    assert not module.seen


@pytest.mark.parametrize("kind", ["EMAWeightAveraging", "StochasticWeightAveraging"])
@killed_at(26, slow=[7, 20])
def test_averaged_weights_go_on_where_they_were(tmp_path: Any, kind: str, killed_at: int) -> None:
    options = {"decay": 0.9} if kind == "EMAWeightAveraging" else {"swa_lrs": 0.01, "swa_epoch_start": 1}

    training = Training(callbacks=lambda: [getattr(of_lightning, kind)(**options)], module=PlainRate)

    check_restarts(training, memory(tmp_path), [killed_at])


class PlainRate(Regression):
    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


def test_a_finished_run_has_the_averaged_weights_again(tmp_path: Any) -> None:
    training = Training(callbacks=lambda: [of_lightning.EMAWeightAveraging(decay=0.9)], module=PlainRate)
    first, _ = training.run(*group_of(memory(tmp_path)))

    again, trainer = training.run(*group_of(memory(tmp_path)))

    assert same_state(dict(again.state_dict()), dict(first.state_dict()))
    assert trainer.global_step == 30


class Unfreezing(of_lightning.BaseFinetuning):
    def freeze_before_training(self, pl_module: Any) -> None:
        self.freeze(pl_module.net[0])

    def finetune_function(self, pl_module: Any, epoch: int, optimizer: Any) -> None:
        if epoch == 1:
            self.unfreeze_and_add_param_group(pl_module.net[0], optimizer, lr=0.001)


class OnlyTrained(PlainRate):
    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW([one for one in self.parameters() if one.requires_grad], lr=0.01)


@killed_at(14, slow=[5])
def test_what_was_unfrozen_stays_unfrozen(tmp_path: Any, killed_at: int) -> None:
    training = Training(callbacks=lambda: [Unfreezing()], module=OnlyTrained)

    check_restarts(training, memory(tmp_path), [killed_at])


# --- what users' own hooks keep ---


class Hooked(PlainRate):
    """Keeps things of its own in Lightning's checkpoint, and changes weights when they are loaded."""

    def __init__(self, *, killed_at: int | None = None) -> None:
        super().__init__(killed_at=killed_at)
        self.save_hyperparameters({"width": 8, "function": torch.nn.functional.mse_loss})
        self.counted: Any = {"batches": 0, "sums": torch.zeros(2)}
        self.loaded: Any = None

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.counted["batches"] += 1
        self.counted["sums"] = self.counted["sums"] + batch[1].sum()

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["counted"] = self.counted
        checkpoint["state_dict"] = {k: v for k, v in checkpoint["state_dict"].items() if k != "net.0.bias"}

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.loaded = copy.deepcopy(checkpoint)
        self.counted = checkpoint["counted"]


class Stateful(pl.LightningDataModule):
    def __init__(self) -> None:
        super().__init__()
        self.served = 0

    def train_dataloader(self) -> Any:
        return DataLoader(samples(), batch_size=4, shuffle=True)

    def state_dict(self) -> dict[str, Any]:
        return {"served": self.trainer.global_step}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.served = state["served"]


def test_users_hooks_and_the_datamodule_get_back_what_they_kept(tmp_path: Any) -> None:
    training = Training(module=Hooked, data=lambda: {"datamodule": Stateful()})

    module, trainer, _ = training.killed_and_restarted(memory(tmp_path), 13)

    whole, _ = training.run(*group_of(memory(tmp_path) + "-whole"))
    assert same_state(module.counted, whole.counted)
    assert same_state(dict(module.state_dict()), dict(whole.state_dict()))
    assert trainer.datamodule.served == 13
    assert module.loaded["global_step"] == 13
    assert module.loaded["hyper_parameters"] == {"width": 8}
    assert module.loaded["state_dict"].keys() == module.state_dict().keys()  # all weights, which are saved anyway


class Doubling(PlainRate):
    """Doubles a weight whenever it is loaded, which Lightning's own restore would do too."""

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.expected = checkpoint["state_dict"]["net.0.weight"] * 2
        checkpoint["state_dict"]["net.0.weight"] = self.expected

    def on_train_start(self) -> None:
        self.began_with = self.net[0].weight.detach().clone()


def test_weights_that_a_hook_changes_while_loading_are_the_changed_ones(tmp_path: Any) -> None:
    module, *_ = Training(module=Doubling).killed_and_restarted(memory(tmp_path), 13)

    assert torch.equal(module.began_with, module.expected)


class Replacing(PlainRate):
    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["state_dict"] = {k: v.half() for k, v in checkpoint["state_dict"].items()}


def test_everything_in_lightnings_own_checkpoint_comes_back(tmp_path: Any) -> None:
    """Key by key, at the beginning of the batch after the restore."""
    found: dict[str, Any] = {}

    class Looking(of_lightning.Callback):
        def __init__(self, name: str) -> None:
            self.name = name

        def on_train_batch_start(self, trainer: Any, *args: Any) -> None:
            if trainer.global_step == 13 and self.name not in found:
                found[self.name] = copy.deepcopy(trainer._checkpoint_connector.dump_checkpoint(weights_only=False))

    def callbacks(name: str) -> list[Any]:
        return [Looking(name), of_lightning.EarlyStopping("val_loss", patience=9), of_lightning.Timer("01:00:00:00")]

    uri, options = memory(tmp_path), {"val_check_interval": 3, "precision": "bf16-mixed"}
    Training(callbacks=functools.partial(callbacks, "whole"), options=options).run(*group_of(f"{uri}-whole"))
    with pytest.raises(Killed):
        Training(callbacks=functools.partial(callbacks, "killed"), options=options).run(*group_of(uri), killed_at=13)
    found.pop("killed")
    Training(callbacks=functools.partial(callbacks, "restored"), options=options).run(*group_of(uri))

    whole, restored = found["whole"], found["restored"]
    assert whole.keys() == restored.keys()
    for checkpoint in (whole, restored):  # seconds differ
        (timer,) = [key for key in checkpoint["callbacks"] if key == "Timer"]
        assert checkpoint["callbacks"].pop(timer)["time_elapsed"]["train"] > 0
    for key in whole:
        assert same_state(whole[key], restored[key]), key


def test_damage_in_what_hooks_are_shown_early_leads_to_the_checkpoint_before(tmp_path: Any) -> None:
    training = Training(module=Hooked, data=lambda: {"datamodule": Stateful()})
    with pytest.raises(Killed):
        training.run(*group_of(memory(tmp_path)), killed_at=7)
    head = raycheck.open_run(memory(tmp_path)).head
    damage(open_store(memory(tmp_path)), head.step, "lightning._extra_state.checkpoint.counted.sums")

    with pytest.raises(raycheck.errors.SupersededError, match="damaged"):
        training.run(*group_of(memory(tmp_path)))
    module, trainer = training.run(*group_of(memory(tmp_path)))

    assert module.loaded["global_step"] == head.step - 1
    assert trainer.global_step == 30


# --- when, and with which metrics ---


def test_settings_see_the_metrics_of_their_own_step(tmp_path: Any) -> None:
    settings = {
        "every_steps": None,
        "when": lambda step, metrics: "val_loss" in metrics,
        "keep_best": {"metric": "val_loss", "mode": "min", "count": 2},
    }
    training = Training(settings=settings, options={"val_check_interval": 5})

    training.run(*group_of(memory(tmp_path)))

    run = raycheck.open_run(memory(tmp_path))
    assert sorted({one.step for one in run.checkpoints}) == [5, 10, 15, 20, 25, 30]
    assert {"val_loss", "train_loss_epoch"} <= run.at(20).details().metrics.keys()


def test_a_save_at_the_end_of_an_epoch_counts_the_epoch(tmp_path: Any) -> None:
    training = Training(settings={"every_epochs": 1})

    training.run(*group_of(memory(tmp_path)))

    saved = [one.details(values=True).values["progress"] for one in raycheck.open_run(memory(tmp_path)).checkpoints]
    progress = list(map(Progress.of, saved))
    assert [(at.step, at.epoch, at.epoch_step, at.samples) for at in progress] == [
        (10, 1, 0, 40),
        (20, 2, 0, 80),
        (30, 3, 0, 120),
    ]


def test_more_epochs_go_on_from_a_finished_run(tmp_path: Any) -> None:
    short = Training(module=PlainRate, options={"max_epochs": 2})
    short.run(*group_of(memory(tmp_path)))

    module, _ = Training(module=PlainRate).run(*group_of(memory(tmp_path)))

    whole, _ = Training(module=PlainRate).run(*group_of(memory(tmp_path) + "-whole"))
    assert same_state(dict(module.state_dict()), dict(whole.state_dict()))


def test_a_file_of_lightnings_counts_for_a_fresh_run_only(tmp_path: Any) -> None:
    plain = pl.Trainer(**{**QUIET, "max_epochs": 1, "enable_checkpointing": False})
    plain.fit(PlainRate(), DataLoader(samples(), batch_size=4))
    plain.save_checkpoint(tmp_path / "file.ckpt")
    training = Training(module=PlainRate, data=lambda: {**Training().data(), "ckpt_path": tmp_path / "file.ckpt"})

    module, trainer, _ = training.killed_and_restarted(memory(tmp_path), 25)

    whole, _ = training.run(*group_of(memory(tmp_path) + "-whole"))
    assert trainer.global_step == 30
    assert whole.seen[0][0] == 10  # the file was of step 10
    assert same_state(dict(module.state_dict()), dict(whole.state_dict()))


def test_fit_adds_the_callback_and_evaluation_is_left_alone(tmp_path: Any) -> None:
    (group,) = group_of(memory(tmp_path))
    trainer = pl.Trainer(**QUIET, callbacks=[raycheck.lightning.Callback(group=group)])
    module = PlainRate()

    raycheck.lightning.fit(trainer, module, raycheck.Batches(samples(), global_batch=4), DataLoader(samples()))

    assert raycheck.open_run(memory(tmp_path)).at(30).step == 30
    assert trainer.validate(module, DataLoader(samples()), verbose=False)[0]["val_loss"] >= 0
    with pytest.raises(raycheck.errors.ConfigError, match="with its own settings"):
        raycheck.lightning.fit(trainer, module, settings=raycheck.SaveSettings())


def test_a_turned_off_callback_trains_as_if_it_were_not_there(tmp_path: Any) -> None:
    _, trainer = Training(settings={"enabled": False}).run(group_of(memory(tmp_path))[0])

    assert trainer.global_step == 30
    with pytest.raises(raycheck.errors.NotFoundError):
        raycheck.open_run(memory(tmp_path))


class OfTwo(Regression):
    """Takes batches {"a": ..., "b": ...}, as Lightning makes them of two loaders."""

    def loss(self, batch: Any) -> torch.Tensor:
        return super().loss(batch["a"]) + super().loss(batch["b"])


@pytest.mark.parametrize("kind", ["stacked", "combined"])
@killed_at(14, slow=[5])
def test_two_datasets_as_one_and_one_loader_that_is_combined_go_on_where_they_were(
    kind: str, tmp_path: Any, killed_at: int
) -> None:
    both = StackDataset(a=samples(), b=samples())
    data = {
        "stacked": lambda: DataLoader(both, batch_size=4, shuffle=True),
        "combined": lambda: CombinedLoader(DataLoader(both, batch_size=4, shuffle=True), mode="min_size"),
    }

    training = Training(module=OfTwo, data=lambda: {"train_dataloaders": data[kind]()})

    check_restarts(training, memory(tmp_path), [killed_at])


# --- refused by name, before the first step ---


class Endless(IterableDataset):
    def __iter__(self) -> Any:
        yield from samples()


class FetchesItself(PlainRate):
    def training_step(self, dataloader_iter: Any) -> Any:
        return super().training_step(*next(dataloader_iter)[:2])


def loader(**options: Any) -> Any:
    return lambda: {"train_dataloaders": DataLoader(**{"dataset": samples(), "batch_size": 4, **options})}


def batches_of_four() -> Any:
    return raycheck.Batches(samples(), global_batch=4).loader()


REFUSED = {
    "a monitored ModelCheckpoint": (
        Training(callbacks=lambda: [of_lightning.ModelCheckpoint(monitor="val_loss", save_top_k=3)]),
        r"keep_best=\{'metric': 'val_loss', 'mode': 'min', 'count': 3\}",
    ),
    "OnExceptionCheckpoint": (Training(callbacks=lambda: [of_lightning.OnExceptionCheckpoint(".")]), "OnException"),
    "ModelPruning": (Training(callbacks=lambda: [of_lightning.ModelPruning("l1_unstructured")]), "ModelPruning"),
    "LearningRateFinder": (Training(callbacks=lambda: [of_lightning.LearningRateFinder()]), "LearningRateFinder"),
    "two of ours": (
        Training(callbacks=lambda: [raycheck.lightning.Callback()]),
        "two of raycheck's",
    ),
    "reloaded loaders": (Training(options={"reload_dataloaders_every_n_epochs": 1}), "reload_dataloaders"),
    "a stream": (Training(data=loader(dataset=Endless(), shuffle=None)), "streams from a Endless"),
    "a sampler": (
        Training(data=loader(sampler=torch.utils.data.SubsetRandomSampler(range(8)))),
        "is ordered by a SubsetRandomSampler",
    ),
    "a loader of one epoch": (
        Training(data=lambda: {"train_dataloaders": raycheck.Batches(samples(), global_batch=4).loader(0)}),
        "without an epoch",
    ),
    "two loaders": (
        Training(data=lambda: {"train_dataloaders": [DataLoader(samples()), DataLoader(samples())]}),
        "2 training loaders",
    ),
    "a CombinedLoader": (
        Training(data=lambda: {"train_dataloaders": CombinedLoader({"a": batches_of_four(), "b": batches_of_four()})}),
        r"2 training loaders.*StackDataset",
    ),
    "samples that are never seen": (Training(data=loader(dataset=samples(42))), "last 2 of 42 samples"),
    "batches fetched by itself": (Training(module=FetchesItself), "dataloader_iter"),
    "replaced weights": (Training(module=Replacing), r"on_save_checkpoint puts other tensors .*net\.0\.weight"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_could_not_be_restored_whole_is_refused_before_the_first_step(tmp_path: Any, name: str) -> None:
    training, match = REFUSED[name]
    steps: list[Any] = []
    training.module = functools.partial(_noted, training.module, steps)

    with pytest.raises(raycheck.errors.ConfigError, match=match):
        training.run(*group_of(memory(tmp_path)))

    assert not steps


def _noted(module: Any, steps: list[Any], **options: Any) -> Any:
    made = module(**options)
    made.seen = steps
    return made


def test_a_loader_without_a_position_is_taken_when_that_is_asked_for(tmp_path: Any) -> None:
    (group,) = group_of(memory(tmp_path))
    callback = raycheck.lightning.Callback(group=group, data_position=False)
    trainer = pl.Trainer(**{**QUIET, "max_epochs": 1}, callbacks=[callback])

    trainer.fit(PlainRate(), DataLoader(Endless(), batch_size=4))

    assert raycheck.open_run(memory(tmp_path)).head.step == 10
