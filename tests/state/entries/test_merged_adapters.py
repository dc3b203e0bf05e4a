"""A checkpoint says which adapters are merged into its weights, and goes only into a model with the same ones merged."""

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import IA3Config, LoraConfig, get_peft_model
from torch import nn

from raycheck.bucket.format.progress import Progress
from raycheck.bucket.store import Store, open_store
from raycheck.errors import ConfigError, StateMismatchError
from raycheck.huggingface.export import export_hf
from raycheck.settings import ExportOptions
from raycheck.state.restore_selection import Selection
from raycheck.state.train_state import TrainState
from tests.support.processes.save_without_ray import restore_state, save, save_state
from tests.support.samples import hf_models

# peft asks transformers by a name that transformers is about to drop, and warns of what the test wants.
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning:transformers", "ignore::UserWarning:peft")


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.first(x))


class LoralibLayer(nn.Linear):
    """Merges as the layers of loralib do, which are trained without peft: in eval(), and takes it out in train()."""

    def __init__(self) -> None:
        super().__init__(8, 8)
        self.lora_A, self.lora_B = nn.Parameter(torch.ones(2, 8)), nn.Parameter(torch.ones(8, 2))
        self.merged = False

    def train(self, mode: bool = True) -> "LoralibLayer":
        super().train(mode)
        if mode == self.merged:
            self.weight.data += (self.lora_B @ self.lora_A).data * (-1 if mode else 1)
            self.merged = not mode
        return self


@pytest.fixture
def run(tmp_path: Path) -> Store:
    return open_store(f"file://{tmp_path}/trained")


def whole(tensor: torch.Tensor) -> None:
    """Fill with small whole numbers, with which a merge and its undoing are exact."""
    tensor.data = torch.randint(-4, 5, tensor.shape).to(tensor.dtype)


def adapted(seed: int, adapters: tuple[str, ...] = ("default",), **config: Any) -> Any:
    torch.manual_seed(seed)
    lora = LoraConfig(**{"r": 2, "lora_alpha": 4, "target_modules": ["first", "last"], **config})
    model = get_peft_model(Small(), lora)
    for name in adapters[1:]:
        model.add_adapter(name, lora)
    for parameter in model.parameters():
        whole(parameter)
    return model.eval()


