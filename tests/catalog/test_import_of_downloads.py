"""`import` takes what `download` wrote: the whole of it, or it says what is missing."""

import shutil
from pathlib import Path
from uuid import uuid4

import pytest
import torch

import raycheck
from raycheck.errors import ConfigError
from tests.support.processes.coordinator_in_thread import group_of


class Net(torch.nn.Module):
    """A model with a frozen part, which becomes a component, and a state with a list that has tensors of both."""

    def __init__(self) -> None:
        super().__init__()
        self.base = torch.nn.Linear(4, 4).requires_grad_(requires_grad=False)
        self.head = torch.nn.Linear(4, 2)


def state_of(model: Net) -> dict[str, object]:
    return {"model": model, "optimizer": torch.optim.AdamW(model.head.parameters(), lr=0.1)}


@pytest.fixture
def trained() -> tuple[str, Net]:
    """A run whose newest checkpoint refers to the frozen part that an earlier one uploaded."""
    uri, model = f"memory://{uuid4().hex}", Net()
    state = state_of(model)
    settings = raycheck.SaveSettings(every_steps=1, keep_last=2)
    with raycheck.Checkpointer(state, settings, group=group_of(uri, owner="ann")[0]) as ckpt:
        ckpt.restore()
        for _ in range(3):
            model.head(torch.ones(1, 4)).sum().backward()
            state["optimizer"].step()
            ckpt.end_step()
    return uri, model


def test_a_download_of_several_components_is_imported_whole(trained: tuple[str, Net], tmp_path: Path) -> None:
    uri, model = trained
    raycheck.catalog.download(uri, tmp_path / "here")
    assert len(raycheck.open_run(uri).head._stored.read_manifest().components) == 2

    done = raycheck.catalog.import_checkpoint(str(tmp_path / "here"), f"memory://{uuid4().hex}")

    fresh = Net()
    state = state_of(fresh)
    raycheck.open_run(done.uri).head.restore(into=state)
    assert (done.step, done.kind, done.left_out) == (3, "dcp", ())
    for name, value in model.state_dict().items():
        assert torch.equal(value, fresh.state_dict()[name]), name
    moments = state["optimizer"].state_dict()["state"]
    assert [item["step"].item() for item in moments.values()] == [3.0, 3.0]


def test_a_part_of_a_download_is_refused_by_name_and_a_folder_of_it_is_not(
    trained: tuple[str, Net], tmp_path: Path
) -> None:
    uri, _ = trained
    folder, dest = tmp_path / "here", f"memory://{uuid4().hex}"
    raycheck.catalog.download(uri, folder)
    (other,) = {path.name for path in folder.iterdir() if path.is_dir()} - {"train"}
    shutil.rmtree(folder / other)

    with pytest.raises(ConfigError, match=f"no component {other}"):
        raycheck.catalog.import_checkpoint(str(folder), dest)

    assert raycheck.catalog.import_checkpoint(str(folder / "train"), dest).step == 3


def test_a_download_as_safetensors_is_refused_since_only_one_entry_of_it_would_come(
    trained: tuple[str, Net], tmp_path: Path
) -> None:
    uri, _ = trained
    raycheck.catalog.download(uri, tmp_path / "here", format="safetensors")

    with pytest.raises(ConfigError, match="format dcp"):
        raycheck.catalog.import_checkpoint(str(tmp_path / "here"), f"memory://{uuid4().hex}")

    (file,) = (tmp_path / "here").glob("model*.safetensors")
    assert raycheck.catalog.import_checkpoint(str(file), f"memory://{uuid4().hex}").entries[0].num_tensors == 4
