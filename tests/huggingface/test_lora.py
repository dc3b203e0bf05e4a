"""LoRA at export: what peft loads from the adapter's directory, and the merged model against peft's own merge."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import IA3Config, LoraConfig, PeftModel, get_peft_model
from torch import nn
from torch.distributed.fsdp import fully_shard

from raycheck.bucket.format.progress import Progress
from raycheck.bucket.store import Store, open_store
from raycheck.errors import ConfigError
from raycheck.huggingface.export import export_hf
from raycheck.settings import ExportOptions
from raycheck.state.train_state import TrainState
from tests.support.processes.gloo_ranks import mesh_of
from tests.support.processes.played_ranks import playing
from tests.support.processes.save_without_ray import save, save_state
from tests.support.samples import hf_models

# peft asks transformers by a name that transformers is about to drop, and warns of what the test wants.
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning:transformers", "ignore::UserWarning:peft")

QV = {"r": 4, "target_modules": ["q_proj", "v_proj"], "init_lora_weights": False}
LORAS: dict[str, dict[str, Any]] = {
    "plain": QV,
    "rank stabilized": {**QV, "use_rslora": True, "lora_alpha": 3},
    "patterns": {**QV, "rank_pattern": {"layers.1.self_attn.q_proj": 6}, "alpha_pattern": {"v_proj": 32}},
    "a head of its own": {**QV, "modules_to_save": ["lm_head"]},
    "embedding": {**QV, "target_modules": ["embed_tokens", "q_proj"]},
    "all linear": {**QV, "target_modules": "all-linear"},
}


@pytest.fixture
def run(tmp_path: Path) -> Store:
    return open_store(f"file://{tmp_path}/trained")


def lora(base: nn.Module, seed: int = 5, **config: object) -> Any:
    torch.manual_seed(seed)
    model = get_peft_model(base, LoraConfig(task_type="CAUSAL_LM", **config)).eval()
    for name, parameter in model.named_parameters():
        if "modules_to_save" in name:
            nn.init.normal_(parameter)
    return model


class Plainly(nn.Module):
    """A model that names its tensors as the plain model does, wherever peft wrapped it."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.inner = model
        self.peft_config, self.active_adapters = model.peft_config, model.active_adapters
        self.get_base_model = model.get_base_model
        self.register_state_dict_post_hook(self._rename)

    @staticmethod
    def _rename(_module: object, state: dict[str, Any], prefix: str, _metadata: object) -> None:
        for key in list(state):
            plain = key.removeprefix(f"{prefix}inner.base_model.model.").replace(".base_layer.", ".")
            state[prefix + plain] = state.pop(key)


@pytest.mark.parametrize("is_plainly_named", [False, True])
@pytest.mark.parametrize("kind", LORAS)
def test_peft_loads_the_adapter_and_computes_the_same(run: Store, tmp_path: Path, kind: str, is_plainly_named: bool):
    base = hf_models.llama()
    model = lora(copy.deepcopy(base), **LORAS[kind])
    checkpoint = save_state(run, {"model": Plainly(model) if is_plainly_named else model})

    written = export_hf(checkpoint, f"{tmp_path}/adapter")

    loaded = PeftModel.from_pretrained(base, tmp_path / "adapter").eval()
    assert set(written.files) == {"adapter_model.safetensors", "adapter_config.json", "raycheck.json"}
    assert not torch.equal(hf_models.logits(model), hf_models.logits(hf_models.llama()))
    assert torch.equal(hf_models.logits(loaded), hf_models.logits(model))


@pytest.mark.parametrize("is_plainly_named", [False, True])
@pytest.mark.parametrize("kind", LORAS)
def test_a_merge_is_peft_s_own_to_the_bit(run: Store, tmp_path: Path, kind: str, is_plainly_named: bool):
    model = lora(hf_models.llama(), **LORAS[kind])
    checkpoint = save_state(run, {"model": Plainly(model) if is_plainly_named else model})

    export_hf(checkpoint, f"{tmp_path}/hf", ExportOptions(merge_lora=True))

    merged = model.merge_and_unload()
    tensors = hf_models.tensors_in(tmp_path / "hf")
    assert set(tensors) == set(merged.state_dict())
    assert all(torch.equal(tensors[name], tensor) for name, tensor in merged.state_dict().items())
    assert torch.equal(hf_models.logits(hf_models.from_pretrained(tmp_path / "hf")), hf_models.logits(merged))


