"""Downloads, with stock torch and safetensors as judges: what lies in the folder is what was saved, or is not there."""

import json
import shutil
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

import raycheck
from raycheck.bucket.format import object_keys
from raycheck.bucket.format.index import Tensor
from raycheck.bucket.protocol.pin_and_evict import evict
from raycheck.bucket.protocol.swap import Register
from raycheck.bucket.store import Store, read_ahead
from raycheck.bucket.store.address import join_uri
from raycheck.catalog import download_safetensors
from raycheck.errors import ConfigError, DamagedError, NotFoundError, StoreError
from raycheck.settings import Retention
from tests.catalog.conftest import Sample, make_sample

no_group = pytest.mark.filterwarnings("ignore:torch.distributed is disabled, unavailable or uninitialized:UserWarning")


def files_in(folder: Path) -> dict[str, bytes]:
    return {str(item.relative_to(folder)): item.read_bytes() for item in folder.rglob("*") if item.is_file()}


# --- what others load ---


@no_group
def test_stock_torch_loads_every_component_of_a_download_from_any_store(place: str, tmp_path: Path) -> None:
    sample = make_sample(join_uri(place, "run"))
    folder = tmp_path / "here"

    done = raycheck.catalog.download(sample.uri, folder)

    assert {name: len(data) for name, data in files_in(folder).items()} == done.files
    found = {}
    for component in ("train", "model.frozen"):
        dcp_to_torch_save(folder / component, tmp_path / f"{component}.pt")
        found |= torch.load(tmp_path / f"{component}.pt", weights_only=False).get("model", {})
    assert dict.fromkeys(flat(found), 0) == dict.fromkeys(sample.model.state_dict(), 0)
    for name, value in sample.model.state_dict().items():
        again = {f"model.{name}": torch.zeros_like(value)}
        component = "model.frozen" if name.startswith("0.") else "train"
        dcp.load(again, storage_reader=dcp.FileSystemReader(folder / component))
        assert torch.equal(again[f"model.{name}"], value)


def flat(tree: dict, prefix: str = "") -> list[str]:
    return [
        name
        for key, value in tree.items()
        for name in (flat(value, f"{prefix}{key}.") if isinstance(value, dict) else [f"{prefix}{key}"])
    ]


def test_safetensors_hold_every_tensor_and_values_json_all_else(sample: Sample, tmp_path: Path) -> None:
    done = raycheck.catalog.download(sample.uri, tmp_path / "here", format="safetensors")

    assert set(done.files) == {"manifest.json", "model.safetensors", "optimizer.safetensors", "values.json"}
    found = load_file(tmp_path / "here/model.safetensors")
    assert {name: value.tolist() for name, value in found.items()} == {
        f"model.{name}": value.tolist() for name, value in sample.model.state_dict().items()
    }
    slots = load_file(tmp_path / "here/optimizer.safetensors")
    weight = sample.optimizer.state[sample.model[1].weight]
    assert torch.equal(slots["optimizer.state.1.weight.exp_avg"], weight["exp_avg"])
    assert float(slots["optimizer.state.1.weight.step"]) == 2.0
    values = json.loads((tmp_path / "here/values.json").read_text())["values"]
    assert values["note"] == {"words": ["a", "b"], "pair": {"$tuple": [1, 2]}}
    assert values["progress"]["step"] == 9