def output(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(torch.arange(16.0).view(2, 8))


def test_merged_weights_do_not_go_into_a_model_whose_adapter_would_be_added_once_more(run: Store):
    model, fresh = adapted(1), adapted(2)
    before = {name: tensor.clone() for name, tensor in fresh.state_dict().items()}
    model.merge_adapter()
    checkpoint = save_state(run, {"model": model})

    with pytest.raises(StateMismatchError, match=r"model\.first and 1 more layers.*'default' merged.*merge_adapter"):
        restore_state(checkpoint, {"model": fresh})

    assert all(torch.equal(tensor, before[name]) for name, tensor in fresh.state_dict().items())


def test_the_cure_for_merged_weights_works(run: Store):
    model, fresh = adapted(1), adapted(2)
    wanted = output(model)
    model.merge_adapter()
    checkpoint = save_state(run, {"model": model})

    fresh.merge_adapter(["default"])
    restore_state(checkpoint, {"model": fresh})
    fresh.unmerge_adapter()

    assert torch.equal(output(fresh), wanted)
    assert not fresh.base_model.model.first.merged


def test_weights_without_the_adapter_do_not_go_into_a_merged_model_until_it_is_unmerged(run: Store):
    model, fresh = adapted(1), adapted(2)
    checkpoint = save_state(run, {"model": model})
    fresh.merge_adapter()

    with pytest.raises(StateMismatchError, match=r"no adapter merged.*'default' is merged: call unmerge_adapter\(\)"):
        restore_state(checkpoint, {"model": fresh})
    fresh.unmerge_adapter()
    restore_state(checkpoint, {"model": fresh})

    assert torch.equal(output(fresh), output(model))


def test_another_adapter_or_layer_is_not_the_same(run: Store):
    model = adapted(1, ("default", "other"))
    model.merge_adapter(["other"])
    checkpoint = save_state(run, {"model": model})
    fresh = adapted(2, ("default", "other"))
    fresh.merge_adapter(["default"])
    half = adapted(3, ("default", "other"))
    half.base_model.model.first.merge(adapter_names=["other"])

    with pytest.raises(StateMismatchError, match=r"call unmerge_adapter\(\) and merge_adapter\(\['other'\]\)"):
        restore_state(checkpoint, {"model": fresh})
    with pytest.raises(StateMismatchError, match=r"not alike: model\.last: "):
        restore_state(checkpoint, {"model": half})
    fresh.unmerge_adapter()
    fresh.merge_adapter(["other"])
    restore_state(checkpoint, {"model": fresh})

    assert torch.equal(output(fresh), output(model))


def test_a_merge_between_two_saves_of_one_run_is_seen(run: Store):
    model = adapted(1)
    state = TrainState({"model": model}, rank=0, world_size=1)

    plain = save(run, [state.stage(Progress(step=1))], save=1)
    again = save(run, [state.stage(Progress(step=2))], save=2)  # nothing has moved: the entry remembers where all lies
    model.merge_adapter()
    merged = save(run, [state.stage(Progress(step=3))], save=3)

    for checkpoint in (plain, again):
        restore_state(checkpoint, {"model": adapted(2)})
    with pytest.raises(StateMismatchError, match="merge_adapter"):
        restore_state(merged, {"model": adapted(2)})


@pytest.mark.parametrize("kind", ["dora", "ia3"])
def test_every_tuner_of_peft_that_merges_is_seen(run: Store, kind: str):
    def made() -> Any:
        if kind == "dora":
            return adapted(1, use_dora=True)
        config = IA3Config(target_modules=["first", "last"], feedforward_modules=[], init_ia3_weights=False)
        return get_peft_model(Small(), config).eval()

    model = made()
    model.merge_adapter()
    checkpoint = save_state(run, {"model": model})

    with pytest.raises(StateMismatchError, match="merge_adapter"):
        restore_state(checkpoint, {"model": made()})


def test_a_layer_of_loralib_is_restored_in_the_mode_in_which_it_was_saved(run: Store):
    model, fresh = nn.Sequential(LoralibLayer()), nn.Sequential(LoralibLayer())
    trained = model[0].weight.data.clone()
    checkpoint = save_state(run, {"model": model.eval()})

    with pytest.raises(StateMismatchError, match=r"call eval\(\)"):
        restore_state(checkpoint, {"model": fresh.train()})
    restore_state(checkpoint, {"model": fresh.eval()})

    torch.testing.assert_close(fresh.train()[0].weight.data, trained)


def test_the_adapter_alone_may_be_taken_from_a_merged_checkpoint(run: Store):
    model, fresh = adapted(1), adapted(2)
    base = fresh.base_model.model.first.base_layer.weight.clone()
    model.merge_adapter()
    checkpoint = save_state(run, {"model": model})
    names = [f"model.{layer}.lora_{which}" for layer in ("first", "last") for which in "AB"]

    TrainState({"model": fresh}, rank=0, world_size=1).apply(checkpoint, Selection.of(names, ()))

    assert torch.equal(fresh.base_model.model.first.base_layer.weight, base)
    assert torch.equal(fresh.base_model.model.first.lora_A["default"].weight,
                       model.base_model.model.first.lora_A["default"].weight)  # fmt: skip


def test_a_checkpoint_that_does_not_say_what_is_merged_is_restored_as_before(
    run: Store, monkeypatch: pytest.MonkeyPatch
):
    model, fresh = adapted(1), adapted(2)
    with monkeypatch.context() as before:
        before.setattr("raycheck.state.entries.module.module_entry.ModuleEntry._merged", lambda _: {})
        checkpoint = save_state(run, {"model": model})

    restore_state(checkpoint, {"model": fresh})

    assert torch.equal(output(fresh), output(model))


def test_an_export_does_not_add_an_adapter_that_is_in_the_weights_already(run: Store, tmp_path: Path):
    torch.manual_seed(5)
    lora = LoraConfig(task_type="CAUSAL_LM", r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    model = get_peft_model(hf_models.llama(), lora).eval()
    state = TrainState({"model": model}, rank=0, world_size=1)
    model.merge_adapter()
    checkpoint = save(run, [state.stage(Progress(step=1))])

    export_hf(checkpoint, f"{tmp_path}/hf", ExportOptions(merge_lora=True))

    tensors = hf_models.tensors_in(tmp_path / "hf")
    merged = model.merge_and_unload().state_dict()
    assert all(torch.equal(tensors[name], tensor) for name, tensor in merged.items())


def test_an_export_refuses_weights_with_another_adapter_in_them(run: Store, tmp_path: Path):
    torch.manual_seed(5)
    lora = LoraConfig(task_type="CAUSAL_LM", r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    model = get_peft_model(hf_models.llama(), lora).eval()
    model.add_adapter("other", lora)
    state = TrainState({"model": model}, rank=0, world_size=1)
    model.merge_adapter(["other"])
    checkpoint = save(run, [state.stage(Progress(step=1))])

    with pytest.raises(ConfigError, match="already has another adapter merged into it: 'other'"):
        export_hf(checkpoint, f"{tmp_path}/hf", ExportOptions(merge_lora=True))
