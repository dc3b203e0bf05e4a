"""A checkpoint as a Hugging Face directory: what others load from it, and what is left when something goes wrong."""

import fcntl
import json
import os
import re
import time
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl
from uuid import uuid4

import pytest
import safetensors.torch
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.testing._internal.two_tensor import TwoTensor
from transformers import AutoTokenizer

import raycheck
from raycheck.bucket.assembly.role import roles_of
from raycheck.bucket.format import object_keys
from raycheck.bucket.format.object_keys import EXPORT_RECORD, exports_prefix
from raycheck.bucket.format.progress import Progress
from raycheck.bucket.reading import Checkpoint
from raycheck.bucket.store import Store, open_store
from raycheck.bucket.store.address import join_uri, settings_in_query
from raycheck.bucket.store.interface import Buffer, Written
from raycheck.bucket.store.local import LocalStore
from raycheck.errors import ConfigError, CorruptError, NotFoundError, StoreError
from raycheck.huggingface import weight_stream
from raycheck.huggingface.export import INDEX_FILE, export_hf
from raycheck.huggingface.export_contents import SAFETENSORS_DTYPES
from raycheck.huggingface.lora import as_saved
from raycheck.huggingface.weight_stream import WeightSource
from raycheck.settings import ExportOptions
from raycheck.state.train_state import TrainState
from tests.support.histories.invariants import assert_invariants
from tests.support.processes.fork_server import run_code
from tests.support.processes.gloo_ranks import mesh_of
from tests.support.processes.played_ranks import playing, save_played
from tests.support.processes.save_without_ray import agreed, save, save_state
from tests.support.samples import hf_models
from tests.support.servers.s3_engines import clients_made

MODELS = {
    "llama": hf_models.llama,
    "tied llama": lambda: hf_models.llama(tie_word_embeddings=True),
    "gpt2": hf_models.gpt2,
    "bfloat16": hf_models.llama_bf16,
    "mixture of experts": hf_models.mixtral,
}


@pytest.fixture
def run(tmp_path: Path) -> Store:
    return open_store(f"file://{tmp_path}/trained")


class Holder(nn.Module):
    """A module without a configuration: tensors of any type as buffers."""

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        super().__init__()
        for name, tensor in tensors.items():
            self.register_buffer(name, tensor)


def config_folder(tmp_path: Path) -> str:
    folder = tmp_path / "config"
    folder.mkdir()
    (folder / "config.json").write_text('{"model_type": "llama"}')
    return str(folder)


@pytest.mark.parametrize("scheme", ["", "file://"])
def test_a_configuration_may_be_a_link_as_in_hugging_faces_cache(run: Store, tmp_path: Path, scheme: str):
    checkpoint = save_state(run, {"model": Holder({"one": torch.ones(1)})})
    blobs, snapshot = config_folder(tmp_path), tmp_path / "snapshots" / "main"
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").symlink_to(Path("..", "..", Path(blobs).name, "config.json"))

    export_hf(checkpoint, f"{tmp_path}/hf", ExportOptions(config_from=f"{scheme}{snapshot}"))

    assert (tmp_path / "hf" / "config.json").is_file()


@pytest.mark.parametrize("kind", MODELS)
def test_from_pretrained_computes_what_the_live_model_does(run: Store, tmp_path: Path, kind: str):
    model = MODELS[kind]()
    checkpoint = save_state(run, {"model": model})

    written = export_hf(checkpoint, f"{tmp_path}/hf", ExportOptions(max_shard_bytes=20_000))

    loaded = hf_models.from_pretrained(tmp_path / "hf")
    assert type(loaded) is type(model)
    assert loaded.dtype == model.dtype
    assert torch.equal(hf_models.logits(loaded), hf_models.logits(model))
    files = {path.name: path.stat().st_size for path in (tmp_path / "hf").iterdir()}
    assert files == written.files
    assert sum(files.values()) == written.size_bytes


