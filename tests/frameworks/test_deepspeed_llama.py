"""A Llama that an engine of DeepSpeed has trained: its export loads with from_pretrained, and LoRA is restored anywhere.

The judge of an export is the digest of each weight that DeepSpeed's own functions put together.
"""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, LlamaForCausalLM
from typer.testing import CliRunner

import raycheck
from raycheck.cli import app
from tests.support.frameworks import deepspeed_training
from tests.support.frameworks.deepspeed_llama import LlamaTraining, llama_of
from tests.support.frameworks.deepspeed_training import digest_of

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::FutureWarning:transformers", "ignore::UserWarning:peft"),
]
Trained = tuple[LlamaTraining, dict[str, Any]]


@pytest.fixture(scope="module", autouse=True)
def installed() -> None:
    deepspeed_training.prepare()


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Trained]:
    """Return a training of two ranks with two checkpoints, and what it was, once for each kind."""
    made: dict[str, Trained] = {}

    def train(stage: int, dtype: str, **more: Any) -> Trained:
        name = f"{stage}{dtype}{sorted(more.items())}"
        if name not in made:
            training = LlamaTraining(
                uri=f"file://{tmp_path_factory.mktemp('llama')}/run", stage=stage, dtype=dtype, **more
            )
            made[name] = training, training.run()
        return made[name]

    return train


@pytest.mark.parametrize(
    ("stage", "dtype", "is_tied"), [(3, "bf16", False), (2, "fp32", False), (3, "bf16", True)], ids=str
)
def test_an_export_of_an_engine_loads_with_the_trained_weights(
    stage: int, dtype: str, is_tied: bool, trained: Any, tmp_path: Path
) -> None:
    training, found = trained(stage, dtype, is_tied=is_tied)

    assert CliRunner().invoke(app, ["export-hf", training.uri, f"{tmp_path}/exact"]).exit_code == 0
    raycheck.export_hf(training.uri, f"{tmp_path}/halves", dtype="bfloat16")

    exact = AutoModelForCausalLM.from_pretrained(tmp_path / "exact")
    assert isinstance(exact, LlamaForCausalLM)
    assert exact.config.architectures == ["LlamaForCausalLM"]
    assert exact.dtype == torch.float32
    assert {name: digest_of(weight) for name, weight in exact.named_parameters()} == {
        name.removesuffix(".weight"): digest
        for name, digest in found["digests"].items()
        if name.endswith(".weight.weight")
    }
    halves = AutoModelForCausalLM.from_pretrained(tmp_path / "halves")
    assert halves.dtype == torch.bfloat16
    if dtype == "bf16":  # the weights with which the engine itself computes
        assert {name: digest_of(weight) for name, weight in halves.named_parameters()} == found["low"]


@pytest.mark.parametrize(("stage", "dtype"), [(2, "bf16"), (3, "bf16"), (3, "fp32")])
def test_lora_is_restored_at_another_stage_and_number_of_ranks(
    stage: int, dtype: str, trained: Any, tmp_path: Path
) -> None:
    training, before = trained(stage, dtype, is_lora=True)
    shutil.copytree(training.uri.removeprefix("file://"), tmp_path / "run")
    other = {**vars(training), "uri": f"file://{tmp_path}/run", "stage": 5 - stage, "world_size": 3, "seed": 1}

    found = LlamaTraining(**other).run()

    assert found["start"] == 4
    assert before["frozen"]
    assert len(before["digests"]) > len(before["low"]) - len(before["frozen"])
    assert {kind: found[kind] for kind in ("digests", "frozen", "low")} == {
        kind: before[kind] for kind in ("digests", "frozen", "low")
    }


@pytest.mark.parametrize("stage", [2, 3])
def test_the_frozen_base_of_a_lora_is_uploaded_once(stage: int, trained: Any) -> None:
    training, _ = trained(stage, "bf16", is_lora=True)

    run = raycheck.open_run(training.uri)

    first, second = (run.at(step) for step in (2, 4))
    folder = Path(training.uri.removeprefix("file://")) / "checkpoints"
    assert list((folder / first.key).glob("*frozen*"))
    assert not list((folder / second.key).glob("*frozen*"))
    names = {tensor.name for tensor in second.tensors()}
    assert "engine.model.model.layers.0.self_attn.q_proj.weight" in names
    assert "engine.model.model.layers.0.self_attn.q_proj.lora_A.default.weight" in names


def test_weights_with_a_merged_adapter_are_not_restored_into_others(trained: Any, tmp_path: Path) -> None:
    training, _ = trained(2, "bf16", is_lora=True, is_merged=True)
    shutil.copytree(training.uri.removeprefix("file://"), tmp_path / "run")
    other = {**vars(training), "uri": f"file://{tmp_path}/run", "is_merged": False}

    with pytest.raises(RuntimeError, match=r"call merge_adapter\(\['default'\]\) on the model before restore"):
        LlamaTraining(**other).run()


@pytest.mark.parametrize("stage", [2, 3])
def test_peft_loads_the_exported_adapter(stage: int, trained: Any, tmp_path: Path) -> None:
    training, found = trained(stage, "bf16", is_lora=True)

    raycheck.export_hf(training.uri, f"{tmp_path}/adapter")
    raycheck.export_hf(training.uri, f"{tmp_path}/merged", merge_lora=True)

    masters = {
        name.removesuffix(".weight").replace(".default", ""): digest
        for name, digest in found["digests"].items()
        if name.endswith(".weight.weight")
    }
    stored = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    assert {name: digest_of(tensor) for name, tensor in stored.items()} == masters
    base = llama_of(LlamaTraining(uri="", stage=stage))
    adapted = PeftModel.from_pretrained(base.bfloat16(), tmp_path / "adapter", autocast_adapter_dtype=False).float()
    merged = LlamaForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32)
    tokens = torch.arange(12).reshape(2, 6)
    with torch.no_grad():
        torch.testing.assert_close(merged(tokens).logits, adapted(tokens).logits, atol=3e-2, rtol=0.0)
