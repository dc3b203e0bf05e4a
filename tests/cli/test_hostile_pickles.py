"""No pickle from the bucket is loaded by any face, whoever wrote it there.

Python tells an audit hook of every global that an unpickler looks up, so a path that nobody thought of would show here.
"""

import pickle
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from uuid import uuid4

import pytest
import torch
from typer.testing import CliRunner

import raycheck
from raycheck.bucket.format import object_keys
from raycheck.bucket.format.checksum import crc32
from raycheck.bucket.format.document import dump
from raycheck.bucket.format.manifest import Blob
from raycheck.bucket.protocol.repair import repair
from raycheck.bucket.protocol.sharing.fork import fork
from raycheck.bucket.reading import Checkpoint
from raycheck.bucket.store import Store, open_store
from raycheck.cli import app
from raycheck.state.train_state import TrainState
from tests.support.processes.save_without_ray import save_state
from tests.support.samples import hf_models
from tests.support.samples.sample_checkpoints import latest_tree, put_latest_tree

_watching: list[list[str]] = []


def _hook(event: str, arguments: tuple) -> None:
    if event == "pickle.find_class":
        for found in _watching:
            found.append(".".join(map(str, arguments[1:])))


sys.addaudithook(_hook)  # cannot be taken away again; it does nothing outside of `watched`


@contextmanager
def watched() -> Iterator[list[str]]:
    _watching.append([])
    try:
        yield _watching[-1]
    finally:
        _watching.pop()


class Bomb:
    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self):
        return Path.touch, (self.marker,)


def state() -> dict[str, object]:
    model = hf_models.llama()
    optimizer = torch.optim.AdamW(model.parameters())
    model(hf_models.IDS, labels=hf_models.IDS).loss.backward()
    optimizer.step()
    return {"model": model, "optimizer": optimizer, "tokenizer": hf_models.tokenizer()}


@pytest.fixture
def checkpoint(tmp_path: Path) -> Checkpoint:
    """Whole by all its checksums; its `.metadata` and whatever else stock torch would load is a bomb."""
    store = open_store(f"memory://{uuid4().hex}")
    saved = save_state(store, state())
    bomb = pickle.dumps(Bomb(tmp_path / "marker"))
    manifest = saved.read_manifest()
    parts = []
    for part in manifest.components:
        store.put(object_keys.metadata_key(part.checkpoint, part.name), bomb)
        parts.append(replace(part, metadata=Blob(size_bytes=len(bomb), crc32=crc32(bomb))))
    data = dump(replace(manifest, components=tuple(parts)))
    store.put(object_keys.manifest_key(saved.entry.key), data)
    tree = latest_tree(store)
    tree["newest"][0]["manifest_crc32"] = crc32(data)
    put_latest_tree(store, tree)
    for key in ("attempts/000001.json", "ray/pointer.json", "exports/step-000000001-a1-s1/config.json"):
        store.put(key, bomb)
    return raycheck.open_run(store.uri).head._stored


def commanded(*arguments: str) -> None:
    assert CliRunner().invoke(app, arguments, catch_exceptions=False).exit_code == 0


def repaired(store: Store) -> None:
    store.delete("latest")
    repair(store)


def packed_and_unpacked(uri: str, file: str) -> None:
    raycheck.catalog.pack(uri, file)
    raycheck.catalog.unpack(file, f"memory://{uuid4().hex}")


FACES: dict[str, Callable[[Checkpoint, Path], object]] = {
    "restore": lambda it, _: TrainState(state(), rank=0, world_size=1).apply(it),
    "restore of a part": lambda it, _: raycheck.open_run(it.store.uri).restore(into={"model": hf_models.llama(seed=1)}),
    "verify": lambda it, _: list(it.verify()),
    "ls": lambda it, _: commanded("ls", it.store.uri),
    "show": lambda it, _: commanded("show", it.store.uri),
    "export": lambda it, folder: raycheck.export_hf(it.store.uri, f"{folder}/hf"),
    "fork": lambda it, _: fork(it.store, open_store(f"memory://{uuid4().hex}"), run_id="a-forked-run"),
    "pack and unpack": lambda it, folder: packed_and_unpacked(it.store.uri, f"{folder}/a.tar"),
    "download": lambda it, folder: raycheck.catalog.download(it.store.uri, folder / "dcp"),
    "download of safetensors": lambda it, folder: raycheck.catalog.download(
        it.store.uri, folder / "st", format="safetensors"
    ),
    "repair": lambda it, _: repaired(it.store),
}


@pytest.mark.parametrize(
    "face", [face if face in ("restore", "export") else pytest.param(face, marks=pytest.mark.slow) for face in FACES]
)
def test_no_face_unpickles_what_lies_in_the_bucket(checkpoint: Checkpoint, tmp_path: Path, face: str) -> None:
    with watched() as found:
        FACES[face](checkpoint, tmp_path)

    assert found == []
    assert not (tmp_path / "marker").exists()


def test_the_bomb_goes_off_where_it_is_loaded(checkpoint: Checkpoint, tmp_path: Path) -> None:
    key = object_keys.metadata_key(checkpoint.entry.key, "train")

    with watched() as found:
        pickle.loads(checkpoint.store.get(key).data)

    assert found
    assert (tmp_path / "marker").exists()