def test_many_files_hold_each_tensor_once_and_the_index_names_them(run: Store, tmp_path: Path):
    model = hf_models.llama()
    checkpoint = save_state(run, {"model": model, "optimizer": torch.optim.AdamW(model.parameters())})

    export_hf(checkpoint, f"{tmp_path}/hf", ExportOptions(max_shard_bytes=20_000))

    index = json.loads((tmp_path / "hf" / INDEX_FILE).read_text())
    files = sorted(path.name for path in (tmp_path / "hf").glob("*.safetensors"))
    expected = model.state_dict()
    tensors = hf_models.tensors_in(tmp_path / "hf")
    assert files == [f"model-{n:05d}-of-{len(files):05d}.safetensors" for n in range(1, len(files) + 1)]
    assert len(files) > 2
    assert sorted(tensors) == sorted(expected) == sorted(index["weight_map"])
    assert all(torch.equal(tensors[name], tensor) for name, tensor in expected.items())
    assert set(index["weight_map"].values()) == set(files)
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in expected.values())
    with safetensors.safe_open(tmp_path / "hf" / files[0], framework="pt") as file:
        assert file.metadata() == {"format": "pt"}


def test_one_file_is_named_as_a_part_too(run: Store, tmp_path: Path):
    checkpoint = save_state(run, {"model": hf_models.llama()})

    export_hf(checkpoint, f"{tmp_path}/hf")

    assert (tmp_path / "hf" / "model-00001-of-00001.safetensors").is_file()
    assert (tmp_path / "hf" / INDEX_FILE).is_file()


def test_shards_of_fsdp_become_whole_tensors(run: Store, tmp_path: Path):
    model, staged = hf_models.llama(), []
    for rank in range(3):
        with playing(rank, 3):
            shards, mesh = hf_models.llama(), mesh_of(3)
            for layer in shards.model.layers:
                fully_shard(layer, mesh=mesh)
            fully_shard(shards, mesh=mesh)
            staged.append(TrainState({"model": shards}, rank=rank, world_size=3).stage(Progress(step=1)))
    checkpoint = save(run, staged)

    export_hf(checkpoint, f"{tmp_path}/hf")

    loaded = hf_models.from_pretrained(tmp_path / "hf")
    assert torch.equal(hf_models.logits(loaded), hf_models.logits(model))
    assert json.loads((tmp_path / "hf" / "config.json").read_text())["architectures"] == ["LlamaForCausalLM"]


@pytest.mark.parametrize("kind", ["rows", "columns", "both"])
def test_boxes_of_any_layout_become_whole_tensors(run: Store, tmp_path: Path, kind: str):
    layouts = {"rows": [Shard(0), Shard(0)], "columns": [Replicate(), Shard(1)], "both": [Shard(1), Shard(0)]}
    weights = {
        "big": torch.randn(2200, 4801),  # 42 MB: more than a block, in rows that fit no sub-block
        "cube": torch.randn(5, 7, 3).bfloat16(),
        "one": torch.randn(3, 1),
        "scalar": torch.tensor(2.5),
        "vector": torch.randn(13),
    }
    placed = {name: layouts[kind] for name, tensor in weights.items() if tensor.dim() > 1}
    placed["vector"] = [Shard(0), Replicate()]
    checkpoint = save_played(run, weights, world_size=4, mesh=(2, 2), layout=placed, is_bare=True)

    export_hf(checkpoint, f"{tmp_path}/hf", ExportOptions(config_from=config_folder(tmp_path)))

    found = hf_models.tensors_in(tmp_path / "hf")
    assert found.pop("seen") == 17
    assert all(torch.equal(found[name], tensor) for name, tensor in weights.items())
    assert set(found) == set(weights)


def test_every_type_that_safetensors_knows_is_written_as_it_is(run: Store, tmp_path: Path):
    tensors = {
        f"as_{str(dtype).removeprefix('torch.')}": (torch.arange(40) % 2).to(dtype).view(8, 5)
        for dtype in SAFETENSORS_DTYPES
    }
    tensors |= {"empty": torch.empty(0, 3), "scalar": torch.tensor(7, dtype=torch.int64)}
    checkpoint = save_state(run, {"model": Holder(tensors)})

    export_hf(checkpoint, f"{tmp_path}/hf", ExportOptions(config_from=config_folder(tmp_path)))

    found = hf_models.tensors_in(tmp_path / "hf")
    assert set(found) == set(tensors)
    for name, tensor in tensors.items():
        assert (found[name].dtype, found[name].shape) == (tensor.dtype, tensor.shape)
        assert bytes(found[name].flatten().view(torch.uint8)) == bytes(tensor.flatten().view(torch.uint8))