@pytest.mark.parametrize("of", ["base", "adapter", "both"])
def test_halves_are_merged_with_peft_s_roundings(run: Store, tmp_path: Path, of: str):
    model = lora(hf_models.llama_bf16() if of != "adapter" else hf_models.llama(), **QV)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.data = parameter.data.to(torch.float32 if of == "base" else torch.bfloat16)
    checkpoint = save_state(run, {"model": model})

    export_hf(checkpoint, f"{tmp_path}/hf", ExportOptions(merge_lora=True))

    merged = model.merge_and_unload().state_dict()
    tensors = hf_models.tensors_in(tmp_path / "hf")
    assert {name: tensor.dtype for name, tensor in tensors.items()} == {n: t.dtype for n, t in merged.items()}
    assert all(torch.equal(tensors[name], tensor) for name, tensor in merged.items())


def test_a_merge_in_blocks_differs_from_the_whole_by_rounding_only(run: Store, tmp_path: Path):
    torch.manual_seed(0)
    model = lora(hf_models.llama(vocab_size=300_007), **{**QV, "target_modules": ["lm_head"]})  # 38 MB: two blocks
    checkpoint = save_state(run, {"model": model})

    export_hf(checkpoint, f"{tmp_path}/hf", ExportOptions(merge_lora=True))

    merged = model.merge_and_unload().state_dict()
    tensors = hf_models.tensors_in(tmp_path / "hf")
    torch.testing.assert_close(tensors["lm_head.weight"], merged["lm_head.weight"], rtol=1e-6, atol=1e-6)
    assert torch.equal(tensors["model.embed_tokens.weight"], merged["model.embed_tokens.weight"])


def test_weights_that_lie_transposed_are_merged(run: Store, tmp_path: Path):
    model = lora(hf_models.gpt2(), r=4, target_modules=["c_attn"], init_lora_weights=False, fan_in_fan_out=True)
    checkpoint = save_state(run, {"model": model})

    export_hf(checkpoint, f"{tmp_path}/hf", ExportOptions(merge_lora=True))

    merged = model.merge_and_unload()
    assert torch.equal(hf_models.logits(hf_models.from_pretrained(tmp_path / "hf")), hf_models.logits(merged))
    assert "lm_head.weight" not in hf_models.tensors_in(tmp_path / "hf")


def test_an_adapter_in_shards_is_exported_whole(run: Store, tmp_path: Path):
    base, staged = hf_models.llama(), []
    for rank in range(2):
        with playing(rank, 2):
            model, mesh = lora(hf_models.llama(), **QV), mesh_of(2)
            for layer in model.base_model.model.model.layers:
                fully_shard(layer, mesh=mesh)
            fully_shard(model, mesh=mesh)
            staged.append(TrainState({"model": model}, rank=rank, world_size=2).stage(Progress(step=1)))
    checkpoint = save(run, staged)
    whole = lora(copy.deepcopy(base), **QV)

    export_hf(checkpoint, f"{tmp_path}/adapter")
    export_hf(checkpoint, f"{tmp_path}/hf", ExportOptions(merge_lora=True))

    loaded = PeftModel.from_pretrained(base, tmp_path / "adapter").eval()
    assert torch.equal(hf_models.logits(loaded), hf_models.logits(whole))
    assert torch.equal(
        hf_models.logits(hf_models.from_pretrained(tmp_path / "hf")), hf_models.logits(whole.merge_and_unload())
    )


def test_an_adapter_that_transformers_itself_added_is_exported(run: Store, tmp_path: Path):
    base = hf_models.llama()
    torch.manual_seed(5)
    model = copy.deepcopy(base)
    model.add_adapter(LoraConfig(**QV))
    checkpoint = save_state(run, {"model": model})

    export_hf(checkpoint, f"{tmp_path}/adapter")

    loaded = PeftModel.from_pretrained(base, tmp_path / "adapter").eval()
    assert torch.equal(hf_models.logits(loaded), hf_models.logits(model))


