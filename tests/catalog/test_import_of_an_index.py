"""A Hugging Face index and its files are imported together only if they say the same."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from raycheck.bucket.store import open_store
from raycheck.catalog.importing.import_checkpoint import Imported, import_checkpoint
from raycheck.errors import ConfigError, CorruptError
from raycheck.run import open_run
from tests.support.samples import hf_models

INDEX = "model.safetensors.index.json"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Returns the directory of a model in several files."""
    folder = tmp_path / "hf"
    hf_models.llama(seed=3).save_pretrained(folder, max_shard_size="20KB")
    return folder


def weight_map(folder: Path, change: Callable[[dict[str, str]], object], index: str = INDEX) -> None:
    document = json.loads((folder / index).read_text())
    change(document["weight_map"])
    (folder / index).write_text(json.dumps(document))


def imported(folder: Path) -> Imported:
    return import_checkpoint(str(folder), f"file://{folder.parent}/runs/new")


def assert_refused(folder: Path, match: str) -> None:
    with pytest.raises(CorruptError, match=match):
        imported(folder)
    assert not list(open_store(f"file://{folder.parent}/runs/new").list_objects(""))


def assert_restored(done: Imported) -> None:
    """The model of seed 3 comes out of the imported run."""
    live = hf_models.llama(seed=4)
    head = open_run(done.uri).head
    assert head is not None
    head.restore(into={"model": live})
    assert torch.equal(hf_models.logits(live), hf_models.logits(hf_models.llama(seed=3)))


def test_an_index_that_names_a_tensor_which_its_file_lacks_is_refused_by_name(folder: Path) -> None:
    name = json.loads((folder / INDEX).read_text())["weight_map"]["model.norm.weight"]
    tensors = load_file(folder / name)
    del tensors["model.norm.weight"]
    save_file(tensors, folder / name)

    assert_refused(folder, f"it names {name} for 'model.norm.weight', which is in none of the files")


def test_a_tensor_that_the_index_does_not_name_is_refused_until_it_does(folder: Path) -> None:
    name = json.loads((folder / INDEX).read_text())["weight_map"]["model.norm.weight"]
    weight_map(folder, lambda places: places.pop("model.norm.weight"))

    assert_refused(folder, f"it does not name 'model.norm.weight', which is in {name}")
    weight_map(folder, lambda places: places.update({"model.norm.weight": name}))
    assert_restored(imported(folder))


def test_a_tensor_in_another_file_than_the_index_says_is_refused(folder: Path) -> None:
    places = json.loads((folder / INDEX).read_text())["weight_map"]
    there = places["model.norm.weight"]
    other = min(set(places.values()) - {there})
    weight_map(folder, lambda places: places.update({"model.norm.weight": other}))

    assert_refused(folder, f"it names {other} for 'model.norm.weight', which is in {there}")


def test_a_tensor_in_two_files_is_refused(folder: Path) -> None:
    places = json.loads((folder / INDEX).read_text())["weight_map"]
    first, last = min(places.values()), max(places.values())
    save_file(load_file(folder / first) | load_file(folder / last), folder / last)

    assert_refused(folder, f"is in {first} too")


def test_an_index_that_leaves_out_a_whole_file_is_refused(folder: Path) -> None:
    last = max(json.loads((folder / INDEX).read_text())["weight_map"].values())
    weight_map(folder, lambda places: [places.pop(key) for key, name in list(places.items()) if name == last])

    assert_refused(folder, r"does not name all \d+ files model-\.\.\.-of-")


def test_the_index_of_files_of_torch_is_held_to_them_too(tmp_path: Path) -> None:
    folder = tmp_path / "hf"
    folder.mkdir()
    torch.save({"a": torch.ones(2)}, folder / "pytorch_model-00001-of-00001.bin")
    places = dict.fromkeys("ab", "pytorch_model-00001-of-00001.bin")
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": places}))

    assert_refused(folder, "for 'b', which is in none of the files")


def test_an_index_beside_the_file_of_all_weights_is_refused_until_one_is_gone(folder: Path) -> None:
    hf_models.llama(seed=5).save_pretrained(folder.parent / "whole")
    shutil.copy(folder.parent / "whole/model.safetensors", folder)

    with pytest.raises(ConfigError, match=r"has both model\.safetensors and model\.safetensors\.index\.json"):
        imported(folder)
    (folder / "model.safetensors").unlink()

    assert imported(folder).is_new


def test_an_index_that_names_the_file_of_all_weights_is_taken(tmp_path: Path) -> None:
    folder = tmp_path / "hf"
    hf_models.llama(seed=3).save_pretrained(folder)
    places = dict.fromkeys(load_file(folder / "model.safetensors"), "model.safetensors")
    (folder / INDEX).write_text(json.dumps({"weight_map": places}))

    assert_restored(imported(folder))


def test_weights_that_are_not_read_are_listed_as_left_out(folder: Path) -> None:
    save_file({"w": torch.ones(2)}, folder / "consolidated.safetensors")
    (folder / "pytorch_model.bin").write_bytes(b"")

    assert imported(folder).left_out == ("consolidated.safetensors", "pytorch_model.bin")
