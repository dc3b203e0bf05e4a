"""A checkpoint holds what its export needs: configurations of models, files of tokenizers."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.fsdp import fully_shard
from transformers import BertConfig, BertModel, T5Config, T5ForConditionalGeneration

from raycheck.bucket.format.object_keys import component_prefix
from raycheck.bucket.store import open_store
from raycheck.errors import ConfigError
from raycheck.state.entries.hf_assets import FACTS, is_safe_file_name, module_assets
from raycheck.state.train_state import TrainState
from raycheck.transfer.stage.local_box import TRAIN
from tests.support.processes.gloo_ranks import mesh_of
from tests.support.processes.played_ranks import playing
from tests.support.processes.save_without_ray import restore_state, save_state
from tests.support.samples import hf_models


def test_a_model_s_configuration_is_what_it_would_save_itself(tmp_path: Path):
    model = hf_models.llama_bf16()
    before = model.config.to_dict()

    assets = module_assets(model)

    assert model.config.to_dict() == before
    model.save_pretrained(tmp_path)
    for name in ("config.json", "generation_config.json"):
        assert json.loads(assets[name]) == json.loads((tmp_path / name).read_text())
    assert json.loads(assets["config.json"])["dtype"] == "bfloat16"


def test_the_class_that_fsdp_makes_and_the_wrapper_of_compile_are_not_named():
    with playing(0, 2):
        model = hf_models.llama()
        fully_shard(model, mesh=mesh_of(2))

        assets = module_assets(torch.compile(model, backend="eager"))

    assert type(model).__name__ == "FSDPLlamaForCausalLM"
    assert json.loads(assets["config.json"])["architectures"] == ["LlamaForCausalLM"]


def test_a_model_that_writes_no_text_has_no_generation_configuration():
    model = BertModel(
        BertConfig(vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4)
    )

    assert set(module_assets(model)) == {"config.json", FACTS}


def test_ties_are_told_as_the_model_declares_them():
    t5 = T5ForConditionalGeneration(T5Config(vocab_size=64, d_model=32, d_kv=8, d_ff=48, num_layers=1, num_heads=4))

    assert json.loads(module_assets(t5)[FACTS])["tied"] == {
        "encoder.embed_tokens.weight": "shared.weight",
        "decoder.embed_tokens.weight": "shared.weight",
        "lm_head.weight": "shared.weight",
    }
    assert json.loads(module_assets(hf_models.llama())[FACTS])["tied"] == {}


class Configured(nn.Module):
    """Looks like a model of transformers 4: its ties are a list of patterns, and apply where weights are one object."""

    _tied_weights_keys = ("head.weight",)

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.head, self.embed = nn.Linear(4, 6, bias=False), nn.Embedding(6, 4)
        self.head.weight = self.embed.weight
        self.config = config


class Config:
    def __init__(self, *, tie_word_embeddings: bool) -> None:
        self.tie_word_embeddings = tie_word_embeddings

    def to_json_string(self) -> str:
        return json.dumps({"model_type": "mine", "torch_dtype": "float16"})


@pytest.mark.parametrize(("is_tied", "expected"), [(True, {"head.weight": "embed.weight"}), (False, {})])
def test_ties_of_transformers_4_are_understood(is_tied: bool, expected: dict[str, str]):
    assets = module_assets(Configured(Config(tie_word_embeddings=is_tied)))

    assert json.loads(assets[FACTS])["tied"] == expected
    assert json.loads(assets["config.json"])["torch_dtype"] == "float32"


class Failing:
    def to_json_string(self) -> str:
        raise RuntimeError("not now")


class Babbling:
    def to_json_string(self) -> str:
        return "[1, 2"


@pytest.mark.parametrize("config", [None, 3, {"hidden_size": 8}, Failing(), Babbling()])
def test_a_model_that_makes_no_sense_has_no_assets_and_can_be_saved(tmp_path: Path, config: object):
    model = Configured(config)

    assert module_assets(model) == {}
    checkpoint = save_state(open_store(f"file://{tmp_path}"), {"model": model})
    restore_state(checkpoint, {"model": Configured(None)})


def test_assets_is_a_name_of_raycheck_s_own():
    with pytest.raises(ConfigError, match="assets"):
        TrainState({"assets": nn.Linear(2, 2)}, rank=0, world_size=1)


def test_a_tokenizer_s_files_are_saved_and_change_nothing_at_a_restore(tmp_path: Path):
    tokenizer, model = hf_models.tokenizer(), nn.Linear(2, 2)
    checkpoint = save_state(open_store(f"file://{tmp_path}"), {"model": model, "tokenizer": tokenizer})
    other = hf_models.tokenizer()
    other.add_tokens(["<new>"])

    restore_state(checkpoint, {"model": model, "tokenizer": other})

    assert "<new>" in other.get_vocab()
    index = checkpoint.read_index(checkpoint.read_manifest())
    assert "tokenizer.json" in index.values["tokenizer"]["files"]


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled, unavailable or uninitialized:UserWarning")
def test_stock_torch_loads_a_checkpoint_with_a_tokenizer(tmp_path: Path):
    tokenizer, model = hf_models.tokenizer(), nn.Linear(2, 2)
    checkpoint = save_state(open_store(f"file://{tmp_path}/run"), {"model": model, "tokenizer": tokenizer})
    tokenizer.save_pretrained(tmp_path / "theirs")

    place = tmp_path / "run" / component_prefix(checkpoint.entry.key, TRAIN)
    dcp_to_torch_save(str(place), tmp_path / "whole.pt")

    whole = torch.load(tmp_path / "whole.pt", weights_only=True)
    files = whole["tokenizer"]["files"]
    assert torch.equal(whole["model"]["weight"], model.weight)
    assert {name: bytes(data) for name, data in files.items()} == {
        path.name: path.read_bytes() for path in (tmp_path / "theirs").iterdir()
    }


class Writer:
    """Has save_pretrained and no state_dict."""

    def __init__(self, files: dict[str, bytes]) -> None:
        self._files = files

    def save_pretrained(self, folder: str) -> None:
        for name, data in self._files.items():
            path = Path(folder, name)
            path.parent.mkdir(exist_ok=True)
            path.write_bytes(data)


def test_files_may_be_empty_and_lie_one_level_down(tmp_path: Path):
    files = {"additional_chat_templates/rag.jinja": b"{{ x }}", "empty.txt": b"", "vocab.json": b"{}"}
    checkpoint = save_state(open_store(f"file://{tmp_path}"), {"model": nn.Linear(2, 2), "tok": Writer(files)})

    index = checkpoint.read_index(checkpoint.read_manifest())

    sizes = {tensor.name: tensor.shape for tensor in index.tensors if tensor.name.startswith("tok.")}
    assert sizes == {f"tok.files.{name}": (len(data),) for name, data in files.items()}


@pytest.mark.parametrize("name", ["model.safetensors", "weights.bin", ".cache", "config.json", "a b"])
def test_files_that_no_tokenizer_has_are_refused_at_construction(name: str):
    with pytest.raises(ConfigError, match="tok"):
        TrainState({"tok": Writer({name: b"x"})}, rank=0, world_size=1)


def test_a_writer_that_fails_is_named():
    with pytest.raises(ConfigError, match=r"state\['tok'\]\.save_pretrained failed: IsADirectoryError"):
        TrainState({"tok": Writer({".": b"x"})}, rank=0, world_size=1)


@given(st.text(alphabet="abC019._-+/\\~: \0\n", max_size=12))
def test_a_safe_name_stays_inside_its_folder(name: str):
    if is_safe_file_name(name):
        path = Path("/root/folder", name)
        assert path.resolve().is_relative_to("/root/folder")
        assert path.name == path.resolve().name
        assert not any(part.startswith(".") for part in path.parts)