def test_a_type_that_safetensors_does_not_know_is_refused_by_name(run: Store, tmp_path: Path):
    checkpoint = save_state(run, {"model": Holder({"wave": torch.zeros(3, dtype=torch.complex128)})})

    with pytest.raises(ConfigError, match="wave"):
        export_hf(checkpoint, f"{tmp_path}/hf", ExportOptions(config_from=config_folder(tmp_path)))

    assert not (tmp_path / "hf").exists()


def test_a_model_of_tensor_subclasses_is_refused_by_its_entry(run: Store, tmp_path: Path):
    module = nn.Module()
    module.register_buffer("weight", TwoTensor(torch.ones(2), torch.ones(2)))
    checkpoint = save_state(run, {"model": module})

    with pytest.raises(ConfigError, match=r"'model' holds tensor subclasses \(weight\)"):
        export_hf(checkpoint, f"{tmp_path}/hf", ExportOptions(config_from=config_folder(tmp_path)))

    assert not (tmp_path / "hf").exists()


class Extra(nn.Linear):
    """A module as Transformer Engine has them, whose extra state holds a tensor."""

    def get_extra_state(self) -> dict[str, torch.Tensor]:
        return {"amax": torch.ones(2)}

    def set_extra_state(self, state: object) -> None:
        """Take nothing."""


def test_tensors_of_an_extra_state_are_no_weights(run: Store, tmp_path: Path):
    checkpoint = save_state(run, {"model": nn.Sequential(Extra(2, 2, bias=False))})

    export_hf(checkpoint, f"{tmp_path}/hf", ExportOptions(config_from=config_folder(tmp_path)))

    assert "model.0._extra_state.amax" in {
        tensor.name for tensor in checkpoint.read_index(checkpoint.read_manifest()).tensors
    }
    assert set(hf_models.tensors_in(tmp_path / "hf")) == {"0.weight"}


def test_storage_settings_open_a_destination_of_the_same_kind_only(s3: str, tmp_path: Path):
    base, _, query = s3.partition("?")
    storage = settings_in_query("s3", dict(parse_qsl(query)))
    root = f"{base}/{uuid4().hex}"
    checkpoint = save_state(open_store(root, storage), {"model": hf_models.llama()})

    written = export_hf(checkpoint, f"{root}-exported", storage=storage)
    export_hf(checkpoint, f"{tmp_path}/hf", storage=storage)
    export_hf(checkpoint, f"memory://{uuid4().hex}", storage=storage)

    found = {item.key: item.size_bytes for item in open_store(f"{root}-exported", storage).list_objects("")}
    assert found == written.files
    assert (tmp_path / "hf" / INDEX_FILE).is_file()


def test_weights_are_converted_and_the_configuration_says_so(run: Store, tmp_path: Path):
    model = hf_models.llama()
    checkpoint = save_state(run, {"model": model})

    export_hf(checkpoint, f"{tmp_path}/hf", ExportOptions(dtype=torch.bfloat16))

    loaded = hf_models.from_pretrained(tmp_path / "hf")
    expected = {name: tensor.bfloat16() for name, tensor in model.state_dict().items()}
    assert loaded.dtype == torch.bfloat16
    assert all(torch.equal(loaded.state_dict()[name], tensor) for name, tensor in expected.items())
    with pytest.raises(ConfigError, match="int8"):
        export_hf(checkpoint, f"{tmp_path}/int8", ExportOptions(dtype="int8"))


@pytest.mark.parametrize("says_tied", [True, False])
def test_tied_weights_stand_once_only_where_the_configuration_ties_them(run: Store, tmp_path: Path, says_tied: bool):
    model = hf_models.llama(tie_word_embeddings=says_tied)
    model.lm_head.weight = model.model.embed_tokens.weight
    checkpoint = save_state(run, {"model": model})

    export_hf(checkpoint, f"{tmp_path}/hf")

    names = set(hf_models.tensors_in(tmp_path / "hf"))
    assert ("lm_head.weight" in names) is not says_tied
    assert "model.embed_tokens.weight" in names
    assert torch.equal(hf_models.logits(hf_models.from_pretrained(tmp_path / "hf")), hf_models.logits(model))