def test_entries_that_are_large_lie_in_several_safetensors_files(
    sample: Sample, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(download_safetensors, "MAX_FILE_BYTES", 5000)

    done = raycheck.catalog.download(sample.uri, tmp_path / "here", format="safetensors")

    index = json.loads((tmp_path / "here/model.safetensors.index.json").read_text())
    assert set(index["weight_map"]) == {f"model.{name}" for name in sample.model.state_dict()}
    assert len(set(index["weight_map"].values())) > 1
    for name, file in index["weight_map"].items():
        assert file in done.files
        assert torch.equal(
            load_file(tmp_path / "here" / file)[name], sample.model.state_dict()[name.removeprefix("model.")]
        )


# --- what is fetched ---


def test_a_repeat_fetches_nothing_and_a_lost_or_changed_file_again(sample: Sample, tmp_path: Path) -> None:
    raycheck.catalog.download(sample.uri, tmp_path / "here")
    before = files_in(tmp_path / "here")
    shard = tmp_path / "here/train/__0_0.distcp"

    again = raycheck.catalog.download(sample.uri, tmp_path / "here")
    shard.write_bytes(before["train/__0_0.distcp"][:-1] + b"x")
    (tmp_path / "here/train/.metadata").unlink()
    mended = raycheck.catalog.download(sample.uri, tmp_path / "here")

    assert again.fetched_bytes == 0
    assert mended.fetched_bytes == len(before["train/__0_0.distcp"]) + len(before["train/.metadata"])
    assert files_in(tmp_path / "here") == before


def test_a_repeat_of_safetensors_fetches_only_what_is_missing_or_changed(sample: Sample, tmp_path: Path) -> None:
    raycheck.catalog.download(sample.uri, tmp_path / "here", format="safetensors")
    before = files_in(tmp_path / "here")
    again = raycheck.catalog.download(sample.uri, tmp_path / "here", format="safetensors")
    (tmp_path / "here/model.safetensors").write_bytes(before["model.safetensors"][:-1] + b"\x01")

    mended = raycheck.catalog.download(sample.uri, tmp_path / "here", format="safetensors")

    assert (again.fetched_bytes, mended.fetched_bytes) == (0, len(before["model.safetensors"]))
    assert files_in(tmp_path / "here") == before


@pytest.mark.parametrize("form", ["dcp", "safetensors"])
def test_a_download_that_broke_off_anywhere_is_taken_up_again(
    sample: Sample, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: str
) -> None:
    """At every read of the store; files are cut into many reads. Nothing under its own name is ever not whole."""
    monkeypatch.setattr(read_ahead, "SPAN_BYTES", 700)
    monkeypatch.setattr(read_ahead, "BYTES_IN_FLIGHT", 1400)
    raycheck.catalog.download(sample.uri, tmp_path / "whole", format=form)
    whole = files_in(tmp_path / "whole")
    opened, left, reads = raycheck.catalog.download_checkpoint.open_store, [0], [0]

    def failing(uri: str, storage: object) -> Store:
        store = opened(uri, storage)
        read = store.get_range

        def get_range(key: str, start: int, stop: int):
            reads[0] += 1
            left[0] -= 1
            if left[0] == 0:
                raise StoreError("gone")
            return read(key, start, stop)

        store.get_range = get_range
        return store

    monkeypatch.setattr("raycheck.catalog.download_checkpoint.open_store", failing)
    broken = 0
    for number in range(1, 60):
        folder = tmp_path / str(number)
        left[0] = number
        try:
            raycheck.catalog.download(sample.uri, folder, format=form)
        except StoreError:
            broken += 1
            found = {name: data for name, data in files_in(folder).items() if not name.endswith(".partial")}
            assert {
                name: data for name, data in found.items() if name != "raycheck-download.json"
            }.items() <= whole.items()
            done = raycheck.catalog.download(sample.uri, folder, format=form)
            assert done.fetched_bytes < sum(done.files.values())
        assert files_in(folder) == whole

    assert broken > (20 if form == "dcp" else 2)


def test_what_has_come_of_a_file_is_not_fetched_again(sample: Sample, tmp_path: Path) -> None:
    raycheck.catalog.download(sample.uri, tmp_path / "here")
    shard = tmp_path / "here/train/__0_0.distcp"
    data = shard.read_bytes()
    shard.unlink()
    shard.with_name("__0_0.distcp.partial").write_bytes(data[:-100])

    done = raycheck.catalog.download(sample.uri, tmp_path / "here")

    assert (done.fetched_bytes, shard.read_bytes()) == (100, data)


@pytest.mark.parametrize("change", [lambda data: b"x" * 1000, lambda data: data + b"more", lambda data: b""])
def test_what_somebody_put_into_a_partial_file_is_not_believed(sample: Sample, tmp_path: Path, change) -> None:
    raycheck.catalog.download(sample.uri, tmp_path / "here")
    whole = files_in(tmp_path / "here")
    shard = tmp_path / "here/train/__0_0.distcp"
    shard.with_name("__0_0.distcp.partial").write_bytes(change(shard.read_bytes()))
    shard.unlink()

    raycheck.catalog.download(sample.uri, tmp_path / "here")

    assert files_in(tmp_path / "here") == whole


def test_only_the_components_asked_for_are_fetched_and_others_later(sample: Sample, tmp_path: Path) -> None:
    one = raycheck.catalog.download(sample.uri, tmp_path / "here", components=["model.frozen"])
    both = raycheck.catalog.download(sample.uri, tmp_path / "here")

    assert set(one.files) == {"manifest.json", "model.frozen/.metadata", "model.frozen/__0_0.distcp"}
    assert set(both.files) - set(one.files) == {"train/.metadata", "train/__0_0.distcp"}
    assert both.fetched_bytes == both.files["train/.metadata"] + both.files["train/__0_0.distcp"]


@pytest.mark.parametrize("step", [4, "4", "step-000000004-a1-s1"])
def test_a_checkpoint_is_named_by_step_or_name(sample: Sample, tmp_path: Path, step: int | str) -> None:
    assert raycheck.catalog.download(sample.uri, tmp_path / "here", at=step).step == 4


def test_what_is_told_of_the_progress_begins_with_what_is_there(sample: Sample, tmp_path: Path) -> None:
    first: list[tuple[int, int]] = []
    second: list[tuple[int, int]] = []

    raycheck.catalog.download(sample.uri, tmp_path / "here", progress=lambda *at: first.append(at))
    raycheck.catalog.download(sample.uri, tmp_path / "here", progress=lambda *at: second.append(at))

    assert first[0][0] == 0
    assert first[-1][0] == first[-1][1]
    assert second == [first[-1]]


# --- folders ---


def test_a_folder_with_other_files_is_refused_and_left_alone(sample: Sample, tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("mine")

    with pytest.raises(ConfigError, match="is not empty"):
        raycheck.catalog.download(sample.uri, tmp_path)

    assert files_in(tmp_path) == {"thesis.txt": b"mine"}


def test_the_folder_of_another_checkpoint_is_refused(sample: Sample, tmp_path: Path) -> None:
    raycheck.catalog.download(sample.uri, tmp_path, at=4)
    before = files_in(tmp_path)

    with pytest.raises(ConfigError, match="holds another checkpoint than step-000000009-a1-s2"):
        raycheck.catalog.download(sample.uri, tmp_path, at=9)

    assert files_in(tmp_path) == before


def test_links_in_the_folder_are_replaced_and_not_followed(sample: Sample, tmp_path: Path) -> None:
    raycheck.catalog.download(sample.uri, tmp_path / "here")
    shard = tmp_path / "here/train/__0_0.distcp"
    data = shard.read_bytes()
    (tmp_path / "victim").write_bytes(b"mine")
    for name in ("__0_0.distcp", "__0_0.distcp.partial"):
        (shard.parent / name).unlink(missing_ok=True)
        (shard.parent / name).symlink_to(tmp_path / "victim")

    raycheck.catalog.download(sample.uri, tmp_path / "here")

    assert (tmp_path / "victim").read_bytes() == b"mine"
    assert not shard.is_symlink()
    assert shard.read_bytes() == data


def test_a_disk_without_room_is_noticed_before_anything_is_fetched(
    sample: Sample, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(tmp_path)._replace(free=100)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)

    for form in ("dcp", "safetensors"):
        with pytest.raises(ConfigError, match="the disk has room for 100"):
            raycheck.catalog.download(sample.uri, tmp_path / form, format=form)


def test_a_folder_that_cannot_be_written_is_an_error_that_names_it(sample: Sample, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no folder")

    with pytest.raises(StoreError, match="file"):
        raycheck.catalog.download(sample.uri, tmp_path / "file" / "below")


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"format": "zip"}, "format='zip'"),
        ({"components": ["nothing"]}, "no component 'nothing'; it has: model.frozen, train"),
        ({"components": ["train"], "format": "safetensors"}, "components= chooses"),
    ],
)
def test_what_cannot_be_done_is_said_before_the_folder_is_made(sample: Sample, tmp_path: Path, options, match) -> None:
    with pytest.raises(ConfigError, match=match):
        raycheck.catalog.download(sample.uri, tmp_path / "here", **options)

    assert not (tmp_path / "here").exists()