def test_only_the_active_one_of_two_adapters_is_exported(run: Store, tmp_path: Path):
    base = hf_models.llama()
    model = lora(copy.deepcopy(base), **QV)
    model.add_adapter("second", LoraConfig(**{**QV, "target_modules": ["k_proj", "q_proj"]}))
    model.set_adapter("second")
    checkpoint = save_state(run, {"model": model})

    export_hf(checkpoint, f"{tmp_path}/adapter")
    export_hf(checkpoint, f"{tmp_path}/hf", ExportOptions(merge_lora=True))

    loaded = PeftModel.from_pretrained(base, tmp_path / "adapter").eval()
    assert torch.equal(hf_models.logits(loaded), hf_models.logits(model))
    merged = model.merge_and_unload(adapter_names=["second"])
    assert torch.equal(hf_models.logits(hf_models.from_pretrained(tmp_path / "hf")), hf_models.logits(merged))


def test_the_magnitudes_of_dora_are_exported_and_no_merge_is_tried(run: Store, tmp_path: Path):
    base = hf_models.llama()
    model = lora(copy.deepcopy(base), **QV, use_dora=True)
    checkpoint = save_state(run, {"model": model})

    export_hf(checkpoint, f"{tmp_path}/adapter")
    with pytest.raises(ConfigError, match=r"layers\.0\.self_attn\.q_proj is a variant"):
        export_hf(checkpoint, f"{tmp_path}/hf", ExportOptions(merge_lora=True))

    loaded = PeftModel.from_pretrained(base, tmp_path / "adapter").eval()
    assert torch.equal(hf_models.logits(loaded), hf_models.logits(model))
    assert not (tmp_path / "hf").exists()


def test_what_cannot_be_merged_is_refused_by_name(run: Store, tmp_path: Path):
    tied = lora(hf_models.llama(tie_word_embeddings=True), **{**QV, "target_modules": ["embed_tokens"]})
    experts = lora(hf_models.mixtral(), **{**QV, "target_parameters": ["mlp.experts.gate_up_proj"]})
    biased = lora(hf_models.llama(attention_bias=True), **QV, lora_bias=True)
    state = {"tied": tied, "experts": experts, "biased": biased, "plain": hf_models.llama()}
    checkpoint = save_state(run, state)

    for entry, text in (("tied", "tied"), ("experts", "experts"), ("biased", "lora_bias"), ("plain", "not a PEFT")):
        with pytest.raises(ConfigError, match=text):
            export_hf(checkpoint, f"{tmp_path}/hf", ExportOptions(entry=entry, merge_lora=True))

    assert not (tmp_path / "hf").exists()


def test_what_is_no_lora_or_has_several_active_is_refused(run: Store, tmp_path: Path):
    ia3 = get_peft_model(hf_models.llama(), IA3Config(target_modules=["k_proj"], feedforward_modules=[]))
    several = lora(hf_models.llama(), **QV)
    several.add_adapter("second", LoraConfig(**QV))
    several.base_model.set_adapter(["default", "second"])
    biases = lora(hf_models.llama(attention_bias=True), **QV, bias="all")
    checkpoint = save_state(run, {"ia3": ia3, "several": several, "biases": biases})

    for entry, text in (("ia3", "IA3"), ("several", "default, second"), ("biases", "biases")):
        with pytest.raises(ConfigError, match=text):
            export_hf(checkpoint, f"{tmp_path}/hf", ExportOptions(entry=entry))

    assert not (tmp_path / "hf").exists()


def test_the_adapter_s_configuration_is_peft_s_own(run: Store, tmp_path: Path):
    model = lora(hf_models.llama(), **LORAS["patterns"])
    checkpoint = save_state(run, {"model": model})
    model.save_pretrained(tmp_path / "theirs")

    export_hf(checkpoint, f"{tmp_path}/ours")

    ours, theirs = (json.loads((tmp_path / who / "adapter_config.json").read_text()) for who in ("ours", "theirs"))
    for config in (ours, theirs):
        config["target_modules"] = sorted(config["target_modules"])
    assert ours == theirs