def test_weights_that_the_configuration_wrongly_calls_tied_are_both_written(run: Store, tmp_path: Path):
    model = hf_models.llama(tie_word_embeddings=True)
    model.lm_head.weight = nn.Parameter(model.model.embed_tokens.weight.detach() * 2)
    checkpoint = save_state(run, {"model": model})

    export_hf(checkpoint, f"{tmp_path}/hf")

    loaded = hf_models.from_pretrained(tmp_path / "hf")
    assert loaded.config.tie_word_embeddings is False
    assert torch.equal(hf_models.logits(loaded), hf_models.logits(model))


def test_the_tokenizer_goes_along(run: Store, tmp_path: Path):
    tokenizer = hf_models.tokenizer()
    checkpoint = save_state(run, {"model": hf_models.llama(), "tokenizer": tokenizer})

    export_hf(checkpoint, f"{tmp_path}/hf")
    export_hf(checkpoint, f"{tmp_path}/bare", ExportOptions(files=()))

    loaded = AutoTokenizer.from_pretrained(tmp_path / "hf")
    text = "a dog is a fox"
    assert loaded(text)["input_ids"] == tokenizer(text)["input_ids"]
    assert not (tmp_path / "bare" / "tokenizer.json").exists()


def test_several_models_must_be_told_apart(run: Store, tmp_path: Path):
    policy, critic = hf_models.llama(seed=1), hf_models.llama(seed=2)
    checkpoint = save_state(run, {"policy": policy, "critic": critic, "plain": nn.Linear(2, 2)})

    with pytest.raises(ConfigError, match="critic, policy"):
        export_hf(checkpoint, f"{tmp_path}/hf")
    with pytest.raises(ConfigError, match="actor"):
        export_hf(checkpoint, f"{tmp_path}/hf", ExportOptions(entry="actor"))
    with pytest.raises(ConfigError, match="config_from"):
        export_hf(checkpoint, f"{tmp_path}/hf", ExportOptions(entry="plain"))
    export_hf(checkpoint, f"{tmp_path}/hf", ExportOptions(entry="critic"))

    assert torch.equal(hf_models.logits(hf_models.from_pretrained(tmp_path / "hf")), hf_models.logits(critic))


def test_each_role_s_model_is_exported_by_its_name(run: Store, tmp_path: Path):
    models = {"actor": hf_models.llama(seed=1), "critic": hf_models.llama(seed=2)}
    roles = roles_of([{"actor"}, {"critic"}])
    ranks = [
        TrainState({name: {"model": model}}, rank=rank, world_size=2, role=roles[rank])
        for rank, (name, model) in enumerate(models.items())
    ]
    checkpoint = save(run, [rank.stage(Progress(step=1)) for rank in agreed(ranks)])

    for name, model in models.items():
        export_hf(checkpoint, f"{tmp_path}/{name}", ExportOptions(entry=f"{name}.model"))
        assert torch.equal(hf_models.logits(hf_models.from_pretrained(tmp_path / name)), hf_models.logits(model))
    with pytest.raises(ConfigError, match=r"holds several models \(actor.model, critic.model\)"):
        export_hf(checkpoint, f"{tmp_path}/both")


def test_a_model_without_configuration_takes_one_from_a_folder(run: Store, tmp_path: Path):
    model = hf_models.llama()
    bare = nn.Module()
    bare.model, bare.lm_head = model.model, model.lm_head
    checkpoint = save_state(run, {"model": bare})
    model.config.save_pretrained(tmp_path / "config")

    with pytest.raises(ConfigError, match="config_from"):
        export_hf(checkpoint, f"{tmp_path}/hf")
    with pytest.raises(ConfigError, match=r"config\.json"):
        export_hf(checkpoint, f"{tmp_path}/hf", ExportOptions(config_from=f"{tmp_path}/none"))
    export_hf(checkpoint, f"{tmp_path}/hf", ExportOptions(config_from=f"{tmp_path}/config"))

    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    assert config["model_type"] == "llama"
    assert torch.equal(hf_models.tensors_in(tmp_path / "hf")["lm_head.weight"], model.lm_head.weight)