# --- damage ---


@pytest.mark.parametrize("form", ["dcp", "safetensors"])
@pytest.mark.parametrize("change", ["flipped", "cut", "gone"])
def test_a_damaged_object_never_gets_its_own_name(sample: Sample, tmp_path: Path, change: str, form: str) -> None:
    key = object_keys.shard_key("step-000000009-a1-s2", "train", 0)
    data = bytearray(sample.store.get(key).data)
    data[len(data) // 2] ^= 1
    if change == "gone":
        sample.store.delete(key)
    else:
        sample.store.put(key, bytes(data if change == "flipped" else data[:100]))

    if form == "safetensors" and change == "flipped":
        data[:] = bytes(byte ^ 1 for byte in data)  # every tensor, not what lies between them
        sample.store.put(key, bytes(data))
    with pytest.raises(DamagedError):
        raycheck.catalog.download(sample.uri, tmp_path, format=form)

    assert not (tmp_path / "train/__0_0.distcp").exists()
    assert not (tmp_path / "model.safetensors").exists()


def test_a_checkpoint_that_retention_drops_meanwhile_is_called_dropped(
    sample: Sample, tmp_path: Path, monkeypatch
) -> None:
    checkpoint = raycheck.open_run(sample.uri).at(4)
    opened = raycheck.catalog.download_checkpoint.open_store

    def late(uri: str, storage: object) -> Store:
        store = opened(uri, storage)
        read = type(store).get_range

        def get_range(key: str, start: int, stop: int):
            if evict_now:
                evict_now.pop()
                evict(Register(sample.store), Retention(keep_last=1))
                for item in list(sample.store.list_objects(object_keys.checkpoint_prefix(checkpoint.key))):
                    sample.store.delete(item.key)
            return read(store, key, start, stop)

        store.get_range = get_range
        return store

    evict_now = [1]
    monkeypatch.setattr("raycheck.catalog.download_checkpoint.open_store", late)

    with pytest.raises(NotFoundError, match="dropped by retention"):
        raycheck.catalog.download(sample.uri, tmp_path, at=4)


def test_bytes_that_changed_on_their_way_are_asked_for_again(sample: Sample, tmp_path: Path, monkeypatch) -> None:
    opened, flips = raycheck.catalog.download_checkpoint.open_store, [1]

    def flipping(uri: str, storage: object) -> Store:
        store = opened(uri, storage)
        read = type(store).get_range

        def get_range(key: str, start: int, stop: int) -> bytes:
            data = bytearray(read(store, key, start, stop))
            if flips and key.endswith("distcp"):
                data[0] ^= flips.pop()
            return bytes(data)

        store.get_range = get_range
        return store

    monkeypatch.setattr("raycheck.catalog.download_checkpoint.open_store", flipping)

    raycheck.catalog.download(sample.uri, tmp_path)

    assert flips == []
    assert (tmp_path / "train/__0_0.distcp").exists()


@pytest.mark.parametrize("name", ["../evil", "a/b", "", ".hidden", "x" * 101, "a\0b", "a\nb"])
def test_an_entry_whose_name_is_no_file_name_is_refused(name: str) -> None:
    """No training saves such an entry; a bucket may say so."""
    with pytest.raises(ConfigError, match="cannot be a file's name"):
        download_safetensors._entry_of(Tensor(name="model.x", dtype="float32", shape=(), path=(name, "x")))


@pytest.mark.parametrize(("path", "entry"), [("model", "model"), ("größe", "größe"), ("metric.rank3.total", "metric")])
def test_a_tensor_lies_in_the_file_of_its_entry(path: str, entry: str) -> None:
    tensor = Tensor(name=f"{path}.x", dtype="float32", shape=(), path=(path, "x"))

    assert download_safetensors._entry_of(tensor) == entry