def test_an_export_goes_to_any_store_in_parts(run: Store, tmp_path: Path, uri: str):
    model = hf_models.llama(vocab_size=150_000)  # two tensors of 19 MB: more than one part on S3
    checkpoint = save_state(run, {"model": model})

    planned = raycheck.export_hf(run.uri, uri, max_shard_bytes=30_000_000, dry_run=True)
    store = open_store(uri)
    assert list(store.list_objects("")) == []

    written = raycheck.export_hf(run.uri, uri, max_shard_bytes=30_000_000)

    assert planned == written
    assert {item.key: item.size_bytes for item in store.list_objects("")} == written.files
    index = json.loads(store.get(INDEX_FILE).data)
    tensors: dict[str, torch.Tensor] = {}
    for file in set(index["weight_map"].values()):
        tensors |= safetensors.torch.load(store.get(file).data)
    assert all(torch.equal(tensors[name], tensor) for name, tensor in model.state_dict().items())
    with pytest.raises(ConfigError, match=r"already an export here|not an empty"):
        export_hf(checkpoint, uri)


def test_an_export_into_its_own_run_makes_no_client_and_asks_once_whether_the_place_is_free(wire, monkeypatch):
    uri = join_uri(wire.uri, uuid4().hex)
    model = hf_models.llama()
    save_state(open_store(uri), {"model": model}, step=7)
    checkpoint = raycheck.open_run(uri).at(None)
    made, before = clients_made(monkeypatch), len(wire.heads)

    raycheck.export_hf(checkpoint, join_uri(uri, "exports/final"))

    asked = wire.heads[before:]
    assert made == []
    assert [head.method for head in asked if "list-type=2" in head.target] == ["GET"]
    assert [head for head in asked if head.method == "HEAD"] == []
    read = [re.sub(r".*/", "", head.target.partition("?")[0]) for head in asked if head.method == "GET"]
    documents = [name for name in read if name in ("latest", "manifest.json", "index", EXPORT_RECORD)]
    assert documents == ["manifest.json", "index", "latest"]
    (file,) = (name for name in raycheck.open_run(uri).export("final").sizes if name.endswith(".safetensors"))
    written = safetensors.torch.load(open_store(uri).get(f"exports/final/{file}").data)
    assert all(torch.equal(written[name], tensor) for name, tensor in model.state_dict().items())
    with pytest.raises(ConfigError, match="already an export here"):
        raycheck.export_hf(checkpoint, join_uri(uri, "exports/final"))


def test_an_export_may_lie_in_its_own_run(tmp_path: Path):
    run_uri = f"file://{tmp_path}/run"
    run = open_store(run_uri)
    checkpoint = save_state(run, {"model": hf_models.llama()}, step=7)
    prefix = exports_prefix(checkpoint.entry.key)

    written = export_hf(checkpoint, run, prefix=prefix)

    assert written.uri == f"{run_uri}/exports/{checkpoint.entry.key}"
    assert {item.key for item in run.list_objects(prefix)} == {prefix + name for name in written.files}
    assert hf_models.from_pretrained(tmp_path / "run" / prefix) is not None
    assert_invariants(run)


def test_the_run_s_head_or_a_step_is_exported(tmp_path: Path):
    run_uri = f"file://{tmp_path}/run"
    models = {step: hf_models.llama(seed=step) for step in (3, 6)}
    for number, (step, model) in enumerate(models.items(), 1):
        checkpoint = save_state(open_store(run_uri), {"model": model}, save_number=number, step=step)

    raycheck.export_hf(run_uri, f"{tmp_path}/head")
    raycheck.export_hf(run_uri, f"{tmp_path}/three", at=3)

    for folder, step in (("head", 6), ("three", 3)):
        assert torch.equal(
            hf_models.logits(hf_models.from_pretrained(tmp_path / folder)), hf_models.logits(models[step])
        )
    with pytest.raises(NotFoundError, match="5"):
        raycheck.export_hf(run_uri, f"{tmp_path}/five", at=5)
    with pytest.raises(ConfigError, match="URI"):
        raycheck.export_hf(raycheck.values.CommittedCheckpoint(checkpoint), f"{tmp_path}/five", at=3)


def test_a_relative_folder_is_one_here(run: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    checkpoint = save_state(run, {"model": hf_models.llama()})

    export_hf(checkpoint, "out/hf")

    assert (tmp_path / "out" / "hf" / INDEX_FILE).is_file()


@pytest.mark.parametrize("place", ["a file", "a full folder", "the run"])
def test_a_wrong_place_is_refused_and_left_as_it_was(run: Store, tmp_path: Path, place: str):
    checkpoint = save_state(run, {"model": hf_models.llama()})
    full = tmp_path / "full"
    full.mkdir()
    (full / "thesis.txt").write_text("mine")
    dest = {"a file": full / "thesis.txt", "a full folder": full, "the run": tmp_path / "trained"}[place]
    before = sorted(tmp_path.rglob("*"))

    with pytest.raises(ConfigError, match="Choose a"):
        export_hf(checkpoint, str(dest))

    assert sorted(tmp_path.rglob("*")) == before
    assert_invariants(run)


@pytest.mark.parametrize("there", ["latest", INDEX_FILE, "model-00001-of-00002.safetensors"])
def test_nothing_is_written_beside_what_the_export_would_not_write(run: Store, there: str):
    checkpoint = save_state(run, {"model": hf_models.llama()})
    dest = open_store(f"memory://beside-{there}")
    dest.put(there, b"mine")

    with pytest.raises(ConfigError, match=there):
        export_hf(checkpoint, dest)

    assert [item.key for item in dest.list_objects("")] == [there]


class FailingStore(LocalStore):
    """A bucket on disk whose n-th write is the last thing that happens."""

    def __init__(self, folder: Path, writes: int) -> None:
        super().__init__(f"file://{folder}", str(folder))
        self._left = writes

    def put_parts(self, key: str, parts: Iterable[memoryview], size_bytes: int) -> None:
        self._count(key)
        super().put_parts(key, parts, size_bytes)

    def put_if_absent(self, key: str, data: bytes) -> Written:
        self._count(key)
        return super().put_if_absent(key, data)

    def _count(self, key: str) -> None:
        self._left -= 1
        if self._left < 0:
            raise StoreError(f"{key}: the network is gone")


def test_a_crash_at_any_write_leaves_no_index_and_the_same_export_ends_it(run: Store, tmp_path: Path):
    model = hf_models.llama()
    checkpoint = save_state(run, {"model": model, "tokenizer": hf_models.tokenizer()})
    writes = len(export_hf(checkpoint, f"{tmp_path}/whole", ExportOptions(max_shard_bytes=40_000)).files)
    assert writes > 5

    for done in range(writes):
        folder = tmp_path / f"crash-{done}"
        if done < writes - 1:  # the last write is repeated by itself
            with pytest.raises(StoreError, match="network"):
                export_hf(checkpoint, FailingStore(folder, done), ExportOptions(max_shard_bytes=40_000))
        assert not (folder / INDEX_FILE).exists()

        export_hf(checkpoint, open_store(str(folder)), ExportOptions(max_shard_bytes=40_000))

        assert torch.equal(hf_models.tensors_in(folder)["lm_head.weight"], model.lm_head.weight)


@pytest.mark.parametrize("damage", ["flip", "remove", "drop"])
def test_damage_found_on_the_way_is_named_and_leaves_no_folder(run: Store, tmp_path: Path, damage: str):
    checkpoint = save_state(run, {"model": hf_models.llama()})
    key = object_keys.shard_key(checkpoint.entry.key, "train", 0)
    data = bytearray(run.get(key).data)
    data[len(data) // 2] ^= 1
    if damage == "flip":
        run.put(key, data)
    else:
        run.delete(key)
    if damage == "drop":
        other = f"file://{tmp_path}/other"
        later = save_state(open_store(other), {"model": hf_models.llama()}, step=9)
        run.put("latest", later.store.get("latest").data)  # retention has dropped the checkpoint meanwhile
    error, text = {
        "flip": (CorruptError, "model\\."),
        "remove": (CorruptError, "missing"),
        "drop": (NotFoundError, "retention"),
    }[damage]

    with pytest.raises(error, match=text):
        export_hf(checkpoint, f"{tmp_path}/out/hf")

    assert list((tmp_path / "out").iterdir()) == []


def test_what_a_killed_export_left_is_removed_but_not_a_living_one_s(run: Store, tmp_path: Path):
    checkpoint = save_state(run, {"model": hf_models.llama()})
    dead, living = (tmp_path / f".hf.raycheck-export-{name}" for name in ("dead", "living"))
    for folder in (dead, living):
        folder.mkdir()
        (folder / "model-00001-of-00009.safetensors").write_bytes(b"half")
    held = os.open(living, os.O_RDONLY)
    fcntl.flock(held, fcntl.LOCK_EX)

    export_hf(checkpoint, f"{tmp_path}/hf")

    os.close(held)
    assert not dead.exists()
    assert living.exists()
    assert (tmp_path / "hf" / INDEX_FILE).is_file()


HOSTILE = ["../../gone", "/tmp/gone", "a/../../gone", "..", ".", "", "a\\b", "a/b/c", "a//b", ".profile", "a\0b", "~/a"]
RESERVED = ["config.json", "model.safetensors", INDEX_FILE, "pytorch_model.bin", "Adapter_Config.json", "x.PKL"]


@pytest.mark.parametrize("name", HOSTILE + RESERVED)
def test_a_file_name_from_a_hostile_bucket_becomes_no_file(run: Store, tmp_path: Path, name: str):
    checkpoint = with_values(
        run, {"model": hf_models.llama(), "tokenizer": hf_models.tokenizer()}, {name: {"$tensor": "model.x"}}
    )

    with pytest.raises(CorruptError, match="refused"):
        export_hf(checkpoint, f"{tmp_path}/out/hf")

    assert not (tmp_path / "out").exists()


def test_an_asset_that_is_no_text_is_refused_by_its_file(run: Store, tmp_path: Path):
    state = {"model": hf_models.llama()}
    staged = TrainState(state, rank=0, world_size=1).stage(Progress(step=1))
    assets = {"model": {**staged.values["assets"]["model"], "config.json": '"\ud800"'}}
    checkpoint = save(run, [replace(staged, values={**staged.values, "assets": assets})])

    with pytest.raises(CorruptError, match=r"config\.json"):
        export_hf(checkpoint, f"{tmp_path}/hf")

    assert not (tmp_path / "hf").exists()


def test_a_shape_that_cannot_be_ends_in_an_error_and_not_in_a_loop(run: Store):
    checkpoint = save_state(run, {"model": Holder({"a": torch.ones(2, 3), "b": torch.ones(4)})})
    manifest = checkpoint.read_manifest()
    index = checkpoint.read_index(manifest)
    shaped = tuple(replace(tensor, shape=(-8, *tensor.shape[1:])) for tensor in index.tensors)
    negative = replace(index, plan=replace(index.plan, tensors=shaped))
    source = WeightSource(checkpoint, manifest, index)
    weights = [as_saved(source, name, f"model.{name}") for name in "ab"]

    with pytest.raises(CorruptError, match=r"model\.a has the shape \[-8, 3\]"):
        WeightSource(checkpoint, manifest, negative).saved("model.a")
    with pytest.raises(AssertionError, match="more bytes"):
        list(source.stream([weights[0], replace(weights[1], shape=(2,))], b"", 64))


class NotedReads(LocalStore):
    """A run on disk that notes which ranges are read."""

    def __init__(self, store: Store) -> None:
        super().__init__(store.uri, f"/{store.root_path}")
        self.starts: set[int] = set()

    def get_range(self, key: str, start: int, stop: int) -> Buffer:
        self.starts.add(start)
        return super().get_range(key, start, stop)


def test_the_next_blocks_are_read_while_one_is_written_and_no_more(run: Store, monkeypatch: pytest.MonkeyPatch):
    tensors = {f"t{number}": torch.randn(32) for number in range(9)}
    checkpoint = save_state(run, {"model": Holder(tensors)})
    manifest = checkpoint.read_manifest()
    store = NotedReads(run)
    source = WeightSource(Checkpoint(store, checkpoint.entry), manifest, checkpoint.read_index(manifest))
    weights = [as_saved(source, name, f"model.{name}") for name in tensors]
    monkeypatch.setattr(weight_stream, "BLOCK_BYTES", 128)  # of one tensor
    monkeypatch.setattr(weight_stream, "AHEAD", 3)

    parts = source.stream(weights, b"", 128)
    found = [bytes(next(parts))]
    deadline = time.monotonic() + 60
    while len(store.starts) < 3:
        assert time.monotonic() < deadline, "nothing is read ahead"
        time.sleep(0.01)
    assert len(store.starts) == 3
    found += [bytes(part) for part in parts]
    assert len(store.starts) == 9
    assert found == [values.numpy().tobytes() for values in tensors.values()]


@pytest.mark.parametrize("place", [7, [], {}, {"$tensor": "rng"}, {"$tensor": "model.lm_head.weight"}, {"$tensor": 3}])
def test_a_file_that_is_no_file_s_bytes_is_refused(run: Store, tmp_path: Path, place: object):
    checkpoint = with_values(
        run, {"model": hf_models.llama(), "tokenizer": hf_models.tokenizer()}, {"vocab.json": place}
    )

    with pytest.raises(CorruptError, match="tokenizer"):
        export_hf(checkpoint, f"{tmp_path}/hf")

    assert not (tmp_path / "hf").exists()


def with_values(run: Store, state: dict[str, Any], files: dict[str, object]) -> Checkpoint:
    """A checkpoint whose tokenizer entry claims other files, as whoever writes to the bucket may have it."""
    staged = TrainState(state, rank=0, world_size=1).stage(Progress(step=1))
    return save(run, [replace(staged, values={**staged.values, "tokenizer": {"files": files}})])


class CountingStore(LocalStore):
    """Counts the bytes that are read of shards."""

    fetched = 0

    def get_range(self, key: str, start: int, stop: int) -> bytes:
        self.fetched += stop - start
        return super().get_range(key, start, stop)

    def put(self, key: str, data: Buffer) -> None:
        raise AssertionError(f"an export never writes to its run: {key}")


@pytest.mark.parametrize("world_size", [1, 3])
def test_no_byte_of_a_large_tensor_is_fetched_twice(run: Store, tmp_path: Path, world_size: int):
    weights = {"big": torch.randn(2500, 9001), "odd": torch.randn(1201, 4801)}  # 90 and 23 MB
    checkpoint = save_played(run, weights, world_size=world_size, is_bare=True)
    counting = CountingStore(run.uri, f"{tmp_path}/trained")

    export_hf(
        Checkpoint(counting, checkpoint.entry), f"{tmp_path}/hf", ExportOptions(config_from=config_folder(tmp_path))
    )

    needed = sum(tensor.nbytes for tensor in weights.values())
    assert needed <= counting.fetched <= 1.01 * needed
    assert all(torch.equal(hf_models.tensors_in(tmp_path / "hf")[name], tensor) for name, tensor in weights.items())


def test_memory_stays_bounded_however_large_the_model_is(run: Store, tmp_path: Path):
    tensors = {"whole": torch.zeros(3, 70_000_000, dtype=torch.bfloat16), "more": torch.zeros(30_000_000)}
    save_state(run, {"model": Holder(tensors)})
    del tensors
    code = f"""
import raycheck, re, raycheck.huggingface.export
from pathlib import Path
def kib(name): return int(re.search(name + r":\\s+(\\d+)", Path("/proc/self/status").read_text())[1])
before = kib("VmRSS")
Path("/proc/self/clear_refs").write_text("5")  # the peak is counted from here
raycheck.export_hf({run.uri!r}, {f"{tmp_path}/hf"!r}, config_from={config_folder(tmp_path)!r})
print((kib("VmHWM") - before) // 1024)
"""

    done = run_code(code, timeout_s=100)

    assert done.returncode == 0, done.stderr
    assert (tmp_path / "hf" / "model-00002-of-00002.safetensors").stat().st_size > 6 * 64 * 1024 * 1024
    assert int(done.stdout) < 3 * 64
